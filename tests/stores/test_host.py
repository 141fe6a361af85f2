"""HostStore and the service that owns its memory: conformance, failures, and processes killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pytest

from aiokv import cli
from aiokv._native import may_have_any
from aiokv.errors import ConfigError, StoreError
from aiokv.layout.host_block import pitch_bytes
from aiokv.stores import DiskStore, HostStore, stores_from
from aiokv.stores.base import KEY_BYTES, split_keys
from aiokv.stores.guard import Costs
from aiokv.stores.host.below import Below
from aiokv.stores.host.link import attach, inspect
from aiokv.stores.host.messages import Load, Publish, Save
from aiokv.stores.host.pools import SlotPools
from aiokv.stores.host.service import HostService
from aiokv.stores.labels import count_labels, label
from aiokv.stores.purging import list_store, purge_store
from aiokv.stores.threads import StoreThreads
from aiokv.stores.use import StoreUse
from aiokv.testing import ScriptedStore
from tests.stores.conformance import (
    DONE,
    FAILED,
    MISSING,
    REFUSED,
    Blocks,
    Medium,
    StoreConformance,
    eventually,
    ids,
    keys_of,
    object_of,
    opened,
    save,
)
from tests.stores.failures import ObjectFailures, ServerFailures, ServerRig
from tests.stores.host_engine import (
    PROMPT_BLOCKS,
    engine,
    hit_blocks,
    saved,
)
from tests.stores.host_server import HostServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.stores import Store

PITCH: Final = pitch_bytes(9_984, with_stores=True)


class HostMedium(Medium):
    def __init__(self, server: HostServer) -> None:
        self.server = server

    def store(self) -> Store:
        return HostStore(self.server.path)

    async def restart(self) -> bool:
        self.server.kill()
        self.server.start()
        return True


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host")  # a short path
    folder.chmod(0o700)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[HostServer]:
    server = HostServer(folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server_with_disk(folder: Path) -> Iterator[HostServer]:
    below = f"disk:{folder / 'disk'}?bytes=64MiB&min_free_bytes=0"
    server = HostServer(folder, f"{8 * PITCH}", below)
    server.start()
    yield server
    server.kill()


class TestHostStore(StoreConformance):
    @pytest.fixture
    def medium(self, server: HostServer) -> HostMedium:
        return HostMedium(server)


class TestHostStoreWithDisk(StoreConformance):
    """Eight objects fit into memory; the others are loaded from the disk."""

    @pytest.fixture
    def medium(self, server_with_disk: HostServer) -> HostMedium:
        return HostMedium(server_with_disk)

    test_many_keys = None  # of other sizes, and faster than the disk is written
    test_concurrent_operations = None  # pins more objects than fit
    test_groups_have_objects_of_different_sizes = None  # the larger ones do not fit


# --- failures -----------------------------------------------------------------------------------


class HostRig(ServerRig):
    def __init__(self, server: HostServer) -> None:
        self.server = server

    def store(self) -> Store:
        return HostStore(self.server.path)

    def store_at(self, port: int) -> Store:
        return HostStore(self.server.path.with_name(f"{port}"))

    def replace(self, key: bytes, content: bytes) -> None:
        """Write to the slot of a key, as a process of the same user can do."""
        at = slot_memory(self.server).find(key)
        assert at >= 0
        begin = at - 9_984 - 16  # see trailer.hpp
        with memory_path(self.server).open("r+b") as memory:
            memory.seek(begin)
            memory.write(content)

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def stop(self) -> None:
        self.server.stop()

    def resume(self) -> None:
        self.server.resume()


def memory_path(server: HostServer) -> Path:
    """Return a path of the memory that the service shares."""
    descriptors = Path(f"/proc/{server.pid}/fd").iterdir()
    return next(path for path in descriptors if "memfd:aiokv-host" in os.readlink(path))


def slot_memory(server: HostServer) -> bytes:
    return memory_path(server).read_bytes()


@pytest.fixture
def rig(server: HostServer) -> HostRig:
    return HostRig(server)


class TestObjectFailures(ObjectFailures):
    # Slots have one size, and a full memory evicts: see test_memory_is_bounded.
    test_values_of_other_lengths_are_wrong = None
    test_a_full_medium_refuses_and_still_serves = None


@pytest.mark.loop("uvloop")
class TestServerFailures(ServerFailures):
    test_a_slow_server_is_not_waited_for = None  # no proxy passes descriptors on


# --- processes ----------------------------------------------------------------------------------


@contextmanager
def process(module: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Run a module in a process, which is killed at the end."""
    command = [sys.executable, "-m", module, *map(str, args)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.mark.asyncio
async def test_a_restarted_engine_hits_what_the_killed_one_had(server: HostServer) -> None:
    seeds = [1, 2, 3]
    with process("tests.stores.host_engine", server.url, *seeds) as running:
        assert running.stdout is not None
        had = int(running.stdout.readline())
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert had == len(seeds) * PROMPT_BLOCKS
    async with engine(server.url) as cache:
        hits = [await hit_blocks(cache, seed) for seed in seeds]
    assert hits[0] >= 0.95 * PROMPT_BLOCKS
    assert sum(hits) >= 0.95 * had


@pytest.mark.asyncio
async def test_engines_share_blocks_and_store_each_once(server: HostServer) -> None:
    async with engine(server.url) as first, engine(server.url) as second:
        for cache, seed, prompts in (
            (first, 1, 1),
            (first, 2, 2),
            (second, 2, 1),
            (second, 3, 2),
            (first, 3, 3),
        ):
            await hit_blocks(cache, seed)
            await saved(cache, prompts)
        assert second.statistics.stores[0].loaded_blocks == PROMPT_BLOCKS  # of prompt 2
        assert first.statistics.stores[0].loaded_blocks == PROMPT_BLOCKS  # of prompt 3
        report = await inspect(server.path)
    (counts,) = report.sizes
    assert (counts.engines, counts.blocks) == (2, 3 * PROMPT_BLOCKS)


@pytest.mark.asyncio
async def test_an_engine_goes_on_without_its_killed_service_and_attaches_again(
    server: HostServer,
) -> None:
    async with engine(server.url) as cache:
        assert await hit_blocks(cache, 1) == 0
        server.kill()
        assert await hit_blocks(cache, 1) == PROMPT_BLOCKS  # of its own memory
        assert await hit_blocks(cache, 2) == 0
        server.start()

        async def is_saved() -> bool:
            seed = next(seeds)
            await hit_blocks(cache, seed)
            report = await inspect(server.path)
            return sum(counts.blocks for counts in report.sizes) > 0

        seeds = iter(range(10, 1_000))
        await eventually(is_saved)


@pytest.mark.asyncio
async def test_slots_of_a_killed_engine_are_free(folder: Path) -> None:
    """The process has pinned two slots of four, and reserved the other two."""
    server = HostServer(folder, f"{4 * PITCH}")
    server.start()
    try:
        blocks = Blocks()
        async with opened(HostMedium(server), blocks) as store:
            await save(store, blocks, [1, 2])
            with process("tests.stores.host_holder", server.path) as running:
                assert running.stdout is not None
                assert running.stdout.readline() == "holds\n"
                blocks.write(0, keys_of([5]))
                assert (await store.save(keys_of([5]), ids(0))).tolist() == [REFUSED]
                running.send_signal(signal.SIGKILL)
                running.wait()

                async def takes_four() -> bool:
                    for block, number in enumerate(range(5, 9)):
                        blocks.write(block, keys_of([number]))
                    await store.save(keys_of(range(5, 9)), ids(0, 1, 2, 3))
                    return bool((await store.lookup(keys_of(range(5, 9)))).all())

                await eventually(takes_four)
            assert not (await store.lookup(keys_of([3, 4]))).any(), "half-written"
    finally:
        server.kill()


@pytest.mark.asyncio
async def test_a_cancelled_request_gives_its_slots_back(folder: Path) -> None:
    server = HostServer(folder, f"{4 * PITCH}")
    server.start()
    try:
        blocks = Blocks()
        async with opened(HostMedium(server), blocks) as store:
            link, _ = await attach(server.path, blocks.memory)
            for number in range(8):
                task = asyncio.create_task(link.ask(Save(number=number, keys=keys_of(range(4)))))
                for _ in range(number):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            await save(store, blocks, range(4))  # all four slots
            link.close()
    finally:
        server.kill()


@pytest.mark.asyncio
async def test_a_client_that_breaks_the_protocol_is_cut(server: HostServer) -> None:
    blocks = Blocks()
    for wrong in (
        Publish(number=7, written=b"\1"),
        Load(number=1, keys=b"short"),
    ):
        link, _ = await attach(server.path, blocks.memory)
        if isinstance(wrong, Publish):
            await link.ask(Save(number=7, keys=keys_of([1, 2])))
        with pytest.raises(StoreError, match="is lost"):
            await link.ask(wrong)
    async with opened(HostMedium(server), blocks) as store:
        await save(store, blocks, [1])


# --- the filter of keys -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_keys_that_the_service_lacks_are_known_without_a_lookup(server: HostServer) -> None:
    blocks = Blocks()
    async with opened(HostMedium(server), blocks) as first, opened(HostMedium(server), blocks) as s:
        assert s.may_have_any(keys_of([1])), "a store that is not attached does not know"
        await s.lookup(keys_of([1]))
        for number in range(20):
            assert not s.may_have_any(keys_of([number]))
            await save(first, blocks, [number])
            assert s.may_have_any(keys_of([1_000, number, 1_001])), "as soon as the save has ended"
        assert not s.may_have_any(keys_of(range(20, 60)))
        await first.remove(keys_of([3]))
        assert not s.may_have_any(keys_of([3]))
        shared = s.shared_filter()
        assert shared is not None
        counters = shared.map()  # as another process does
        found = [may_have_any(counters, keys_of([number])) for number in range(60)]
        assert found == [number < 20 and number != 3 for number in range(60)]

        server.kill()

        async def has_noticed_the_end() -> bool:
            return s.may_have_any(keys_of([3]))

        await eventually(has_noticed_the_end)
        assert s.shared_filter() is None
        server.start()
        await eventually(lambda: is_answered(s))
        assert not s.may_have_any(keys_of(range(20))), "the memory of the new service is empty"
        await save(first, blocks, [1])
        assert s.may_have_any(keys_of([1]))


async def is_answered(store: Store) -> bool:
    with suppress(StoreError):
        await store.lookup(keys_of([0]))
        return True
    return False


@pytest.mark.asyncio
async def test_keys_on_the_disk_below_are_never_missing_in_the_filter(
    server_with_disk: HostServer,
) -> None:
    """Eight of forty objects fit into memory. Loads bring others back, and thus evict."""
    server, blocks, rng = server_with_disk, Blocks(), np.random.default_rng(0)
    async with opened(HostMedium(server), blocks) as store:
        removed: set[int] = set()
        for number in range(40):
            await save(store, blocks, [number])
            await eventually(lambda number=number: saved_below(server, number + 1))
            other = int(rng.integers(number + 1))
            if number % 5 == 4 and other not in removed:
                await store.remove(keys_of([other]))
                removed.add(other)
            elif other not in removed:
                assert (await store.load(keys_of([other]), ids(9))).tolist() == [DONE]
            for key in range(number + 1):
                assert store.may_have_any(keys_of([key])) is (key not in removed)
    server.terminate()
    server.start()
    async with opened(HostMedium(server), blocks) as store:
        await store.lookup(keys_of([0]))
        for key in range(80):
            assert store.may_have_any(keys_of([key])) is (key < 40 and key not in removed)


@pytest.mark.asyncio
async def test_requests_for_prompts_that_the_service_lacks_do_not_ask_it(
    server: HostServer,
) -> None:
    async with engine(server.url) as first, engine(server.url) as second:
        for seed in range(1, 4):
            assert await hit_blocks(second, seed) == 0
        store = second.statistics.stores[0]
        assert (store.lookups, store.spared_lookups) == (1, 2)  # the first one attaches
        await hit_blocks(first, 9)
        await saved(first, 1)
        assert await hit_blocks(second, 9) == PROMPT_BLOCKS
        assert second.statistics.stores[0].lookups == 2


@pytest.mark.asyncio
async def test_processes_of_other_users_are_refused_on_both_sides(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, user = folder / "host.sock", os.getuid()
    async with HostService(path, 8 * PITCH):
        assert path.stat().st_mode & 0o777 == 0o600
        monkeypatch.setattr("aiokv.wire.sockets.os.getuid", lambda: user + 1)
        with pytest.raises(StoreError, match=f"runs as user {user}, not as user {user + 1}"):
            await attach(path, Blocks().memory)
        monkeypatch.setattr("aiokv.stores.host.link.check_user", lambda _: None)
        with pytest.raises(StoreError, match="cannot be used"):
            await attach(path, Blocks().memory)
        monkeypatch.undo()
        assert (await inspect(path)).sizes == []


@pytest.mark.asyncio
async def test_an_engine_of_another_version_is_refused(
    server: HostServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv.stores.host.link.PROTOCOL_VERSION", 2)
    with pytest.raises(StoreError, match="has version 2 of the protocol; this service has"):
        await attach(server.path, Blocks().memory)


# --- the store below ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_objects_beyond_the_memory_and_before_a_kill_are_on_the_disk(
    server_with_disk: HostServer,
) -> None:
    server, blocks = server_with_disk, Blocks()
    async with opened(HostMedium(server), blocks) as store:
        for number in range(20):
            await save(store, blocks, [number])
            await eventually(lambda number=number: saved_below(server, number + 1))
        assert store.statistics().used_bytes == 8 * PITCH
        server.kill()
        server.start()
        keys, blocks_of_all = keys_of(range(20)), np.arange(20, dtype=np.int32)

        async def is_found() -> bool:
            try:
                return bool((await store.lookup(keys)).all())
            except StoreError:
                return False

        await eventually(is_found)
        for block in range(0, 20, 4):
            part = slice(block, block + 4)
            part_keys = keys[block * KEY_BYTES : (block + 4) * KEY_BYTES]
            assert (await store.load(part_keys, blocks_of_all[part])).tolist() == [DONE] * 4
        for number in range(20):
            expected = Blocks(1).write(0, keys_of([number]))
            assert blocks.read(number) == expected
        assert (await store.remove(keys_of([3]))).tolist() == [DONE]
        assert (await store.load(keys_of([3]), ids(0))).tolist() == [MISSING]


@pytest.mark.asyncio
async def test_write_budget_below_admits_objects_that_are_used_again(folder: Path) -> None:
    blocks = Blocks(8, 1_000_000)  # the file of the budget, which counts too, is much smaller
    budget = 8 * blocks.memory.pitch_bytes
    below = f"disk:{folder / 'disk'}?bytes=64MiB&min_free_bytes=0&write_bytes_per_day={budget}"
    server = HostServer(folder, f"{budget}", below)
    server.start()
    try:
        async with opened(HostMedium(server), blocks) as store:
            await save(store, blocks, range(7))
            await eventually(lambda: saved_below(server, 7))
            await save(store, blocks, [7])  # an eighth is left: the second use is admitted

            async def is_saved_after_a_use() -> bool:
                assert (await store.load(keys_of([7]), ids(5))).tolist() == [DONE]
                return await saved_below(server, 8)

            await eventually(is_saved_after_a_use)
        assert server.terminate() == 0
    finally:
        server.kill()
    assert (folder / "disk" / "admission").stat().st_mode & 0o777 == 0o640


@pytest.mark.asyncio
async def test_statistics_of_an_engine_count_the_objects_in_memory_by_label(
    server: HostServer,
) -> None:
    salt, blocks = label("salt", "tenant"), Blocks()
    keys = b"".join(key[: -len(salt)] + salt for key in split_keys(keys_of(range(3))))
    async with opened(HostMedium(server), blocks) as first, opened(HostMedium(server), blocks) as s:
        for number, key in enumerate(split_keys(keys)):
            blocks.write(number, key)
        assert (await first.save(keys, ids(0, 1, 2))).tolist() == [DONE] * 3

        async def has(blocks: int) -> bool:
            await s.lookup(keys)
            return s.statistics().labels.get(f"salt:{salt.hex()}", 0) == blocks

        await eventually(partial(has, 3))
        await first.remove(keys[:KEY_BYTES])
        await eventually(partial(has, 2))
        await first.remove(keys)
        await eventually(partial(has, 0))


async def saved_below(server: HostServer, count: int) -> bool:
    return sum(counts.saved_below for counts in (await inspect(server.path)).sizes) >= count


@pytest.mark.asyncio
async def test_sigterm_saves_what_waits_and_removes_the_socket(
    server_with_disk: HostServer,
) -> None:
    server, blocks = server_with_disk, Blocks()
    async with opened(HostMedium(server), blocks) as store:
        keys = await save(store, blocks, range(8))
        assert server.terminate() == 0
        assert not server.path.exists()
        server.start()
        await eventually(lambda: finds(store, keys))


@pytest.mark.asyncio
async def test_objects_that_leave_memory_before_their_save_below_cost_no_budget() -> None:
    store, pools, threads = ScriptedStore(), SlotPools(8 * PITCH), StoreThreads("test", 1)
    pool = pools.pool(9_984, PITCH)
    part = store.for_group("9984")
    use = StoreUse(part, write_bytes_per_day=4 * PITCH)
    costs = Costs.new(use)
    below = await Below(use, pool, pools, threads, 1.0, costs).opened()
    below.save_soon(keys_of([1, 2]))  # no slot has them any more
    await below.aclose()
    assert costs.writes is not None
    assert (costs.writes.left, part.calls["save"]) == (1.0, 0)
    await threads.aclose()
    pools.close()


@pytest.mark.asyncio
async def test_objects_are_saved_below_after_a_save_that_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, pools, threads = ScriptedStore(), SlotPools(8 * PITCH), StoreThreads("test", 1)
    pool = pools.pool(9_984, PITCH)
    part = store.for_group("9984")
    below = await Below(StoreUse(part), pool, pools, threads, 1.0, None).opened()
    key, blocks, slots = keys_of([1]), Blocks(1), pools.reserve(pool, 1)
    blocks.write(0, key)
    assert pool.memory.save(key, slots, blocks.memory, ids(0)).tolist() == [DONE]
    pool.commit(key, slots)

    async def raises(_: object) -> None:
        raise MemoryError("no memory")

    async def is_logged() -> bool:
        return "host.save_below_failed blocks=1" in caplog.text and "no memory" in caplog.text

    async def is_saved() -> bool:
        return below.saved_blocks == 1

    with monkeypatch.context() as patch:
        patch.setattr(threads, "run", raises)
        below.save_soon(key)
        await eventually(is_logged)
    assert below.dropped_blocks == 1
    caplog.clear()  # the exception of the record has references to the pool
    below.save_soon(key)
    await eventually(is_saved)
    await below.aclose()
    await threads.aclose()
    pools.close()


@pytest.mark.asyncio
async def test_a_fetch_waits_for_the_cancelled_one_that_still_writes_its_blocks() -> None:
    store, pools, threads = ScriptedStore(), SlotPools(8 * PITCH), StoreThreads("test", 1)
    pool = pools.pool(9_984, PITCH)
    part = store.for_group("9984")
    below = await Below(StoreUse(part), pool, pools, threads, 1.0, None).opened()
    first, second = keys_of([1]), keys_of([2])
    part.objects |= {key: object_of(key, 9_984) for key in (first, second)}
    late = part.hold("load", call=0)
    cancelled = asyncio.create_task(below.fetch(first))

    async def has_begun() -> bool:
        return part.calls["load"] == 1

    await eventually(has_begun)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    fetch = asyncio.create_task(below.fetch(second))
    for _ in range(20):
        await asyncio.sleep(0)
    assert part.calls["load"] == 1
    late.open()
    await fetch
    assert pool.table.contains(second).all()
    await below.aclose()
    await threads.aclose()
    pools.close()


@pytest.mark.asyncio
async def test_purge_removes_blocks_on_the_disk_of_sizes_that_no_engine_has_attached(
    server_with_disk: HostServer,
) -> None:
    server, salt = server_with_disk, label("salt", "a")
    sizes = [Blocks(payload_bytes=size) for size in (9_984, 5_000)]
    keys = keys_of([1])[: -len(salt)] + salt

    async def fill() -> None:
        for blocks in sizes:
            async with opened(HostMedium(server), blocks) as store:
                blocks.write(0, keys)
                assert (await store.save(keys, ids(0))).tolist() == [DONE]
        server.terminate()  # saves what waits

    async def is_found() -> list[bool]:
        found = []
        for blocks in sizes:
            async with opened(HostMedium(server), blocks) as store:
                found.append(bool((await store.lookup(keys)).all()))
        return found

    await fill()
    server.start()
    async with opened(HostMedium(server), sizes[1]) as store:
        assert await store.purge(salt) == 2
    assert await is_found() == [False, False]

    await fill()  # once more, and now purge the folder
    folder = server.path.parent / "disk"
    assert (await purge_store(str(folder), "a")).removed_blocks == 2
    server.start()
    assert await is_found() == [False, False]


@pytest.mark.asyncio
async def test_failed_remove_and_purge_below_are_errors_of_their_calls_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def fail(*_: object) -> None:
        raise StoreError("the disk failed")

    (below,) = stores_from([f"disk:{folder / 'disk'}?bytes=8MiB&min_free_bytes=0"])
    path, blocks = folder / "host.sock", Blocks()
    async with HostService(path, 8 * PITCH, below):
        store = HostStore(path)
        await store.open(blocks.memory)
        await save(store, blocks, [1])
        monkeypatch.setattr(DiskStore, "remove", fail)
        monkeypatch.setattr(DiskStore, "purge", fail)
        for _ in range(2):
            with pytest.raises(StoreError, match="the disk failed"):
                await store.remove(keys_of([1]))
            with pytest.raises(StoreError, match="the disk failed"):
                await store.purge(b"salt!")
        assert (await store.lookup(keys_of([1]))).tolist() == [True]
        assert "host.detached" not in caplog.text
        await store.aclose()


@pytest.mark.asyncio
async def test_purge_of_a_service_makes_no_memory(server: HostServer) -> None:
    assert (await purge_store(server.url, "a")).removed_blocks == 0
    assert (await inspect(server.path)).sizes == []


@pytest.mark.asyncio
async def test_purge_works_beside_a_size_that_the_disk_refuses(folder: Path) -> None:
    below = f"disk:{folder / 'disk'}?bytes=1MiB&min_free_bytes=0"
    server = HostServer(folder, below=below)
    server.start()
    try:
        async with opened(HostMedium(server), Blocks(2, payload_bytes=2 << 20)) as store:
            with pytest.raises(StoreError, match="bytes is 1048576"):
                await store.lookup(keys_of([1]))
        async with opened(HostMedium(server), Blocks()) as store:
            assert await store.purge(b"salt!") == 0
    finally:
        server.kill()


async def finds(store: Store, keys: bytes) -> bool:
    try:
        return bool((await store.lookup(keys)).all())
    except StoreError:
        return False


# --- memory of several sizes --------------------------------------------------------------------


def filled(pools: SlotPools, payload_bytes: int, first: int, count: int) -> int:
    """Store keys in the pool of a size; return how many there was room for."""
    pool = pools.pool(payload_bytes, pitch_bytes(payload_bytes, with_stores=True))
    keys = keys_of(range(first, first + count))
    slots = pools.wanted(pool, keys)
    pool.memory.touch(pool.take_new(slots[slots >= 0]))
    pool.commit(keys[: int((slots >= 0).sum()) * KEY_BYTES], slots[slots >= 0])
    assert sum(pool.held_bytes for pool in pools.pools.values()) <= pools.capacity_bytes
    assert pool.table.check() == ""
    return int((slots >= 0).sum())


def test_sizes_share_the_memory_within_its_limit() -> None:
    small, large = 4_032, 12_224
    pools = SlotPools(48 * 4_096)
    first = pools.pool(small, 4_096)
    first.attach("a", 1.0)
    assert filled(pools, small, 0, 100) == 48
    assert first.held_bytes == pools.capacity_bytes
    second = pools.pool(large, 12_288)
    assert filled(pools, large, 1_000, 4) == 0  # no engine, no share
    second.attach("b", 1.0)
    assert filled(pools, large, 1_000, 4) == 4
    assert (first.held_bytes, second.held_bytes) == (36 * 4_096, 4 * 12_288)
    assert filled(pools, large, 2_000, 16) == 8  # half of the memory
    assert (first.held_bytes, second.held_bytes) == (24 * 4_096, 8 * 12_288)
    assert (first.table.stored, second.table.stored) == (24, 8)
    second.detach("b")
    assert filled(pools, small, 5_000, 48) == 48
    assert second.held_bytes == 0
    pools.close()


def test_memory_that_a_pool_gives_returns_to_the_kernel() -> None:
    pools = SlotPools(64 * 4_096)
    pool = pools.pool(4_032, 4_096)
    filled(pools, 4_032, 0, 64)
    filter_bytes = 4_096
    assert os.fstat(pool.descriptor).st_blocks * 512 == 64 * 4_096 + filter_bytes
    pool.give(16 * 4_096)
    assert os.fstat(pool.descriptor).st_blocks * 512 == 48 * 4_096 + filter_bytes
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(pool.descriptor, 0)
    pools.close()


# --- command line and arguments -----------------------------------------------------------------


def test_stat_prints_the_counts_of_a_service(
    server: HostServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["store", "stat", server.url]) == 0
    assert "limit: 64.0 MiB" in capsys.readouterr().out
    assert cli.main(["store", "stat", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "capacity_bytes": 64 << 20,
        "below": "",
        "sizes": [],
        "labels": {},
    }


@pytest.mark.asyncio
async def test_ls_counts_the_blocks_of_shared_memory_by_label(server: HostServer) -> None:
    async with opened(HostMedium(server), blocks := Blocks()) as store:
        await save(store, blocks, range(4))
        await store.remove(keys_of([3]))
        listing = await list_store(server.url)
    assert (listing.kind, listing.path, listing.blocks) == ("host", server.url, 3)
    keys = np.frombuffer(keys_of(range(3)), np.uint8).reshape(-1, KEY_BYTES)
    assert listing.labels == count_labels(keys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "{path}", "--bytes", "0"], "'0' is not a size above 0"),
        (["serve", "/nowhere/at/all", "--bytes", "1MiB"], "/nowhere/at does not exist"),
        (["serve", "{path}", "--bytes", "1MiB", "--below", "disk:/x"], "has no bytes"),
        (["serve", "{path}", "--bytes", "1MiB", "--below", "host:///x"], "must be a disk store"),
        (["serve", "/tmp/" + "x" * 120, "--bytes", "1MiB"], "at most 107"),
        (["stat", "host:///nowhere/host.sock"], "no host service listens"),
        (["stat", "host://nowhere/host.sock"], "has a host"),
    ],
)
def test_wrong_arguments_are_named(
    folder: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [arg.format(path=folder / "host.sock") for arg in args]
    with suppress(SystemExit):
        assert cli.main(["store", *args]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "host.sock").exists()


def test_a_second_service_on_a_path_is_refused(
    server: HostServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["store", "serve", str(server.path), "--bytes", "1MiB"]) == 2
    assert "another process listens there" in capsys.readouterr().err
    assert server.path.exists()


def test_url_and_arguments() -> None:
    (use,) = stores_from(["host:///run/aiokv/host.sock?threads=2&deadline=3"])
    assert use.store.url == "host:///run/aiokv/host.sock"
    assert use.deadline_seconds == 3.0
    with pytest.raises(ConfigError, match="threads is 0"):
        HostStore("/run/host.sock", threads=0)
    with pytest.raises(ConfigError, match="has a host"):
        stores_from(["host://run/host.sock"])
    with pytest.raises(ConfigError, match="at most 107"):
        HostStore("/" + "x" * 200)


@pytest.mark.asyncio
async def test_blocks_larger_than_the_memory_are_refused(server: HostServer) -> None:
    blocks = Blocks()
    size = {"payload_bytes": (80 << 20) - 64, "pitch_bytes": 80 << 20}
    with pytest.raises(StoreError, match="a block takes 83886080 bytes"):
        await attach(server.path, msgspec.structs.replace(blocks.memory, **size))


@pytest.mark.asyncio
async def test_objects_without_the_right_trailer_are_not_saved(server: HostServer) -> None:
    blocks = Blocks()
    async with opened(HostMedium(server), blocks) as store:
        blocks.write(0, keys_of([1]))
        blocks.array[0, 77] ^= 1
        assert (await store.save(keys_of([1]), ids(0))).tolist() == [FAILED]
        assert (await store.lookup(keys_of([1]))).tolist() == [False]
