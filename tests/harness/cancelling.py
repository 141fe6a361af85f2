"""Cancel a coroutine at each of its awaits, one run per await."""

from __future__ import annotations

import asyncio
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator


async def cancelled_at(work: Coroutine[Any, Any, Any], number: int, *, again: bool = False) -> bool:
    """Run ``work`` in a task of its own; cancel the task when it suspends for the n-th time.

    Args:
        number: of the suspension, from 1.
        again: cancel it at each later suspension, too.

    Returns:
        False when ``work`` ended before; its error is raised.
    """

    async def run() -> None:
        await _counted(work, number, again)  # a task takes no generator, from Python 3.12 on

    task = asyncio.create_task(run())
    await asyncio.wait((task,))
    if task.cancelled():
        return True
    task.result()
    return False


@coroutine
def _counted(work: Coroutine[Any, Any, Any], number: int, again: bool) -> Generator[Any, Any, Any]:
    task = asyncio.current_task()
    assert task is not None
    resume = partial(work.send, None)
    suspensions = 0
    while True:
        try:
            waited_for = resume()
        except StopIteration as end:
            return end.value
        suspensions += 1
        if suspensions == number or (again and suspensions > number):
            asyncio.get_running_loop().call_soon(task.cancel)
        try:
            yield waited_for
        except BaseException as error:
            resume = partial(work.throw, error)
        else:
            resume = partial(work.send, None)
