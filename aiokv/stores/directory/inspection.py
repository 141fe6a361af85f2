"""DirectoryFiles: listing, verification and clean-up of the files of a directory store."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from aiokv.base.units import format_bytes
from aiokv.stores.base import KEY_BYTES
from aiokv.stores.directory.files import IDENTITY, INCOMING, is_object
from aiokv.stores.inspection import FileGroup, Place, Reading, StoreDirectory, allocated_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

_PROBE: Final = ".clock"


class _File(NamedTuple):
    """One file: path below the folder, bytes, allocated bytes, and time of the last use."""

    name: str
    num_bytes: int
    disk_bytes: int
    used_at: float

    @property
    def place(self) -> Place:
        """The object in the file, which is named by its key."""
        return Place(bytes.fromhex(os.path.basename(self.name)), self.name, self.num_bytes)


class DirectoryFiles(StoreDirectory):
    """The folder of a directory store, which any number of engines may use at the same time."""

    kind = "directory"

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def has_store(path: Path) -> bool:
        """Return True if the folder has files of a directory store."""
        return (path / IDENTITY).is_file() or (path / INCOMING).is_dir()

    def locked(self) -> AbstractContextManager[object]:
        """Engines may use the store meanwhile: a file under its name never changes."""
        return nullcontext()

    def read(self) -> Reading:
        """List the files; see :class:`StoreDirectory`. Files with other names are left alone."""
        files = list(self._objects())
        incomplete = list(self._scan(INCOMING))
        sizes: dict[int, list[_File]] = {}
        for file in files:
            sizes.setdefault(file.num_bytes, []).append(file)
        return Reading(
            keys=np.frombuffer(b"".join(file.place.key for file in files), np.uint8).reshape(
                -1, KEY_BYTES
            ),
            seconds=np.array([file.used_at for file in files]),
            order=np.arange(len(files)),
            place=lambda block: files[block].place,
            keep_only=partial(self._keep_only, files),
            groups=[
                FileGroup(
                    name=f"files of {format_bytes(size)}",
                    blocks=len(group),
                    block_bytes=size * len(group),
                    disk_bytes=sum(file.disk_bytes for file in group),
                )
                for size, group in sorted(sizes.items())
            ],
            disk_bytes=sum(file.disk_bytes for file in incomplete),
            incomplete={file.name: file.used_at for file in incomplete},
        )

    def now(self, *, dry_run: bool) -> float:
        """Return the time by the clock of the file system; see :class:`StoreDirectory`."""
        probe = self.path / INCOMING / f"{_PROBE}-{os.getpid()}"
        if dry_run or not probe.parent.is_dir():
            return time.time()
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _objects(self) -> Iterator[_File]:
        for number in range(256):
            folder = f"{number:02x}"
            for file in self._scan(folder):
                if is_object(folder, os.path.basename(file.name)):
                    yield file

    def _scan(self, folder: str) -> Iterator[_File]:
        try:
            entries = os.scandir(self.path / folder)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False):
                        name, disk_bytes = f"{folder}/{entry.name}", allocated_bytes(status)
                        yield _File(name, status.st_size, disk_bytes, status.st_mtime)

    def _keep_only(
        self, files: Sequence[_File], kept: NDArray[np.bool_], abandoned: Sequence[str]
    ) -> int:
        """Remove files; see :class:`Reading`. Another process may remove them meanwhile."""
        freed = 0
        for name in [*(files[block].name for block in np.flatnonzero(~kept).tolist()), *abandoned]:
            path = self.path / name
            with suppress(FileNotFoundError):
                num_bytes = allocated_bytes(os.stat(path))
                os.unlink(path)
                freed += num_bytes
        return freed
