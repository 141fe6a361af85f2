"""SignedReads: parts of objects of S3 over HTTP, received without copies in Python.

The obstore package returns the body of a response in pieces of new memory, each copied under the
GIL. Here it signs the URL of the request only. Threads receive the body into buffers that stay in
the caches of the processor, and an ``ObjectWriter`` copies it from there to the blocks. Over HTTPS,
where decryption takes most of the time, this gains nothing.
"""

from __future__ import annotations

import http.client
import time
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from aiokv.errors import StoreError

if TYPE_CHECKING:
    import socket
    import threading
    from collections.abc import Callable
    from urllib.parse import SplitResult

    from aiokv._native import ObjectWriter

_BUFFER_BYTES: Final = 512 << 10
_CONNECT_SECONDS: Final = 1.0
_KEPT_SECONDS: Final = 30.0  # routers and servers may drop an idle connection without notice
_END_SECONDS: Final = 0.1  # for the end of a body without a length, once all bytes are there
_PAUSE_SECONDS: Final = 60.0  # after a request that was not answered
_ANSWERS: Final = (
    HTTPStatus.PARTIAL_CONTENT,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
)


class SignedReads:
    """Reads of the objects of one bucket. Connections are kept, one per thread that reads.

    What a server answers besides the part that was asked for is not examined: the caller repeats
    the request by the package, which knows proxies, redirections, and other ways to sign.

    Args:
        sign: returns the URL of GET requests of an object.
        timeout_seconds: limit of one read.
    """

    def __init__(self, sign: Callable[[str], str], timeout_seconds: float) -> None:
        self._sign = sign
        self._timeout_seconds = timeout_seconds
        self._idle: list[_Connection] = []
        self._not_before = 0.0

    def read(
        self,
        name: str,
        part: tuple[int, int],
        num_bytes: int,
        writer: ObjectWriter,
        unwanted: threading.Event,
    ) -> bool:
        """Read a part of an object; blocks.

        Args:
            name: of the object.
            part: first byte, and the end.
            num_bytes: length of the object.
            writer: gets the part.
            unwanted: ends the read early once it is set.

        Returns:
            False if the object has another length, or the server has not answered, now or within
            the last minute: nothing was written.

        Raises:
            StoreError: the response ended early, or did not arrive in time.
        """
        deadline = time.monotonic() + self._timeout_seconds
        connection = self._request(name, part, num_bytes, deadline)
        if connection is None:
            return False
        is_whole = False
        try:
            is_whole = connection.receive(part[1] - part[0], writer, unwanted, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise StoreError(f"the response ended early: {error}") from error
        finally:
            if is_whole:
                self._idle.append(connection)
            else:
                connection.close()
        return True

    def _request(
        self, name: str, part: tuple[int, int], num_bytes: int, deadline: float
    ) -> _Connection | None:
        """Return a connection that will receive the part; None without one."""
        if time.monotonic() < self._not_before:
            return None
        connection, status, has_begun = None, 0, False
        try:
            url = urlsplit(self._sign(name))
            connection = self._connection(url)
            status = connection.request(url, part, deadline)
            has_begun = connection.has_begun(part, num_bytes)
        except TimeoutError as error:
            if time.monotonic() >= deadline:
                raise StoreError("the server has not answered in time") from error
            status = 0  # it could not be reached in time
        except Exception:  # the request of the package tells what is wrong
            status = 0
        finally:
            if connection is not None and not has_begun:
                connection.close()
        if status not in _ANSWERS:
            self._not_before = time.monotonic() + _PAUSE_SECONDS
        return connection if has_begun else None

    def _connection(self, url: SplitResult) -> _Connection:
        with suppress(IndexError):
            connection = self._idle.pop()
            if time.monotonic() < connection.used_at + _KEPT_SECONDS:
                return connection
            connection.close()
        return _Connection(http.client.HTTPConnection(url.hostname or "", url.port))

    def close(self) -> None:
        """Close the connections. No thread may be reading."""
        while self._idle:
            self._idle.pop().close()


class _Connection:
    """A connection to the server, which has one request at a time, and a buffer.

    Attributes:
        used_at: end of the last whole read.
    """

    def __init__(self, client: http.client.HTTPConnection) -> None:
        self._client = client
        self.used_at = 0.0
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def request(self, url: SplitResult, part: tuple[int, int], deadline: float) -> int:
        """Request a part of an object; return the status of the response.

        Raises:
            OSError: the server cannot be reached, or has not answered in time.
            HTTPException: the response is none of HTTP.
        """
        if self._client.sock is not None:
            with suppress(ConnectionError):  # the server may have closed an idle connection
                return self._exchange(url, part, deadline)
            self._client.close()
        return self._exchange(url, part, deadline)

    def _exchange(self, url: SplitResult, part: tuple[int, int], deadline: float) -> int:
        if self._client.sock is None:
            self._client.timeout = min(_CONNECT_SECONDS, _left(deadline))
            self._client.connect()
        self._socket = self._client.sock
        self._socket.settimeout(_left(deadline))
        headers = {"Range": f"bytes={part[0]}-{part[1] - 1}"}
        self._client.request("GET", f"{url.path}?{url.query}", headers=headers)
        self._response = self._client.getresponse()
        return self._response.status

    def has_begun(self, part: tuple[int, int], num_bytes: int) -> bool:
        """Return True if the part of an object of this length is being received."""
        response, place = self._response, f"bytes {part[0]}-{part[1] - 1}/{num_bytes}"
        return (
            response is not None
            and response.status == HTTPStatus.PARTIAL_CONTENT
            and response.headers.get("Content-Range") == place
            and response.length in (part[1] - part[0], None)
        )

    def receive(
        self, num_bytes: int, writer: ObjectWriter, unwanted: threading.Event, deadline: float
    ) -> bool:
        """Receive the body of the response; return False if it became unwanted, or is longer.

        Raises:
            OSError: it ended early, or has not arrived in time.
            HTTPException: a chunk ended early.
        """
        response = self._response
        if response is None or self._socket is None:
            raise ConnectionError("no request was sent")
        has_length = response.length is not None  # otherwise in chunks, or until the end
        body = response.fp if has_length else response
        filled = 0
        while num_bytes:
            if unwanted.is_set():
                return False
            self._socket.settimeout(_left(deadline))
            count = body.readinto1(self._buffer[filled : filled + num_bytes])
            if not count:
                raise ConnectionError(f"{num_bytes} bytes are missing")
            filled, num_bytes = filled + count, num_bytes - count
            if filled == len(self._buffer) or not num_bytes:
                writer.write(self._buffer[:filled])
                filled = 0
        is_at_end = has_length or _is_at_end(response, self._socket)
        response.close()
        self.used_at = time.monotonic()
        return is_at_end

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._client.close()


def _is_at_end(response: http.client.HTTPResponse, connection: socket.socket) -> bool:
    """Return True if a body without a length has ended: the connection can be used again."""
    connection.settimeout(_END_SECONDS)
    try:
        return not response.read1(1)
    except (OSError, http.client.HTTPException):
        return False


def _left(deadline: float) -> float:
    """Return the seconds until a deadline.

    Raises:
        TimeoutError: it has passed.
    """
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("the server is too slow")
    return left
