"""MooncakeStore with a real master and holder: conformance and failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aiokv.stores import MooncakeStore
from aiokv.testing.leftovers import open_descriptors
from tests.stores.conformance import Blocks, Medium, StoreConformance, ids, keys_of, save
from tests.stores.mooncake_cluster import MooncakeCluster, why_absent

if TYPE_CHECKING:
    from collections.abc import Iterator

REASON = why_absent()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class MooncakeMedium(Medium):
    def __init__(self, cluster: MooncakeCluster) -> None:
        self.cluster = cluster

    def store(self) -> MooncakeStore:
        return MooncakeStore(self.cluster.address)

    async def restart(self) -> bool:
        self.cluster.master.kill()
        self.cluster.start()
        return True


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
def medium(cluster: MooncakeCluster) -> MooncakeMedium:
    cluster.start()
    cluster.clear()
    return MooncakeMedium(cluster)


@pytest.mark.loop("asyncio")  # a client takes a second to close
class TestConformance(StoreConformance):
    pass
