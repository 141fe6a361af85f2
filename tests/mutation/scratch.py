"""A copy of the repository in which one mutant at a time is built and tested."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.mutation.mutant import Mutant

_MEMORY_BYTES = 12 << 30  # address space of one command: a mutant may allocate without end
_FAILURE = re.compile(r"^FAILED |^ERROR |error: |Fatal|\(Failed\)|\(Timeout\)|SEGFAULT|Error")
# One loop of the two is enough to detect a mutant.
_PYTEST = (
    "-m",
    "pytest",
    "-x",
    "-q",
    "--no-header",
    "--tb=no",
    "-p",
    "no:cacheprovider",
    "-k",
    "not uvloop",
)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a command; ``said`` is its last line that names a failure."""

    passed: bool
    timed_out: bool
    said: str

    def raise_unless_passed(self, message: str) -> None:
        if not self.passed:
            raise SystemExit(f"mutate: {message}: {self.said}")


class Scratch:
    """Files, a virtual environment and a build of their own; nothing of the repository changes.

    The environment sees the packages of the running interpreter, but not its ``aiokv``.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self.folder = folder
        self._python = folder / ".venv" / "bin" / "python"
        self._build = folder / "build"
        # pytest cleans up the folder of all its runs; the leftovers of others are no failure here.
        self._temporary = tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True)
        self._extension = folder / "aiokv" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"

    def prepare(self, *, native: bool) -> None:
        """Copy the tracked and untracked files; build the native core if it is to be mutated."""
        for name in self._listed():
            source, target = self._root / name, self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                shutil.copyfile(source, target)
        environment = self.folder / ".venv"
        venv.create(environment, with_pip=False, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        paths = [str(self.folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        (packages / "mutation.pth").write_text("\n".join(paths) + "\n")
        if native:
            self._configure().raise_unless_passed("cmake fails")
            self.build().raise_unless_passed("the native core does not build")
        else:
            import aiokv._native as installed

            shutil.copyfile(str(installed.__file__), self._extension)

    def source(self, mutant: Mutant) -> bytes:
        return (self.folder / mutant.path).read_bytes()

    def write(self, mutant: Mutant, source: bytes) -> None:
        (self.folder / mutant.path).write_bytes(source)

    def build_tests(self, names: Sequence[str]) -> Result:
        """Rebuild the executables of some native tests; this takes less time than ``build``."""
        return self._build_targets(f"test_{name}" for name in names)

    def build(self) -> Result:
        """Rebuild the extension."""
        result = self._build_targets(["_native"])
        if result.passed:
            shutil.copyfile(self._build / self._extension.name, self._extension)
        return result

    def native_tests(self, names: Sequence[str], timeout_seconds: float) -> Result:
        pattern = "|".join(f"^{name}$" for name in names)
        command = ["ctest", "--test-dir", str(self._build), "-R", pattern, "--timeout", "20"]
        return self._run([*command, "--stop-on-failure"], timeout_seconds)

    def pytest(self, paths: Sequence[str], timeout_seconds: float) -> Result:
        command = [str(self._python), *_PYTEST, "-o", "timeout=30", *paths]
        return self._run(command, timeout_seconds)

    def _build_targets(self, targets: Iterable[str]) -> Result:
        return self._run(["cmake", "--build", str(self._build), "--target", *targets], 600)

    def _listed(self) -> list[str]:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self._root, check=True, capture_output=True)
        names = listed.stdout.decode().split("\0")
        return [name for name in names if name and (self._root / name).is_file()]

    def _configure(self) -> Result:
        options = {
            "CMAKE_BUILD_TYPE": "Debug",
            # A mutant may leave a variable unused; an index out of range must not pass.
            "CMAKE_CXX_FLAGS": "-O1 -g0 -w -D_GLIBCXX_ASSERTIONS",
            "AIOKV_BUILD_TESTS": "ON",
            "AIOKV_CUDA": "OFF",
            "SKBUILD": "ON",
            "Python_EXECUTABLE": sys.executable,
        }
        defines = [f"-D{name}={value}" for name, value in options.items()]
        source = str(self.folder / "native")
        return self._run(
            ["cmake", "-G", "Ninja", "-S", source, "-B", str(self._build), *defines], 120
        )

    def _run(self, command: Sequence[str], timeout_seconds: float) -> Result:
        """Run a command in its own process group, which ends with it."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={
                **os.environ,
                "AIOKV_MUTATION": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PATH": path,
                "TMPDIR": self._temporary.name,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
        timed_out = False
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if timed_out:
            output, _ = process.communicate()
        said = [line for line in output.splitlines() if _FAILURE.search(line)]
        last = said[-1].strip() if said else f"status {process.returncode}"
        return Result(process.returncode == 0 and not timed_out, timed_out, last)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
