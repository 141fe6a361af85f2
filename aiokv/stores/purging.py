"""Purges and listings of a store without an engine, for ``aiokv store``."""

from __future__ import annotations

import mmap
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.stores.base import KEY_BYTES, StoreMemory
from aiokv.stores.host.link import inspect
from aiokv.stores.inspection import Listing, open_files
from aiokv.stores.labels import count_labels, label
from aiokv.stores.options import url_path, without_user
from aiokv.stores.urls import stores_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokv.stores.base import Store


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
    if not has_url(target):
        path = unquote(parts.path) if parts.scheme else target
        done = open_files(path).clean(lambda stage, total: _ignore, names={"salt": salt})
        return Purge(kind=done.kind, url=done.path, removed_blocks=done.selected_blocks)
    async with _opened(target) as store:
        removed = await store.purge(label("salt", salt))
    return Purge(kind=store.kind, url=without_user(store.url), removed_blocks=removed)


def has_url(target: str) -> bool:
    """Return True if the target is the URL of a store without files of its own."""
    return urlsplit(target).scheme not in ("", "disk", "directory")


async def list_store(url: str) -> Listing:
    """Return the number of blocks of a store by label. The bytes of its blocks count as 0: they are
    not known without reading the blocks.

    Args:
        url: URL of a store that can list its objects, such as Redis or S3; or of a host service,
            whose memory is counted, and not the store below.

    Raises:
        ConfigError: the URL is wrong.
        StoreError: the store cannot list its objects, cannot be reached, or failed.
    """
    if urlsplit(url).scheme == "host":
        report = await inspect(Path(url_path(url, "host:///run/aiokv/host.sock")))
        blocks = sum(size.blocks for size in report.sizes)
        return _listing("host", url, blocks, report.labels)
    async with _opened(url) as store:
        found = [keys async for keys in store.stored_keys()]
    keys = np.frombuffer(b"".join(found), np.uint8).reshape(-1, KEY_BYTES)
    return _listing(store.kind, without_user(store.url), len(keys), count_labels(keys))


def _listing(kind: str, url: str, blocks: int, labels: dict[str, int]) -> Listing:
    return Listing(
        kind=kind, path=url, blocks=blocks, block_bytes=0, disk_bytes=0, labels=labels, groups=[]
    )


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Store]:
    """Open the store of a URL with host memory for one block, and close it."""
    (use,) = stores_from([url])
    size = mmap.PAGESIZE
    try:
        await use.store.open(StoreMemory.allocate(1, size - TRAILER_BYTES, size))
        yield use.store
    finally:
        await use.store.aclose()


def _ignore(blocks: int) -> None:
    pass
