"""Engines in forked processes, and engines whose loop ended before they were closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.patience import PROGRAM_SECONDS

PROGRAM = Path(__file__).with_name("forking_program.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_forked_child_unwinds_through_the_engine_and_the_parent_continues(loop):
    ended = run("fork", loop)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_engine_whose_loop_has_ended_is_closed_from_another_loop(loop):
    ended = run("open", loop)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
