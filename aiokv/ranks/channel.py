"""Frames over a Unix stream socket that only this user may open.

A frame is a length (4 bytes, little-endian) and a payload of that length. Both sides check with the
kernel that the other side runs as the same user, whatever the modes of file and directory.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from aiokv.errors import AiokvError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_FRAME_BYTES: Final = 64 << 20
MAX_PATH_BYTES: Final = 107  # of sockaddr_un, less the zero at its end
_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid


class ChannelError(AiokvError):
    """The other side violates the protocol; the channel is cut."""


class Channel(asyncio.Protocol):
    """One connection, on either side. Frames arrive in callbacks of the loop.

    Args:
        on_frame: gets each frame; a ``ChannelError`` or a message that cannot be decoded cuts the
            channel.
        on_closed: called once at the end, with the reason; never from inside a call.
        max_frame_bytes: a longer frame cuts the channel as soon as its length has arrived.

    Attributes:
        max_frame_bytes: of the next frames; may be changed by ``on_frame``.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[str], None],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._reason = ""
        self._reads = True
        self.max_frame_bytes = max_frame_bytes

    def send(self, frame: bytes) -> None:
        """Queue a frame. A channel that was closed or has ended ignores it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Read nothing more, and end the connection when all queued frames have been sent."""
        self._stop_reading()
        if self._transport is not None:
            self._transport.close()

    def cut(self, reason: str) -> None:
        """End the connection now, or as soon as it is made; the first reason is kept."""
        self._reason = self._reason or reason
        self._stop_reading()
        if self._transport is not None:
            self._transport.abort()

    def _stop_reading(self) -> None:
        self._reads = False
        self._buffer = bytearray()

    # --- asyncio.Protocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        uid = peer_uid(transport)
        if uid != os.getuid():
            self.cut(f"the other side runs as user {uid}, not as user {os.getuid()}")
        elif not self._reads:  # closed or cut before it was connected
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._reads:
            return
        self._buffer += data
        try:
            self._take_frames()
        except (ChannelError, msgspec.MsgspecError) as error:
            self.cut(f"protocol: {error}")
        except RecursionError:  # msgspec counts the nesting of what it decodes or skips
            self.cut("protocol: the message is nested too deeply")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._stop_reading()
        on_closed = self._on_closed
        # The callbacks may refer to the owner of the channel: without this cycle the channel is
        # freed at once, not when the garbage collector runs.
        self._on_frame, self._on_closed = _ignore, _ignore
        closed = "the connection ended" if error is None else f"the connection ended: {error}"
        on_closed(self._reason or closed)

    def _take_frames(self) -> None:
        buffer, begin = self._buffer, 0
        while self._reads and len(buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            if length > self.max_frame_bytes:
                raise ChannelError(
                    f"the frame has {length} bytes; the limit is {self.max_frame_bytes}"
                )
            behind = begin + _LENGTH.size + length
            if behind > len(buffer):
                break
            frame = bytes(memoryview(buffer)[begin + _LENGTH.size : behind])
            begin = behind
            self._on_frame(frame)
        del buffer[:begin]


def _ignore(_: object) -> None:
    """Ignore a callback of a channel that has ended."""


def frame_of(payload: bytes) -> bytes:
    """Return a payload as the frame that ``send`` takes.

    Raises:
        ChannelError: longer than the other side would accept.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise ChannelError(f"the message has {len(payload)} bytes; the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def peer_uid(transport: asyncio.BaseTransport) -> int:
    """Return the user id of the process at the other end, from the kernel."""
    connection: socket.socket = transport.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def listen(path: Path) -> socket.socket:
    """Return a listening socket with a file of mode 0600; one process at a time owns the path.

    Raises:
        ConfigError: there is no such directory, or other users may write to it; another process
            listens there, or is about to; or the path is too long, or names another kind of file.
    """
    check_length(path)
    if not path.parent.is_dir():
        raise ConfigError(
            f"cannot listen at {path}: {path.parent} does not exist",
            hint="make the directory, with mode 0700, or change RankGroup(path=...)",
        )
    mode = path.parent.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"cannot listen at {path}: other users may write to {path.parent}",
            hint="use a directory of mode 0700",
        )
    try:
        with claimed(path):
            remove_stale(path)
            return _bind(path)
    except OSError as error:
        raise ConfigError(f"cannot listen at {path}: {error}") from error


def _bind(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)  # no process can connect before listen()
        listening.listen()
    except BaseException:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold the lock that a process needs to check or change the path of a socket.

    The lock is a file beside the socket, which exists only while it is held.

    Raises:
        ConfigError: another process holds the lock.
    """
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _lock(lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # before the file is unlocked: see _lock
        os.close(descriptor)


def _lock(lock: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"another process holds the lock {lock} to open or remove a socket"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the process that held the lock has removed the file


def checked_path(path: Any) -> Path:
    """Return ``path`` as the path of a socket.

    Raises:
        ConfigError: it is of the wrong type, or empty.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"path is {path!r}; it must be the path of a Unix socket")
    return Path(name)


def check_length(path: Path) -> None:
    """Check the length of the path of a Unix socket.

    Raises:
        ConfigError: the path is longer than the kernel accepts.
    """
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"{path} is {num_bytes} bytes long; the path of a Unix socket has at most "
            f"{MAX_PATH_BYTES}",
            hint="pass a shorter path=; where none is passed, set TMPDIR to a shorter directory",
        )


def remove_stale(path: Path) -> None:
    """Remove the socket of a manager that was killed; call it in ``claimed(path)``.

    Raises:
        ConfigError: a process listens there, or the file is not a socket.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"cannot listen at {path}: the file is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # do not wait while the backlog is full
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise ConfigError(
        f"cannot listen at {path}: another process listens there", hint="choose another path"
    )
