"""DirectoryFiles: listing, verification and clean-up of the files of a directory store."""

from __future__ import annotations

import os
import re
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from aiokv import _native
from aiokv.base.units import format_bytes
from aiokv.stores.base import KEY_BYTES, TRAILER_BYTES
from aiokv.stores.directory.files import IDENTITY, INCOMING
from aiokv.stores.inspection import (
    BadBlock,
    Cleaning,
    FileGroup,
    Listing,
    Verification,
    allocated_bytes,
    in_threads,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aiokv.stores.inspection import Stages

_OBJECT: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_ABANDONED_AFTER_SECONDS: Final = 3_600.0  # an incomplete file that is younger may be written now
_PROBE: Final = ".clock"


class _File(NamedTuple):
    """One file: path below the folder, bytes, allocated bytes, and time of the last use."""

    name: str
    num_bytes: int
    disk_bytes: int
    used_at: float

    @property
    def key(self) -> bytes:
        return bytes.fromhex(os.path.basename(self.name))


class DirectoryFiles:
    """The folder of a directory store, which any number of engines may use at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @staticmethod
    def has_store(path: Path) -> bool:
        """Return True if the folder has files of a directory store."""
        return (path / IDENTITY).is_file() or (path / INCOMING).is_dir()

    def listing(self) -> Listing:
        """Return the content of the store; see :class:`~aiokv.stores.inspection.StoreFiles`.

        Blocks that engines save or remove meanwhile may be counted or not.
        """
        files = list(self._objects())
        incomplete = list(self._scan(INCOMING))
        sizes: dict[int, list[_File]] = {}
        for file in files:
            sizes.setdefault(file.num_bytes, []).append(file)
        return Listing(
            kind="directory",
            path=str(self._path),
            blocks=len(files),
            block_bytes=sum(file.num_bytes for file in files),
            disk_bytes=sum(file.disk_bytes for file in (*files, *incomplete)),
            incomplete_files=len(incomplete),
            oldest_seconds=min((file.used_at for file in files), default=None),
            newest_seconds=max((file.used_at for file in files), default=None),
            groups=[
                FileGroup(
                    name=f"files of {format_bytes(size)}",
                    blocks=len(group),
                    block_bytes=size * len(group),
                    disk_bytes=sum(file.disk_bytes for file in group),
                )
                for size, group in sorted(sizes.items())
            ],
        )

    def verify(self, stages: Stages, *, threads: int) -> Verification:
        """Read every block; see :class:`~aiokv.stores.inspection.StoreFiles`.

        Engines may use the store meanwhile: a file under its name never changes.
        """
        started = time.perf_counter()
        files = list(self._objects())
        bad = self._bad_blocks(files, stages, threads)
        return Verification(
            kind="directory",
            path=str(self._path),
            blocks=len(files),
            block_bytes=sum(file.num_bytes for file in files),
            seconds=time.perf_counter() - started,
            bad=bad,
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
        """Clean up; see :class:`~aiokv.stores.inspection.StoreFiles`.

        Engines may use the store meanwhile. Incomplete files are removed when they are older than
        an hour.
        """
        now = self._server_time(dry_run=dry_run)
        files = list(self._objects())
        bad = self._bad_blocks(files, stages, threads) if verify else []
        bad_names = {block.file for block in bad}
        old = [
            file
            for file in files
            if older_than_seconds is not None
            and file.used_at < now - older_than_seconds
            and file.name not in bad_names
        ]
        incomplete = [
            file for file in self._scan(INCOMING) if file.used_at < now - _ABANDONED_AFTER_SECONDS
        ]
        removed = [file for file in files if file.name in bad_names] + old + incomplete
        freed = 0
        for file in () if dry_run else removed:
            with suppress(FileNotFoundError):  # another process has removed it meanwhile
                os.unlink(self._path / file.name)
                freed += file.disk_bytes
        return Cleaning(
            kind="directory",
            path=str(self._path),
            old_blocks=len(old),
            bad_blocks=len(bad),
            incomplete_files=len(incomplete),
            freed_bytes=freed,
            kept_blocks=len(files) - len(old) - len(bad),
        )

    def _objects(self) -> Iterator[_File]:
        """Yield the files of blocks; files with other names are left alone."""
        for number in range(256):
            folder = f"{number:02x}"
            for file in self._scan(folder):
                name = os.path.basename(file.name)
                if _OBJECT.fullmatch(name) and name.startswith(folder):
                    yield file

    def _scan(self, folder: str) -> Iterator[_File]:
        try:
            entries = os.scandir(self._path / folder)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False):
                        yield _File(
                            f"{folder}/{entry.name}",
                            status.st_size,
                            allocated_bytes(status),
                            status.st_mtime,
                        )

    def _bad_blocks(self, files: list[_File], stages: Stages, threads: int) -> list[BadBlock]:
        progress = stages("verify", len(files))
        bad: list[BadBlock] = []
        with closing(in_threads(self._fault, files, threads)) as reasons:
            for file, reason in zip(files, reasons, strict=True):
                if reason:
                    bad.append(BadBlock(key=file.key.hex(), file=file.name, reason=reason))
                progress(1)
        return bad

    def _fault(self, file: _File) -> str:
        """Return a description of the fault of a block; empty if it has none, or was removed."""
        try:
            data = (self._path / file.name).read_bytes()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"the file cannot be read: {error.strerror}"
        if len(data) < TRAILER_BYTES:
            return f"the file has {len(data)} bytes, fewer than a trailer"
        if not _native.verify_object(data, file.key):
            return "length, key or checksum is wrong"
        return ""

    def _server_time(self, *, dry_run: bool) -> float:
        """Return the time by the clock of the file system, which dates the files."""
        probe = self._path / INCOMING / f"{_PROBE}-{os.getpid()}"
        if dry_run or not probe.parent.is_dir():
            return time.time()
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)
