"""RedisStore on a cluster of three masters and three replicas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import StoreError
from aiokv.stores.redis import RedisStore
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.conformance import (
    DONE,
    FAILED,
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
from tests.stores.servers import free_port
from tests.stores.servers_redis import Cluster, RedisServer, needs_server, redis, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.stores.base import Store

pytestmark = needs_server

# A key of each master: a server that has won an election begins no other for 16 s, and may count a
# late vote of the last one in it.
PROMOTED, KILLED, STOPPED = 0, 1, 3


class ClusterMedium(Medium):
    def __init__(self, cluster: Cluster, url: str = "", **options: object) -> None:
        self.cluster = cluster
        self.url = url
        self.options = options

    def store(self) -> Store:
        options = {"connect_timeout_seconds": PATIENCE_SECONDS, **self.options}
        return RedisStore(self.url or self.cluster.url, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Return a cluster that is empty and serves all slots."""
    shared_cluster.until_ready()
    for server in shared_cluster.servers:
        if server.is_master():
            server.command("FLUSHALL")
    return shared_cluster


class TestRedisStoreOnCluster(StoreConformance):
    @pytest.fixture
    def medium(self, cluster: Cluster) -> ClusterMedium:
        return ClusterMedium(cluster)


def name_of(number: int) -> bytes:
    return b"aiokv:" + keys_of([number]).hex().encode()


def slot_of(number: int) -> int:
    return int(redis.crc.key_slot(name_of(number)))


@pytest.mark.asyncio
async def test_keys_are_on_all_masters(cluster: Cluster) -> None:
    blocks = Blocks()
    async with opened(ClusterMedium(cluster), blocks) as store:
        await save(store, blocks, range(12))
        assert store.statistics().details["slot_refreshes"] == 1
        assert store.statistics().details.get("redirections", 0) == 0
    counts = [server.command("DBSIZE") for server in cluster.servers if server.is_master()]
    assert sum(counts) == 12
    assert min(counts) > 0


@pytest.mark.asyncio
async def test_one_node_that_answers_is_enough_to_begin(cluster: Cluster) -> None:
    blocks = Blocks()
    url = f"redis://127.0.0.1:1,127.0.0.1:{cluster.servers[5].port}"  # nothing listens on port 1
    async with opened(ClusterMedium(cluster, url), blocks) as store:
        await save(store, blocks, range(4))


@pytest.mark.asyncio
async def test_database_of_a_cluster_is_0(cluster: Cluster) -> None:
    url = f"{cluster.servers[0].url}/1"
    async with opened(ClusterMedium(cluster, url), Blocks()) as store:
        with pytest.raises(StoreError, match="SELECT is not allowed in cluster mode"):
            await store.lookup(keys_of([1]))


@pytest.mark.asyncio
async def test_slot_that_is_moving(cluster: Cluster) -> None:
    """ASK for keys that have moved, then MOVED for the whole slot."""
    blocks = Blocks()
    slot = slot_of(3)
    source = cluster.master_of(name_of(3))
    target = next(s for s in cluster.servers if s.is_master() and s is not source)
    names = {server: server.command("CLUSTER", "MYID").decode() for server in (source, target)}
    async with opened(ClusterMedium(cluster), blocks) as store:
        keys = await save(store, blocks, range(6))
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        try:
            assert (await store.load(keys, np.arange(8, 14, dtype=np.int32))).tolist() == [DONE] * 6
            source.command("MIGRATE", "127.0.0.1", target.port, name_of(3), 0, 5000)
            assert (await store.lookup(keys)).all()  # ASK
            assert (await store.load(keys, np.arange(14, 20, dtype=np.int32))).tolist() == [
                DONE
            ] * 6
            assert store.statistics().details["redirections"] == 2
            assert (await store.remove(keys_of([3]))).tolist() == [DONE]
            await save(store, blocks, range(6))
            assert (await store.lookup(keys)).all()
            redirections = store.statistics().details["redirections"]
            for server in (target, source):
                server.command("CLUSTER", "SETSLOT", slot, "NODE", names[target])
            assert (await store.lookup(keys)).all()  # MOVED
            assert store.statistics().details["redirections"] == redirections + 1
            assert (await store.load(keys, np.arange(6, 12, dtype=np.int32))).tolist() == [DONE] * 6
            assert store.statistics().details["redirections"] == redirections + 1
        finally:
            for server in (source, target):
                server.command("CLUSTER", "SETSLOT", slot, "NODE", names[target])
    assert (blocks.array[:6] == blocks.array[6:12]).all()


@pytest.mark.asyncio
async def test_replica_that_is_promoted(cluster: Cluster) -> None:
    blocks = Blocks()
    async with opened(ClusterMedium(cluster), blocks) as store:
        keys = await save(store, blocks, range(8))
        master = cluster.master_of(name_of(PROMOTED))
        replica = cluster.replica_of(master)
        cluster.until_replicated(master, replica)
        replica.command("CLUSTER", "FAILOVER")
        until(lambda: replica.is_master() and not master.is_master())
        results = await store.load(keys, np.arange(8, 16, dtype=np.int32))
        assert results.tolist() == [DONE] * 8
        assert store.statistics().details["redirections"] > 0
        assert await saved_and_loaded(store, blocks)


@pytest.mark.loop("asyncio")
@pytest.mark.asyncio
async def test_replica_takes_over_from_a_killed_master(cluster: Cluster) -> None:
    blocks = Blocks()
    async with opened(ClusterMedium(cluster), blocks) as store:
        keys = await save(store, blocks, range(8))
        master = cluster.master_of(name_of(KILLED))
        replica = cluster.replica_of(master)
        cluster.until_replicated(master, replica)
        master.kill()
        try:
            results = await store.load(keys, np.arange(8, 16, dtype=np.int32))
            assert FAILED in results
            assert set(results.tolist()) <= {DONE, FAILED}  # other masters serve their keys
            await check_taken_over(store, blocks, keys, replica)
        finally:
            master.start()
        await check_former_master(cluster, store, blocks, keys, master)


@pytest.mark.loop("uvloop")
@pytest.mark.asyncio
async def test_replica_takes_over_from_a_stopped_master(cluster: Cluster) -> None:
    blocks = Blocks()
    medium = ClusterMedium(cluster, connect_timeout_seconds=2.0)
    async with opened(medium, blocks) as store:
        keys = await save(store, blocks, range(8))
        master = cluster.master_of(name_of(STOPPED))
        replica = cluster.replica_of(master)
        cluster.until_replicated(master, replica)
        master.stop()
        try:
            await check_taken_over(store, blocks, keys, replica)
        finally:
            master.resume()
        await check_former_master(cluster, store, blocks, keys, master)


async def check_taken_over(store: Store, blocks: Blocks, keys: bytes, replica: RedisServer) -> None:
    """Load the objects of blocks 0 to 7 until the replica serves, and save others."""
    last: object = None

    async def is_served() -> bool:
        nonlocal last
        try:
            async with asyncio.timeout(5.0):
                last = await store.load(keys, np.arange(8, 16, dtype=np.int32))
        except (StoreError, TimeoutError) as error:
            last = error
            return False
        return bool((last == DONE).all())

    try:
        await eventually(is_served)
    except TimeoutError:
        pytest.fail(f"the replica does not serve; last: {last}")
    assert replica.is_master()
    assert (blocks.array[:8] == blocks.array[8:16]).all()
    await save(store, blocks, range(20, 28))


async def check_former_master(
    cluster: Cluster, store: Store, blocks: Blocks, keys: bytes, former: RedisServer
) -> None:
    """Load the objects when the server that failed is back, as a replica."""
    cluster.until_ready()
    until(lambda: not former.is_master())

    async def is_served() -> bool:
        try:
            is_found = (await store.lookup(keys)).all()
            results = await store.load(keys, np.arange(8, 16, dtype=np.int32))
        except StoreError:  # a connection took longer than ``connect_timeout_seconds``
            return False
        return bool(is_found and (results == DONE).all())

    await eventually(is_served)


@pytest.mark.asyncio
async def test_cluster_without_slots(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = {"cluster_enabled": "yes", "cluster_port": str(free_port())}
    server = RedisServer(tmp_path_factory.mktemp("alone"), **options)
    try:
        server.start()
        async with opened(ClusterMedium(Cluster.__new__(Cluster), server.url), Blocks()) as store:
            with pytest.raises(StoreError, match="a cluster that has no slots"):
                await store.load(keys_of([1]), ids(0))
    finally:
        server.kill()
