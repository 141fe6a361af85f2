"""RedisStore on a single server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from aiokv import cli
from aiokv.errors import ConfigError, StoreError
from aiokv.stores.redis import RedisStore
from aiokv.stores.redis.connection import RedisConnection, ReplyError
from aiokv.stores.redis.options import Address
from aiokv.stores.redis.slots import SlotMap
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.conformance import (
    DONE,
    FAILED,
    MISSING,
    PRESENT,
    REFUSED,
    WRONG,
    Blocks,
    Medium,
    StoreConformance,
    eventually,
    ids,
    keys_of,
    object_of,
    opened,
    save,
    saved_and_loaded,
)
from tests.stores.failures import ObjectFailures, ServerFailures, ServerRig, guarded
from tests.stores.servers import free_port
from tests.stores.servers_redis import (
    Proxy,
    RedisServer,
    ScriptedServer,
    needs_server,
    running_server,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

    from aiokv.stores.base import Store

pytestmark = needs_server

SECRET = "s3cret-of-the-test"


class ServerMedium(Medium):
    """A server, or a proxy before it."""

    def __init__(self, server: RedisServer, url: str = "", **options: object) -> None:
        self.server = server
        self.url = url
        self.options = options

    def store(self) -> Store:
        options = {"connect_timeout_seconds": PATIENCE_SECONDS, **self.options}
        return RedisStore(self.url or self.server.url, **options)  # type: ignore[arg-type]

    async def restart(self) -> bool:
        await asyncio.to_thread(self.server.restart)
        return True


def name_of(number: int) -> str:
    """Return the key on the server of a key of a test."""
    return f"aiokv:{keys_of([number]).hex()}"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """Return a server that is empty."""
    shared_server.command("FLUSHALL")
    return shared_server


@contextlib.asynccontextmanager
async def opened_at(url: str, blocks: Blocks, **options: object) -> AsyncIterator[Store]:
    async with opened(ServerMedium(RedisServer.__new__(RedisServer), url, **options), blocks) as s:
        yield s


class TestRedisStore(StoreConformance):
    @pytest.fixture
    def medium(self, server: RedisServer) -> ServerMedium:
        return ServerMedium(server)


class TestRedisStoreWithTtl(StoreConformance):
    @pytest.fixture
    def medium(self, server: RedisServer) -> ServerMedium:
        return ServerMedium(server, ttl_seconds=1000, prefix="{ttl}", connections=1)


class RedisRig(ServerRig):
    """A server of its own, and another one that is full."""

    def __init__(self, server: RedisServer, full_server: RedisServer) -> None:
        self.server = server
        self._full_server = full_server

    def store(self) -> Store:
        return self.store_at(self.server.port)

    def store_at(self, port: int) -> Store:
        return RedisStore(f"redis://127.0.0.1:{port}", connect_timeout_seconds=PATIENCE_SECONDS)

    def full(self) -> Store:
        self._full_server.start()
        used = re.findall(rb"used_memory:([0-9]+)", self._full_server.command("INFO", "memory"))
        self._full_server.command("CONFIG", "SET", "maxmemory", int(used[0]) + 200_000)
        return self.store_at(self._full_server.port)

    def replace(self, key: bytes, content: bytes) -> None:
        self.server.command("SET", f"aiokv:{key.hex()}", content)

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


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[RedisRig]:
    full_server = RedisServer(tmp_path / "full")
    with running_server(tmp_path / "server") as server:
        try:
            yield RedisRig(server, full_server)
        finally:
            full_server.kill()


class TestObjectFailures(ObjectFailures):
    pass


@pytest.mark.loop("uvloop")
class TestServerFailures(ServerFailures):
    async def test_a_changed_password_is_no_failure_of_requests(self, rig: RedisRig) -> None:
        async with guarded(rig.store()) as requests:
            assert await requests.save([1]) == [DONE]
            with rig.server.client() as client:
                client.config_set("requirepass", SECRET)
                client.client_kill_filter(_type="normal", skipme=True)
                await requests.until_refused()
                requests.cost_a_millisecond()
                client.config_set("requirepass", "")
            await eventually(requests.are_served_again)


# --- objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"x", b"y" * 10_047, b"z" * 10_049, b"!" * 3_000_000])
@pytest.mark.asyncio
async def test_value_of_another_length_is_wrong_and_not_read(
    server: RedisServer, value: bytes
) -> None:
    blocks = Blocks()
    async with opened_at(server.url, blocks) as store:
        keys = await save(store, blocks, range(3))
        with server.client() as client:
            client.set(name_of(1), value)
        blocks.fill(0xEE)
        assert (await store.lookup(keys)).tolist() == [True, False, True]
        assert (await store.load(keys, ids(5, 6, 7))).tolist() == [DONE, WRONG, DONE]
        assert (blocks.array[6] == 0xEE).all()
        assert (blocks.array[8:] == 0xEE).all()
        assert blocks.read(7) == object_of(keys_of([2]), 9_984)
        await save(store, blocks, [1])  # replaces the value
        assert (await store.load(keys_of([1]), ids(9))).tolist() == [DONE]
        assert store.statistics().details["load_wrong"] == 1


@pytest.mark.asyncio
async def test_value_of_another_type_is_wrong_and_replaced(server: RedisServer) -> None:
    blocks = Blocks()
    async with opened_at(server.url, blocks) as store:
        server.command("RPUSH", name_of(1), "a list")
        assert (await store.lookup(keys_of([1]))).tolist() == [False]
        assert (await store.load(keys_of([1]), ids(0))).tolist() == [WRONG]
        await save(store, blocks, [1])
        assert (await store.load(keys_of([1]), ids(0))).tolist() == [DONE]


@pytest.mark.asyncio
async def test_other_bytes_of_the_right_length_are_left_to_the_guard(server: RedisServer) -> None:
    blocks = Blocks()
    async with opened_at(server.url, blocks) as store:
        with server.client() as client:
            client.set(name_of(1), b"\r\n$-1\r\n+".ljust(10_048, b"\n"))
        assert (await store.load(keys_of([1]), ids(3))).tolist() == [DONE]
    assert blocks.read(3) == b"\r\n$-1\r\n+".ljust(10_048, b"\n")


@pytest.mark.asyncio
async def test_save_does_not_send_present_objects(server: RedisServer) -> None:
    blocks = Blocks()
    async with opened_at(server.url, blocks) as store:
        await save(store, blocks, range(3))
        await save(store, blocks, range(5))
        assert store.statistics().details["save_present"] == 3
    assert {name.decode() for name in server.command("KEYS", "*")} == set(map(name_of, range(5)))


@pytest.mark.asyncio
async def test_ttl_begins_again_with_each_use(server: RedisServer) -> None:
    blocks = Blocks()
    async with opened_at(server.url, blocks, ttl_seconds=5000) as store:
        keys = await save(store, blocks, [1])
        uses = [(store.load(keys, ids(2)), DONE), (store.save(keys, ids(0)), PRESENT)]
        for use, expected in uses:
            assert 4000 < server.command("TTL", name_of(1)) <= 5000
            server.command("EXPIRE", name_of(1), 100)
            assert (await use).tolist() == [expected]
        assert 4000 < server.command("TTL", name_of(1)) <= 5000
    async with opened_at(server.url, blocks) as store:
        await save(store, blocks, [2])
        assert server.command("TTL", name_of(2)) == -1


@pytest.mark.asyncio
async def test_prefix_and_database_separate_stores(server: RedisServer) -> None:
    blocks = Blocks()
    async with (
        opened_at(server.url, blocks) as store,
        opened_at(f"{server.url}/3", blocks) as third,
        opened_at(server.url, blocks, prefix="other:") as other,
    ):
        keys = await save(third, blocks, [1])
        assert (await store.lookup(keys)).tolist() == [False]
        await save(other, blocks, [2])
        assert (await store.lookup(keys_of([2]))).tolist() == [False]
        with server.client(db=3) as client:
            assert client.exists(name_of(1)) == 1


@pytest.mark.asyncio
async def test_batch_over_several_connections(server: RedisServer) -> None:
    blocks = Blocks(num_blocks=20, payload_bytes=(4 << 20) - 64)
    async with opened_at(server.url, blocks, connections=4) as store:
        keys = await save(store, blocks, range(10))
        assert (await store.load(keys, np.arange(10, 20, dtype=np.int32))).tolist() == [DONE] * 10
        # One for the slots, two for the values: a batch leaves the others to other calls.
        assert store.statistics().details["connections_opened"] == 3
    assert (blocks.array[:10] == blocks.array[10:]).all()


# --- full servers --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_full_server_refuses_and_serves(tmp_path: Path) -> None:
    blocks = Blocks(payload_bytes=(1 << 20) - 64)
    with running_server(tmp_path, maxmemory="14mb", maxmemory_policy="noeviction") as server:
        async with opened_at(server.url, blocks, connections=1) as store:
            keys = keys_of(range(20))
            results = await store.save(keys, np.arange(20, dtype=np.int32))
            stored = int((results == DONE).sum())
            assert 0 < stored < 20
            assert set(results.tolist()) == {DONE, REFUSED}
            # What follows a first refusal is not sent, except for what was on its way.
            (rejected,) = re.findall(
                rb"cmdstat_set:.*rejected_calls=([0-9]+)", server.command("INFO", "commandstats")
            )
            assert 0 < int(rejected) <= 2
            assert (await store.lookup(keys)).tolist() == (results == DONE).tolist()
            assert (await store.load(keys[:32], ids(20))).tolist() == [DONE]
            refused = keys_of([int(np.flatnonzero(results == REFUSED)[0])])
            assert (await store.save(refused, ids(0))).tolist() == [REFUSED]
            await store.remove(keys)
            assert (await store.save(refused, ids(0))).tolist() == [DONE]


@pytest.mark.asyncio
async def test_full_server_that_evicts(tmp_path: Path) -> None:
    blocks = Blocks(payload_bytes=(1 << 20) - 64)
    with running_server(tmp_path, maxmemory="14mb", maxmemory_policy="allkeys-lru") as server:
        async with opened_at(server.url, blocks, connections=1) as store:
            keys = keys_of(range(20))
            results = await store.save(keys, np.arange(20, dtype=np.int32))
            assert results.tolist() == [DONE] * 20
            assert 0 < (await store.lookup(keys)).sum() < 20


# --- authentication -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    directory = tmp_path_factory.mktemp("locked")
    with running_server(directory, requirepass=SECRET) as server:
        server.command(
            "ACL", "SETUSER", "worker", "on", f">{SECRET}2", "~aiokv:*", "resetchannels",
            "+get", "+getex", "+set", "+strlen", "+expire", "+unlink", "+asking", "+cluster|slots",
            "+select",
        )  # fmt: skip
        server.command("ACL", "SETUSER", "reader", "on", f">{SECRET}3", "~*", "+get", "+strlen")
        yield server


@pytest.mark.parametrize(
    ("user", "options"),
    [
        (f":{SECRET}@", {}),
        (f"default:{SECRET}@", {}),
        ("", {"password": SECRET}),
        (f":wrong{SECRET}@", {"password": SECRET}),
        (f"worker:{SECRET}2@", {}),
        ("worker@", {"password": f"{SECRET}2"}),
        ("", {"username": "worker", "password": f"{SECRET}2", "ttl_seconds": 60}),
    ],
)
@pytest.mark.asyncio
async def test_right_credentials(
    locked_server: RedisServer, user: str, options: dict[str, object]
) -> None:
    locked_server.command("FLUSHALL")
    blocks = Blocks()
    url = locked_server.url.replace("//", f"//{user}")
    async with opened_at(url, blocks, **options) as store:
        keys = await save(store, blocks, [1])
        assert (await store.load(keys, ids(1))).tolist() == [DONE]
        assert (await store.remove(keys)).tolist() == [DONE]
        assert SECRET not in f"{store.url} {store!r} {store.statistics()}"


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", "NOAUTH"),
        (f":no{SECRET}@", "WRONGPASS"),
        (f"ghost:{SECRET}@", "WRONGPASS"),
        (f"reader:{SECRET}3@", "NOPERM"),
    ],
)
@pytest.mark.asyncio
async def test_wrong_credentials(locked_server: RedisServer, user: str, expected: str) -> None:
    blocks = Blocks()
    async with opened_at(locked_server.url.replace("//", f"//{user}"), blocks) as store:
        with pytest.raises(StoreError, match=expected) as caught:
            await store.save(keys_of([1]), ids(0))
    assert SECRET not in every_text(caught.value)


@pytest.mark.asyncio
async def test_database_that_the_server_does_not_have(server: RedisServer) -> None:
    async with opened_at(f"{server.url}/999", Blocks()) as store:
        with pytest.raises(StoreError, match="database 999: ERR DB index is out of range"):
            await store.lookup(keys_of([1]))


def every_text(error: BaseException | None) -> str:
    """Return the texts of an error and its causes, as a log prints them."""
    texts = []
    while error is not None:
        texts.append(f"{error!r} {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


# --- servers that fail ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_stopped_server_holds_a_call_until_it_is_cancelled(tmp_path: Path) -> None:
    blocks = Blocks()
    with running_server(tmp_path) as server:
        async with opened_at(server.url, blocks) as store:
            keys = await save(store, blocks, range(4))
            server.stop()
            calls = [
                asyncio.create_task(call)
                for call in (
                    store.load(keys, ids(8, 9, 10, 11)),
                    store.save(keys_of([5]), ids(0)),
                    store.lookup(keys),
                    store.remove(keys_of([6])),
                )
            ]
            done, pending = await asyncio.wait(calls, timeout=0.02)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls, timeout=PATIENCE_SECONDS)
            assert (len(done), len(pending)) == (0, 4)
            assert all(call.cancelled() for call in calls)
            blocks.array[8:12] = 0x55
            server.resume()
            assert (await store.lookup(keys)).all()
            assert (await store.load(keys, ids(12, 13, 14, 15))).tolist() == [DONE] * 4
            assert (blocks.array[8:12] == 0x55).all()


@pytest.mark.asyncio
async def test_server_that_does_not_reply_to_a_new_connection(tmp_path: Path) -> None:
    blocks = Blocks()
    with running_server(tmp_path) as server:
        server.stop()
        async with opened_at(server.url, blocks, connect_timeout_seconds=0.05) as store:
            with pytest.raises(StoreError, match=r"did not reply within 0\.05 s"):
                await store.lookup(keys_of([1]))
        url = server.url.replace("//", f"//:{SECRET}@")
        async with opened_at(url, blocks, connect_timeout_seconds=0.05) as store:
            with pytest.raises(StoreError, match=r"did not reply within 0\.05 s") as caught:
                await store.lookup(keys_of([1]))
        assert SECRET not in every_text(caught.value)


@pytest.mark.asyncio
async def test_stopped_server_does_not_log_in(tmp_path: Path) -> None:
    blocks = Blocks()
    with running_server(tmp_path, requirepass=SECRET) as server:
        url = server.url.replace("//", f"//:{SECRET}@")
        async with opened_at(url, blocks, connect_timeout_seconds=0.1) as store:
            keys = keys_of([1])

            async def is_connected() -> bool:
                with contextlib.suppress(StoreError):  # a busy server took longer than 0.1 s
                    await store.lookup(keys)
                    return True
                return False

            await eventually(is_connected)
            server.stop()
            with pytest.raises(StoreError, match=r"did not reply within 0\.1 s"):
                await store.load(keys, ids(0))  # on another connection than the lookup


@pytest.mark.asyncio
async def test_killed_server_is_an_error_until_it_is_back(tmp_path: Path) -> None:
    blocks = Blocks()
    with running_server(tmp_path) as server:
        async with opened_at(server.url, blocks) as store:
            keys = await save(store, blocks, range(4))
            server.kill()
            for _ in range(2):
                for call in (store.lookup(keys), store.load(keys, ids(0, 1, 2, 3))):
                    with pytest.raises(StoreError, match=f"127.0.0.1:{server.port}"):
                        await call
            server.start()
            assert (await store.lookup(keys)).tolist() == [False] * 4
            assert await saved_and_loaded(store, blocks)


@pytest.mark.asyncio
async def test_idle_connections_that_the_server_closed_are_replaced(server: RedisServer) -> None:
    blocks = Blocks()
    async with opened_at(server.url, blocks) as store:
        keys = await save(store, blocks, range(2))
        with server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert (await store.load(keys, ids(2, 3))).tolist() == [DONE] * 2


@pytest.mark.asyncio
async def test_address_without_a_server() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # no listen: connections are refused
        port = silent.getsockname()[1]
        async with opened_at(f"redis://127.0.0.1:{port}", Blocks()) as store:
            with pytest.raises(StoreError, match=f"cannot connect to 127.0.0.1:{port}"):
                await store.lookup(keys_of([1]))


@pytest.mark.asyncio
async def test_address_that_does_not_answer() -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # fills the backlog: the kernel drops further packets
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"redis://127.0.0.1:{full.getsockname()[1]}"
        async with opened_at(url, Blocks(), connect_timeout_seconds=0.05) as store:
            with pytest.raises(StoreError, match=r"did not reply within 0\.05 s"):
                await store.lookup(keys_of([1]))


@pytest.mark.asyncio
async def test_host_name_is_resolved(server: RedisServer) -> None:
    blocks = Blocks()
    async with opened_at(server.url.replace("127.0.0.1", "localhost"), blocks) as store:
        assert await saved_and_loaded(store, blocks)


# --- transfers that are cut -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_slow_server(server: RedisServer) -> None:
    blocks = Blocks()
    async with (
        Proxy(server.port, chunk_bytes=777) as proxy,
        opened_at(proxy.url, blocks) as store,
    ):
        keys = await save(store, blocks, range(8))
        assert (await store.load(keys, np.arange(8, 16, dtype=np.int32))).tolist() == [DONE] * 8
    assert (blocks.array[:8, :10_048] == blocks.array[8:16, :10_048]).all()


@pytest.mark.asyncio
async def test_replies_in_single_bytes(server: RedisServer) -> None:
    blocks = Blocks(payload_bytes=100)
    async with (
        Proxy(server.port, chunk_bytes=1) as proxy,
        opened_at(proxy.url, blocks) as store,
    ):
        keys = await save(store, blocks, range(3))
        found = keys + keys_of([9]) + keys_of([10])
        server.command("SET", name_of(10), "short")
        results = await store.load(found, np.arange(8, 13, dtype=np.int32))
        assert results.tolist() == [DONE] * 3 + [MISSING, WRONG]
    assert (blocks.array[:3, :164] == blocks.array[8:11, :164]).all()


@pytest.mark.parametrize("received", [0, 3, 8, 9, 5_000, 10_055, 10_058, 15_000])
@pytest.mark.asyncio
async def test_cancelled_in_the_middle_of_a_value(server: RedisServer, received: int) -> None:
    blocks = Blocks()
    async with Proxy(server.port) as proxy, opened_at(proxy.url, blocks) as store:
        keys = await save(store, blocks, range(4))
        proxy.replies.allow(received)
        load = asyncio.create_task(store.load(keys, ids(8, 9, 10, 11)))
        await proxy.replies.held.wait()
        load.cancel()
        await asyncio.wait([load])
        assert load.cancelled()
        blocks.array[8:12] = 0x44
        proxy.replies.allow(None)
        assert (await store.load(keys, ids(12, 13, 14, 15))).tolist() == [DONE] * 4
        assert (blocks.array[8:12] == 0x44).all()
    assert (blocks.array[8:12] == 0x44).all()
    assert (blocks.array[:4, :10_048] == blocks.array[12:16, :10_048]).all()


@pytest.mark.parametrize("received", [0, 5_000, 10_058, 15_000])
@pytest.mark.asyncio
async def test_connection_lost_in_the_middle_of_a_value(server: RedisServer, received: int) -> None:
    blocks = Blocks()
    async with Proxy(server.port) as proxy, opened_at(proxy.url, blocks) as store:
        keys = await save(store, blocks, range(4))
        blocks.array[8:12] = 0x44
        proxy.replies.allow(received)
        load = asyncio.create_task(store.load(keys, ids(8, 9, 10, 11)))
        await proxy.replies.held.wait()
        await proxy.cut()
        proxy.replies.allow(None)
        if received < 10_058:
            with pytest.raises(StoreError, match="lost the connection to"):
                await load
        else:  # one whole value and a part of the next
            assert (await load).tolist() == [DONE, FAILED, FAILED, FAILED]
            assert blocks.read(8) == blocks.read(0)
            assert (blocks.array[10:12] == 0x44).all()
        assert await saved_and_loaded(store, blocks)


@pytest.mark.asyncio
async def test_aclose_ends_a_call_in_the_middle_of_a_value(server: RedisServer) -> None:
    blocks = Blocks()
    async with Proxy(server.port) as proxy, opened_at(proxy.url, blocks) as store:
        keys = await save(store, blocks, range(4))
        proxy.replies.allow(5_000)
        load = asyncio.create_task(store.load(keys, ids(8, 9, 10, 11)))
        await proxy.replies.held.wait()
        await store.aclose()
        with pytest.raises(StoreError, match="was closed"):
            await load
        with pytest.raises(StoreError, match="is closed"):
            await store.lookup(keys)


@pytest.mark.asyncio
async def test_server_killed_in_the_middle_of_a_value(tmp_path: Path) -> None:
    blocks = Blocks()
    with running_server(tmp_path) as server:
        async with Proxy(server.port) as proxy, opened_at(proxy.url, blocks) as store:
            keys = await save(store, blocks, range(4))
            proxy.replies.allow(5_000)
            load = asyncio.create_task(store.load(keys, ids(8, 9, 10, 11)))
            await proxy.replies.held.wait()
            server.kill()
            await proxy.cut()
            proxy.replies.allow(None)
            with pytest.raises(StoreError, match="lost the connection"):
                await load
            server.start()
            assert await saved_and_loaded(store, blocks)


@pytest.mark.asyncio
async def test_save_of_which_a_part_was_sent_is_not_stored(server: RedisServer) -> None:
    blocks = Blocks(num_blocks=2, payload_bytes=(24 << 20) - 64)  # more than sockets buffer
    async with Proxy(server.port) as proxy, opened_at(proxy.url, blocks) as store:
        assert not (await store.lookup(keys_of([1]))).any()
        proxy.requests.allow(1_000_000)
        saving = asyncio.create_task(store.save(keys_of([1]), ids(0)))
        await proxy.requests.held.wait()
        saving.cancel()
        await asyncio.wait([saving])
        assert saving.cancelled()
        proxy.requests.allow(None)
        assert (await store.lookup(keys_of([1]))).tolist() == [False]
        assert (await store.save(keys_of([1]), ids(0))).tolist() == [DONE]
        blocks.array[1] = 7
        assert (await store.load(keys_of([1]), ids(1))).tolist() == [DONE]
    assert (blocks.array[0] == blocks.array[1]).all()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$x\r\n",
        b"$10048\r\n" + b"x" * 10_048 + b"no end",
        b":12\r\n",
        b":twelve\r\n",
        b"+" + b"x" * 100_000,
        b"*1\r\n",
    ],
    ids=["http", "length", "end", "number", "no-number", "line", "array"],
)
@pytest.mark.asyncio
async def test_server_that_does_not_speak_resp(reply: bytes) -> None:
    async with ScriptedServer(reply) as server, opened_at(server.url, Blocks()) as store:
        with pytest.raises(StoreError, match=r"127\.0\.0\.1.*(RESP|expected|its length)"):
            await store.load(keys_of([1]), ids(0))


@pytest.mark.parametrize(
    "reply",
    [
        b"-LOADING the dataset in memory\r\n",
        b"-CLUSTERDOWN Hash slot not served\r\n",
        b"-MOVED 1 nowhere\r\n",
        b"-ERR\r\n",
    ],
)
@pytest.mark.asyncio
async def test_error_replies_to_a_whole_batch_are_raised(reply: bytes) -> None:
    async with ScriptedServer(reply) as server, opened_at(server.url, Blocks()) as store:
        for call in (store.load(keys_of([1]), ids(0)), store.save(keys_of([1]), ids(0))):
            with pytest.raises(StoreError, match=f"server replied '{reply[1:-2].decode()}'"):
                await call
        with pytest.raises(StoreError, match="server replied"):
            await store.lookup(keys_of([1, 2]))


@pytest.mark.asyncio
async def test_redirections_in_a_circle_end(server: RedisServer) -> None:
    blocks = Blocks()
    async with ScriptedServer(b"") as fake, opened_at(fake.url, blocks) as store:
        fake.reply = f"-MOVED 1 :{fake.port}\r\n".encode()
        with pytest.raises(StoreError, match="redirected the keys 5 times in a row"):
            await store.load(keys_of([1]), ids(0))
        assert store.statistics().details["redirections"] == 5


class ShortSocket(socket.socket):
    """A socket that sends at most 7 bytes at a time, as after a signal."""

    def sendmsg(self, buffers: Iterable[bytes | memoryview]) -> int:  # type: ignore[override]
        return self.send(b"".join(buffers)[:7])


def test_short_sends_are_continued() -> None:
    left, right = socket.socketpair()
    with right, ShortSocket(fileno=left.detach()) as short:
        parts = [b"some", b"", memoryview(b"bytes of a block"), b"and", memoryview(b"others")]
        RedisConnection(short).send(parts)
        assert right.recv(1000) == b"".join(parts)


def test_replies_of_all_kinds() -> None:
    left, right = socket.socketpair()
    with right, left:
        right.sendall(
            b"*4\r\n$3\r\na\r\n\r\n:-7\r\n*-1\r\n*1\r\n+OK\r\n-ERR no\r\n:1\r\n:2\r\n+x\r\n"
        )
        connection = RedisConnection(left)
        assert connection.read_reply() == [b"a\r\n", -7, None, [b"OK"]]
        assert connection.read_reply() == ReplyError("ERR no")
        assert connection.read_lines(2) == [b":1", b":2"]
        assert connection.read_lines(1) == [b"+x"]
        assert connection.is_usable()


@pytest.mark.parametrize(
    "reply",
    [
        b"$2000000000\r\n",
        b"*1\r\n" * 100,
        b"*1000000000\r\n" + b":1\r\n" * 600_000,
        b"*5000\r\n" + (b"$16000\r\n" + bytes(16_000) + b"\r\n") * 2_200,
    ],
    ids=["text", "depth", "list", "sum"],
)
def test_reply_that_is_longer_than_that_of_any_command_is_an_error(reply: bytes) -> None:
    left, right = socket.socketpair()
    left.settimeout(PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as threads, right, left:
        sending = threads.submit(right.sendall, reply)
        with pytest.raises(ConnectionError, match="the reply of the server is too long"):
            RedisConnection(left).read_reply()
        left.close()
        with contextlib.suppress(OSError):
            sending.result()


def test_value_that_is_longer_than_that_of_any_server_is_an_error() -> None:
    left, right = socket.socketpair()
    left.settimeout(PATIENCE_SECONDS)
    with right, left:
        right.sendall(b"$536870913\r\n")
        with pytest.raises(ConnectionError, match="the reply of the server is too long"):
            RedisConnection(left).read_value(memoryview(bytearray(100)))


NODE = [b"10.0.0.1", 6379, b"id"]


@pytest.mark.parametrize(
    "slots",
    [
        [[0, 10**12, NODE]],
        [[-5, 16_383, NODE]],
        [[7, 3, NODE]],
        [[0, 16_383, NODE], [0, 16_383, NODE]],
        [[0, 16_383]],
        [[b"0", 16_383, NODE]],
        [[0, 16_383, [6379, NODE]]],
        [5],
    ],
)
def test_malformed_list_of_slots_is_a_store_error(slots: list[Any]) -> None:
    with pytest.raises(StoreError, match="malformed list to CLUSTER SLOTS"):
        SlotMap(Address("127.0.0.1", 6379), slots)


@pytest.mark.asyncio
async def test_reply_that_is_too_long_counts_as_a_failure_of_the_store() -> None:
    async with (
        ScriptedServer(b"$2000000000\r\n") as server,
        opened_at(server.url, Blocks()) as store,
    ):
        with pytest.raises(StoreError, match="the reply of the server is too long"):
            await store.load(keys_of([1]), ids(0))


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    directory = tmp_path_factory.mktemp("tls")
    make_certificate(directory)
    files = {name: str(directory / name) for name in ("cert.pem", "key.pem")}
    options = {
        "tls_cert_file": files["cert.pem"],
        "tls_key_file": files["key.pem"],
        "tls_ca_cert_file": files["cert.pem"],
        "tls_auth_clients": "no",
        "tls_port": str(free_port()),
        "requirepass": SECRET,
    }
    with running_server(directory / "server", **options) as server:
        yield server


def make_certificate(directory: Path) -> None:
    """Make a certificate for 127.0.0.1 that signs itself."""
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    try:
        subprocess.run(command.split(), cwd=directory, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"openssl cannot make a certificate: {error}")


def tls_url(server: RedisServer, options: str) -> str:
    place = f"rediss://:{SECRET}@127.0.0.1:{server.options['tls_port']}"
    return f"{place}?{options.format(ca=server.options['tls_cert_file'])}"


@pytest.mark.asyncio
async def test_tls(tls_server: RedisServer) -> None:
    blocks = Blocks(num_blocks=8, payload_bytes=1_000_000)
    async with opened_at(tls_url(tls_server, "ssl_ca_certs={ca}"), blocks) as store:
        for _ in range(2):
            keys = await save(store, blocks, range(3))
            found = keys[:32] + keys_of([9]) + keys[32:]
            results = await store.load(found, ids(4, 5, 6, 7))
            assert results.tolist() == [DONE, MISSING, DONE, DONE]
            assert (blocks.array[:3, :1_000_064] == blocks.array[[4, 6, 7], :1_000_064]).all()
            with tls_server.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                client.flushall()


@pytest.mark.asyncio
async def test_tls_call_is_cancelled(tls_server: RedisServer) -> None:
    blocks = Blocks(num_blocks=8, payload_bytes=1_000_000)
    async with opened_at(tls_url(tls_server, "ssl_ca_certs={ca}"), blocks) as store:
        keys = await save(store, blocks, range(4))
        tls_server.stop()
        load = asyncio.create_task(store.load(keys, ids(4, 5, 6, 7)))
        done, _ = await asyncio.wait([load], timeout=0.02)
        load.cancel()
        await asyncio.wait([load])
        blocks.array[4:8] = 1
        tls_server.resume()
        assert not done
        assert (await store.load(keys[:96], ids(0, 1, 2))).tolist() == [DONE] * 3
        assert (blocks.array[4:8] == 1).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", "certificate verify failed|CERTIFICATE_VERIFY_FAILED"),
        ("ssl_cert_reqs=none", ""),
        ("ssl_cert_reqs=required&ssl_check_hostname=false&ssl_ca_certs={ca}", ""),
    ],
)
@pytest.mark.asyncio
async def test_tls_certificates_are_verified(
    tls_server: RedisServer, options: str, expected: str
) -> None:
    async with opened_at(tls_url(tls_server, options), Blocks()) as store:
        if not expected:
            assert (await store.lookup(keys_of([1]))).shape == (1,)
            return
        with pytest.raises(StoreError, match=expected) as caught:
            await store.lookup(keys_of([1]))
    assert SECRET not in every_text(caught.value)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"http://:{SECRET}@host", "scheme"),
        (f":{SECRET}@host:6379", "scheme"),
        (f"redis://:{SECRET}@host:port", "a port must be"),
        (f"redis://:{SECRET}@host:99999", "a port must be"),
        (f"redis://:{SECRET}@host,other:port", "a port must be"),
        (f"redis://:a/{SECRET}@host", "quoted"),
        (f"redis://:a?{SECRET}@host", "quoted"),
        (f"redis://:a#{SECRET}@host", "quoted"),
        (f"redis://:a[{SECRET}@host", "quoted"),
        (f"redis://:a\u2100{SECRET}@host", "quoted"),
        (f"redis://:{SECRET}@host/zero", "database zero"),
        (f"redis://:{SECRET}@host?db=zero", "db"),
        (f"redis://:{SECRET}@host?db=-1", "database -1"),
        (f"redis://:{SECRET}@host?colour=red", "unknown options: colour"),
        (f"redis://:{SECRET}@host?ssl_ca_certs=x", "unknown options: ssl_ca_certs"),
        (f"rediss://:{SECRET}@host?ssl_ca_certs=/absent", "FileNotFoundError"),
        (f"rediss://:{SECRET}@host?ssl_cert_reqs=perhaps", "perhaps"),
        (f"rediss://:{SECRET}@host?ssl_speed=high", "ssl_speed"),
    ],
)
@pytest.mark.asyncio
async def test_wrong_url(url: str, expected: str) -> None:
    store = RedisStore(url)
    with pytest.raises(ConfigError, match=expected) as caught:
        await store.open(Blocks().memory)
    with pytest.raises(ConfigError) as of_url:
        await RedisStore.from_url(url).open(Blocks().memory)
    assert SECRET not in every_text(of_url.value)
    assert SECRET not in every_text(caught.value)
    assert SECRET not in f"{store.url} {store!r}"
    await store.aclose()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttl_seconds", -1),
        ("connections", 0),
        ("connections", 65),
        ("connect_timeout_seconds", 0),
        ("max_concurrent", 0),
    ],
)
def test_number_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be between"):
        RedisStore(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name} is {value}.*; it must be between"):
        RedisStore.from_url(f"redis://:{SECRET}@host?{name}={value}")


@pytest.mark.asyncio
async def test_options_of_the_url(server: RedisServer) -> None:
    blocks = Blocks()
    options = "prefix=from%20url:&ttl_seconds=77&connections=3&connect_timeout_seconds=2.5"
    store = RedisStore.from_url(f"{server.url}/0?{options}&max_concurrent=5")
    assert (store.kind, store.url, store.max_concurrent) == ("redis", f"{server.url}/0", 5)
    async with contextlib.aclosing(store):
        await store.open(blocks.memory)
        keys = await save(store, blocks, [1])
    assert 0 < server.command("TTL", f"from url:{keys.hex()}") <= 77


def test_option_that_is_no_number() -> None:
    with pytest.raises(
        ConfigError, match="option 'connections' of redis://host: invalid literal"
    ) as e:
        RedisStore.from_url(f"redis://:{SECRET}@host?connections=many")
    assert SECRET not in every_text(e.value)


@pytest.mark.asyncio
async def test_store_is_opened_again_with_other_memory(server: RedisServer) -> None:
    blocks, others = Blocks(), Blocks()
    store = RedisStore(server.url)
    await store.open(blocks.memory)
    keys = await save(store, blocks, range(3))
    await store.aclose()
    blocks.fill(0x22)
    await store.open(others.memory)
    assert (await store.load(keys, ids(5, 6, 7))).tolist() == [DONE] * 3
    await store.aclose()
    assert others.read(7) == object_of(keys_of([2]), 9_984)
    assert (blocks.array == 0x22).all()


@pytest.mark.asyncio
async def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    store = RedisStore()
    with pytest.raises(ConfigError, match=r"pip install 'aiokv\[redis\]'"):
        await store.open(Blocks().memory)
    await store.aclose()


@pytest.mark.asyncio
async def test_objects_that_no_server_accepts(server: RedisServer) -> None:
    blocks = Blocks(num_blocks=1)
    memory = msgspec.structs.replace(blocks.memory, payload_bytes=512 << 20)
    with pytest.raises(ConfigError, match="536870976 bytes; a value of Redis has at most"):
        await RedisStore(server.url).open(memory)


@pytest.mark.asyncio
async def test_store_that_is_not_open() -> None:
    with pytest.raises(StoreError, match="redis://host/1 is not open"):
        await RedisStore(f"redis://:{SECRET}@host/1").lookup(keys_of([1]))


def test_ls_of_a_url_counts_the_blocks_of_each_label(
    server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fill() -> bytes:
        blocks = Blocks()
        async with opened_at(server.url, blocks) as store:
            return await save(store, blocks, range(5))

    keys = asyncio.run(fill())
    assert cli.main(["store", "ls", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "blocks: 5" in lines
    assert f"salt {keys[27:32].hex()}: 1" in lines
