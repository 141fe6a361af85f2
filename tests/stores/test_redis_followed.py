"""RedisStore whose changes an engine follows, so that it knows without a lookup what is missing."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.stores.proof import derive_keys
from aiokv.stores.redis import RedisStore, commands
from aiokv.stores.store_set import StoreSet
from aiokv.stores.use import StoreUse
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.conformance import Blocks, eventually, ids, keys_of
from tests.stores.servers import free_port
from tests.stores.servers_redis import RedisServer, needs_server, running_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [needs_server, pytest.mark.asyncio]

FINGERPRINT = bytes(32)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_server(tmp_path_factory.mktemp("followed")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    shared_server.command("FLUSHALL")
    return shared_server


class Engine:
    """The stores of an engine with one RedisStore."""

    def __init__(self, url: str, **options: Any) -> None:
        store = RedisStore(url, connect_timeout_seconds=PATIENCE_SECONDS, **options)
        self.blocks = Blocks()
        self.store = store
        self.stores = StoreSet([StoreUse(store, lookup_deadline_seconds=PATIENCE_SECONDS)])

    @property
    def filter_keys(self) -> int:
        return self.stores.statistics()[0].filter_keys

    async def until_filter_has(self, num_keys: int) -> None:
        """Wait until the filter has a number of keys; 0 when there is none."""

        async def has() -> bool:
            return self.filter_keys == num_keys

        await eventually(has)

    async def looked_up(self, number: int) -> tuple[int, int]:
        """Return the number of blocks that were found, and of lookups on the server."""
        before = self.stores.statistics()[0].lookups
        answer = await self.stores.lookup(keys_of([number]))
        return answer.blocks, self.stores.statistics()[0].lookups - before

    async def save(self, number: int) -> None:
        """Save a block past the statistics of the engine, as if another one did."""
        self.blocks.write(0, key(number))
        assert not (await self.store.save(key(number), ids(0))).any()


@asynccontextmanager
async def engine(url: str, **options: Any) -> AsyncIterator[Engine]:
    made = Engine(url, **options)
    try:
        await made.stores.open(made.blocks.memory, FINGERPRINT)
        yield made
    finally:
        await made.stores.aclose()


def key(number: int) -> bytes:
    return derive_keys(FINGERPRINT, keys_of([number]))


async def test_server_is_asked_only_for_blocks_that_it_may_have(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with engine(server.url) as other:
        await other.save(0)
        async with engine(server.url) as one:
            await one.until_filter_has(1)
            assert await one.looked_up(0) == (1, 1)
            assert await one.looked_up(1) == (0, 0)
            server.command("SET", "aiokv:another kind of key", "value")
            await other.save(1)
            await one.until_filter_has(2)
            assert await one.looked_up(1) == (1, 1)
            await other.store.remove(key(1))
            assert await one.looked_up(1) == (0, 1)  # the filter keeps removed keys

            async def is_remembered() -> bool:  # a removal is reported, too, as any change
                return await one.looked_up(1) == (0, 0)

            await eventually(is_remembered)
    assert "store.not_followed" not in caplog.text


async def test_keys_of_other_prefixes_are_not_followed(server: RedisServer) -> None:
    async with engine(server.url, prefix="a[*]:") as one, engine(server.url) as other:
        await other.save(0)
        await one.save(1)
        await one.until_filter_has(1)
        await other.until_filter_has(1)
        assert [await one.looked_up(n) for n in (0, 1)] == [(0, 0), (1, 1)]


class SlowStore(RedisStore):
    """A store whose list of keys ends when a test says so."""

    is_listed = False

    async def stored_keys(self, label: bytes = b"") -> AsyncIterator[bytes]:
        while not self.is_listed:
            await spin()
            yield b""


async def test_changes_are_yielded_while_the_keys_are_listed(server: RedisServer) -> None:
    store = SlowStore(server.url, connect_timeout_seconds=PATIENCE_SECONDS)
    await store.open(Blocks().memory)
    changes = store.follow_keys()
    try:
        assert await anext(changes) == b""
        server.command("SET", f"aiokv:{key(1).hex()}", "value")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await anext(changes) != key(1):
                pass
        store.is_listed = True
        while await anext(changes) is not None:
            pass
    finally:
        await changes.aclose()
        await store.aclose()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_server_that_reports_no_more_saves_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(commands, "PING_SECONDS", 0.1)
    with running_server(tmp_path) as server:
        async with engine(server.url) as one:
            await one.save(0)
            await one.until_filter_has(1)
            if fault == "killed":
                server.kill()
            else:
                server.stop()
            await one.until_filter_has(0)
            if fault == "stopped":
                server.resume()
                assert [await one.looked_up(n) for n in (0, 1)] == [(1, 1), (0, 1)]


async def test_quiet_server_stays_followed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "PING_SECONDS", 0.01)
    server.command("CONFIG", "RESETSTAT")

    async def is_asked() -> bool:
        found = re.search(rb"cmdstat_ping:calls=(\d+)", server.command("INFO", "commandstats"))
        return found is not None and int(found[1]) > 3

    async with engine(server.url) as one:
        await one.save(0)
        await one.until_filter_has(1)
        await eventually(is_asked)
        assert one.filter_keys == 1


async def test_request_that_exceeds_its_deadline_does_not_end_the_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "SILENT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("aiokv.stores.guard.FOLLOW_PAUSE_SECONDS", 2 * PATIENCE_SECONDS)
    with running_server(tmp_path) as server:
        async with engine(server.url) as one, engine(server.url) as other:
            await one.save(0)
            await one.until_filter_has(1)
            refreshes = one.store.statistics().details["slot_refreshes"]
            server.stop()
            late = asyncio.create_task(one.store.lookup(key(0)))
            await spin(20)  # it has sent its request
            late.cancel()
            await asyncio.wait({late})
            assert late.cancelled()
            server.resume()
            await other.save(1)
            await one.until_filter_has(2)
            assert await one.looked_up(1) == (1, 1)
            assert one.store.statistics().details["slot_refreshes"] > refreshes  # as after an error


async def test_user_who_may_not_follow_changes_asks_the_server(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rules = ["+get", "+set", "+strlen", "+scan", "+client|id"]
    server.command("ACL", "SETUSER", "worker", "on", ">secret", "~aiokv:*", *rules)
    async with engine(server.url.replace("//", "//worker:secret@")) as one:

        async def is_logged() -> bool:
            return "client|tracking" in caplog.text

        await eventually(is_logged)
        await one.save(0)
        assert [await one.looked_up(n) for n in (0, 1)] == [(1, 1), (0, 1)]
        assert "secret" not in caplog.text


async def test_cluster_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    options = {"cluster_enabled": "yes", "cluster_port": str(free_port())}
    with running_server(tmp_path, **options) as node:
        node.command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)

        async def serves() -> bool:
            return bool(node.command("CLUSTER", "INFO").startswith(b"cluster_state:ok"))

        await eventually(serves)
        async with engine(node.url) as one:

            async def is_logged() -> bool:
                return "store.not_followed" in caplog.text

            await eventually(is_logged)
            await one.save(0)
            assert [await one.looked_up(n) for n in (0, 1)] == [(1, 1), (0, 1)]
