"""Inspection of stores on a file system: list, verify and clean up.

``aiokv store`` works on the files of a store, whether or not an engine has opened it. Each kind of
store has a class with the methods of :class:`StoreFiles`; :func:`open_files` finds the right one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from aiokv.errors import UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable, Sequence

    from aiokv.stores.disk.inspection import DiskFiles

    # (stage, total) -> function that takes the number of blocks done since its last call
    Stages = Callable[[str, int], Callable[[int], None]]


_T = TypeVar("_T")
_R = TypeVar("_R")


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
        kind: ``"disk"`` or ``"directory"``.
        path: path of the store.
        used_by: id of the process that has opened a disk store; None if none is known.
        blocks: blocks that can be found.
        block_bytes: bytes of these blocks, with their trailers.
        disk_bytes: bytes that the file system has allocated for all files of the store.
        quarantined_blocks: slots that are no longer used because their bytes were wrong.
        incomplete_files: files that were begun and not finished, such as of a killed process.
        oldest_seconds: Unix time of the earliest save (disk) or last use (directory) of a block;
            None without blocks.
        newest_seconds: the same for the latest save or use.
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
        old_blocks: blocks that were older than the limit.
        bad_blocks: blocks whose bytes were wrong.
        quarantined_blocks: slots that can be used again.
        incomplete_files: files that were begun and not finished.
        freed_bytes: bytes that the file system got back; 0 when nothing was removed yet.
        kept_blocks: blocks that remain.
    """

    kind: str
    path: str
    old_blocks: int = 0
    bad_blocks: int = 0
    quarantined_blocks: int = 0
    incomplete_files: int = 0
    freed_bytes: int = 0
    kept_blocks: int = 0


class StoreFiles(Protocol):
    """The files of one store. All methods block, and raise ``OSError``."""

    def listing(self) -> Listing:
        """Return the content of the store. Reads only; works while an engine uses the store."""

    def verify(self, stages: Stages, *, threads: int) -> Verification:
        """Read every block, and compare its trailer with its bytes.

        Raises:
            UsageError: a process uses the store, which is of a kind for one process at a time.
        """

    def clean(
        self,
        stages: Stages,
        *,
        older_than_seconds: float | None,
        verify: bool,
        threads: int,
        dry_run: bool,
    ) -> Cleaning:
        """Remove incomplete files and the data of removed and quarantined blocks.

        Args:
            stages: shows progress.
            older_than_seconds: also remove blocks that were saved (disk) or used for the last time
                (directory) longer ago; None for none.
            verify: also remove blocks whose bytes are wrong; reads every block.
            threads: number of threads that read.
            dry_run: count, and change nothing.

        Raises:
            UsageError: a process uses the store, which is of a kind for one process at a time; or
                the records of the store cannot be read.
        """


class PoolFiles:
    """A store with directories of its own for each pool of host memory and each size of blocks.

    Args:
        folder: directory of the store.
        paths: it, if it has blocks itself, and those below it.
    """

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        from aiokv.stores.disk.inspection import DiskFiles

        self._folder = folder
        self._parts = [DiskFiles(path) for path in paths]

    def _below(self, part: DiskFiles, text: str) -> str:
        """Return the text behind the path of the directory below that of the store, if any."""
        place = part.path.relative_to(self._folder)
        return text if place == Path() else f"{place}/{text}"

    def listing(self) -> Listing:
        """Return the content of all parts; see :class:`StoreFiles`."""
        listings = [(part, part.listing()) for part in self._parts]
        oldest = [one.oldest_seconds for _, one in listings if one.oldest_seconds is not None]
        newest = [one.newest_seconds for _, one in listings if one.newest_seconds is not None]
        return msgspec.structs.replace(
            listings[0][1],
            path=str(self._folder),
            **_sums(
                [one for _, one in listings],
                ("blocks", "block_bytes", "disk_bytes", "quarantined_blocks", "incomplete_files"),
            ),
            oldest_seconds=min(oldest, default=None),
            newest_seconds=max(newest, default=None),
            damage=[self._below(part, text) for part, one in listings for text in one.damage],
            notes=[self._below(part, text) for part, one in listings for text in one.notes],
            groups=[
                msgspec.structs.replace(group, name=self._below(part, group.name))
                for part, one in listings
                for group in one.groups
            ],
        )

    def verify(self, stages: Stages, *, threads: int) -> Verification:
        """Read every block of all parts; see :class:`StoreFiles`."""
        results = [(part, part.verify(stages, threads=threads)) for part in self._parts]
        return msgspec.structs.replace(
            results[0][1],
            path=str(self._folder),
            **_sums([one for _, one in results], ("blocks", "block_bytes", "seconds")),
            damage=[self._below(part, text) for part, one in results for text in one.damage],
            notes=[self._below(part, text) for part, one in results for text in one.notes],
            bad=[
                msgspec.structs.replace(bad, file=self._below(part, bad.file))
                for part, one in results
                for bad in one.bad
            ],
        )

    def clean(
        self,
        stages: Stages,
        *,
        older_than_seconds: float | None,
        verify: bool,
        threads: int,
        dry_run: bool,
    ) -> Cleaning:
        """Clean up all parts, one after the other; see :class:`StoreFiles`."""
        results = [
            part.clean(
                stages,
                older_than_seconds=older_than_seconds,
                verify=verify,
                threads=threads,
                dry_run=dry_run,
            )
            for part in self._parts
        ]
        counts = [name for name in Cleaning.__struct_fields__ if name not in ("kind", "path")]
        return msgspec.structs.replace(results[0], path=str(self._folder), **_sums(results, counts))


def _sums(results: Sequence[object], names: Iterable[str]) -> dict[str, Any]:
    """Return the sum of each field."""
    return {name: sum(getattr(result, name) for result in results) for name in names}


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
        return DiskFiles(folder) if parts == [folder] else PoolFiles(folder, parts)
    if DirectoryFiles.has_store(folder):
        return DirectoryFiles(folder)
    raise UsageError(
        f"{folder} is not a store: it has neither the journal of a disk store nor the folders of a "
        "directory store",
        hint="pass the path that was given to DiskStore or DirectoryStore",
    )


def allocated_bytes(status: os.stat_result) -> int:
    """Return the bytes that the file system has allocated for a file."""
    return status.st_blocks * 512


def in_threads(check: Callable[[_T], _R], items: Iterable[_T], threads: int) -> Generator[_R]:
    """Yield ``check(item)`` of each item, in their order; the threads end with the iteration."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="aiokv-verify")
    try:
        yield from pool.map(check, items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
