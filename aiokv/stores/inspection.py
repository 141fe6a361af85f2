"""Inspection of stores on a file system: list, verify and clean up.

``aiokv store`` works on the files of a store, whether or not an engine has opened it. A store has
one or more directories; each kind of store has its own :class:`StoreDirectory`, which reads and
removes blocks.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from aiokv import _native
from aiokv.errors import UsageError
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.stores.labels import count_labels, has_label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from aiokv.stores.labels import Kind

    # (stage, total) -> function that takes the number of blocks done since its last call
    Stages = Callable[[str, int], Callable[[int], None]]

_BATCH_BLOCKS: Final = 64  # blocks that one thread reads at a time
_ABANDONED_AFTER_SECONDS: Final = 3_600.0  # a younger incomplete file may be in use


class FileGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one file, or of all files of one size.

    Attributes:
        name: name of the file, or of the group.
        blocks: blocks that can be found.
        quarantined_blocks: slots that are no longer used because their bytes were wrong.
        block_bytes: bytes of these blocks, with their trailers.
        disk_bytes: bytes that the file system has allocated.
    """

    name: str
    blocks: int
    quarantined_blocks: int = 0
    block_bytes: int
    disk_bytes: int


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a store; ``aiokv store ls --json`` writes it.

    Attributes:
        kind: kind of the store.
        path: path of the store, or its URL without secrets; a URL has no bytes and no groups.
        used_by: id of the process that has opened a disk store; None if none is known.
        blocks: blocks that can be found.
        block_bytes: bytes of these blocks, with their trailers.
        disk_bytes: bytes that the file system has allocated for all files of the store.
        quarantined_blocks: slots that are no longer used because their bytes were wrong.
        incomplete_files: files that were begun and not finished, such as of a killed process.
        oldest_seconds: Unix time of the earliest save (disk) or last use (directory) of a block;
            None without blocks.
        newest_seconds: the same for the latest save or use.
        labels: blocks by label, such as ``"salt:6e340b9cff"``: see ``aiokv.stores.labels``.
        damage: descriptions of the damaged records of the store; empty if there are none.
        notes: descriptions of records of saves that a crash has interrupted; they are no damage.
        groups: blocks by file, or by size of their files.
    """

    kind: str
    path: str
    used_by: int | None = None
    blocks: int
    block_bytes: int
    disk_bytes: int
    quarantined_blocks: int = 0
    incomplete_files: int = 0
    oldest_seconds: float | None = None
    newest_seconds: float | None = None
    labels: dict[str, int] = {}
    damage: list[str] = []
    notes: list[str] = []
    groups: list[FileGroup]


class BadBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block whose bytes are wrong.

    Attributes:
        key: key of the block in hexadecimal.
        file: name of its file.
        slot: its slot in a disk store, over all segment files; None in other stores.
        reason: description of the error.
    """

    key: str
    file: str
    slot: int | None = None
    reason: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading all blocks; ``aiokv store verify --json`` writes it.

    Attributes:
        kind: ``"disk"`` or ``"directory"``.
        path: path of the store.
        blocks: blocks that were read.
        block_bytes: bytes of these blocks, with their trailers.
        seconds: wall-clock time.
        damage: descriptions of the damaged records of the store; empty if there are none.
        notes: descriptions of records of saves that a crash has interrupted; they are no damage.
        bad: the blocks whose bytes are wrong.
    """

    kind: str
    path: str
    blocks: int
    block_bytes: int
    seconds: float
    damage: list[str] = []
    notes: list[str] = []
    bad: list[BadBlock] = []

    @property
    def is_good(self) -> bool:
        """True if nothing is wrong."""
        return not self.damage and not self.bad


class Cleaning(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a clean-up, or of a dry run; ``aiokv store gc --json`` writes it.

    Attributes:
        kind: ``"disk"`` or ``"directory"``.
        path: path of the store.
        selected_blocks: blocks that had all properties that were asked for.
        bad_blocks: blocks whose bytes were wrong.
        quarantined_blocks: slots that can be used again.
        incomplete_files: files that were begun and not finished.
        freed_bytes: bytes that the file system got back; 0 when nothing was removed yet.
        kept_blocks: blocks that remain.
    """

    kind: str
    path: str
    selected_blocks: int = 0
    bad_blocks: int = 0
    quarantined_blocks: int = 0
    incomplete_files: int = 0
    freed_bytes: int = 0
    kept_blocks: int = 0


class Place(NamedTuple):
    """Where an object is.

    Attributes:
        key: key of its block.
        file: name of the file, below the directory of the part.
        num_bytes: bytes of the object, trailer included.
        offset: of its first byte in the file.
        slot: its slot in a disk store, over all segment files; None in other stores.
    """

    key: bytes
    file: str
    num_bytes: int
    offset: int = 0
    slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """State of the files of a part at one reading.

    Attributes:
        keys: ``[N, KEY_BYTES]``.
        seconds: ``[N]`` Unix time of the save (disk) or the last use (directory) of each block.
        order: ``[N]`` blocks in the order in which they are read fastest.
        groups: the blocks by file, or by size of their files.
        place: returns the place of a block; any thread may call it.
        keep_only: removes all blocks but those of a mask ``[N]``, and the incomplete files with
            some names; blocks, raises ``OSError``, and returns the bytes that were freed.
        disk_bytes: bytes that the file system has allocated for files without blocks.
        incomplete: incomplete files by name, with the Unix time of the last write of each.
        damage: descriptions of the damaged records.
        notes: descriptions of records of saves that a crash has interrupted.
        used_by: id of the process that has opened the part; None if none is known.
        obstacle: reason why the blocks to keep are not known; empty if they are.
    """

    keys: NDArray[np.uint8]
    seconds: NDArray[np.float64]
    order: NDArray[np.intp]
    groups: list[FileGroup]
    place: Callable[[int], Place]
    keep_only: Callable[[NDArray[np.bool_], Sequence[str]], int]
    disk_bytes: int = 0
    incomplete: dict[str, float] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    used_by: int | None = None
    obstacle: str = ""

    def total(self, count: str) -> int:
        """Return the sum of a number of the groups."""
        return sum(getattr(group, count) for group in self.groups)


class StoreDirectory(ABC):
    """The files of one store in one directory. All methods block, and raise ``OSError``.

    Attributes:
        kind: kind of the store.
        path: the directory.
    """

    kind: str
    path: Path

    @abstractmethod
    def locked(self) -> AbstractContextManager[object]:
        """Return a context in which no engine changes the files.

        Raises:
            UsageError: a process uses the store, which is of a kind for one process at a time.
        """

    @abstractmethod
    def read(self) -> Reading:
        """Read the state of the files; changes nothing, and works while an engine uses them."""

    @abstractmethod
    def now(self, *, dry_run: bool) -> float:
        """Return the Unix time by the clock that dates the blocks; ``dry_run`` writes no file."""


class StoreFiles:
    """The files of one store. All methods block, and raise ``OSError``.

    Args:
        folder: directory of the store.
        parts: the store has directories of its own for each pool of host memory and each size of
            blocks.
    """

    def __init__(self, folder: Path, parts: Sequence[StoreDirectory]) -> None:
        self._folder = folder
        self._parts = parts
        self._common: dict[str, Any] = {"kind": parts[0].kind, "path": str(folder)}

    def listing(self) -> Listing:
        """Return the content of the store. Reads only; works while an engine uses the store.

        Each part of a disk store is read at one moment of the call. Blocks of a directory
        store that engines save or remove meanwhile may be counted or not.
        """
        found = [(part, part.read()) for part in self._parts]
        readings = [reading for _, reading in found]
        seconds = np.concatenate([reading.seconds for reading in readings])
        groups = [
            msgspec.structs.replace(group, name=self._below(part, group.name))
            for part, reading in found
            for group in reading.groups
        ]
        return Listing(
            **self._common,
            used_by=readings[0].used_by,
            blocks=len(seconds),
            block_bytes=sum(group.block_bytes for group in groups),
            disk_bytes=sum(group.disk_bytes for group in groups)
            + sum(reading.disk_bytes for reading in readings),
            quarantined_blocks=sum(group.quarantined_blocks for group in groups),
            incomplete_files=sum(len(reading.incomplete) for reading in readings),
            oldest_seconds=float(seconds.min()) if len(seconds) else None,
            newest_seconds=float(seconds.max()) if len(seconds) else None,
            labels=count_labels(np.concatenate([reading.keys for reading in readings])),
            groups=groups,
            **self._texts(found),
        )

    def verify(self, stages: Stages, *, threads: int) -> Verification:
        """Read every block, and compare its trailer with its bytes.

        Raises:
            UsageError: a process uses the store, which is of a kind for one process at a time.
        """
        began = time.perf_counter()
        found, bad = [], []
        for part in self._parts:
            with part.locked():
                reading = part.read()
                faults = _faults(part, reading, stages, threads)
            found.append((part, reading))
            bad += [
                msgspec.structs.replace(block, file=self._below(part, block.file))
                for _, block in faults
            ]
        return Verification(
            **self._common,
            blocks=sum(len(reading.seconds) for _, reading in found),
            block_bytes=sum(reading.total("block_bytes") for _, reading in found),
            seconds=time.perf_counter() - began,
            bad=bad,
            **self._texts(found),
        )

    def clean(
        self,
        stages: Stages,
        *,
        older_than_seconds: float | None = None,
        names: Mapping[Kind, str] | None = None,
        verify: bool = False,
        threads: int = 1,
        dry_run: bool = False,
    ) -> Cleaning:
        """Remove incomplete files and the data of removed and quarantined blocks; and the blocks
        that have all the properties that are given.

        Args:
            stages: shows progress.
            older_than_seconds: they were saved (disk) or used for the last time (directory) longer
                ago; None for any time.
            names: their salt, model or version of the weights; None for any.
            verify: also remove blocks whose bytes are wrong; reads every block.
            threads: number of threads that read.
            dry_run: count, and change nothing.

        Raises:
            UsageError: a process uses the store, which is of a kind for one process at a time; or
                the records of the store cannot be read.
        """
        counts: dict[str, int] = dict.fromkeys(Cleaning.__struct_fields__[2:], 0)
        for part in self._parts:
            with part.locked():
                now, reading = part.now(dry_run=dry_run), part.read()
                if reading.obstacle:
                    raise UsageError(reading.obstacle, hint="remove the directory")
                is_bad = np.zeros(len(reading.seconds), np.bool_)
                if verify:
                    is_bad[[block for block, _ in _faults(part, reading, stages, threads)]] = True
                selects = older_than_seconds is not None or bool(names)
                selected = np.full(len(reading.seconds), selects)
                if older_than_seconds is not None:
                    selected &= reading.seconds < now - older_than_seconds
                for kind, name in (names or {}).items():
                    selected &= has_label(reading.keys, kind, name)
                selected &= ~is_bad
                kept = ~(is_bad | selected)
                abandoned = [
                    name
                    for name, written in reading.incomplete.items()
                    if written < now - _ABANDONED_AFTER_SECONDS
                ]
                counts["selected_blocks"] += int(selected.sum())
                counts["bad_blocks"] += int(is_bad.sum())
                counts["kept_blocks"] += int(kept.sum())
                counts["quarantined_blocks"] += reading.total("quarantined_blocks")
                counts["incomplete_files"] += len(abandoned)
                counts["freed_bytes"] += 0 if dry_run else reading.keep_only(kept, abandoned)
        return Cleaning(**self._common | counts)

    def _below(self, part: StoreDirectory, text: str) -> str:
        """Return ``text`` with the path of a part, relative to that of the store, before it."""
        place = part.path.relative_to(self._folder)
        return text if place == Path() else f"{place}/{text}"

    def _texts(self, found: Sequence[tuple[StoreDirectory, Reading]]) -> dict[str, Any]:
        return {
            name: [
                self._below(part, text)
                for part, reading in found
                for text in getattr(reading, name)
            ]
            for name in ("damage", "notes")
        }


def _faults(
    part: StoreDirectory, reading: Reading, stages: Stages, threads: int
) -> list[tuple[int, BadBlock]]:
    """Read every block; return those whose bytes are wrong, in the order of reading."""
    order = reading.order.tolist()
    batches = [order[i : i + _BATCH_BLOCKS] for i in range(0, len(order), _BATCH_BLOCKS)]
    progress = stages("verify", len(order))
    found: list[tuple[int, BadBlock]] = []

    def read(batch: list[int]) -> list[tuple[int, BadBlock]]:
        places = [(block, reading.place(block)) for block in batch]
        return [
            (block, BadBlock(key=place.key.hex(), file=place.file, slot=place.slot, reason=reason))
            for block, place in places
            if (reason := _fault(part.path / place.file, place))
        ]

    pool = ThreadPoolExecutor(threads, thread_name_prefix="aiokv-verify")
    try:
        for batch, faults in zip(batches, pool.map(read, batches), strict=True):
            found += faults
            progress(len(batch))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found


def _fault(path: Path, place: Place) -> str:
    """Read an object; return a description of its fault, empty if it has none, or was removed."""
    what = "file" if place.slot is None else "slot"
    try:
        with path.open("rb") as file:
            part = file.fileno(), place.offset, place.num_bytes
            os.posix_fadvise(*part, os.POSIX_FADV_DONTNEED)  # read the medium, not the page cache
            file.seek(place.offset)
            data = file.read(place.num_bytes)
            os.posix_fadvise(*part, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and place.slot is None:
            return ""  # an engine has removed the block meanwhile
        return f"the {what} cannot be read: {error.strerror}"
    if len(data) < place.num_bytes:
        return f"the file ends within the {what}"
    if len(data) < TRAILER_BYTES:
        return f"the file has {len(data)} bytes, fewer than a trailer"
    return "" if _native.verify_object(data, place.key) else "length, key or checksum is wrong"


def open_files(path: str | os.PathLike[str]) -> StoreFiles:
    """Return the files of the store at a path.

    Raises:
        UsageError: there is no store at the path.
    """
    from aiokv.stores.directory.inspection import DirectoryFiles
    from aiokv.stores.disk.inspection import DiskFiles

    folder = Path(path)
    if not folder.is_dir():
        reason = "it is not a folder" if folder.exists() else "there is no such folder"
        raise UsageError(f"{folder} is not a store: {reason}")
    if parts := DiskFiles.parts_of(folder):
        return StoreFiles(folder, [DiskFiles(part) for part in parts])
    if DirectoryFiles.has_store(folder):
        return StoreFiles(folder, [DirectoryFiles(folder)])
    raise UsageError(
        f"{folder} is not a store: it has neither the journal of a disk store nor the folders of a "
        "directory store",
        hint="pass the path that was given to DiskStore or DirectoryStore",
    )


def allocated_bytes(status: os.stat_result) -> int:
    """Return the bytes that the file system has allocated for a file."""
    return status.st_blocks * 512
