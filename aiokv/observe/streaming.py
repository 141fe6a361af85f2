"""KV events of an engine as server-sent events, for ``/events``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.events import AllBlocksCleared, BlockStored

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from aiokv.engine import CacheEngine
    from aiokv.events import KVEvent, KVEventBatch

    Message = MutableMapping[str, Any]

KEEP_ALIVE_SECONDS: Final = 15.0  # proxies close a connection that is silent for longer
_KEEP_ALIVE: Final = b": keep-alive\n\n"


async def stream_events(
    engine: CacheEngine,
    gone: asyncio.Future[None],
    write: Callable[[bytes], Awaitable[None]],
    name_of: Callable[[str], str],
) -> None:
    """Send the batches of events of an engine until ``gone`` is done, or the engine is closed.

    A client that reads too slowly gets ``AllBlocksCleared`` and all blocks again; the engine queues
    a bounded number of changes for it.

    Args:
        engine: an open engine of this loop.
        gone: future that ends the stream when it is done; this function cancels it on return.
        write: sends a part of the body.
        name_of: returns what to show of the name of a salt or an adapter.

    Raises:
        OSError: some servers raise it when the client has left.

    Cancellation: the subscription has ended.
    """
    batch: asyncio.Future[KVEventBatch | None] | None = None
    try:
        async with engine.kv_events() as events:
            while not gone.done():
                if batch is None:
                    batch = asyncio.ensure_future(_next(aiter(events)))
                await asyncio.wait(
                    (gone, batch), timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if batch.done():
                    taken, batch = batch.result(), None
                    if taken is None:
                        return
                    await write(_message(taken, name_of))
                elif not gone.done():
                    await write(_KEEP_ALIVE)
    finally:
        await _end(gone, batch)


async def _next(events: Any) -> KVEventBatch | None:
    """Return the next batch; None after the last one."""
    batch: KVEventBatch | None = await anext(events, None)
    return batch


async def disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks, and wait for their ends."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def _message(batch: KVEventBatch, name_of: Callable[[str], str]) -> bytes:
    """Return a batch as one server-sent event, whose data are one line of JSON."""
    value = {
        "time_seconds": batch.ts,
        "events": [_plain(event, name_of) for event in batch.events],
    }
    return b"event: batch\ndata: " + msgspec.json.encode(value) + b"\n\n"


def _plain(event: KVEvent, name_of: Callable[[str], str]) -> dict[str, Any]:
    """Return an event without token ids and item keys, and with hashes as hex digits.

    JavaScript cannot hold 64-bit integers.
    """
    fields: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, AllBlocksCleared):
        return fields
    fields |= {"medium": event.medium, "block_hashes": _hex(event.block_hashes)}
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        fields |= {
            "parent_block_hash": None if parent is None else _hex([parent])[0],
            "block_size": event.block_size,
            "lora_name": name_of(event.lora_name or "") or None,
        }
    return fields


def _hex(hashes: Iterable[int | bytes]) -> list[str]:
    return [f"{value:016x}" if isinstance(value, int) else value.hex() for value in hashes]
