"""An S3 server whose medium is full after 8 objects: ``python full_s3_server.py PORT``.

Moto has no limit of its own. This server knows GET, HEAD, PUT and DELETE of one object, and ranges.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_OBJECTS = 8
FULL = b"<Error><Code>XMinioStorageFull</Code><Message>The storage is full</Message></Error>"
objects: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer_object(with_body=False)

    def do_GET(self) -> None:
        self._answer_object(with_body=True)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if len(objects) >= MAX_OBJECTS and self.path not in objects:
            self._answer(507, FULL)
        else:
            objects[self.path] = content
            self._answer(200, b"")

    def do_DELETE(self) -> None:
        objects.pop(self.path, None)
        self._answer(204, b"")

    def _answer_object(self, *, with_body: bool) -> None:
        content = objects.get(self.path)
        if content is None:
            self._answer(404, b"")
        else:
            first, _, last = self.headers.get("Range", "bytes=-")[len("bytes=") :].partition("-")
            part = content[int(first) : int(last) + 1] if first else content
            head = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}" if first else ""
            self._answer(206 if first else 200, part, head, with_body=with_body)

    def _answer(
        self, status: int, content: bytes, content_range: str = "", *, with_body: bool = True
    ) -> None:
        self.send_response(status)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
