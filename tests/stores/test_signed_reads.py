"""SignedReads of answers without Content-Length, each with one request."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import StoreError
from aiokv.stores.signed_reads import SignedReads
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENT = bytes(range(256)) * 8_192
PART = (1_000, 1_500_000)  # more than the buffer of a connection
CHUNK_BYTES = 100_000


class Server(ThreadingHTTPServer):
    """Answers GET with a part of ``CONTENT``, without the last ``missing_bytes``."""

    daemon_threads = True
    in_chunks = True
    missing_bytes = 0
    extra = b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0
        self.connections = 0

    def sign(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}?signature=1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.server.requests += 1
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = CONTENT[first : last + 1 - self.server.missing_bytes] + self.server.extra
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
        if not self.server.in_chunks:
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(body), CHUNK_BYTES):
            chunk = body[start : start + CHUNK_BYTES]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


class Writer:
    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, piece: memoryview) -> None:
        self.written += piece


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def read(reads: SignedReads) -> bytes | None:
    writer = Writer()
    was_read = reads.read("name", PART, len(CONTENT), writer, threading.Event())  # type: ignore[arg-type]
    return bytes(writer.written) if was_read else None


@pytest.mark.parametrize("in_chunks", [True, False])
def test_answers_without_a_length_are_read_by_one_request(server: Server, in_chunks: bool) -> None:
    server.in_chunks = in_chunks
    reads = SignedReads(server.sign, PATIENCE_SECONDS)
    for count in (1, 2):
        assert read(reads) == CONTENT[slice(*PART)]
        assert server.requests == count
    assert server.connections == (1 if in_chunks else 2)
    reads.close()


@pytest.mark.parametrize("in_chunks", [True, False])
def test_an_answer_without_a_length_that_ends_early_fails(server: Server, in_chunks: bool) -> None:
    server.in_chunks, server.missing_bytes = in_chunks, 1
    reads = SignedReads(server.sign, PATIENCE_SECONDS)
    with pytest.raises(StoreError, match="ended early: 1 bytes are missing"):
        read(reads)


def test_a_connection_with_more_than_the_part_is_not_used_again(server: Server) -> None:
    server.extra = b"more"
    reads = SignedReads(server.sign, PATIENCE_SECONDS)
    for count in (1, 2):
        assert read(reads) == CONTENT[slice(*PART)]
        assert server.connections == count
