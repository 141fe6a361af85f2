"""Lookup, load, save and remove of keys of one node: jobs for a thread, on one connection.

Requests are pipelined: a window of them is sent before their replies are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiokv.errors import StoreError
from aiokv.stores.base import Result
from aiokv.stores.redis.connection import (
    ReplyError,
    WrongLength,
    encode,
    encode_around,
    simple_reply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aiokv.stores.redis.connection import RedisConnection
    from aiokv.stores.redis.options import Address

# Limit of the bytes of values in flight per connection; two values are always allowed. A server
# keeps unsent replies in its memory. With more in flight, reads are slower, because the bytes leave
# the CPU's caches.
WINDOW_BYTES: Final = 256 << 10
# Limit of requests in flight. A thread holds the GIL while it writes the requests of half a window,
# and while it reads their replies.
WINDOW_KEYS: Final = 256

SCANNED_KEYS: Final = 1_000  # per request; the server does nothing else meanwhile
# A server that is followed is asked for a sign of life after the first time without a message, and
# given up after the second.
PING_SECONDS: Final = 2.0
SILENT_SECONDS: Final = 2.0
_CHANNEL: Final = b"__redis__:invalidate"
_ASKING: Final = encode(b"ASKING")


@dataclass(slots=True)
class BatchKey:
    """One key of a batch on its way.

    Attributes:
        name: the key on the server.
        block: bytes of the object in its host block; empty for lookup and remove.
        result: outcome so far.
        error: the error that the server replied for this key, or None.
        node: the node that a redirection named, or None.
        asking: the redirection was ``ASK``: the slot is moving to the node.
    """

    name: bytes
    block: memoryview
    result: Result = Result.FAILED
    error: ReplyError | None = None
    node: Address | None = None
    asking: bool = False

    def refuse(self, error: ReplyError) -> None:
        """Set the outcome for an error that the server replied."""
        self.error = error
        self.result = _RESULTS.get(error.code, Result.FAILED)

    def redirect(self, node: Address, *, asking: bool) -> None:
        """Prepare for another attempt at the node that a redirection named."""
        self.node, self.asking = node, asking
        self.result, self.error = Result.FAILED, None


_RESULTS: Final = {"OOM": Result.REFUSED, "WRONGTYPE": Result.WRONG}


def lookup(connection: RedisConnection, items: Sequence[BatchKey], object_bytes: int) -> None:
    """Set the result of each item: ``DONE``, ``MISSING``, or ``WRONG`` for another length."""
    known = {b":%d" % object_bytes: Result.DONE, b":0": Result.MISSING}
    for item, line in _ask(connection, items, b"STRLEN"):
        result = known.get(line)
        if result is not None:
            item.result = result
        elif not _is_refused(item, line):
            item.result = Result.WRONG


def load(connection: RedisConnection, items: Sequence[BatchKey], ttl_seconds: int) -> None:
    """Read values into blocks; with a TTL, an object expires that long after the last load."""
    verb, expire = (b"GETEX", (b"EX", b"%d" % ttl_seconds)) if ttl_seconds else (b"GET", ())

    def send(group: Sequence[BatchKey]) -> Sequence[BatchKey]:
        connection.send([_encode_each(group, verb, expire)])
        return group

    for group in _overlapped(items, _values_at_a_time(items), send):
        for item in group:
            if item.asking:
                connection.read_lines(1)
            found = connection.read_value(item.block)
            if isinstance(found, ReplyError):
                item.refuse(found)
            elif isinstance(found, WrongLength):
                item.result = Result.WRONG
            else:
                item.result = Result.DONE if found else Result.MISSING


def save(connection: RedisConnection, items: Sequence[BatchKey], ttl_seconds: int) -> None:
    """Send values of keys that the server does not have.

    An object of the right length is kept: objects of one key are interchangeable. A value of
    another length is replaced. After a first refusal for want of memory the remaining
    items are refused without sending them.
    """
    lookup(connection, items, len(items[0].block))
    if ttl_seconds:
        _extend(connection, [item for item in items if item.result is Result.DONE], ttl_seconds)
    absent = []
    for item in items:
        if item.result is Result.DONE:
            item.result = Result.PRESENT
        elif item.result in (Result.MISSING, Result.WRONG):
            item.result, item.error = Result.FAILED, None
            absent.append(item)
    expire = (b"EX", b"%d" % ttl_seconds) if ttl_seconds else ()
    refusals: list[ReplyError] = []

    def send(group: Sequence[BatchKey]) -> Sequence[BatchKey]:
        if refusals:
            for item in group:
                item.refuse(refusals[0])
            return ()
        connection.send(_encode_values(group, expire))
        return group

    for group in _overlapped(absent, _values_at_a_time(absent), send):
        for item, line in _read_lines(connection, group):
            if not _is_refused(item, line):
                item.result = Result.DONE
            elif item.error is not None and item.result is Result.REFUSED:
                refusals.append(item.error)


def remove(connection: RedisConnection, items: Sequence[BatchKey]) -> None:
    """Remove keys. The server frees their memory in another thread."""
    for item, line in _ask(connection, items, b"UNLINK"):
        if not _is_refused(item, line):
            item.result = Result.DONE


def scan(connection: RedisConnection, cursor: bytes, pattern: bytes) -> tuple[bytes, list[bytes]]:
    """Return the next cursor, ``b"0"`` at the end, and the next names that match a pattern.

    Raises:
        StoreError: the server refuses the command.
    """
    reply = connection.request(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCANNED_KEYS)
    if not isinstance(reply, list) or len(reply) != 2:
        raise StoreError(f"redis store: the server replied {reply!r} to SCAN")
    following, names = reply
    if not isinstance(following, bytes) or not isinstance(names, list):
        raise StoreError(f"redis store: the server replied {reply!r} to SCAN")
    return following, [name for name in names if isinstance(name, bytes)]


def follow(
    connection: RedisConnection, prefix: bytes, deliver: Callable[[list[bytes]], object]
) -> None:
    """Deliver the names with a prefix that any client sets or that are removed, until the
    connection ends: an empty list first, when all later changes will be delivered.

    Uses the server's invalidation messages for caches of clients, in broadcasting mode.

    Raises:
        StoreError: the server refuses a command.
        OSError: the connection has ended, or the server has not replied for ``SILENT_SECONDS``.
    """
    connection.limit(SILENT_SECONDS)
    number = connection.request(b"CLIENT", b"ID")
    redirected = (b"REDIRECT", b"%d" % number if isinstance(number, int) else b"")
    for request in (
        (b"CLIENT", b"TRACKING", b"ON", *redirected, b"BCAST", b"PREFIX", prefix),
        (b"SUBSCRIBE", _CHANNEL),
    ):
        if isinstance(reply := connection.request(*request), ReplyError):
            raise StoreError(f"redis store: the server replied {reply.text!r} to {request[0]!r}")
    deliver([])
    while True:
        if not connection.has_bytes_within(PING_SECONDS):
            connection.send([encode(b"PING")])
        match connection.read_reply():
            case [b"message", _, list(names)]:
                deliver([name for name in names if isinstance(name, bytes)])


def escaped(text: bytes) -> bytes:
    """Return a pattern that matches a text only."""
    return re.sub(rb"([\\*?\[\]])", rb"\\\1", text)


def _extend(connection: RedisConnection, items: Sequence[BatchKey], ttl_seconds: int) -> None:
    """Delay the expiry of stored objects. Objects that expired meanwhile count as missing."""
    for item, line in _ask(connection, items, b"EXPIRE", b"%d" % ttl_seconds):
        if not _is_refused(item, line) and line == b":0":
            item.result = Result.MISSING


# --- pipelines ------------------------------------------------------------------------------------


def _overlapped(
    items: Sequence[BatchKey], size: int, send: Callable[[Sequence[BatchKey]], Sequence[BatchKey]]
) -> Iterator[Sequence[BatchKey]]:
    """Yield groups of items whose replies are due; the next group was sent before.

    Args:
        items: items of one node, all with the same ``asking``.
        size: items of a group.
        send: sends the requests of a group, and returns the items that it has sent.
    """
    sent: Sequence[BatchKey] = ()
    for begin in range(0, len(items), size):
        behind = send(items[begin : begin + size])
        if sent:
            yield sent
        sent = behind
    if sent:
        yield sent


def _ask(
    connection: RedisConnection, items: Sequence[BatchKey], verb: bytes, *arguments: bytes
) -> Iterator[tuple[BatchKey, bytes]]:
    """Send a request per item, without a value, and yield its reply line."""

    def send(group: Sequence[BatchKey]) -> Sequence[BatchKey]:
        connection.send([_encode_each(group, verb, arguments)])
        return group

    for group in _overlapped(items, WINDOW_KEYS // 2, send):
        yield from _read_lines(connection, group)


def _read_lines(
    connection: RedisConnection, group: Sequence[BatchKey]
) -> Iterator[tuple[BatchKey, bytes]]:
    if group[0].asking:
        lines = connection.read_lines(2 * len(group))[1::2]
    else:
        lines = connection.read_lines(len(group))
    return zip(group, lines, strict=True)


def _is_refused(item: BatchKey, line: bytes) -> bool:
    """Return True if a reply line is an error; set the error as the item's outcome."""
    reply = simple_reply(line)
    if isinstance(reply, ReplyError):
        item.refuse(reply)
        return True
    return False


def _encode_each(group: Sequence[BatchKey], verb: bytes, behind: Sequence[bytes]) -> bytes:
    """Return the requests of a group; all names have the same length."""
    head, tail = encode_around((verb,), len(group[0].name), behind)
    if group[0].asking:
        head = _ASKING + head
    return head + (tail + head).join([item.name for item in group]) + tail


def _encode_values(group: Sequence[BatchKey], behind: Sequence[bytes]) -> list[bytes | memoryview]:
    buffers: list[bytes | memoryview] = []
    for item in group:
        head, tail = encode_around((b"SET", item.name), len(item.block), behind)
        buffers += [_ASKING + head if item.asking else head, item.block, tail]
    return buffers


def _values_at_a_time(items: Sequence[BatchKey]) -> int:
    """Return the number of values in half a window."""
    if not items:
        return 1
    return max(1, min(WINDOW_KEYS, WINDOW_BYTES // len(items[0].block)) // 2)
