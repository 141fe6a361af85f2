"""The command line: exit statuses, messages, and no tracebacks."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiokv import cli
from aiokv.cli.running import run_async
from aiokv.errors import ConfigError
from tests.harness.patience import PROGRAM_SECONDS


@pytest.fixture
def fake_command(monkeypatch):
    """Make ``aiokv fake`` call the function that the test sets."""
    module = SimpleNamespace(
        add_parser=lambda subparsers: subparsers.add_parser("fake"), run=lambda args: 0
    )
    monkeypatch.setattr(cli, "_command_modules", lambda: iter([("fake", module)]))
    return module


@pytest.fixture
def default_sigterm():
    """Restore the default of SIGTERM, which a parent process of the tests may have changed."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "argv", [["-V"], ["--version"], ["replay", "-V"], ["store", "ls", "--version"]]
)
def test_version(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"aiokv {importlib.metadata.version('aiokv')}"


def test_no_command_prints_the_help(fake_command, capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert shown.out == capsys.readouterr().out
    assert shown.err == ""


def test_the_help_lists_all_commands_with_a_line_each(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert re.search(rf"^    {command} +\w", shown, re.MULTILINE), command
    assert list(cli.COMMANDS) == sorted(cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_has_a_help_and_ends_with_2_for_bad_usage(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: aiokv {command}")
    assert max(map(len, shown.splitlines())) <= 100
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, "--no-such-flag"])


TRACE = str(Path(__file__).parents[1] / "data" / "small.jsonl")


@pytest.mark.parametrize(
    "argv",
    [
        ["demo", "--conversations", "2", "--turns", "2"],
        ["replay", TRACE, "--limit", "100", "--host-blocks", "500", "--verbose"],
        [
            "replay",
            TRACE,
            "--limit",
            "20",
            "--execute",
            "--execute-mib",
            "8",
            "--speed",
            "1000",
            "--verbose",
        ],
    ],
    ids=["demo", "replay", "timed-replay"],
)
def test_durations_have_a_unit_that_suits_them(argv, capsys):
    """No duration has four digits of a unit below a second, such as 123456 us."""
    assert cli.main(argv) == 0
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert re.search(r"\d (ms|µs)", text)
    assert re.findall(r"\d[\d,]{3,}(?:\.\d+)? ?(?:ns|us|µs|ms)\b", text) == []
    assert re.findall(r"\d ?us\b", text) == []


def test_the_package_can_be_run_as_a_module():
    ended = subprocess.run(
        [sys.executable, "-m", "aiokv", "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout == f"aiokv {importlib.metadata.version('aiokv')}\n"


@pytest.mark.parametrize("argv", [["no-such-command"], ["--no-such-flag"]])
def test_bad_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: aiokv" in capsys.readouterr().err


def test_status_of_the_command_is_returned(fake_command):
    fake_command.run = lambda args: 7
    assert cli.main(["fake"]) == 7


@pytest.mark.parametrize(
    ("argv", "level"),
    [
        (["fake"], "warning"),
        (["--log-level", "debug", "fake"], "debug"),
        (["fake", "--log-level", "info"], "info"),
        (["--log-level", "debug", "fake", "--log-level", "info"], "info"),
    ],
    ids=["none", "before", "after", "both"],
)
def test_log_level_is_an_option_of_the_program_and_of_each_command(fake_command, argv, level):
    levels = []
    fake_command.run = lambda args: levels.append(args.log_level) or 0
    assert cli.main(argv) == 0
    assert levels == [level]


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


@pytest.mark.usefixtures("default_sigterm")
def test_termination_has_no_traceback_and_restores_the_signal(fake_command, capsys):
    def run(args):
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal was not handled")

    fake_command.run = run
    assert cli.main(["fake"]) == 143
    assert capsys.readouterr().err == "aiokv: terminated\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_sigterm")
def test_termination_of_a_loop_cancels_its_main_task(fake_command, capsys):
    ended = []

    async def serve():
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    fake_command.run = lambda args: run_async(serve())
    assert cli.main(["fake"]) == 143
    assert ended == ["cancelled"]
    assert capsys.readouterr().err == "aiokv: terminated\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_sigterm")
def test_termination_stays_ignored_where_the_parent_ignores_it(fake_command):
    async def serve():
        signal.raise_signal(signal.SIGTERM)
        return 0

    fake_command.run = lambda args: run_async(serve())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert cli.main(["fake"]) == 0


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


@pytest.mark.parametrize("flag", ["--version", "config"])
def test_output_to_a_full_disk_has_no_traceback(flag):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "aiokv", flag]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
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
        assert process.wait(timeout=PROGRAM_SECONDS) == 141
    assert stderr == b""


def test_starting_the_command_loads_no_engine_and_no_renderer():
    code = (
        "import sys\n"
        "from aiokv import cli\n"
        "cli.command_parser()\n"
        "heavy = {'rich', 'structlog', 'uvloop', 'cupy', 'paddle'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
