"""A function call in a new Python process, which ends with it."""

from __future__ import annotations

import asyncio
import pickle
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from aiokv.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

P = ParamSpec("P")
T = TypeVar("T")


class ProcessKilledError(InternalError):
    """A signal has ended a process of the demo."""


class Child(Generic[T]):
    """A process that calls one function; see :func:`start_in_new_process`."""

    def __init__(self, process: asyncio.subprocess.Process, path: str) -> None:
        self._process = process
        self._path = path

    def kill(self) -> None:
        """Kill the process, as a crash does. Idempotent."""
        if self._process.returncode is None:
            self._process.kill()

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await self._process.wait()

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
        result, error = _read(self._path)
        if error is not None:
            raise error
        return result


@asynccontextmanager
async def start_in_new_process(
    function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> AsyncIterator[Child[T]]:
    """Call ``function(*args, **kwargs)`` in a new process, which is killed when the block is left.

    Args:
        function: module-level function; it is pickled with its arguments and its result.
    """
    with tempfile.TemporaryDirectory(prefix="aiokv-") as folder:
        path = _write_call(folder, (function, args, kwargs))
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, path)
        child: Child[T] = Child(process, path)
        try:
            yield child
        finally:
            child.kill()
            await child.ended()


async def call_in_new_process(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``, called in a new process.

    Args:
        function: module-level function; it is pickled with its arguments and its result.

    Raises:
        Exception: exception that the function raised.
        InternalError: the process ended without a result.

    Cancellation: the process is killed.
    """
    async with start_in_new_process(function, *args, **kwargs) as child:
        return await child.result()


def _write_call(folder: str, call: tuple[object, ...]) -> str:
    path = Path(folder, "call")
    path.write_bytes(pickle.dumps(call))
    return str(path)


def _read(path: str) -> Any:
    return pickle.loads(Path(path).read_bytes())


def _main(path: str) -> None:
    """Replace the call in a file by its result and its error. One of the two is None."""
    function, args, kwargs = _read(path)
    result, error = None, None
    try:
        result = function(*args, **kwargs)
    except Exception as failure:
        error = failure
    Path(path).write_bytes(pickle.dumps((result, error)))


if __name__ == "__main__":
    _main(sys.argv[1])
