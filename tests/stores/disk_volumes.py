"""Volumes of a disk store that fail, or that remember what a power cut could lose."""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import TYPE_CHECKING

import msgspec

from aiokv.stores.disk.volume import Volume
from tests.harness.flaky_io import FlakyIo

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.stores.disk.io import DiskIo

SECTOR_BYTES = 512


class FailingVolume(Volume):
    """A volume whose operations fail: those of blocks, and ``journal.write`` (in the middle),
    ``journal.sync``, ``allocate`` and ``rename``.

    Attributes:
        io: the blocks, once the store is open.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.io: FlakyIo
        self._failures: dict[str, int] = {}

    def fail(self, operation: str, code: int) -> None:
        """Let an operation fail with an errno from now on."""
        if operation in ("read", "write", "flush"):
            self.io.fail(operation, code)
        else:
            self._failures[operation] = code

    def heal(self) -> None:
        """Let all operations succeed."""
        self._failures.clear()
        self.io.heal()

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if "journal.write" in self._failures:
            super().write(fd, data[: len(data) // 2], offset)
        self._check("journal.write")
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._check("journal.sync")
        super().sync(fd)

    def allocate(self, fd: int, num_bytes: int, offset: int) -> None:
        self._check("allocate")
        super().allocate(fd, num_bytes, offset)

    def rename(self, old: str, new: str) -> None:
        self._check("rename")
        super().rename(old, new)

    def open_io(self) -> DiskIo:
        self.io = FlakyIo(super().open_io())
        return self.io

    def _check(self, operation: str) -> None:
        if operation in self._failures:
            code = self._failures[operation]
            raise OSError(code, os.strerror(code))


class Event(msgspec.Struct):
    """One operation: of the data of a file, of a name, or a note of the test.

    Attributes:
        kind: ``write``, ``truncate``, ``sync``, ``create``, ``rename``, ``unlink``,
            ``sync_directory``, ``note``.
        file: number of the file, as it was created.
        offset: of a write, or the new size.
        data: bytes of a write.
        names: old and new name.
        begun: number of events when it began.
        ended: number of events when it ended; None while it runs.
        note: what the test noted.
    """

    kind: str
    file: int = -1
    offset: int = 0
    data: bytes = b""
    names: tuple[str, str] = ("", "")
    begun: int = 0
    ended: int | None = None
    note: object = None


class RecordingVolume(Volume):
    """A volume that records all operations in ``events``, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.events: list[Event] = []
        self._files = itertools.count()
        self._numbers: dict[str, int] = {}  # by name
        self._of_fd: dict[int, int] = {}

    def boot(self) -> bytes:
        return b"the boot before the power cut...".ljust(32)

    def begin(self, kind: str, **fields) -> Event:
        event = Event(kind=kind, begun=len(self.events), **fields)
        self.events.append(event)
        return event

    def end(self, event: Event) -> None:
        event.ended = len(self.events)

    def note(self, note: object) -> None:
        self.begin("note", note=note)

    def number(self, fd: int) -> int:
        return self._of_fd[fd]

    def open(self, name: str, *, write: bool, create: bool = False, direct: bool = False) -> int:
        fd = super().open(name, write=write, create=create, direct=direct)
        if name not in self._numbers:
            self._numbers[name] = next(self._files)
            self.begin("create", file=self._numbers[name], names=("", name))
        self._of_fd[fd] = self._numbers[name]
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        event = self.begin("write", file=self.number(fd), offset=offset, data=bytes(data))
        super().write(fd, data, offset)
        self.end(event)

    def sync(self, fd: int) -> None:
        event = self.begin("sync", file=self.number(fd))
        super().sync(fd)
        self.end(event)

    def truncate(self, fd: int, num_bytes: int) -> None:
        event = self.begin("truncate", file=self.number(fd), offset=num_bytes)
        super().truncate(fd, num_bytes)
        self.end(event)

    def allocate(self, fd: int, num_bytes: int, offset: int) -> None:
        super().allocate(fd, num_bytes, offset)
        self.end(self.begin("truncate", file=self.number(fd), offset=self.size(fd)))

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._numbers[new] = self._numbers.pop(old)
        self.begin("rename", names=(old, new))

    def unlink(self, name: str) -> None:
        super().unlink(name)
        if self._numbers.pop(name, None) is not None:
            self.begin("unlink", names=(name, ""))

    def sync_directory(self) -> None:
        event = self.begin("sync_directory")
        super().sync_directory()
        self.end(event)

    def open_io(self) -> DiskIo:
        return RecordingIo(super().open_io(), self)


class RecordingIo:
    """The blocks of a recording volume."""

    def __init__(self, io: DiskIo, volume: RecordingVolume) -> None:
        self._io = io
        self._volume = volume
        self.backend = io.backend
        self.register_buffer = io.register_buffer
        self.read = io.read
        self.aclose = io.aclose

    async def write(self, fd, addresses, lengths, offsets) -> NDArray[np.int32]:
        events = [
            self._volume.begin(
                "write",
                file=self._volume.number(fd),
                offset=int(offset),
                data=ctypes.string_at(int(address), int(length)),
            )
            for address, length, offset in zip(addresses, lengths, offsets, strict=True)
        ]
        results = await self._io.write(fd, addresses, lengths, offsets)
        for event in events:
            self._volume.end(event)
        return results

    async def flush(self, fd: int) -> int:
        event = self._volume.begin("sync", file=self._volume.number(fd))
        result = await self._io.flush(fd)
        self._volume.end(event)
        return result


def write_image(events: list[Event], count: int, rng: random.Random, target: Path) -> None:
    """Write the files that a power cut after ``count`` events may leave.

    What a flush covers is there. Of each later write, any sectors are there; of the later changes
    of names, the first few.
    """
    happened = events[:count]
    target.mkdir()
    for name, file in _names(happened, count, rng).items():
        (target / name).write_bytes(_content(happened, count, file, rng))


def _ended(event: Event, count: int) -> bool:
    return event.ended is not None and event.ended <= count


def _names(events: list[Event], count: int, rng: random.Random) -> dict[str, int]:
    kinds = ("create", "rename", "unlink")
    synced = max(
        (e.begun for e in events if e.kind == "sync_directory" and _ended(e, count)), default=0
    )
    changes = [e for e in events if e.kind in kinds]
    sure = sum(1 for e in changes if e.begun < synced)
    names: dict[str, int] = {}
    for event in changes[: rng.randint(sure, len(changes))]:
        old, new = event.names
        if event.kind == "create":
            names[new] = event.file
        elif event.kind == "rename":
            names[new] = names.pop(old)
        else:
            names.pop(old)
    return names


def _content(events: list[Event], count: int, file: int, rng: random.Random) -> bytes:
    ours = [e for e in events if e.file == file]
    synced = max((e.begun for e in ours if e.kind == "sync" and _ended(e, count)), default=0)
    content = bytearray()
    for event in ours:
        sure = event.ended is not None and event.ended <= synced
        if event.kind == "truncate" and (sure or rng.random() < 0.5):
            content = content[: event.offset].ljust(event.offset, b"\0")
        if event.kind != "write":
            continue
        for offset, sector in _sectors(event):
            if sure or rng.random() < 0.5:
                content.extend(bytes(max(0, offset + len(sector) - len(content))))
                content[offset : offset + len(sector)] = sector
    return bytes(content)


def _sectors(event: Event) -> Iterator[tuple[int, bytes]]:
    for begin in range(0, len(event.data), SECTOR_BYTES):
        yield event.offset + begin, event.data[begin : begin + SECTOR_BYTES]
