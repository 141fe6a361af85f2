"""Purges of a store without an engine, for ``aiokv store purge``."""

from __future__ import annotations

import mmap
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from aiokv.layout.host_format import TRAILER_BYTES
from aiokv.stores.base import StoreMemory
from aiokv.stores.inspection import open_files
from aiokv.stores.labels import label
from aiokv.stores.options import without_user
from aiokv.stores.urls import stores_from


class Purge(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a purge; ``aiokv store purge --json`` writes it.

    Attributes:
        kind: kind of the store.
        url: address without secrets, or path.
        removed_blocks: number of blocks that were removed.
    """

    kind: str
    url: str
    removed_blocks: int


async def purge_store(target: str, salt: str) -> Purge:
    """Remove all blocks of a salt from a store: of all models, sizes of blocks, and groups.

    A call that was interrupted has removed a part; the next one removes the rest. The bytes of a
    disk store are given back to the file system.

    Args:
        target: URL of a store, or the folder of a disk or directory store.
        salt: as for ``CacheEngine.match``.

    Raises:
        UsageError: there is no store at the path, or a process uses the disk store.
        ConfigError: the URL is wrong.
        StoreError: the store cannot be reached, or failed.
        OSError: a file cannot be read or removed.
    """
    parts = urlsplit(target)
    if parts.scheme in ("", "disk", "directory"):
        path = unquote(parts.path) if parts.scheme else target
        done = open_files(path).clean(lambda stage, total: _ignore, names={"salt": salt})
        return Purge(kind=done.kind, url=done.path, removed_blocks=done.selected_blocks)
    (use,) = stores_from([target])
    store, size = use.store, mmap.PAGESIZE
    pages = mmap.mmap(-1, size)
    memory = StoreMemory(
        address=np.frombuffer(pages, np.uint8).ctypes.data,
        num_blocks=1,
        pitch_bytes=size,
        payload_bytes=size - TRAILER_BYTES,
        view=memoryview(pages),
    )
    try:
        await store.open(memory)
        removed = await store.purge(label("salt", salt))
    finally:
        await store.aclose()
    return Purge(kind=store.kind, url=without_user(store.url), removed_blocks=removed)


def _ignore(blocks: int) -> None:
    pass
