"""SignedReads: what is read from a server that answers by a script."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

import pytest

from aiokv.errors import StoreError
from aiokv.stores import signed_reads
from aiokv.stores.signed_reads import SignedReads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv._native import ObjectWriter

CONTENT = bytes(range(256)) * 4096  # 1 MiB
PART = (1000, 900_000)  # more than the buffer of a connection
CHUNK_BYTES = 100_000
CLOSES = ("Connection", "close")


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests of ranges of ``CONTENT``; the script may replace an answer."""

    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        script = self.server.script
        (script.pop(0) if script else Handler.answer)(self)

    def answer(self, status: int = 206, missing: int = 0, length: int = len(CONTENT)) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(status)
        self.send_header("Content-Range", f"bytes {first}-{last}/{length}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(CONTENT[first : last + 1 - missing])
        self.close_connection = missing > 0

    def answer_without_length(
        self, *, in_chunks: bool, missing: int = 0, more: bytes = b"", ends: bool = True
    ) -> None:
        """Answer in chunks, or until the connection ends."""
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = CONTENT[first : last + 1 - missing] + more
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
        self.send_header(*(("Transfer-Encoding", "chunked") if in_chunks else CLOSES))
        self.end_headers()
        for start in range(0, len(body), CHUNK_BYTES) if in_chunks else ():
            chunk = body[start : start + CHUNK_BYTES]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.write((b"0\r\n\r\n" if ends else b"") if in_chunks else body)
        if not ends:
            self.server.held.wait()

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Callable[[Handler], None]] = []
        self.requests: list[str] = []
        self.connections = 0
        self.held = threading.Event()  # set at the end of the test


class Reader:
    """Reads parts of the object, and keeps what was read."""

    def __init__(self, server: Server, timeout_seconds: float) -> None:
        url = f"http://127.0.0.1:{server.server_port}"
        self.reads = SignedReads(lambda name: f"{url}/{name}?signature=1", timeout_seconds)
        self.unwanted = threading.Event()
        self.received = b""

    def write(self, piece: memoryview) -> None:
        self.received += piece

    def read(self) -> bool:
        self.received = b""
        writer = cast("ObjectWriter", self)
        return self.reads.read("kv/one", PART, len(CONTENT), writer, self.unwanted)


@contextmanager
def opened(timeout_seconds: float = 600.0) -> Iterator[tuple[Server, Reader]]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        reader = Reader(server, timeout_seconds)
        try:
            yield server, reader
        finally:
            server.held.set()
            reader.reads.close()
            server.shutdown()
            thread.join()


def test_parts_are_read_by_signed_urls_over_one_connection():
    with opened() as (server, reader):
        for _ in range(3):
            assert reader.read()
            assert reader.received == CONTENT[slice(*PART)]
        assert server.requests == ["/kv/one?signature=1"] * 3
        assert server.connections == 1


def test_a_kept_connection_that_the_server_has_closed_is_replaced():
    def answer_and_close(handler: Handler) -> None:
        handler.answer()
        handler.close_connection = True  # without telling the client

    with opened() as (server, reader):
        server.script = [answer_and_close]
        assert reader.read()
        assert reader.read()
        assert reader.received == CONTENT[slice(*PART)]
        assert server.connections == 2


def test_connections_are_kept_for_half_a_minute(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(signed_reads.time, "monotonic", lambda: now)
    with opened() as (server, reader):
        for later, connections in ((0.0, 1), (29.0, 1), (29.0, 1), (31.0, 2)):
            now += later
            assert reader.read()
            assert server.connections == connections


@pytest.mark.parametrize(
    ("answer", "pauses"),
    [
        ({"status": 404}, False),
        ({"status": 416}, False),
        ({"length": len(CONTENT) + 1}, False),  # another object has taken the name
        ({"status": 403}, True),
        ({"status": 307}, True),
        ({"status": 200}, True),
    ],
)
def test_other_answers_are_left_to_the_package_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], pauses: bool
):
    now = 0.0
    monkeypatch.setattr(signed_reads.time, "monotonic", lambda: now)
    with opened() as (server, reader):
        server.script = [lambda handler: handler.answer(**answer)]
        assert not reader.read()
        assert reader.received == b""
        now = 59.0
        assert reader.read() is not pauses
        now = 61.0
        assert reader.read()
        assert reader.received == CONTENT[slice(*PART)]


def test_a_response_that_ends_early_is_an_error_and_its_connection_is_not_used_again():
    with opened() as (server, reader):
        server.script = [lambda handler: handler.answer(missing=1)]
        with pytest.raises(StoreError, match="ended early: 1 bytes are missing"):
            reader.read()
        assert reader.read()
        assert server.connections == 2


@pytest.mark.parametrize("in_chunks", [True, False])
def test_answers_without_a_length_are_read_by_one_request(in_chunks: bool):
    with opened() as (server, reader):
        server.script = [lambda handler: handler.answer_without_length(in_chunks=in_chunks)] * 2
        for count in (1, 2):
            assert reader.read()
            assert reader.received == CONTENT[slice(*PART)]
            assert len(server.requests) == count
        assert server.connections == (1 if in_chunks else 2)


@pytest.mark.parametrize("in_chunks", [True, False])
def test_an_answer_without_a_length_that_ends_early_is_an_error(in_chunks: bool):
    with opened() as (server, reader):
        server.script = [
            lambda handler: handler.answer_without_length(in_chunks=in_chunks, missing=1)
        ]
        with pytest.raises(StoreError, match="ended early: 1 bytes are missing"):
            reader.read()


@pytest.mark.parametrize("answer", [{"more": b"more"}, {"ends": False}], ids=["longer", "open"])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_a_connection_is_not_used_again_if_the_answer_does_not_end_with_the_part(
    answer: dict[str, Any], in_chunks: bool
):
    with opened() as (server, reader):
        server.script = [
            lambda handler: handler.answer_without_length(in_chunks=in_chunks, **answer)
        ]
        for connections in (1, 2):
            assert reader.read()
            assert reader.received == CONTENT[slice(*PART)]
            assert server.connections == connections


def test_an_answer_that_does_not_come_in_time_is_an_error():
    with opened(timeout_seconds=0.05) as (server, reader):
        server.script = [lambda handler: cast("None", handler.server.held.wait())]
        with pytest.raises(StoreError, match="not answered in time"):
            reader.read()


def test_a_server_that_cannot_be_reached_in_time_is_left_to_the_package_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
):
    attempts = 0

    def connect(client: object) -> None:
        nonlocal attempts
        attempts += 1
        raise TimeoutError

    monkeypatch.setattr(signed_reads.http.client.HTTPConnection, "connect", connect)
    with opened() as (_, reader):
        assert not reader.read()
        assert not reader.read()
    assert attempts == 1


def test_a_read_ends_when_it_is_unwanted():
    with opened() as (_, reader):
        reader.unwanted.set()
        assert reader.read()
        assert reader.received == b""


def test_a_url_that_cannot_be_signed_is_left_to_the_package():
    def refuse(name: str) -> str:
        raise ValueError(name)

    reads = SignedReads(refuse, 1.0)
    assert not reads.read("one", PART, 1, cast("ObjectWriter", None), threading.Event())
    reads.close()
