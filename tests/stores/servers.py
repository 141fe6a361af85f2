"""Server processes of the tests: started on free ports of 127.0.0.1, stopped and killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

HINT = "run `make services`"
_ports = random.SystemRandom().sample(range(10_000, 32_768), 1_000)  # none of outgoing connections


class Server:
    """A process that listens on a port; its output goes to a file.

    Args:
        command: returns the command line for a port.
        log: file of its output.
        port: port to listen on; None for a free one, which stays the same after a restart.
        is_ready: returns whether the server answers; the default connects to the port.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        log: Path,
        *,
        port: int | None = None,
        is_ready: Callable[[], bool] | None = None,
    ) -> None:
        self._command = command
        self._log = log
        self._is_ready = is_ready or (lambda: accepts(self.port))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port() if port is None else port

    def start(self) -> None:
        """Start the process and wait until it answers."""
        assert self._process is None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(self.port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._log.parent,
                env=os.environ | {"MC_TCP_BIND_ADDRESS": "127.0.0.1"},
            )
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self._process.args!r} ended:\n{self._log.read_text()[-2000:]}")
        return self._is_ready()

    def kill(self) -> None:
        """End the process at once, with SIGKILL; also when it is stopped. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop the process with SIGSTOP: its connections stay, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # Its threads run on until the signal has reached each of them.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a stopped process continue."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self._process is not None


class ProxyServer(Server):
    """A process that forwards to a port of 127.0.0.1, slowly on demand; see ``proxy.py``."""

    def __init__(self, target: int, log: Path) -> None:
        program = str(Path(__file__).with_name("proxy.py"))
        super().__init__(lambda port: [sys.executable, program, str(target), str(port)], log)

    def slow_down(self) -> None:
        """Forward 100 bytes per second."""
        self.signal(signal.SIGUSR1)

    def speed_up(self) -> None:
        """Forward at full speed."""
        self.signal(signal.SIGUSR2)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until a condition holds; fail after a time that no server should need."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS} s"
        time.sleep(0.01)


def accepts(port: int) -> bool:
    """Return whether a port of 127.0.0.1 accepts connections."""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS):
            return True
    except OSError:
        return False


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free just now, and another one with each call.

    The kernel gives such a port to no connection, also not while the server of the port is down.
    """
    while True:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", _ports.pop()))
            return int(listener.getsockname()[1])
