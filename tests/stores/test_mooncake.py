"""MooncakeStore with a real master and holder: conformance and failures."""

from __future__ import annotations

import asyncio
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ConfigError, StoreError
from aiokv.stores import MooncakeStore
from aiokv.stores.mooncake import link
from aiokv.stores.mooncake import store as store_module
from aiokv.stores.mooncake.client import MooncakeClient, import_library
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.leftovers import open_descriptors, running_threads
from tests.stores.conformance import (
    DONE,
    Blocks,
    StoreConformance,
    eventually,
    ids,
    keys_of,
    opened,
    save,
)
from tests.stores.failures import ObjectFailures, ServerFailures, ServerRig, guarded
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "CONNECT_SECONDS", PATIENCE_SECONDS)  # that a busy machine keeps
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


class KeptClients:
    """The module ``mooncake.store``, with clients that are used again: closing one takes 1 s."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._idle: list[Any] = []
        self.ReplicateConfig = library.ReplicateConfig

    def MooncakeDistributedStore(self) -> KeptClient:
        return KeptClient(self)

    def take(self, arguments: tuple[Any, ...]) -> Any:
        """Return a client that is set up."""
        if self._idle:
            return self._idle.pop()
        client = self._library.MooncakeDistributedStore()
        assert client.setup(*arguments) == 0
        return client

    def keep(self, client: Any) -> None:
        self._idle.append(client)

    def close(self) -> None:
        for client in self._idle:
            client.close()


class KeptClient:
    """A client that is set up and closed once for several tests."""

    def __init__(self, clients: KeptClients) -> None:
        self._clients = clients
        self._client: Any = None

    def setup(self, *arguments: Any) -> int:
        self._client = self._clients.take(arguments)
        return 0

    def close(self) -> None:
        self._clients.keep(self._client)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.fixture(scope="module")
def kept_clients(cluster: MooncakeCluster) -> Iterator[KeptClients]:
    clients = KeptClients(import_library())
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", cluster.address)
    for client in [clients.take(arguments), clients.take(arguments)]:  # as many as a test uses
        clients.keep(client)
    yield clients
    clients.close()


@pytest.fixture
def keeps_clients(kept_clients: KeptClients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "import_library", lambda: kept_clients)


@pytest.mark.usefixtures("keeps_clients")
class KeepsClients:
    @pytest.fixture(autouse=True)
    def no_leaks(self) -> Iterator[None]:
        """Check that the test closed its threads; clients that are kept have descriptors."""
        before = running_threads()
        yield
        assert not running_threads() - before


class TestConformance(KeepsClients, StoreConformance):
    pass


class TestObjectFailures(KeepsClients, ObjectFailures):
    pass


@pytest.mark.loop("asyncio")
class TestServerFailures(ServerFailures):
    pass


class HolderRig(MooncakeRig):
    """The process that holds the memory is the server: the master still knows its objects."""

    def kill(self) -> None:
        self.cluster.holder.kill()

    def stop(self) -> None:
        self.cluster.holder.stop()

    def resume(self) -> None:
        self.cluster.holder.resume()


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
async def test_a_holder_that_does_not_answer_costs_one_deadline(
    cluster: MooncakeCluster, *, is_killed: bool
) -> None:
    cluster.kill()  # the master may still give memory of a holder that was killed
    cluster.start()
    rig = HolderRig(cluster)
    async with guarded(rig.store()) as requests:
        assert await requests.save([1]) == [DONE]
        (rig.kill if is_killed else rig.stop)()
        try:
            await requests.until_refused()
            requests.cost_a_millisecond()
        finally:
            (rig.start if is_killed else rig.resume)()
        await eventually(requests.are_served_again)


@pytest.mark.asyncio
async def test_no_client_is_set_up_for_a_stopped_master(
    rig: MooncakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting up holds the interpreter's lock until the master answers."""
    monkeypatch.setattr(store_module, "MooncakeClient", must_not_be_called)
    monkeypatch.setattr(link, "CONNECT_SECONDS", 0.2)
    store = rig.store()
    rig.stop()
    try:
        await store.open(Blocks().memory)
        with pytest.raises(StoreError, match="does not answer"):
            await store.lookup(keys_of([1]))
    finally:
        rig.resume()
        await store.aclose()


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
async def test_a_killed_master_is_known_without_asking_the_library(
    rig: MooncakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the library takes seconds to fail."""
    async with opened(rig, Blocks()) as store:
        assert not (await store.lookup(keys_of([1]))).any()
        monkeypatch.setattr(MooncakeClient, "exist", must_not_be_called)
        rig.kill()
        for _ in range(10):
            await asyncio.sleep(0)  # the loop sees the end of the connection
        with pytest.raises(StoreError, match="is unreachable: Connect call failed"):
            await store.lookup(keys_of([1]))


def must_not_be_called(*arguments: object) -> None:
    pytest.fail("the library was called")


def test_an_address_without_a_port_is_refused() -> None:
    for master in ("host", "host:", "host:0", "host:port", "", "host:1/path", ":50051"):
        with pytest.raises(ConfigError, match="it must be host:port"):
            MooncakeStore(master)


def test_arguments_and_url() -> None:
    with pytest.raises(ConfigError, match="protocol is 'udp'"):
        MooncakeStore("host:1", protocol="udp")
    with pytest.raises(ConfigError, match="replicas is 0"):
        MooncakeStore("host:1", replicas=0)
    assert MooncakeStore.from_url("mooncake://host:50051?replicas=2").url == "mooncake://host:50051"
    with pytest.raises(ConfigError, match=r"option .replica. .*known options: .*replicas"):
        MooncakeStore.from_url("mooncake://host:50051?replica=2")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"aiokv\[mooncake\]"),
        (ImportError("libibverbs.so.1: cannot open shared object"), "apt-get install libibverbs1"),
        (ImportError("libcuda.so.1: cannot open shared object"), r"aiokv\[mooncake-cpu\]"),
    ],
)
@pytest.mark.asyncio
async def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", Missing(error))
    store = MooncakeStore("127.0.0.1:1")
    with pytest.raises(ConfigError, match=hint):
        await store.open(Blocks().memory)
    await store.aclose()


class Missing(types.ModuleType):
    """A package whose modules cannot be imported."""

    def __init__(self, error: ImportError) -> None:
        super().__init__("missing")
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise self._error


def test_timeouts_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "700")
    monkeypatch.delenv("MC_RPC_CONNECT_TIMEOUT_MS", raising=False)
    import_library()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "700"
    assert os.environ["MC_RPC_CONNECT_TIMEOUT_MS"] == "200"
