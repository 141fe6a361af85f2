"""A store of your own: blocks in a SQLite database, which several processes may share.

A store moves objects by key: the bytes of a block and a trailer with which aiokv verifies each
object after a load. ``tests/stores/conformance.py`` has the tests that every store must pass.

Install: pip install .
Run:     python examples/sqlite_store.py
Output:
    tokens from the store: 0 in the first engine, 96 in the second one
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import aiokv
from aiokv.errors import StoreError
from aiokv.stores import Result, Store, StoreMemory, StoreStatistics, split_keys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from numpy.typing import NDArray

T = TypeVar("T")
SCHEMA = """
PRAGMA journal_mode=WAL;
CREATE TABLE IF NOT EXISTS objects (id INTEGER PRIMARY KEY, key BLOB UNIQUE, data BLOB);
"""
INSERT = "INSERT OR IGNORE INTO objects (key, data) VALUES (?, ?)"
LIMIT = "DELETE FROM objects WHERE id <= (SELECT max(id) FROM objects) - ?"


class SqliteStore(Store):
    """Objects by key in a table, which keeps the newest ``max_objects``."""

    kind, max_concurrent = "sqlite", 4

    def __init__(self, path: Path, max_objects: int = 100_000) -> None:
        self.url, self._path, self._max_objects = f"sqlite:{path}", path, max_objects
        self._thread: ThreadPoolExecutor | None = None  # has the database while it is open

    def for_group(self, group: str) -> SqliteStore:
        return SqliteStore(self._path, self._max_objects)  # one table: keys of groups differ

    async def open(self, memory: StoreMemory) -> None:
        self._memory = memory
        self._db = sqlite3.connect(self._path, timeout=30.0, check_same_thread=False)
        self._thread = ThreadPoolExecutor(1, "sqlite")
        try:
            await self._run(lambda: self._db.executescript(SCHEMA))
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        if self._thread is not None:
            await self._run(self._db.close)  # after the calls in flight: there is one thread
            self._thread.shutdown()
            self._thread = None

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        def find(key: bytes) -> bool:
            found = self._db.execute("SELECT 1 FROM objects WHERE key = ?", [key])
            return found.fetchone() is not None

        return np.array(await self._each(find, split_keys(keys)), np.bool_)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        def read(key: bytes, block: int) -> Result:
            row = self._db.execute("SELECT data FROM objects WHERE key = ?", [key]).fetchone()
            if row is None:
                return Result.MISSING
            self._memory.object(block)[:] = row[0]
            return Result.DONE

        return np.array(await self._each(read, split_keys(keys), blocks.tolist()), np.uint8)

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        def write(key: bytes, block: int) -> Result:
            done = self._db.execute(INSERT, [key, self._memory.object(block)])
            self._db.execute(LIMIT, [self._max_objects])
            return Result.DONE if done.rowcount else Result.PRESENT

        return np.array(await self._each(write, split_keys(keys), blocks.tolist()), np.uint8)

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        def delete(key: bytes) -> Result:
            self._db.execute("DELETE FROM objects WHERE key = ?", [key])
            return Result.DONE

        return np.array(await self._each(delete, split_keys(keys)), np.uint8)

    async def stored_keys(self, label: bytes = b"") -> AsyncIterator[bytes]:
        keys = await self._run(lambda: self._db.execute("SELECT key FROM objects").fetchall())
        yield b"".join(key for (key,) in keys if key.endswith(label))

    def statistics(self) -> StoreStatistics:
        return StoreStatistics()

    async def _each(self, function: Callable[..., T], *columns: list[Any]) -> list[T]:
        """Call a function in the thread for each row, all in one transaction."""

        def run() -> list[T]:
            with self._db:
                return [function(*row) for row in zip(*columns, strict=True)]

        return await self._run(run)

    async def _run(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            raise StoreError(f"{self.url} is closed")
        call = asyncio.get_running_loop().run_in_executor(self._thread, function)
        try:
            return await asyncio.shield(call)
        except sqlite3.Error as error:
            raise StoreError(f"{self.url}: {error}") from error
        finally:  # a cancelled call ends when the thread does not use its blocks any more
            while not call.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([call])


async def tokens_from_store(path: Path) -> int:
    """Serve a prompt with an engine whose memory is empty."""
    regions = aiokv.Regions(num_layers=2)
    regions.add("kv", layers=[np.zeros((64, 16, 2, 32), np.float32) for _ in range(2)])
    config = aiokv.CacheConfig(
        block_tokens=16, device_blocks=64, host_blocks=64, model="tiny", weights_version="1"
    )
    engine = aiokv.CacheEngine(config, regions, stores=[SqliteStore(path)])
    async with engine, engine.match(range(100)) as lease:
        await lease.allocate(100, wait_store=5.0)
        with engine.computing([lease]):
            pass  # the model computes the positions from lease.cached_tokens on
        lease.commit(100)
        engine.step()
        return lease.usage.fetched_tokens


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kv.sqlite")
        first, second = await tokens_from_store(path), await tokens_from_store(path)
    print(f"tokens from the store: {first} in the first engine, {second} in the second one")


if __name__ == "__main__":
    asyncio.run(main())
