"""MooncakeCluster: a master and a process that holds the memory, for tests and benches."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

from aiokv.errors import ConfigError
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.servers import HINT, Server, free_port, wait_until

SEGMENT_BYTES = 16 << 20


def why_absent() -> str:
    """Return why no cluster can be started here; empty when one can."""
    if importlib.util.find_spec("mooncake") is None:
        return f"mooncake-transfer-engine is not installed; {HINT}"
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", "2000")  # longer than a server stalls
    from aiokv.stores.mooncake.client import import_library

    try:
        import_library()
    except ConfigError as error:
        return f"{error}; {HINT}"
    return ""


class MooncakeCluster:
    """One master and one holder, on free ports of 127.0.0.1."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        metrics_port = free_port()
        program = str(Path(sys.executable).parent / "mooncake_master")
        self.master = Server(
            lambda port: [
                program, "-rpc_address=127.0.0.1", f"-rpc_port={port}", "-client_ttl=5",
                "-metrics_host=127.0.0.1", f"-metrics_port={metrics_port}",
            ],
            folder / "master.log",
        )  # fmt: skip
        self.holder = Server(
            lambda port: [
                sys.executable, str(Path(__file__).with_name("mooncake_holder.py")), self.address,
                str(segment_bytes), str(port),
            ],
            folder / "holder.log",
        )  # fmt: skip

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.master.port}"

    def start(self) -> None:
        """Start what does not run."""
        for server in (self.master, self.holder):
            if not server.is_running:
                server.start()

    def clear(self) -> None:
        """Remove all objects."""
        self._command(b"clear\n")

    def put(self, name: str, content: bytes) -> None:
        """Replace an object past the store."""
        self._command(f"put {name} {len(content)}\n".encode() + content)

    def fill(self) -> None:
        """Leave no memory for further objects."""
        self._command(b"fill\n")

    def _command(self, command: bytes) -> None:
        """Let the holder carry out a command, again if the master did not answer it in time."""
        wait_until(lambda: self._is_carried_out(command))

    def _is_carried_out(self, command: bytes) -> bool:
        with socket.create_connection(
            ("127.0.0.1", self.holder.port), timeout=PATIENCE_SECONDS
        ) as connection:
            connection.sendall(command)
            return connection.recv(16) == b"0\n"

    def kill(self) -> None:
        """End all processes."""
        self.holder.kill()
        self.master.kill()
