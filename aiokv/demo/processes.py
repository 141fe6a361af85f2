"""A call of an async function in a new Python process, which ends with it."""

from __future__ import annotations

import asyncio
import pickle
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, TypeVarTuple

from aiokv.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class ProcessKilledError(InternalError):
    """A signal has ended a process of the demo."""


class Child(Generic[T]):
    """A process that calls one function; see :func:`start_in_new_process`."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self._process = process
        self._path = path

    def kill(self) -> None:
        """Kill the process, as a crash does. Idempotent."""
        if self._process.returncode is None:
            self._process.kill()

    async def result(self) -> T:
        """Return the result of the function.

        Raises:
            Exception: exception that the function raised.
            ProcessKilledError: a signal has ended the process.
            InternalError: the process ended without a result.

        Cancellation: nothing changed.
        """
        status = await self._process.wait()
        if status < 0:
            raise ProcessKilledError(f"a process of the demo was killed by signal {-status}")
        if status:
            raise InternalError(f"a process of the demo ended with status {status}")
        result: T
        result, error = pickle.loads(self._path.read_bytes())
        if error is not None:
            raise error
        return result


@asynccontextmanager
async def start_in_new_process(
    function: Callable[[*Arguments], Awaitable[T]],
    *args: *Arguments,
    pass_fds: Collection[int] = (),
) -> AsyncIterator[Child[T]]:
    """Await ``function(*args)`` in a new process, which is killed when the block is left.

    Args:
        function: module-level function; it is pickled with its arguments and its result.
        args: positional arguments.
        pass_fds: file descriptors that the process inherits, with the same numbers.
    """
    with tempfile.TemporaryDirectory(prefix="aiokv-") as folder:
        path = _write_call(folder, function, args)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, str(path), pass_fds=pass_fds
        )
        child: Child[T] = Child(process, path)
        try:
            yield child
        finally:
            child.kill()
            await process.wait()


def _write_call(folder: str, *call: object) -> Path:
    path = Path(folder, "call")
    path.write_bytes(pickle.dumps(call))
    return path


def _main(path: Path) -> None:
    """Replace the call in a file by its result and its error. One of the two is None."""
    import uvloop

    function, args = pickle.loads(path.read_bytes())
    result, error = None, None
    try:
        result = uvloop.run(function(*args))
    except Exception as failure:
        error = failure
    path.write_bytes(pickle.dumps((result, error)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
