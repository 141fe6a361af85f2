"""Log lines keep their fields in each common set-up of logging, and are silent in none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

EMIT = """
from aiokv.observe.logs import Log
Log("aiokv.engine.transfers").warning("transfer.failed", transfer_id=7, reason="disk is full")
try:
    raise OSError("broken pipe")
except OSError as error:
    Log("aiokv.ranks").error("rank.cannot_begin", rank=3, exc_info=error)
"""

CLI = "from aiokv import cli; cli._configure_logs('warning')"
BASIC_CONFIG = "import logging; logging.basicConfig(format='%(levelname)s %(name)s %(message)s')"
STRUCTLOG_ALONE = """
import structlog
structlog.configure(processors=[structlog.processors.add_log_level,
    structlog.processors.format_exc_info, structlog.processors.JSONRenderer()])
"""
STRUCTLOG_IN_LOGGING = """
import logging, structlog
structlog.configure(
    processors=[structlog.stdlib.add_logger_name,
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    logger_factory=structlog.stdlib.LoggerFactory(), wrapper_class=structlog.stdlib.BoundLogger)
handler = logging.StreamHandler()
handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[
    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]))
logging.getLogger().addHandler(handler)
"""
JSON_FORMATTER = """
import json, logging
class Formatter(logging.Formatter):
    def format(self, record):
        plain = logging.makeLogRecord({}).__dict__
        line = {k: v for k, v in record.__dict__.items() if k not in plain}
        return json.dumps({**line, "message": record.getMessage()})
handler = logging.StreamHandler()
handler.setFormatter(Formatter())
logging.getLogger().addHandler(handler)
"""


def lines_of(set_up: str) -> list[str]:
    """Return the output of a process that configures its logs and then logs two lines."""
    process = subprocess.run(
        [sys.executable, "-c", set_up + "\n" + EMIT], capture_output=True, check=True, text=True
    )
    return (process.stdout + process.stderr).splitlines()


def test_the_command_line_prints_fields():
    first, *rest = lines_of(CLI)
    assert "transfer.failed" in first
    assert "transfer_id=7" in first
    assert "reason='disk is full'" in first
    assert "rank=3" in rest[0]
    assert "OSError: broken pipe" in "".join(rest)


def test_the_command_line_prints_fields_of_other_libraries_records():
    lines = lines_of(
        CLI + "\nimport logging; logging.getLogger('aiokv.plugin').warning('x.y', extra={'n': 5})"
    )
    assert "n=5" in lines[0]


def test_basic_config_prints_fields():
    first, second, *traceback = lines_of(BASIC_CONFIG)
    assert (
        first
        == "WARNING aiokv.engine.transfers transfer.failed transfer_id=7 reason='disk is full'"
    )
    assert second == "ERROR aiokv.ranks rank.cannot_begin rank=3"
    assert traceback[-1] == "OSError: broken pipe"


@pytest.mark.parametrize("set_up", [STRUCTLOG_ALONE, STRUCTLOG_IN_LOGGING])
def test_users_of_structlog_get_fields(set_up):
    first, second = map(json.loads, lines_of(set_up))
    assert (first["event"], first["transfer_id"], first["reason"]) == (
        "transfer.failed",
        7,
        "disk is full",
    )
    assert second["rank"] == 3
    assert "OSError: broken pipe" in second["exception"]


def test_a_json_formatter_gets_fields_as_attributes():
    first, second = map(json.loads, lines_of(JSON_FORMATTER))
    assert (first["event"], first["transfer_id"]) == ("transfer.failed", 7)
    assert first["message"] == "transfer.failed transfer_id=7 reason='disk is full'"
    assert (second["event"], second["rank"]) == ("rank.cannot_begin", 3)


def test_nothing_configured_is_silent():
    assert lines_of("") == []


def test_an_import_of_structlog_alone_configures_nothing():
    assert lines_of("import structlog") == []
