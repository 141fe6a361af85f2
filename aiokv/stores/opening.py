"""Opening: attempts to open a store, in the background, until one succeeds.

An engine starts without a store whose disk or server fails, and uses the store when it is open.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiokv.base.logs import Log
from aiokv.errors import AiokvError, StoreError
from aiokv.stores.breaker import FIRST_PAUSE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = Log(__name__)


class Opening:
    """Attempts to open one store, from ``open`` or ``reopen`` of its guard until ``aclose``.

    Args:
        url: url of the store, without user and password.
        attempt: opens the store; raises ``AiokvError`` only.
        on_open: called when the store is open, unless ``cancel`` was called before.
        gives_up: returns True for an error of the first attempt after which none follows, unless
            the limit of ``first`` has passed: the caller then goes on without the store.
        longest_pause_seconds: limit of the pause between two attempts.

    Attributes:
        failure: reason why the store is not open; empty until the first attempt has failed or the
            limit of ``first`` has passed, and when the store is open.
        task: makes the attempts.
    """

    def __init__(
        self,
        url: str,
        attempt: Callable[[], Awaitable[None]],
        on_open: Callable[[], None],
        gives_up: Callable[[AiokvError], bool],
        longest_pause_seconds: float,
    ) -> None:
        self.failure = ""
        self._url = url
        self._attempt = attempt
        self._on_open = on_open
        self._gives_up = gives_up
        self._longest_pause_seconds = longest_pause_seconds
        self._is_cancelled = False
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._tried: asyncio.Future[AiokvError | None] = loop.create_future()
        self.task = loop.create_task(self._run())

    async def first(self, limit: float | None) -> AiokvError | None:
        """Return the error of the first attempt; None if it has succeeded.

        Args:
            limit: seconds since the beginning of the first attempt, after which None is returned;
                None for no limit.

        Cancellation: the attempts go on.
        """
        ends: set[asyncio.Future[Any]] = {self._tried, self.task}
        seconds = limit
        if limit is not None:
            seconds = max(self._began + limit - asyncio.get_running_loop().time(), 0.0)
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._tried.done():
            return self._tried.result()
        if not self.task.done():
            self._note_failure(f"opening takes longer than {limit} s")
        return None

    def cancel(self) -> None:
        """Cancel the attempt under way, and make no more; ``task`` ends soon."""
        self._is_cancelled = True
        self.task.cancel()

    async def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while (error := await self._error()) is not None:
            if not self._tried.done():
                self._tried.set_result(error)
                if not self.failure and self._gives_up(error):
                    return
            self._note_failure(str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._longest_pause_seconds)
        if self._is_cancelled:  # the store has ignored the cancellation
            return
        self._on_open()
        if self.failure:
            self.failure = ""
            log.warning("store.available", url=self._url, operations="open")
        if not self._tried.done():
            self._tried.set_result(None)

    async def _error(self) -> AiokvError | None:
        """Make an attempt; return its error."""
        try:
            await self._attempt()
        except AiokvError as error:
            return error
        except asyncio.CancelledError:
            if self._is_cancelled or self.task.cancelling():
                raise
            return StoreError(f"store {self._url} cancelled its own opening")
        return None

    def _note_failure(self, reason: str) -> None:
        """Log why the store is not open, once for each reason in a row."""
        if reason != self.failure:
            self.failure = reason
            log.error("store.not_opened", url=self._url, reason=reason)
