"""Stores of further groups: `for_group` keeps the options of the store."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager

import pytest

from aiokv.errors import ConfigError
from aiokv.stores import DirectoryStore
from aiokv.stores.threads import StoreThreads
from tests.stores.conformance import Blocks, save

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def opened(store):
    """Open a store; yield it with its blocks."""
    blocks = Blocks()
    await store.open(blocks.memory)
    try:
        yield store, blocks
    finally:
        await store.aclose()


@pytest.mark.parametrize("threads", [1, 3])
async def test_directory_of_a_group_has_as_many_threads(tmp_path, monkeypatch, threads):
    counts = []

    def counting(name, count):
        counts.append(count)
        return StoreThreads(name, count)

    monkeypatch.setattr("aiokv.stores.directory.store.StoreThreads", counting)
    store = DirectoryStore(tmp_path / "kv", threads=threads)
    for pool in (store, store.for_group("state")):
        async with opened(pool):
            pass
    assert counts[:2] == counts[2:]
    assert counts[0] == threads + 1, "one more lists the folder"


@pytest.mark.parametrize("fsync", [False, True])
async def test_directory_of_a_group_is_flushed_alike(tmp_path, monkeypatch, fsync):
    flushed, flush = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(fd) or flush(fd))
    first = DirectoryStore(tmp_path / "kv", fsync=fsync)
    async with opened(first.for_group("state")) as (store, blocks):
        flushed.clear()
        await save(store, blocks, range(1))
    assert bool(flushed) is fsync


async def test_directory_of_a_group_has_the_same_limit(tmp_path):
    store = DirectoryStore(tmp_path / "kv", bytes=1000).for_group("state")
    with pytest.raises(ConfigError, match="bytes is 1000"):
        await store.open(Blocks().memory)
