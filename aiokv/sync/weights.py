"""SyncWeightsUpdate: an update of the model's weights, from a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Self

from aiokv.base.checks import Unique
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from aiokv.sync.futures import EngineFuture
    from aiokv.sync.port import Port


class SyncWeightsUpdate(Unique):
    """Update of the weights of the model; see ``CacheEngine.updating_weights``.

    ::

        with engine.updating_weights(version="2"):
            ...  # load the new weights

    An interrupt of the entry cancels it: nothing changed, or, if the block was entered already, the
    engine has dropped all cached blocks and grants again. An exception in the block is raised after
    the update.
    """

    __slots__ = ("_held", "_leave", "_make", "_port")

    def __init__(self, port: Port, make: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._port = port
        self._make = make
        self._held: EngineFuture[None] | None = None
        self._leave: asyncio.Event | None = None

    def __enter__(self) -> Self:
        self._port.thread.check_not_current("updating_weights")
        if self._held is not None:
            raise UsageError("this SyncWeightsUpdate was entered already; it can be entered once")
        begun: Future[None] = Future()
        held = self._held = self._port.begin(self._hold, begun)
        try:
            wait((begun, held), return_when=FIRST_COMPLETED)
        except BaseException:
            held.cancel()
            raise
        if not begun.done():
            held.result()  # raises
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        held, leave = self._held, self._leave
        if held is None or leave is None:
            raise UsageError("this SyncWeightsUpdate was not entered")
        if exc_type is None:
            self._port.thread.post(leave.set)
            held.result()
        else:
            held.cancel()
            wait((held,))

    async def _hold(self, begun: Future[None]) -> None:
        self._leave = asyncio.Event()
        async with self._make():
            begun.set_result(None)
            await self._leave.wait()
