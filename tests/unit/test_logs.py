"""Log lines keep their fields in each common set-up of logging, and are silent in none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from aiokv.base.logs import log_fields
from aiokv.errors import UsageError

EMIT = """
from aiokv.base.logs import Log
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


SERVER = """
import logging
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("SERVER %(levelname)s %(message)s"))
logging.getLogger("server").addHandler(handler)
logging.getLogger("server").setLevel("WARNING")
logging.getLogger("server").propagate = False
"""
JOIN = """
from aiokv.base.logs import Log, join_log
join_log("server")
join_log("server")
Log("aiokv.engine").info("engine.opened")
"""


def test_lines_join_the_log_of_a_server_once():
    first, second, *_ = lines_of(SERVER + JOIN)
    assert first == "SERVER WARNING transfer.failed transfer_id=7 reason='disk is full'"
    assert second == "SERVER ERROR rank.cannot_begin rank=3"


@pytest.mark.slow
@pytest.mark.parametrize("set_up", [BASIC_CONFIG, STRUCTLOG_ALONE, STRUCTLOG_IN_LOGGING, CLI])
def test_lines_do_not_join_the_log_of_a_server_if_shown_elsewhere(set_up):
    lines = lines_of(SERVER + set_up + JOIN)
    assert any("transfer.failed" in line for line in lines)
    assert not any("SERVER" in line for line in lines)


def test_lines_below_the_level_of_all_handlers_are_disabled():
    level = "import logging; logging.getLogger('server').setLevel('DEBUG');handler.setLevel('INFO')"
    shown = "print(Log('aiokv.x').is_on(logging.DEBUG), Log('aiokv.x').is_on(logging.INFO))"
    assert "False True" in lines_of(SERVER + level + JOIN + shown)


def test_join_log_keeps_a_level_set_by_the_user():
    quiet = "import logging; logging.getLogger('aiokv').setLevel('ERROR')"
    first, *_ = lines_of(SERVER + quiet + JOIN)
    assert first == "SERVER ERROR rank.cannot_begin rank=3"


def test_nothing_configured_is_silent():
    assert lines_of("") == []


def test_an_import_of_structlog_alone_configures_nothing():
    assert lines_of("import structlog") == []


# --- levels ---------------------------------------------------------------------------------------

LEVELS = """
from aiokv.base.logs import Log
log = Log("aiokv.engine")
for level in ("debug", "info", "warning", "error"):
    getattr(log, level)(f"a.{level}", n=1)
"""
STRUCTLOG_AT_INFO = """
import logging, structlog
structlog.configure(processors=[structlog.processors.JSONRenderer()],
    wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
"""
UVICORN = """
import copy, logging.config, uvicorn.config
config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
config["formatters"]["default"]["use_colors"] = False
config["loggers"]["aiokv"] = {"handlers": ["default"], "level": "INFO"}
logging.config.dictConfig(config)
"""
UVICORN_ALONE = """
import logging.config, uvicorn.config
logging.config.dictConfig(uvicorn.config.LOGGING_CONFIG)
"""


def output_of(program: str) -> list[str]:
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    return (process.stdout + process.stderr).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("set_up", "shown"),
    [
        ("", []),
        ("import logging; logging.basicConfig()", ["warning", "error"]),
        ("import logging; logging.basicConfig(level='INFO')", ["info", "warning", "error"]),
        (
            "import logging; logging.basicConfig(); logging.getLogger('aiokv').setLevel('DEBUG')",
            ["debug", "info", "warning", "error"],
        ),
        (STRUCTLOG_ALONE, ["debug", "info", "warning", "error"]),
        (STRUCTLOG_AT_INFO, ["info", "warning", "error"]),
        (
            STRUCTLOG_ALONE + "import logging; logging.getLogger('aiokv').setLevel('ERROR')",
            ["error"],
        ),
        (STRUCTLOG_IN_LOGGING, ["warning", "error"]),
        (
            STRUCTLOG_IN_LOGGING + "logging.getLogger().setLevel('INFO')",
            ["info", "warning", "error"],
        ),
        (UVICORN, ["info", "warning", "error"]),
        (UVICORN_ALONE, []),
    ],
)  # fmt: skip
def test_the_configuration_of_the_application_decides_which_levels_are_shown(set_up, shown):
    lines = output_of(f"{set_up}\n{LEVELS}")
    assert [line.split("a.")[1].split()[0].strip("',\"}") for line in lines] == shown


def test_uvicorn_prints_fields():
    lines = output_of(UVICORN + EMIT)
    assert lines[0] == "WARNING:  transfer.failed transfer_id=7 reason='disk is full'"
    assert lines[1] == "ERROR:    rank.cannot_begin rank=3"
    assert lines[-1] == "OSError: broken pipe"


def test_levels_that_are_off_are_found_without_an_import():
    program = """
import sys
from aiokv.base.logs import DEBUG, Log
log = Log("aiokv.engine")
assert not log.is_on(DEBUG)
import logging
logging.getLogger("aiokv").setLevel("DEBUG")
assert log.is_on(DEBUG)
assert "structlog" not in sys.modules
import structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
assert not log.is_on(DEBUG)
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
assert log.is_on(DEBUG)
structlog.reset_defaults()
logging.getLogger("aiokv").setLevel("INFO")
assert not log.is_on(DEBUG)
"""
    assert output_of(program) == []


# --- context --------------------------------------------------------------------------------------

IN_CONTEXT = """
import asyncio
from aiokv.base.logs import Log, log_fields
log = Log("aiokv.engine")

async def request(name):
    with log_fields(request_id=name):
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(log.warning, "a.later")
        log.warning("a.b", n=1)
        await asyncio.sleep(0)
    log.warning("a.outside")

async def main():
    await asyncio.gather(request("r1"), request("r2"))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("set_up", [STRUCTLOG_ALONE, STRUCTLOG_IN_LOGGING, JSON_FORMATTER])
def test_fields_of_the_context_are_in_each_line(set_up):
    lines = [json.loads(line) for line in output_of(set_up + IN_CONTEXT)]
    assert sorted((line["event"], line.get("request_id")) for line in lines if "n" in line) == [
        ("a.b", "r1"), ("a.b", "r2"),
    ]  # fmt: skip
    assert sorted(line["request_id"] for line in lines if line["event"] == "a.later") == [
        "r1", "r2",
    ]  # fmt: skip
    assert {line.get("request_id") for line in lines if line["event"] == "a.outside"} == {None}


def test_a_field_of_the_event_wins_over_one_of_the_context():
    program = """
from aiokv.base.logs import Log, log_fields
with log_fields(request_id="outer", owner="context"):
    with log_fields(request_id="inner"):
        Log("aiokv").warning("a.b", owner="event")
"""
    (line,) = output_of(BASIC_CONFIG + program)
    assert line == "WARNING aiokv a.b request_id='inner' owner='event'"


def test_context_variables_of_structlog_are_in_each_line():
    set_up = STRUCTLOG_ALONE.replace(
        "processors=[", "processors=[structlog.contextvars.merge_contextvars, "
    )
    bind = "\nstructlog.contextvars.bind_contextvars(request_id='r1')\n"
    first, _ = map(json.loads, output_of(set_up + bind + EMIT))
    assert (first["event"], first["request_id"]) == ("transfer.failed", "r1")


def test_names_of_record_attributes_are_refused_as_fields():
    with (
        pytest.raises(UsageError, match="args, name cannot be fields"),
        log_fields(name="x", args=1, request_id="r1"),
    ):
        pass


def test_an_exception_of_a_processor_does_not_reach_the_engine():
    program = """
import structlog
def broken(logger, name, event_dict):
    raise ValueError("a bug of the processor")
structlog.configure(processors=[broken])
from aiokv.base.logs import Log
Log("aiokv").warning("a.b")
print("goes on")
"""
    lines = output_of(program)
    assert "goes on" in lines
    assert lines[-1] == "ValueError: a bug of the processor"
