"""RankSocket: the Unix socket of the manager, and its private directory."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiokv.errors import AiokvError, ConfigError
from aiokv.ranks.rank_state import MAX_RANKS
from aiokv.wire.unix import OwnedSocket, claimed, remove_stale

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from aiokv.ranks.messages import RankConnection
    from aiokv.wire.listener import Listener

PREFIX: Final = "aiokv-ranks-"  # name of private directories
_SOCKET: Final = "ranks"


class RankSocket:
    """A Unix socket that ranks connect to.

    Args:
        path: path of the socket; None for one in a new private directory per ``open``.

    Attributes:
        path: where the ranks connect; None before a private socket is opened for the first time.
        is_private: only ranks that the group starts know the path, so it can be closed once they
            have connected, and no file is left.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.is_private = path is None
        self._directory: Path | None = None
        self._listener: Listener[RankConnection] | None = None
        self._ending: Listener[RankConnection] | None = None  # the listener that aclose waits for
        self._owned: OwnedSocket | None = None

    @property
    def handshakes(self) -> int:
        """Number of accepted sockets without a Hello."""
        return 0 if self._listener is None else self._listener.handshakes

    def open(self, listen: Callable[[socket.socket, str], Listener[RankConnection]]) -> Path:
        """Listen, and return the path of the socket; idempotent while it listens.

        Args:
            listen: returns the listener of a listening socket with this name.

        Raises:
            ConfigError: the socket or its directory cannot be created. Nothing is left behind.
        """
        if self.path is not None and self._listener is not None:
            return self.path
        try:
            path = self._place()
            self._owned = OwnedSocket(path, MAX_RANKS)
            self._listener = listen(self._owned.listening, str(path))
        except BaseException:
            self.close()
            raise
        return path

    def end_handshakes(self) -> None:
        """Begin to end the handshakes of all sockets without a Hello. Idempotent."""
        if self._listener is not None:
            self._listener.end_handshakes()

    async def aclose(self) -> None:
        """Close the socket, and wait for the ends of handshakes. Idempotent; see ``close``.

        Cancellation: call it again.
        """
        listener = self._listener
        if listener is not None:
            self._ending = listener
        self.close()
        if self._ending is not None:
            await self._ending.aclose()

    def _place(self) -> Path:
        if self.path is not None and not self.is_private:
            return self.path
        remove_abandoned()
        try:
            self._directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise ConfigError(
                f"cannot create a private directory: {error}",
                hint="set TMPDIR to another directory",
            ) from error
        self.path = self._directory / _SOCKET
        return self.path

    def close(self) -> None:
        """Stop listening, and remove the socket and its directory. Idempotent.

        Sockets without a Hello are closed; open connections are not affected.
        """
        if self._listener is not None and self._owned is not None:
            self._owned.remove()
            self._listener.close()
            self._listener = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def remove_abandoned() -> None:
    """Remove the private directories of managers that were killed while their ranks started."""
    try:
        entries = [e for e in os.scandir(tempfile.gettempdir()) if e.name.startswith(PREFIX)]
    except OSError:
        return  # creating a directory there will raise this error, too
    for entry in entries:
        path = Path(entry.path) / _SOCKET
        try:
            status = entry.stat(follow_symlinks=False)
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and path.exists():
                with claimed(path):
                    remove_stale(path)
                path.parent.rmdir()
        except (OSError, AiokvError):
            continue  # a manager listens there, or is removing it
