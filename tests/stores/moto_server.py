"""MotoServer: an S3 server for tests, with one empty bucket after each start."""

from __future__ import annotations

import http.client
import importlib.util
import sys
from typing import TYPE_CHECKING

from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.servers import HINT, Server

if TYPE_CHECKING:
    from pathlib import Path

BUCKET = "kvcache"
SIGNED = "AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request"


def why_absent() -> str:
    """Return why no server can be started here; empty when one can."""
    missing = [name for name in ("moto", "obstore") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed; {HINT}" if missing else ""


class MotoServer(Server):
    """A process with all objects in its memory.

    Args:
        folder: for its output.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            folder / "moto.log",
        )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        super().start()
        self.request("PUT", f"/{BUCKET}")

    def clear(self) -> None:
        """Remove all objects, and require no credentials."""
        self.request("POST", "/moto-api/reset-auth", b"inf")
        self.request("POST", "/moto-api/reset")
        self.request("PUT", f"/{BUCKET}")

    def require_credentials(self) -> None:
        """Refuse requests: no credentials are known to the server."""
        self.request("POST", "/moto-api/reset-auth", b"0")

    def put(self, name: str, content: bytes) -> None:
        """Write an object past the store."""
        self.request("PUT", f"/{BUCKET}/{name}", content)

    def request(self, method: str, path: str, body: bytes = b"") -> None:
        """Send one request; fail unless it succeeds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body=body, headers={"Authorization": SIGNED})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status < 300, text
        finally:
            connection.close()
