"""RedisStore whose master Redis Sentinel names: fail-overs by a killed master and by a command."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from aiokv.errors import StoreError
from aiokv.stores import stores_from
from aiokv.stores.redis import RedisStore
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.conformance import (
    DONE,
    Blocks,
    Medium,
    StoreConformance,
    eventually,
    ids,
    keys_of,
    opened,
    save,
    saved_and_loaded,
)
from tests.stores.servers import Server, free_port
from tests.stores.servers_redis import (
    PROGRAM,
    Listener,
    RedisServer,
    needs_server,
    running_server,
    until,
)
from tests.stores.test_redis_followed import Engine, engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from aiokv.stores.base import Store

pytestmark = needs_server

SECRET, SENTINEL_SECRET = "s3cret", "s3cret-of-the-sentinel"


class Sentinel(RedisServer):
    """A Sentinel process that watches a master, and needs no other one for a fail-over."""

    def __init__(self, directory: Path, master: RedisServer) -> None:
        directory.mkdir()
        self.options = {"requirepass": SENTINEL_SECRET}
        self.config = directory / "sentinel.conf"
        self.config.write_text(
            f"bind 127.0.0.1\ndir {directory}\nrequirepass {SENTINEL_SECRET}\n"
            f"sentinel monitor kv 127.0.0.1 {master.port} 1\n"
            f"sentinel auth-pass kv {SECRET}\n"
            "sentinel down-after-milliseconds kv 2000\n"
            f"sentinel failover-timeout kv {int(PATIENCE_SECONDS * 1000)}\n"
        )
        command = [str(PROGRAM), str(self.config), "--sentinel", "--port"]
        Server.__init__(
            self,
            lambda port: [*command, str(port)],
            directory / "log",
            is_ready=self._is_answering,
        )


class Watched:
    """A master with a replica, and their Sentinel."""

    def __init__(self, directory: Path) -> None:
        login = {"requirepass": SECRET, "masterauth": SECRET, "repl_diskless_sync_delay": "0"}
        self.servers = [RedisServer(directory / str(n), **login) for n in range(2)]
        for server in self.servers:
            server.start()
        master, replica = self.servers
        replica.command("REPLICAOF", "127.0.0.1", master.port)
        until(lambda: replica.command("ROLE")[3] == b"connected")
        self.sentinel = Sentinel(directory / "sentinel", master)
        self.sentinel.start()
        until(lambda: b"slaves=1" in self.sentinel.command("INFO", "sentinel"))

    @property
    def url(self) -> str:
        options = f"sentinel=kv&sentinel_password={SENTINEL_SECRET}"
        return f"redis://:{SECRET}@127.0.0.1:{self.sentinel.port}/0?{options}"

    def kill(self) -> None:
        for server in (self.sentinel, *self.servers):
            server.kill()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.kill()


@pytest.fixture(scope="class")
def class_watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    watched = Watched(tmp_path_factory.mktemp("sentinel"))
    yield watched
    watched.kill()


class SentinelMedium(Medium):
    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def store(self) -> Store:
        (use,) = stores_from([f"{self.watched.url}&connect_timeout_seconds={PATIENCE_SECONDS}"])
        return use.store


class TestRedisSentinel(StoreConformance):
    @pytest.fixture
    def medium(self, class_watched: Watched) -> SentinelMedium:
        class_watched.servers[0].command("FLUSHALL")
        return SentinelMedium(class_watched)


@pytest.mark.asyncio
async def test_replica_takes_over_from_a_killed_master(watched: Watched) -> None:
    master, replica = watched.servers
    blocks = Blocks()
    async with opened(SentinelMedium(watched), blocks) as store:
        keys = await save(store, blocks, [1])
        until(lambda: replica.command("DBSIZE") == 1)
        master.kill()
        await eventually(lambda: saved_and_loaded(store, blocks))
        assert (await store.load(keys, ids(1))).tolist() == [DONE]
        assert replica.is_master()


@pytest.mark.asyncio
async def test_new_master_is_followed_after_a_fail_over(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv.stores.guard.FOLLOW_PAUSE_SECONDS", 0.1)
    _, replica = watched.servers
    url, _ = watched.url.split("?")
    one = Engine(url, sentinel="kv", sentinel_password=SENTINEL_SECRET)
    try:
        await one.stores.open(one.blocks.memory, bytes(32))
        await one.save(0)
        await one.until_filter_has(1)
        until(lambda: replica.command("DBSIZE") == 1)
        until(lambda: watched.sentinel.command("SENTINEL", "FAILOVER", "kv") == b"OK")
        until(replica.is_master)

        async def saves() -> bool:
            try:
                await one.save(1)
            except (StoreError, AssertionError):  # the old master is read-only
                return False
            return replica.command("DBSIZE") == 2

        await eventually(saves)
        await one.until_filter_has(2)
        assert [await one.looked_up(n) for n in (0, 1, 2)] == [(1, 1), (1, 1), (0, 0)]
    finally:
        await one.stores.aclose()


class NamingServer(Listener):
    """A Sentinel that replies with a port to each request."""

    def __init__(self, named_port: int) -> None:
        super().__init__()
        self.named_port = named_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            text = str(self.named_port)
            writer.write(f"*2\r\n$9\r\n127.0.0.1\r\n${len(text)}\r\n{text}\r\n".encode())


class Failover(NamedTuple):
    """Two servers: ``one`` follows the old one by a Sentinel, ``other`` uses the new one."""

    old: RedisServer
    new: RedisServer
    sentinel: NamingServer
    one: Engine
    other: Engine

    async def finds_the_keys_of_the_new_server(self) -> None:
        """Return when ``one`` finds key 2, which ``other`` has saved."""

        async def is_found() -> bool:
            return (await self.one.looked_up(2))[0] == 1

        await eventually(is_found)


@asynccontextmanager
async def failing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Failover]:
    monkeypatch.setattr("aiokv.stores.guard.FOLLOW_PAUSE_SECONDS", 0.1)
    with running_server(tmp_path / "old") as old, running_server(tmp_path / "new") as new:
        async with NamingServer(old.port) as sentinel, engine(new.url) as other:
            one = Engine(sentinel.url, sentinel="kv")
            try:
                await one.stores.open(one.blocks.memory, bytes(32))
                await one.save(0)
                await one.until_filter_has(1)
                yield Failover(old, new, sentinel, one, other)
            finally:
                await one.stores.aclose()


@pytest.mark.asyncio
async def test_old_master_that_still_runs_is_followed_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with failing_over(tmp_path, monkeypatch) as both:
        both.sentinel.named_port = both.new.port
        both.old.command("REPLICAOF", "127.0.0.1", free_port())  # without a link to the new one
        with pytest.raises(StoreError, match="READONLY"):
            await both.one.save(1)
        await both.other.save(2)
        await both.finds_the_keys_of_the_new_server()


@pytest.mark.asyncio
async def test_master_that_another_one_has_replaced_is_followed_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv.stores.redis.commands.SILENT_SECONDS", PATIENCE_SECONDS)
    async with failing_over(tmp_path, monkeypatch) as both:
        await both.other.save(2)
        both.sentinel.named_port = both.new.port
        both.old.stop()
        late = asyncio.create_task(both.one.store.lookup(keys_of([0])))
        await spin(20)  # it has sent its request
        late.cancel()
        await asyncio.wait({late})
        both.old.resume()
        await both.one.store.lookup(keys_of([0]))  # asks for the master first
        await both.finds_the_keys_of_the_new_server()


@pytest.mark.asyncio
async def test_sentinel_that_does_not_know_the_master(watched: Watched) -> None:
    store = RedisStore.from_url(watched.url.replace("sentinel=kv", "sentinel=other"))
    assert SECRET not in f"{store.url} {store!r}"
    blocks = Blocks()
    await store.open(blocks.memory)
    try:
        with pytest.raises(StoreError, match="knows no such master"):
            await store.lookup(keys_of([1]))
    finally:
        await store.aclose()
