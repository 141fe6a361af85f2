"""S3Store with a moto server: conformance and failures."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import ConfigError, StoreError
from aiokv.stores import S3Store, s3
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.leftovers import open_descriptors
from tests.stores.conformance import (
    DONE,
    MISSING,
    Blocks,
    StoreConformance,
    eventually,
    ids,
    keys_of,
    opened,
)
from tests.stores.failures import ObjectFailures, ServerFailures, ServerRig, guarded
from tests.stores.moto_server import BUCKET, MotoServer, why_absent
from tests.stores.servers import Server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

REASON = why_absent()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class S3Rig(ServerRig):
    def __init__(self, server: MotoServer, full_server: Server) -> None:
        self.server = server
        self._full_server = full_server

    def store(self) -> S3Store:
        return self.store_at(self.server.port)

    def store_at(self, port: int, timeout_seconds: float = PATIENCE_SECONDS) -> S3Store:
        return S3Store(
            f"s3://{BUCKET}/models/kv",
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            options={"access_key_id": "test", "secret_access_key": "test"},
            timeout_seconds=timeout_seconds,
        )

    def full(self) -> S3Store:
        self._full_server.start()
        return self.store_at(self._full_server.port)

    def replace(self, key: bytes, content: bytes) -> None:
        # The folder is the label of the salt.
        self.server.put(f"models/kv/{key[-5:].hex()}/{key.hex()}", content)

    async def restart(self) -> bool:
        self.kill()
        self.start()
        return True

    @property
    def port(self) -> int:
        return self.server.port

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def stop(self) -> None:
        self.server.stop()

    def resume(self) -> None:
        self.server.resume()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    server = MotoServer(tmp_path_factory.mktemp("moto"))
    try:
        server.start()
        asyncio.run(use_once(S3Rig(server, server)))
        yield server
    finally:
        server.kill()


async def use_once(rig: S3Rig) -> None:
    """Let the runtime of obstore open descriptors that it keeps until the process ends."""
    async with opened(rig, Blocks()) as store:
        await store.lookup(keys_of([0]))


@pytest.fixture
def rig(server: MotoServer, tmp_path: Path) -> Iterator[S3Rig]:
    if not server.is_running:
        server.start()
    server.clear()
    program = str(Path(__file__).with_name("full_s3_server.py"))
    full_server = Server(lambda port: [sys.executable, program, str(port)], tmp_path / "full.log")
    before = open_descriptors()
    yield S3Rig(server, full_server)
    full_server.kill()
    gc.collect()
    wait_until(lambda: not open_descriptors() - before)  # the runtime closes them in its threads


@pytest.fixture
def medium(rig: S3Rig) -> S3Rig:
    return rig


@pytest.mark.loop("uvloop")  # the server takes milliseconds per request
class TestConformance(StoreConformance):
    pass


@pytest.mark.loop("asyncio")
class TestConformanceInThreads(StoreConformance):
    """Large objects are copied by threads; here all are."""

    test_many_keys = None
    test_a_restarted_server_is_used_again = None

    @pytest.fixture(autouse=True)
    def all_in_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3, "INLINE_BYTES", 0)


@pytest.mark.loop("uvloop")
class TestObjectFailures(ObjectFailures):
    pass


@pytest.mark.loop("uvloop")
class TestServerFailures(ServerFailures):
    async def test_denied_access_is_no_failure_of_requests(self, rig: S3Rig) -> None:
        async with guarded(rig.store()) as requests:
            assert await requests.save([1]) == [DONE]
            rig.server.require_credentials()
            await requests.until_refused()
            requests.cost_a_millisecond()
            rig.server.clear()
            await eventually(requests.are_served_again)

    async def test_denied_access_is_an_error_in_plain_words(self, rig: S3Rig) -> None:
        blocks = Blocks()
        async with opened(rig, blocks) as store:
            rig.server.require_credentials()
            for operation in (
                store.lookup(keys_of([1])),
                store.load(keys_of([1]), ids(0)),
                store.save(keys_of([1]), ids(0)),
                store.remove(keys_of([1])),
            ):
                with pytest.raises(StoreError, match=r"access is denied.*check the credentials"):
                    await operation


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("operation", ["load", "save", "remove"])
async def test_a_large_batch_needs_no_task_per_key(rig: S3Rig, operation: str) -> None:
    async with opened(rig, Blocks(num_blocks=60)) as store:
        keys, blocks = keys_of(range(60)), ids(*range(60))
        before = len(asyncio.all_tasks())
        arguments = (keys,) if operation == "remove" else (keys, blocks)
        call = asyncio.create_task(getattr(store, operation)(*arguments))
        await spin(2)
        assert len(asyncio.all_tasks()) - before == 1 + 16  # the call, and ``concurrency`` requests
        expected = MISSING if operation == "load" else DONE
        assert (await call).tolist() == [expected] * 60


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
async def test_a_stopped_server_in_threads(rig: S3Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "INLINE_BYTES", 0)
    # A thread that has begun is not cancelled: it ends with the limit of its request.
    async with guarded(rig.store_at(rig.port, timeout_seconds=1.0)) as requests:
        await eventually(requests.are_served_again)
        rig.stop()
        try:
            await requests.until_refused()
            requests.cost_a_millisecond()
        finally:
            rig.resume()
        await eventually(requests.are_served_again)


@pytest.mark.asyncio
async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    store = S3Store("s3://bucket/prefix")
    with pytest.raises(ConfigError, match=r"aiokv\[s3\]"):
        await store.open(Blocks().memory)
    await store.aclose()


@pytest.mark.asyncio
async def test_an_unknown_option_of_the_package_is_refused() -> None:
    store = S3Store("s3://bucket/prefix", options={"no_such_option": "1"})
    with pytest.raises(ConfigError, match="no_such_option"):
        await store.open(Blocks().memory)
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["gs", "az"])
async def test_other_clouds_are_opened_by_scheme(scheme: str) -> None:
    options = {"account_name": "test", "account_key": "dGVzdA=="} if scheme == "az" else {}
    if scheme == "gs":
        options = {"skip_signature": "true"}
    store = S3Store(f"{scheme}://bucket/prefix", options=options)
    await store.open(Blocks().memory)
    await store.aclose()


def test_arguments_and_url() -> None:
    store = S3Store.from_url("s3://bucket/prefix?endpoint=http://127.0.0.1:9000&concurrency=8")
    assert store.url == "s3://bucket/prefix"
    assert S3Store("s3://user:secret@bucket/prefix").url == "s3://bucket/prefix"
    for url, reason in (
        ("bucket/prefix", "it must be scheme://bucket/prefix"),
        ("ftp://bucket/prefix", "the scheme is one of"),
        ("s3://bucket?concurrency=0", "concurrency is 0"),
        ("s3://bucket?timeout_seconds=0", "timeout_seconds is 0.0"),
        ("s3://bucket?secret_access_key=x", "option 'secret_access_key' .* is unknown"),
    ):
        with pytest.raises(ConfigError, match=reason):
            S3Store.from_url(url)
