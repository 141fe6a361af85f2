"""Frames over a Unix stream socket that only this user may open.

A frame is its length (4 bytes, little-endian) and so many bytes. Both sides check with the kernel
that the other is the same user, whatever the modes of file and directory.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING, Final, cast

import msgspec

from aiokv.errors import AiokvError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_FRAME_BYTES: Final = 64 << 20
MAX_PATH_BYTES: Final = 107  # of sockaddr_un, less the zero at its end
_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid


class ChannelError(AiokvError):
    """The other side does not keep to the protocol; the channel is cut."""


class Channel(asyncio.Protocol):
    """One connection, either side. Frames arrive in callbacks of the loop.

    Args:
        on_frame: gets each frame; a ``ChannelError`` or a message that cannot be decoded cuts the
            channel.
        on_closed: called once at the end, with the reason; never from inside a call.
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._reason = ""

    def send(self, frame: bytes) -> None:
        """Queue a frame; without effect on a channel that has ended."""
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        """End it when all that was queued has left."""
        if self._transport is not None:
            self._transport.close()

    def cut(self, reason: str) -> None:
        """End it now, or as soon as it is connected; the first reason stays."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # --- of asyncio.Protocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        uid = peer_uid(transport)
        if uid != os.getuid():
            self.cut(f"the other side runs as user {uid}, not as {os.getuid()}")
        elif self._reason:
            self.cut(self._reason)

    def data_received(self, data: bytes) -> None:
        if self._reason:
            return
        self._buffer += data
        try:
            self._take_frames()
        except (ChannelError, msgspec.MsgspecError) as error:
            self.cut(f"protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        hung_up = "it hung up" if error is None else f"it hung up: {error}"
        self._on_closed(self._reason or hung_up)

    def _take_frames(self) -> None:
        begin, end = 0, len(self._buffer)
        while end - begin >= _LENGTH.size and not self._reason:
            (length,) = _LENGTH.unpack_from(self._buffer, begin)
            if length > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
            behind = begin + _LENGTH.size + length
            if behind > end:
                break
            frame = bytes(memoryview(self._buffer)[begin + _LENGTH.size : behind])
            begin = behind
            self._on_frame(frame)
        del self._buffer[:begin]


def frame_of(payload: bytes) -> bytes:
    """What ``send`` takes.

    Raises:
        ChannelError: longer than the other side would accept.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {len(payload)} bytes; the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def peer_uid(transport: asyncio.BaseTransport) -> int:
    """The user at the other end, as the kernel knows it."""
    connection: socket.socket = transport.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def listen(path: Path) -> socket.socket:
    """A listening socket with a file of mode 0600.

    Raises:
        ConfigError: there is no such directory, or others may write to it; somebody listens there
            already, or the path is taken by another kind of file or too long.
    """
    check_length(path)
    if not path.parent.is_dir():
        raise ConfigError(
            f"cannot listen at {path}: {path.parent} does not exist",
            hint="make the directory, with mode 0700, or change RankGroup(path=...)",
        )
    mode = path.parent.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"others may write to {path.parent}", hint="use a directory of mode 0700")
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)  # nobody can connect before listen()
        listening.listen()
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    listening.setblocking(False)
    return listening


def check_length(path: Path) -> None:
    """Raises:
    ConfigError: the kernel takes no such long address.
    """
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"{path} is {num_bytes} bytes long; the path of a Unix socket has at most "
            f"{MAX_PATH_BYTES}",
            hint="pass a shorter path=; where none is passed, set TMPDIR to a shorter directory",
        )


def _remove_stale(path: Path) -> None:
    """Remove what a manager that was killed has left behind."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"{path} is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"somebody listens at {path} already")
