"""The store of the examples passes the tests that every store must pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.examples.files import loaded
from tests.stores.conformance import Blocks, Medium, StoreConformance, keys_of, opened, save

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.stores import Store


class Database(Medium):
    def __init__(self, path: Path, **options: int) -> None:
        self._path, self._options = path, options

    def store(self) -> Store:
        return loaded("sqlite_store").SqliteStore(self._path, **self._options)


@pytest.fixture
def medium(tmp_path: Path) -> Database:
    return Database(tmp_path / "kv.sqlite")


class TestConformance(StoreConformance):
    pass


@pytest.mark.asyncio
async def test_newest_objects_are_kept(tmp_path):
    blocks = Blocks()
    async with opened(Database(tmp_path / "kv.sqlite", max_objects=3), blocks) as store:
        await save(store, blocks, range(5))
        assert (await store.lookup(keys_of(range(5)))).tolist() == [False] * 2 + [True] * 3


@pytest.mark.asyncio
async def test_open_of_a_path_that_is_no_database_leaves_a_store_that_can_be_closed(tmp_path):
    (tmp_path / "kv.sqlite").write_bytes(b"no database" * 1000)
    store = Database(tmp_path / "kv.sqlite").store()
    with pytest.raises(Exception, match="not a database"):
        await store.open(Blocks().memory)
    await store.aclose()
