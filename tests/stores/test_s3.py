"""S3Store with a moto server: conformance and failures."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import cli
from aiokv.errors import ConfigError, StoreError
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.stores import S3Store, s3
from aiokv.stores.base import KEY_BYTES, split_keys
from aiokv.stores.bundles import Bundle
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.leftovers import open_descriptors
from tests.stores.conformance import (
    DONE,
    MISSING,
    PRESENT,
    WRONG,
    Blocks,
    StoreConformance,
    eventually,
    ids,
    keys_of,
    object_of,
    opened,
)
from tests.stores.failures import ObjectFailures, ServerFailures, ServerRig, guarded
from tests.stores.moto_server import BUCKET, MotoServer, why_absent
from tests.stores.servers import Server, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

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


# --- bundles ------------------------------------------------------------------------------------


class Prompts:
    """Prompts whose consecutive blocks a store saves and loads; block n is host block n."""

    def __init__(self, store: S3Store, blocks: Blocks) -> None:
        self.store = store
        self.blocks = blocks

    def keys(self, *numbers: int) -> bytes:
        return b"".join(key[:-5] + b"salt!" for key in split_keys(keys_of(numbers)))

    async def save(self, *numbers: int) -> list[int]:
        keys = self.keys(*numbers)
        for block, key in enumerate(split_keys(keys)):
            self.blocks.write(block, key)
        follows = np.arange(len(numbers)) > 0
        return (await self.store.save_chains(keys, ids(*range(len(numbers))), follows)).tolist()

    async def find(self, *numbers: int) -> int:
        found = await self.store.lookup_prefix(self.keys(*numbers))
        assert sorted(found.tolist(), reverse=True) == found.tolist()
        return int(found.sum())

    async def load(self, *numbers: int) -> list[int]:
        keys = self.keys(*numbers)
        self.blocks.fill(0xEE)
        results = (await self.store.load(keys, ids(*range(len(numbers))))).tolist()
        for block, (key, result) in enumerate(zip(split_keys(keys), results, strict=True)):
            if result == DONE:
                assert self.blocks.read(block) == object_of(key, self.blocks.memory.payload_bytes)
        return results

    @property
    def requests(self) -> int:
        return self.store.statistics().details["requests"]

    @property
    def path(self) -> str:
        return f"models/kv/{b'salt!'.hex()}"


@asynccontextmanager
async def prompts(rig: S3Rig, num_blocks: int = 128) -> AsyncIterator[Prompts]:
    blocks = Blocks(num_blocks)
    async with opened(rig, blocks) as store:
        assert isinstance(store, S3Store)
        yield Prompts(store, blocks)


PROMPT = tuple(range(100))


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("inline_bytes", [0, 1 << 30])
async def test_a_prompt_is_saved_found_and_loaded_with_few_requests(
    rig: S3Rig, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(s3, "INLINE_BYTES", inline_bytes)
    async with prompts(rig) as first, prompts(rig) as second:
        assert await first.save(*PROMPT) == [DONE] * 100
        assert first.requests <= 10
        assert await first.save(*PROMPT) == [PRESENT] * 100
        assert await second.find(*PROMPT, 200, 201) == 100
        assert await second.load(*PROMPT) == [DONE] * 100
        assert second.requests <= 20
        assert await second.find(300, 301) == 0
        assert await second.load(*PROMPT[17:31]) == [DONE] * 14  # a part
        assert await second.load(99, 3, 4, 300, 5) == [DONE, DONE, DONE, MISSING, DONE]
        turn = range(400, 420)  # the next turn: a bundle of its own behind the first
        assert await second.save(*PROMPT, *turn) == [PRESENT] * 100 + [DONE] * 20
        assert await first.find(*PROMPT, *turn) == 120
        assert await first.load(*PROMPT[90:], *turn) == [DONE] * 30
        other = range(500, 510)  # a prompt that parts from the first one
        assert await first.save(*PROMPT[:50], *other) == [PRESENT] * 50 + [DONE] * 10
        assert await second.find(*PROMPT[:50], *other) == 60


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("has_proxy", [False, True])
async def test_large_parts_are_received_without_the_package_unless_there_is_a_proxy(
    rig: S3Rig, monkeypatch: pytest.MonkeyPatch, has_proxy: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(s3, "INLINE_BYTES", 0)
    if has_proxy:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr("aiokv.stores.signed_reads.SignedReads.read", refuse)
    else:
        monkeypatch.setattr("obstore.get", refuse)
    async with prompts(rig) as first:
        assert await first.save(*PROMPT) == [DONE] * 100
        assert await first.load(*PROMPT) == [DONE] * 100


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
async def test_bundles_are_loaded_without_a_lookup(rig: S3Rig) -> None:
    async with prompts(rig) as first, prompts(rig) as second:
        await first.save(1, 2)
        assert await second.load(1) == [DONE]
        assert await second.load(1, 2) == [DONE, DONE]


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
async def test_engines_that_save_the_same_prompt_at_once_keep_whole_bundles(rig: S3Rig) -> None:
    async with prompts(rig) as first, prompts(rig) as second, prompts(rig) as third:
        saves = [p.save(*PROMPT[:30], *range(n, n + 9)) for p, n in ((first, 200), (second, 300))]
        for results in await asyncio.gather(*saves):
            assert set(results) <= {DONE, PRESENT}
        for n in (200, 300):
            assert await third.find(*PROMPT[:30], *range(n, n + 9)) == 39
            assert await third.load(*PROMPT[:30], *range(n, n + 9)) == [DONE] * 39


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("digits", ["0416", "0507"])  # of HTTP
async def test_digits_of_a_name_are_no_status(rig: S3Rig, digits: str) -> None:
    key = bytes.fromhex(digits).ljust(KEY_BYTES, b"\0")
    blocks = Blocks()
    async with opened(rig, blocks) as store:
        blocks.write(0, key)
        rig.server.kill()
        with pytest.raises(StoreError):
            await store.lookup_prefix(key)
        with pytest.raises(StoreError):
            await store.load(key, ids(0))
        with pytest.raises(StoreError):
            await store.save(key, ids(0))


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
async def test_bundles_that_were_removed_or_replaced_are_missing(rig: S3Rig) -> None:
    async with prompts(rig) as first, prompts(rig) as second:
        await first.save(1, 2, 3)
        assert await second.find(1, 2, 3) == 3
        assert (await first.store.remove(first.keys(2))).tolist() == [DONE]  # the whole bundle
        assert await first.find(1, 2, 3) == 0
        assert await second.load(1, 2, 3) == [MISSING] * 3
        assert await second.find(1, 2, 3) == 0
        await first.save(1, 2, 3)
        assert await second.find(1, 2, 3) == 3
        await first.store.remove(first.keys(1))
        await first.save(1, 7)  # shorter than what the second store knows
        assert await second.load(2, 3) == [MISSING] * 2
        assert await second.find(1, 2, 3) == 1
        assert await second.load(1) == [DONE]
        await first.store.remove(first.keys(1))
        await first.save(1, 8)  # as long as what the second store knows
        assert await second.load(1, 7) == [DONE, MISSING] or await second.load(7) == [MISSING]
        assert await second.save(1, 2, 3) == [PRESENT, DONE, DONE]
        assert await first.find(1, 2, 3) == 3


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
async def test_block_in_a_bundle_that_this_process_has_not_seen_is_removed(rig: S3Rig) -> None:
    async with prompts(rig) as first, prompts(rig) as second:
        await first.save(1, 2, 3)
        await first.save(4)
        assert (await second.store.remove(second.keys(9, 2, 4))).tolist() == [DONE] * 3
        async with prompts(rig) as third:
            assert await third.find(1, 2, 3) == 0
            assert await third.find(4) == 0


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("place", ["header", "object", "end"])
async def test_a_damaged_bundle_gives_no_wrong_block_and_is_replaced(
    rig: S3Rig, place: str
) -> None:
    async with prompts(rig) as first, prompts(rig) as second:
        await first.save(1, 2, 3)
        keys, size = split_keys(first.keys(1, 2, 3)), first.blocks.memory.object_bytes
        bundle = Bundle(keys, size)
        content = bytearray(
            bundle.header + b"".join(object_of(key, size - TRAILER_BYTES) for key in keys)
        )
        if place == "header":
            content[50] ^= 1
        elif place == "object":
            content[bundle.offset(1) + 5] ^= 1
        else:
            del content[-10:]
        rig.server.put(f"{first.path}/{keys[0].hex()}", bytes(content))
        if place == "object":
            assert await second.find(1, 2, 3) == 3
            assert await second.load(1, 2, 3) == [DONE, WRONG, DONE]
            await second.store.quarantine(keys[1])
        else:
            assert await second.find(1, 2, 3) == 0
            assert set(await first.load(1, 2, 3)) <= {DONE, MISSING, WRONG}  # checked there
        assert await second.save(1, 2, 3) == [DONE] * 3
        assert await first.find(1, 2, 3) == 3
        assert await first.load(1, 2, 3) == [DONE] * 3


@pytest.mark.asyncio
@pytest.mark.loop("asyncio")
async def test_a_purge_removes_bundles_and_counts_their_blocks(rig: S3Rig) -> None:
    async with prompts(rig) as first, prompts(rig) as second:
        await first.save(*PROMPT)
        await first.store.save(keys_of([500]), ids(0))
        found = [keys async for keys in second.store.stored_keys(b"salt!")]
        assert sorted(split_keys(b"".join(found))) == sorted(split_keys(first.keys(*PROMPT)))
        assert await second.store.purge(b"salt!") == 100
        assert await second.find(*PROMPT) == 0
        assert await first.load(*PROMPT) == [MISSING] * 100
        assert (await first.store.lookup(keys_of([500]))).tolist() == [True]


def test_ls_of_a_url_counts_the_blocks_in_bundles(
    rig: S3Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fill() -> None:
        async with prompts(rig) as p:
            await p.save(*PROMPT)

    asyncio.run(fill())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    url = f"s3://{BUCKET}/models/kv?region=us-east-1&endpoint=http://127.0.0.1:{rig.port}"
    assert cli.main(["store", "ls", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"s3 store: s3://{BUCKET}/models/kv", "blocks: 100"]
    assert f"salt {b'salt!'.hex()}: 100" in lines
