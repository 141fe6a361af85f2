"""Connection: one blocking socket to a server, used by one thread at a time.

A thread reads a value from the socket straight into a host block, and sends a value straight from
a host block: Python copies no payload, and the thread does not hold the GIL while the kernel
copies. A ``BufferedProtocol`` on the event loop is as fast while the loop is idle. But its copies
hold the loop, and each part of a value waits for the tasks that compute on the loop: the protocol
is slower then, on asyncio by an order of magnitude for small blocks (``bench/redis_store.py``).

The protocol is RESP2, which every version of Valkey and Redis speaks.
"""

from __future__ import annotations

import select
import socket
from ssl import SSLWantReadError
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Sequence

Reply: TypeAlias = "int | bytes | ReplyError | list[Reply] | None"

_BUFFER_BYTES: Final = 64 << 10
_MAX_LINE_BYTES: Final = 16 << 10  # first line of a reply; server errors are much shorter
# Limits of replies other than objects. The longest lists the slots of a cluster, with some texts,
# numbers and lists for each of at most 16,384 ranges of slots.
_MAX_TEXT_BYTES: Final = 16 << 10
_MAX_REPLY_BYTES: Final = 32 << 20
_ELEMENT_BYTES: Final = 64  # counted for each text, number and list
_MAX_DEPTH: Final = 8
MAX_VALUE_BYTES: Final = 512 << 20  # a server's default of proto-max-bulk-len
_MAX_BUFFERS: Final = 1024  # per sendmsg: IOV_MAX of Linux
_CRLF: Final = b"\r\n"


class ReplyError(NamedTuple):
    """An error that the server replied, such as ``MOVED 3999 127.0.0.1:6381``."""

    text: str

    @property
    def code(self) -> str:
        """First word of the text."""
        return self.text.partition(" ")[0]


class WrongLength(NamedTuple):
    """A value was found, but its length is not that of an object; its bytes were discarded."""

    num_bytes: int


def encode(*arguments: bytes) -> bytes:
    """Return a request."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


def encode_around(
    before: Sequence[bytes], num_bytes: int, after: Sequence[bytes] = ()
) -> tuple[bytes, bytes]:
    """Return the parts of a request before and behind an argument of ``num_bytes``."""
    parts = [b"*%d\r\n" % (len(before) + 1 + len(after))]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in before]
    parts.append(b"$%d\r\n" % num_bytes)
    behind = [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in after]
    return b"".join(parts), b"".join([_CRLF, *behind])


class RedisConnection:
    """Requests and replies on a connected socket.

    All methods block, except for ``abort``, ``close`` and ``is_usable``.

    Args:
        connected: a connected socket; the connection closes it.
        tls: context of TLS, or None.
        host: name that the certificate must have.

    Raises:
        OSError: in any method that blocks: the connection was lost, aborted, or the server sent
            bytes that are not RESP. The connection must be closed then.
    """

    def __init__(
        self, connected: socket.socket, tls: ssl.SSLContext | None = None, host: str = ""
    ) -> None:
        self._tls: ssl.SSLSocket | None = None
        if tls is not None:
            self._tls = tls.wrap_socket(
                connected, server_hostname=host, do_handshake_on_connect=False
            )
        self._socket = self._tls or connected
        self._receive_flags = 0 if tls else socket.MSG_WAITALL
        self._aborted = False
        # Bytes begin:end of the buffer were received and not used yet.
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._begin = 0
        self._end = 0
        self._reply_bytes = 0  # bytes of the reply that is being read

    def handshake(self) -> None:
        """Begin TLS, if there is a context."""
        if self._tls is not None:
            self._tls.do_handshake()

    def abort(self) -> None:
        """Make a thread that uses the connection stop; callable from another thread."""
        self._aborted = True
        try:
            # Not SSLSocket.shutdown: it takes the TLS state away from the thread that uses it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            return  # the server closed it first

    def close(self) -> None:
        """Close the socket. No thread may use the connection."""
        self._socket.close()

    def is_usable(self) -> bool:
        """Return False when the server closed the connection, or sent bytes without a request."""
        if self._begin != self._end:
            return False
        try:
            if self._tls is None:
                self._socket.recv(1, socket.MSG_DONTWAIT)
            else:
                self._tls.setblocking(False)
                self._tls.recv(1)  # processes TLS records, then raises SSLWantReadError
        except (BlockingIOError, SSLWantReadError):
            self._socket.setblocking(True)
            return True
        except OSError:
            return False
        return False

    def has_bytes_within(self, seconds: float) -> bool:
        """Return True as soon as there are bytes to read, or the connection has ended; False after
        ``seconds``."""
        if self._begin != self._end or (self._tls is not None and self._tls.pending()):
            return True
        polled = select.poll()
        polled.register(self._socket, select.POLLIN)
        return bool(polled.poll(1000 * seconds))

    def limit(self, seconds: float) -> None:
        """Raise ``TimeoutError`` from now on when a part of a reply does not arrive in time."""
        self._socket.settimeout(seconds)

    # --- requests ---------------------------------------------------------------------------------

    def send(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Send buffers, one behind the other, not copied."""
        rest = _joined(buffers)
        while rest:
            self._check()
            if self._tls is not None:
                self._tls.sendall(rest.pop(0))
            else:
                _drop_sent(rest, self._socket.sendmsg(rest[:_MAX_BUFFERS]))
        self._check()

    def request(self, *arguments: bytes) -> Reply:
        """Send one request and return its reply."""
        self.send([encode(*arguments)])
        return self.read_reply()

    # --- replies ----------------------------------------------------------------------------------

    def read_reply(self) -> Reply:
        """Return the next reply, which is no object of the store.

        Raises:
            ConnectionError: the reply is longer than that of any command.
        """
        self._reply_bytes = 0
        return self._read_part(0)

    def _read_part(self, depth: int) -> Reply:
        """Return a reply within ``depth`` lists."""
        line = self._read_line(_BUFFER_BYTES)
        is_text, is_list = line.startswith(b"$"), line.startswith(b"*")
        length = _integer(line[1:]) if is_text or is_list else len(line)
        self._reply_bytes += _ELEMENT_BYTES + (0 if is_list else max(length, 0))
        if (
            depth > _MAX_DEPTH
            or self._reply_bytes > _MAX_REPLY_BYTES
            or (is_text and length > _MAX_TEXT_BYTES)
        ):
            raise ConnectionError(f"the reply of the server is too long: {line[:40]!r}")
        if not is_text and not is_list:
            return simple_reply(line)
        if length < 0:
            return None
        if is_list:
            return [self._read_part(depth + 1) for _ in range(length)]
        value = bytearray(length)
        self._receive_into(memoryview(value))
        self._end_value(_BUFFER_BYTES)
        return bytes(value)

    def read_value(self, block: memoryview) -> bool | ReplyError | WrongLength:
        """Read the next reply into a block if it is a value of the block's length.

        Return True when the block was filled, and False when the server does not have the key. Up
        to ``len(block)`` bytes of the block may be overwritten, and no others.
        """
        # Bytes after the first line belong in the block, so read no further than that line.
        ahead = len(b"$%d\r\n" % len(block))
        line = self._read_line(ahead)
        if not line.startswith(b"$"):
            reply = simple_reply(line)
            if isinstance(reply, ReplyError):
                return reply
            raise ConnectionError(f"expected a value, but the server replied {reply!r}")
        length = _integer(line[1:])
        if length < 0:
            return False
        if length > MAX_VALUE_BYTES:
            raise ConnectionError(f"the reply of the server is too long: {line[:40]!r}")
        if length != len(block):
            self._discard(length)
            self._end_value(ahead)
            return WrongLength(length)
        self._receive_into(block)
        self._end_value(ahead)
        return True

    def read_lines(self, count: int) -> list[bytes]:
        """Return the next replies, one line each, without line ends."""
        lines: list[bytes] = []
        while len(lines) < count:
            end = self._bytes.rfind(_CRLF, self._begin, self._end)
            if end < 0:
                self._receive_line(_BUFFER_BYTES)
                continue
            found = bytes(self._buffer[self._begin : end]).split(_CRLF, count - len(lines))
            if len(found) > count - len(lines):
                end -= len(found.pop()) + 2
            lines += found
            self._begin = end + 2
        return lines

    def _read_line(self, ahead: int) -> bytes:
        """Return the next line without its end; receive at most ``ahead`` bytes at once."""
        while True:
            end = self._bytes.find(_CRLF, self._begin, self._end)
            if end >= 0:
                line = bytes(self._buffer[self._begin : end])
                self._begin = end + 2
                return line
            self._receive_line(ahead)

    def _receive_line(self, ahead: int) -> None:
        """Receive more of a line that is not complete."""
        received = self._end - self._begin
        if received > _MAX_LINE_BYTES:
            raise ConnectionError(
                "the reply of the server is not RESP: it is a line without an end"
            )
        self._receive_more(max(1, ahead - received))

    def _end_value(self, ahead: int) -> None:
        """Take the end of a value, and up to ``ahead`` bytes of the reply behind it."""
        while self._end - self._begin < 2:
            self._receive_more(2 + ahead - (self._end - self._begin))
        if not self._bytes.startswith(_CRLF, self._begin, self._end):
            raise ConnectionError("the server sent a value that does not end with its length")
        self._begin += 2

    def _receive_more(self, most: int) -> None:
        """Append at least one byte and at most ``most`` bytes to the buffer."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin and self._end + most > _BUFFER_BYTES:
            rest = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        self._end += self._received(self._buffer[self._end : self._end + most], 0)

    def _receive_into(self, target: memoryview) -> None:
        """Fill ``target`` with the next bytes."""
        done = min(len(target), self._end - self._begin)
        target[:done] = self._buffer[self._begin : self._begin + done]
        self._begin += done
        while done < len(target):
            done += self._received(target[done:], self._receive_flags)

    def _discard(self, num_bytes: int) -> None:
        taken = min(num_bytes, self._end - self._begin)
        self._begin += taken
        rest = num_bytes - taken
        if rest:
            self._begin = self._end = 0
        while rest:
            rest -= self._received(self._buffer[: min(rest, _BUFFER_BYTES)], self._receive_flags)

    def _received(self, target: memoryview, flags: int) -> int:
        self._check()
        received = self._socket.recv_into(target, 0, flags)
        self._check()
        if received == 0:
            raise ConnectionResetError("the server closed the connection")
        return received

    def _check(self) -> None:
        if self._aborted:
            raise ConnectionAbortedError("the operation was cancelled")


def simple_reply(line: bytes) -> int | bytes | ReplyError:
    """Return the reply that is one line, without its end.

    Raises:
        ConnectionError: the line is not such a reply.
    """
    kind, text = line[:1], line[1:]
    if kind == b"-":
        return ReplyError(text.decode(errors="replace"))
    if kind == b":":
        return _integer(text)
    if kind == b"+":
        return text
    raise ConnectionError(f"the reply of the server is not RESP: {line[:40]!r}")


def _integer(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"expected a number, but the server sent {text[:40]!r}") from None


def _joined(buffers: Iterable[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return buffers with neighbouring ``bytes`` joined; views are not copied."""
    joined: list[bytes | memoryview] = []
    small: list[bytes] = []
    for buffer in buffers:
        if isinstance(buffer, bytes):
            small.append(buffer)
            continue
        joined += [b"".join(small), buffer]
        small = []
    return [*joined, b"".join(small)] if small else joined


def _drop_sent(buffers: list[bytes | memoryview], sent: int) -> None:
    """Remove the first ``sent`` bytes."""
    whole = 0
    while whole < len(buffers) and sent >= len(buffers[whole]):
        sent -= len(buffers[whole])
        whole += 1
    del buffers[:whole]
    if sent:
        buffers[0] = memoryview(buffers[0])[sent:]
