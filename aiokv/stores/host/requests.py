"""Requests: those of one connection to the service that are not answered yet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.logs import Log
from aiokv.errors import StoreError
from aiokv.stores.host.messages import Counts, Reply
from aiokv.stores.waiting import all_ended
from aiokv.wire.frames import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiokv.stores.host.messages import FromEngine, FromService
    from aiokv.wire.connection import Connection

_log: Final = Log(__name__)


class Requests:
    """Answers requests by number. A failure of the store below is an answer, too; other failures
    end the connection.

    Args:
        connection: gets the replies; None if it is not known yet.
        on_failure: called with the number of a request that has failed.
        counts: returns the counts of the replies.

    Attributes:
        connection: as given, or set later.
    """

    def __init__(
        self,
        connection: Connection[FromService, FromEngine] | None = None,
        on_failure: Callable[[int], None] = lambda number: None,
        counts: Callable[[], Counts] = Counts,
    ) -> None:
        self.connection = connection
        self._on_failure = on_failure
        self._counts = counts
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def numbers(self) -> set[int]:
        """Numbers of the requests that are not answered."""
        return set(self._tasks)

    def begin(self, number: int, request: Coroutine[Any, Any, bytes]) -> None:
        """Answer a request with the bytes that the coroutine returns."""
        if number in self._tasks:
            request.close()
            raise ProtocolError(f"the number {number} of a request that has not ended")
        self._tasks[number] = asyncio.create_task(self._answer(number, request))

    def reply(self, number: int, data: bytes, error: str = "") -> None:
        """Answer a request that was not begun."""
        if self.connection is not None:
            counts = self._counts()
            self.connection.send(Reply(number=number, data=data, counts=counts, error=error))

    def cancel(self, number: int) -> None:
        """End a request without an answer, if it has begun."""
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()

    def cancel_all(self) -> None:
        """End all requests without answers."""
        for number in self.numbers:
            self.cancel(number)

    async def aclose(self) -> None:
        """End the connection and its requests."""
        tasks = set(self._tasks.values())
        if self.connection is not None:
            self.connection.abort("the service is closing")
        await asyncio.sleep(0)  # then on_closed was called
        await all_ended(tasks)

    async def _answer(self, number: int, request: Coroutine[Any, Any, bytes]) -> None:
        try:
            self.reply(number, await request)
        except (StoreError, OSError) as error:  # such as of the store below
            _log.error("host.request_failed", reason=str(error))
            self._tasks.pop(number, None)
            self._on_failure(number)
            self.reply(number, b"", str(error) or type(error).__name__)
        except Exception as error:
            _log.error("host.request_failed", reason=str(error))
            if self.connection is not None:
                self.connection.abort(f"a request failed: {error}")
        finally:
            self._tasks.pop(number, None)
