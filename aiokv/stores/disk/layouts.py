"""Layouts: blocks of several sizes and formats in the directory of one disk store.

The first layout has its files in the directory itself, and each further one in a directory below
it, such as ``layout-1-135168-131072``: format 1, slots of 135,168 bytes, payloads of 131,072 bytes.
A model with larger blocks begins with an empty layout; the earlier one is found again when the
earlier model is back.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from aiokv.base.logs import Log
from aiokv.errors import LayoutError, UsageError
from aiokv.stores.disk.layout import (
    FORMAT_VERSION,
    HEADER_BYTES,
    JOURNAL,
    LAYOUT,
    decode_header,
    segment_name,
    segment_numbers,
)
from aiokv.stores.labels import ends_with

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from aiokv.stores.base import StoreMemory
    from aiokv.stores.disk.volume import Volume

_log: Final = Log(__name__)


class OtherLayouts:
    """Files of the layouts that the store does not use now. Each method blocks.

    They count towards the limit of the store, and give way to its blocks.

    Args:
        volumes: a volume per layout.
        folder: directory of the store.

    Attributes:
        num_bytes: bytes of their segments.
    """

    def __init__(self, volumes: Iterable[Volume], folder: Path) -> None:
        self._folder = folder
        self._volumes = sorted(volumes, key=_used_at)
        self.num_bytes = self._measured_bytes()

    def purge(self, used: Path, label: bytes) -> int:
        """Remove the blocks of a label; see ``purge_closed``. ``used`` is the layout in use."""
        removed = purge_closed(self._folder, label, used)
        self.num_bytes = self._measured_bytes()
        return removed

    def _measured_bytes(self) -> int:
        return sum(
            volume.stat(name).st_size for volume in self._volumes for name in _segments(volume)
        )

    def shrink(self, num_bytes: int) -> None:
        """Remove segments until the others have at most ``num_bytes``; see ``remove_segment``."""
        while self.num_bytes > num_bytes and self.remove_segment():
            pass

    def remove_segment(self) -> bool:
        """Remove the last segment of the layout that was used longest ago.

        Returns:
            False when there is none.

        Raises:
            OSError: it cannot be removed.
        """
        while self._volumes:
            volume = self._volumes[0]
            names = _segments(volume)
            if len(names) <= 1:
                # Remove it first, because its records name slots of the segment.
                volume.unlink(JOURNAL)
                del self._volumes[0]
            if names:
                volume.unlink(names[-1])
                before, self.num_bytes = self.num_bytes, self._measured_bytes()
                removed_bytes = before - self.num_bytes
                _log.info("disk.layout_shrunk", path=str(volume.path), removed_bytes=removed_bytes)
                return True
        return False


def purge_closed(folder: Path, label: bytes, used: Path | None = None) -> int:
    """Remove the blocks of a label from the layouts and groups of a store that are not open; return
    their number. Blocks.

    Args:
        folder: directory of the store.
        label: end of the keys of these blocks.
        used: directory of the layout in use, if the caller holds the lock of ``folder``.

    Raises:
        OSError: a file cannot be read or written; a second call removes the rest.
    """
    from aiokv.stores.disk.inspection import DiskFiles

    removed = 0
    for path in DiskFiles.parts_of(folder):
        files = DiskFiles(path)
        with ExitStack() as locks:
            if used is None or files.lock_path != folder:
                try:
                    locks.enter_context(files.locked())
                except UsageError:  # a store has opened it, and purges it itself
                    continue
            if path == used or (reading := files.read()).obstacle:
                continue
            kept = ~ends_with(reading.keys, label)
            if not kept.all():
                reading.keep_only(kept, ())
                removed += int(np.count_nonzero(~kept))
    return removed


def find_layout(volume: Volume, memory: StoreMemory) -> tuple[Volume, OtherLayouts]:
    """Return the volume of the blocks of ``memory``, which may not exist yet, and the others.

    Raises:
        OSError: the directory cannot be read.
    """
    below = [volume.below(name) for name in volume.names() if name.startswith(LAYOUT)]
    parts = [(part, _content(part, memory)) for part in (volume, *below)]
    fitting = [part for part, content in parts if content == "fits"]
    if fitting:
        chosen = fitting[0]
    elif parts[0][1] == "nothing":
        chosen = volume
    else:
        chosen = volume.below(
            f"{LAYOUT}{FORMAT_VERSION}-{memory.pitch_bytes}-{memory.payload_bytes}"
        )
    return chosen, OtherLayouts(
        (part for part, _ in parts if part.path != chosen.path), volume.path
    )


def _content(volume: Volume, memory: StoreMemory) -> Literal["fits", "other", "nothing"]:
    """Return the kind of blocks of a volume; ``"nothing"`` if its header is missing or damaged."""
    if JOURNAL not in volume.names():
        return "nothing"
    fd = volume.open(JOURNAL, write=False)
    try:
        header = decode_header(volume.read(fd, HEADER_BYTES, 0))
    except LayoutError:
        return "other"
    finally:
        volume.close(fd)
    if header is None:
        return "nothing"
    sizes = header.slot_bytes, header.payload_bytes
    return "fits" if sizes == (memory.pitch_bytes, memory.payload_bytes) else "other"


def _segments(volume: Volume) -> list[str]:
    return [segment_name(number) for number in segment_numbers(volume.names())]


def _used_at(volume: Volume) -> float:
    """Return the time of the last change of the journal; 0 without a journal."""
    return volume.stat(JOURNAL).st_mtime if JOURNAL in volume.names() else 0.0
