"""Completion: what the shells complete, and what a machine without shtab prints."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from aiokv import cli
from aiokv.cli.completion import SHELLS
from tests.harness.patience import PROGRAM_SECONDS

BASH = shutil.which("bash")
# Completes the words that follow the script, as bash does for the last of them.
DRIVER = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p aiokv | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
"$function" aiokv "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path, capsys):
    """The path of the script for bash."""
    pytest.importorskip("shtab", reason="needs shtab")
    assert cli.main(["completion", "bash"]) == 0
    path = tmp_path / "aiokv.bash"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["re"], {"replay"}),
        (["store", ""], {"ls", "verify", "gc", "purge", "serve", "stat", "hot", "warm"}),
        (["store", "gc", "--d"], {"--dry-run"}),
        (["replay", "--eviction-policy", "ad"], {"adaptive"}),
        (["completion", "f"], {"fish"}),
        (["store", "ls", "kv-"], {"kv-files"}),
        (["replay", "kv-"], {"kv-files"}),
        (["doctor", "--json", "kv-"], {"kv-files"}),
    ],
)
def test_bash_completes_commands_options_values_and_paths(script, tmp_path, words, expected):
    (tmp_path / "kv-files").mkdir()
    done = subprocess.run(
        ["bash", "--norc", "-c", DRIVER, "bash", str(script), "aiokv", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    assert {word.strip().rstrip("/") for word in done.stdout.splitlines()} == expected, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_all_commands(shell, capsys):
    pytest.importorskip("shtab", reason="needs shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in cli.COMMANDS)


def test_without_shtab_the_message_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "pip install 'aiokv[completion]'" in shown.err
