"""Clients that leave, for any ASGI server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Message, Receive, Send


MAX_BODY_BYTES: Final = 1 << 20
SEND_SECONDS: Final = 30.0  # a client that does not read for so long loses its connection


class BodyTooLarge(ValueError):
    """The body of a request has more bytes than the server reads."""


async def body_of(receive: Receive) -> bytes:
    """Return the body of a request, or as much of it as a client that left has sent.

    Raises:
        BodyTooLarge: the body has more than ``MAX_BODY_BYTES``; the rest of it was not read.
    """
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body has more than {MAX_BODY_BYTES:,} bytes")
    return bytes(body)


class _StalledError(OSError):
    """The client has not read for too long."""


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, send: Send) -> AsyncIterator[Send]:
    """Cancel the block when the client leaves or stops reading, and end it without an error.

    A server waits in ``send`` while its buffer of unsent bytes is full. Without a limit, a client
    that never reads would keep its blocks and its place among the running requests.

    Args:
        receive: ``receive`` of the ASGI call, after the body of the request was read.
        send: ``send`` of the ASGI call.

    Yields:
        The ``send`` to use in the block.
    """
    task, left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = task.cancel()

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)
        except TimeoutError:
            raise _StalledError(f"the client has read too little for {SEND_SECONDS:g} s") from None

    watcher = asyncio.create_task(watch())
    try:
        yield send_in_time
    except _StalledError:
        pass
    except asyncio.CancelledError:
        if not left or task.uncancel():  # the server has cancelled it, too
            raise
    finally:
        watcher.cancel()
