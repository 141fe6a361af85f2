"""HostServer: the service ``aiokv store serve`` for tests."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.servers import Server

if TYPE_CHECKING:
    from pathlib import Path


class HostServer(Server):
    """The process ``aiokv store serve``."""

    def __init__(self, folder: Path, size: str = "64MiB", below: str | None = None) -> None:
        self.path = folder / "host.sock"
        self.url = f"host://{self.path}"
        command = [sys.executable, "-m", "aiokv", "store", "serve", str(self.path)]
        command += ["--bytes", size, *(["--below", below] if below else [])]
        super().__init__(lambda _: command, folder / "log", port=1, is_ready=self._accepts)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            client.connect(str(self.path))
            return True
        return False

    def terminate(self) -> int:
        """End the process with SIGTERM; return its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(PATIENCE_SECONDS)
        self._process = None
        return status

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid
