"""MooncakeStore with a real master and holder: conformance and failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aiokv.stores import MooncakeStore
from aiokv.testing.leftovers import open_descriptors
from tests.stores.conformance import Blocks, StoreConformance, ids, keys_of, save
from tests.stores.failures import ObjectFailures, ServerFailures, ServerRig
from tests.stores.mooncake_cluster import MooncakeCluster, why_absent

if TYPE_CHECKING:
    from collections.abc import Iterator

REASON = why_absent()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class MooncakeRig(ServerRig):
    """The master is the server: without it, no object is found."""

    def __init__(self, cluster: MooncakeCluster) -> None:
        self.cluster = cluster

    def store(self) -> MooncakeStore:
        return self.store_at(self.port)

    def store_at(self, port: int) -> MooncakeStore:
        return MooncakeStore(f"127.0.0.1:{port}")

    def full(self) -> MooncakeStore:
        self.cluster.fill()
        return self.store()

    def replace(self, key: bytes, content: bytes) -> None:
        self.cluster.put(f"aiokv/{key.hex()}", content)

    async def restart(self) -> bool:
        self.kill()
        self.start()
        return True

    @property
    def port(self) -> int:
        return self.cluster.master.port

    def kill(self) -> None:
        self.cluster.master.kill()

    def start(self) -> None:
        self.cluster.start()

    def stop(self) -> None:
        self.cluster.master.stop()

    def resume(self) -> None:
        self.cluster.master.resume()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    cluster = MooncakeCluster(tmp_path_factory.mktemp("mooncake"))
    try:
        cluster.start()
        before: set[str] = set()
        while before != (before := open_descriptors()):  # the library keeps one set per core
            asyncio.run(use_once(MooncakeStore(cluster.address)))
        yield cluster
    finally:
        cluster.kill()


async def use_once(store: MooncakeStore) -> None:
    """Let the library open descriptors that it keeps until the process ends."""
    blocks = Blocks()
    await store.open(blocks.memory)
    await save(store, blocks, [0])
    await store.load(keys_of([0]), ids(1))
    await store.aclose()


@pytest.fixture
def rig(cluster: MooncakeCluster) -> MooncakeRig:
    cluster.start()
    cluster.clear()
    return MooncakeRig(cluster)


@pytest.fixture
def medium(rig: MooncakeRig) -> MooncakeRig:
    return rig


@pytest.mark.loop("asyncio")  # a client takes a second to close
class TestConformance(StoreConformance):
    pass


@pytest.mark.loop("asyncio")
class TestObjectFailures(ObjectFailures):
    pass


@pytest.mark.loop("asyncio")
class TestServerFailures(ServerFailures):
    pass
