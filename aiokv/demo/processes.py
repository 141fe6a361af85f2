"""A function call in a new Python process, which ends with it."""

from __future__ import annotations

import asyncio
import pickle
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from aiokv.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


async def call_in_new_process(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``, called in a new process.

    Args:
        function: of a module; it, its arguments and its result are pickled.

    Raises:
        Exception: what the function raised.
        InternalError: the process ended without a result.

    Cancellation: the process is killed.
    """
    with tempfile.TemporaryDirectory(prefix="aiokv-") as folder:
        path = _write_call(folder, (function, args, kwargs))
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, path)
        try:
            status = await process.wait()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        if status:
            end = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise InternalError(f"a process of the demo {end}")
        result: T
        result, error = _read(path)
    if error is not None:
        raise error
    return result


def _write_call(folder: str, call: tuple[object, ...]) -> str:
    path = Path(folder, "call")
    path.write_bytes(pickle.dumps(call))
    return str(path)


def _read(path: str) -> Any:
    return pickle.loads(Path(path).read_bytes())


def _main(path: str) -> None:
    """Replace the call in a file by its result and its error, one of which is None."""
    function, args, kwargs = _read(path)
    result, error = None, None
    try:
        result = function(*args, **kwargs)
    except Exception as failure:
        error = failure
    Path(path).write_bytes(pickle.dumps((result, error)))


if __name__ == "__main__":
    _main(sys.argv[1])
