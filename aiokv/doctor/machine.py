"""Machine: the files, limits and programs that checks look at."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GPU_PROBE: Final = str(Path(__file__).with_name("gpu_probe.py"))


_READINGS: Final = 2_000


class ProbeError(Exception):
    """A program did not end in time, or failed; the message says which."""


def run_python(arguments: Sequence[str], deadline_seconds: float) -> str:
    """Return the output of a Python process.

    Raises:
        ProbeError: it did not end within the deadline (it is killed then), or failed.
    """
    command = [sys.executable, *arguments]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {deadline_seconds:g} s") from None
    except OSError as error:
        raise ProbeError(f"cannot start {sys.executable}: {error.strerror or error}") from error
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        status = f"ended by signal {-ended.returncode}" if ended.returncode < 0 else "failed"
        raise ProbeError(lines[-1] if lines else status)
    return ended.stdout


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native() -> Any:
    from aiokv import _native

    return _native


def _open_eventfd() -> None:
    os.close(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def _clock_seconds() -> float:
    """Return the least time of one reading, over several runs of many."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(_READINGS):
            time.monotonic()
        times.append((time.perf_counter() - begin) / _READINGS)
    return min(times)


@dataclass(slots=True, kw_only=True)
class Machine:
    """Inputs of the checks; tests replace them.

    Attributes:
        root: folder whose ``proc`` and ``sys`` are read.
        python: version of the interpreter.
        system: name of the operating system.
        release: version of the kernel.
        cpus: numbers of the CPUs that the process may use.
        soft_limit: returns the soft limit of a resource.
        version: returns the version of an installed package, or None.
        run: runs Python with arguments and a deadline, and returns the output.
        native: the extension module of aiokv.
        open_eventfd: opens and closes an eventfd.
        clock_seconds: returns the time that one reading of the clock takes.
    """

    root: Path = Path("/")
    python: str = sys.version.split()[0]
    system: str = os.uname().sysname
    release: str = os.uname().release
    cpus: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    soft_limit: Callable[[int], int] = lambda which: resource.getrlimit(which)[0]
    version: Callable[[str], str | None] = package_version
    run: Callable[[Sequence[str], float], str] = run_python
    native: Any = field(default_factory=_native)
    open_eventfd: Callable[[], None] = _open_eventfd
    clock_seconds: Callable[[], float] = _clock_seconds

    def read(self, path: str) -> str | None:
        """Return the text of a file below ``root``, stripped; None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Return the integer in a file below ``root``; None if there is none."""
        text = self.read(path)
        try:
            return None if text is None else int(text)
        except ValueError:
            return None
