"""The command line: statuses, messages, and that nothing prints a traceback."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiokv import cli
from aiokv.errors import ConfigError


@pytest.fixture
def fake_command(monkeypatch):
    """Make ``aiokv fake`` call the function that the test sets."""
    module = SimpleNamespace(
        add_parser=lambda subparsers: subparsers.add_parser("fake"), run=lambda args: 0
    )
    monkeypatch.setattr(cli, "_command_modules", lambda: iter([("fake", module)]))
    return module


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"aiokv {importlib.metadata.version('aiokv')}"


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["--no-such-flag"]])
def test_bad_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: aiokv" in capsys.readouterr().err


def test_status_of_the_command_is_returned(fake_command):
    fake_command.run = lambda args: 7
    assert cli.main(["fake"]) == 7


def test_error_prints_message_and_hint(fake_command, capsys):
    def run(args):
        raise ConfigError("device_blocks is 0", hint="use 1 or more")

    fake_command.run = run
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "aiokv: error: device_blocks is 0\nhint: use 1 or more\n"


def test_interrupt_has_no_traceback(fake_command, capsys):
    def run(args):
        raise KeyboardInterrupt

    fake_command.run = run
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "aiokv: interrupted\n"


PRINTS_MUCH = (
    "import sys\n"
    "from types import SimpleNamespace\n"
    "from aiokv import cli\n"
    "def run(args):\n"
    "    for _ in range(100_000):\n"
    "        print('x' * 80)\n"
    "    return 0\n"
    "module = SimpleNamespace(add_parser=lambda s: s.add_parser('fake'), run=run)\n"
    "cli._command_modules = lambda: iter([('fake', module)])\n"
    "sys.exit(cli.main(['fake']))\n"
)


def test_a_full_disk_has_no_traceback():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PRINTS_MUCH], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr == b"aiokv: error: [Errno 28] No space left on device\n"


def test_no_memory_has_no_traceback(fake_command, capsys):
    def run(args):
        raise MemoryError("364 PiB")

    fake_command.run = run
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err.startswith("aiokv: error: out of memory: 364 PiB\nhint: ")


def test_broken_pipe_is_quiet():
    with subprocess.Popen(
        [sys.executable, "-c", PRINTS_MUCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=30) == 141
    assert stderr == b""


def test_starting_the_command_loads_no_engine_and_no_renderer():
    code = (
        "import sys\n"
        "from aiokv import cli\n"
        "cli._make_parser()\n"
        "heavy = {'rich', 'structlog', 'uvloop', 'cupy', 'paddle'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
