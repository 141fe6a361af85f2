"""Lookup, load, save and remove of keys of one node: jobs for a thread, on one connection.

Requests are pipelined: a window of them is sent before their replies are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from aiokv.stores.base import Result
from aiokv.stores.redis.connection import ReplyError, WrongLength, encode, encode_around

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.stores.redis.connection import Connection
    from aiokv.stores.redis.options import Address

    Buffers: TypeAlias = list[bytes | memoryview]

# Bytes of values in flight on a connection. A server keeps replies that it could not send in its
# memory, so a window bounds what a slow client costs the server.
WINDOW_BYTES: Final = 4 << 20
MAX_WINDOW: Final = 256  # requests; three buffers each are less than IOV_MAX
SMALL_WINDOW: Final = 1024  # requests without values

_ASKING: Final = encode(b"ASKING")


@dataclass(slots=True)
class Item:
    """One key of a batch on its way.

    Attributes:
        name: the key on the server.
        block: bytes of the object in its host block; empty for lookup and remove.
        result: outcome so far.
        error: the error that the server replied for this key, or None.
        node: the node that a redirection named, or None.
        asking: the redirection was ``ASK``: the slot is moving to the node.
        was_present: a save found the object on the server.
    """

    name: bytes
    block: memoryview
    result: Result = Result.FAILED
    error: ReplyError | None = None
    node: Address | None = None
    asking: bool = False
    was_present: bool = False

    def refuse(self, error: ReplyError) -> None:
        """Set the outcome for an error that the server replied."""
        self.error = error
        self.result = _RESULTS.get(error.code, Result.FAILED)

    def redirect(self, node: Address, *, asking: bool) -> None:
        """Prepare for another attempt at the node that a redirection named."""
        self.node, self.asking = node, asking
        self.result, self.error = Result.FAILED, None


_RESULTS: Final = {"OOM": Result.REFUSED, "WRONGTYPE": Result.WRONG}


def lookup(connection: Connection, items: Sequence[Item], object_bytes: int) -> None:
    """Set the result of each item: ``DONE``, ``MISSING``, or ``WRONG`` for another length."""

    def read(item: Item) -> None:
        length = connection.read_reply()
        if isinstance(length, ReplyError):
            item.refuse(length)
        elif length == object_bytes:
            item.result = Result.DONE
        else:
            item.result = Result.WRONG if length else Result.MISSING

    _pipeline(connection, items, lambda item: [encode(b"STRLEN", item.name)], read, SMALL_WINDOW)


def load(connection: Connection, items: Sequence[Item], ttl_seconds: int) -> None:
    """Read values into blocks; with a TTL, an object expires that long after the last load."""
    expire = (b"EX", b"%d" % ttl_seconds) if ttl_seconds else ()
    verb = b"GETEX" if ttl_seconds else b"GET"

    def read(item: Item) -> None:
        found = connection.read_value(item.block)
        if isinstance(found, ReplyError):
            item.refuse(found)
        elif isinstance(found, WrongLength):
            item.result = Result.WRONG
        else:
            item.result = Result.DONE if found else Result.MISSING

    window = _window(items)
    _pipeline(connection, items, lambda item: [encode(verb, item.name, *expire)], read, window)


def save(connection: Connection, items: Sequence[Item], ttl_seconds: int) -> None:
    """Send values of keys that the server does not have.

    An object with the same length under a key has the same bytes: keys are digests of the content.
    A value of another length is replaced. After a first refusal for want of memory the remaining
    items are refused without sending them.
    """
    lookup(connection, items, len(items[0].block))
    present = [item for item in items if item.result is Result.DONE]
    if ttl_seconds:
        _extend(connection, present, ttl_seconds)
    expire = (b"EX", b"%d" % ttl_seconds) if ttl_seconds else ()
    absent = [item for item in items if item.result in (Result.MISSING, Result.WRONG)]
    for item in present:
        item.was_present = item.result is Result.DONE
    for item in absent:
        item.result, item.error = Result.FAILED, None
    full: list[ReplyError] = []

    def request(item: Item) -> Buffers:
        head, tail = encode_around((b"SET", item.name), len(item.block), expire)
        return [head, item.block, tail]

    def read(item: Item) -> None:
        reply = connection.read_reply()
        if isinstance(reply, ReplyError):
            item.refuse(reply)
            if item.result is Result.REFUSED:
                full.append(reply)
        else:
            item.result = Result.DONE

    answered = _pipeline(connection, absent, request, read, _window(absent), lambda: bool(full))
    for item in absent[answered:]:
        item.refuse(full[0])


def _extend(connection: Connection, items: Sequence[Item], ttl_seconds: int) -> None:
    """Let objects that are present expire later; one that expired meanwhile is missing."""

    def read(item: Item) -> None:
        reply = connection.read_reply()
        if isinstance(reply, ReplyError):
            item.refuse(reply)
        elif reply == 0:
            item.result = Result.MISSING

    seconds = b"%d" % ttl_seconds
    _pipeline(
        connection, items, lambda item: [encode(b"EXPIRE", item.name, seconds)], read, SMALL_WINDOW
    )


def remove(connection: Connection, items: Sequence[Item]) -> None:
    """Remove keys; the server frees the memory in a thread of its own."""

    def read(item: Item) -> None:
        reply = connection.read_reply()
        if isinstance(reply, ReplyError):
            item.refuse(reply)
        else:
            item.result = Result.DONE

    _pipeline(connection, items, lambda item: [encode(b"UNLINK", item.name)], read, SMALL_WINDOW)


def _window(items: Sequence[Item]) -> int:
    object_bytes = len(items[0].block) if items else 1
    return max(2, min(MAX_WINDOW, WINDOW_BYTES // object_bytes))


def _pipeline(
    connection: Connection,
    items: Sequence[Item],
    request: Callable[[Item], Buffers],
    read: Callable[[Item], None],
    window: int,
    stops: Callable[[], bool] = lambda: False,
) -> int:
    """Send the requests of items, at most ``window`` ahead of the replies that were read.

    Return the number of items that were sent and read: fewer than all once ``stops()`` is true.
    """
    sent = answered = 0
    while answered < len(items) and not (stops() and answered == sent):
        if sent < len(items) and sent - answered <= window // 2 and not stops():
            upto = min(len(items), answered + window)
            buffers: Buffers = []
            for item in items[sent:upto]:
                if item.asking:
                    buffers.append(_ASKING)
                buffers += request(item)
            connection.send(buffers)
            sent = upto
        if items[answered].asking:
            connection.read_reply()
        read(items[answered])
        answered += 1
    return answered
