"""Groups of a server's blocks beside full attention: windows, recurrent state, more attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from aiokv import CacheConfig, LeaseState, WindowGroup
from aiokv.base.plan import OFFLOAD, ONLOAD
from aiokv.errors import ConfigError, LeaseError, UsageError
from aiokv.stores import DiskStore
from aiokv.testing import ManualEvent, ScriptedStore, run_until_idle
from tests.harness.cache import BLOCK_TOKENS, prompt
from tests.harness.closing import complete_during
from tests.harness.external import ExternalCache
from tests.harness.external_groups import external_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np

    from aiokv import Lease
    from aiokv.base.plan import Route
    from aiokv.testing.manual import ManualCopy

A = prompt(1, 6)  # 24 positions that can be hit
B = prompt(2, 6)
DEVICE_BLOCKS = 120

pytestmark = pytest.mark.asyncio


def _ids(request: int) -> range:
    return range(30 * request, 30 * request + 7)


class GroupCache(ExternalCache):
    """A server whose request number n has the ids from 30 n on: attention, then the groups."""

    def __init__(self, *names: str, host_copies: int = 20, **config: Any) -> None:
        super().__init__(
            device_blocks=DEVICE_BLOCKS,
            groups=external_groups(names, DEVICE_BLOCKS, host_copies),
            **config,
        )

    def rows(self, request: int, blocks: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
        """Return the ids of these blocks of the groups, of seven blocks."""
        rows = {}
        for number, name in enumerate(self.groups, 1):
            kept = set(blocks.get(name, ()))
            first = 30 * request + 7 * number
            rows[name] = [first + i if i in kept else -1 for i in range(7)]
        return rows

    async def begin_request(
        self,
        tokens: np.ndarray,
        request: int,
        blocks: Mapping[str, Iterable[int]],
        *,
        computed_tokens: int = 0,
        **allocate: Any,
    ) -> Lease:
        """Return a lease that has named seven blocks, and these of the groups."""
        lease = await self.granted(tokens, **allocate)
        lease.assign(
            _ids(request),
            computed_tokens=computed_tokens,
            groups=self.rows(request, blocks),
        )
        return lease

    async def compute_request(
        self, tokens: np.ndarray, request: int, blocks: Mapping[str, Iterable[int]] | None = None
    ) -> Lease:
        """Return a lease that has computed its prompt, with these blocks of the groups."""
        if blocks is None:
            blocks = {name: range(6) for name in self.groups}
        lease = await self.begin_request(tokens, request, blocks)
        assert not lease.transfer_ids
        self.write_request(tokens, request, blocks)
        lease.commit(len(tokens))
        return lease

    def write_request(
        self, tokens: np.ndarray, request: int, blocks: Mapping[str, Iterable[int]]
    ) -> None:
        words = self.memory.words(tokens)
        self.memory.write(_ids(request)[:6], words)
        rows = self.rows(request, blocks)
        for name, group in self.groups.items():
            written = [i for i in blocks.get(name, ()) if i < 6]
            group.memory.write([rows[name][i] for i in written], words[written])

    async def store_request(self, tokens: np.ndarray, request: int = 0, **blocks: Any) -> None:
        """Cache a prompt in host memory, with these blocks of the groups; all without names."""
        (await self.compute_request(tokens, request, blocks or None)).release()
        await self.finish()

    def check_request(self, tokens: np.ndarray, request: int, hit: int) -> None:
        """Compare all blocks that a hit of ``hit`` blocks needs."""
        words = self.memory.words(tokens)
        self.memory.check(_ids(request)[:hit], words[:hit])
        for name, group in self.groups.items():
            needed = group.needed(hit)
            rows = self.rows(request, {name: needed})
            group.memory.check([rows[name][i] for i in needed], words[needed], name)

    async def check_cached(self, tokens: np.ndarray, request: int, **allocate: Any) -> int:
        """Load what is cached of a prompt, and compare it; return the cached blocks."""
        lease = await self.granted(tokens, **allocate)
        hit = lease.cached_tokens // BLOCK_TOKENS
        lease.assign(_ids(request), groups=self.rows(request, self.needed(hit)))
        await self.finish()
        self.check_request(tokens, request, hit)
        lease.release()
        return hit

    def copies(self, route: Route) -> list[ManualCopy]:
        """Return the copies of a route that have not ended, of all groups."""
        return [copy for copy in self.device.copies if copy.route == route]

    def needed(self, hit: int) -> dict[str, list[int]]:
        return {name: group.needed(hit) for name, group in self.groups.items()}

    def counts(self, what: str) -> dict[str, int]:
        groups = self.engine.statistics().groups
        return {name: getattr(groups[name], what) for name in self.groups}


@pytest.mark.parametrize(("name", "needed"), [("near", 2), ("far", 4), ("mamba", 1), ("full", 6)])
async def test_hit_loads_what_each_retention_needs(name, needed):
    async with GroupCache(name) as cache:
        await cache.store_request(A)
        assert cache.counts("offloaded_blocks") == {name: 6}
        assert await cache.check_cached(A, 1) == 6
        assert cache.counts("onloaded_blocks") == {name: needed}


async def test_hit_ends_at_the_longest_boundary_that_all_groups_have():
    async with GroupCache("mamba", "mamba2", "near") as cache:
        await cache.store_request(A, mamba=[1, 3, 4], mamba2=[1, 3, 5], near=[0, 1, 2, 3])
        assert await cache.check_cached(A, 1) == 4
        assert cache.counts("onloaded_blocks") == {"mamba": 1, "mamba2": 1, "near": 2}


async def test_blocks_of_the_servers_own_prefix_are_not_loaded():
    async with GroupCache("far") as cache:  # a hit of six blocks needs the first one and 3 to 5
        await cache.store_request(A)
        blocks = {"far": [0, 3, 4, 5]}
        lease = await cache.begin_request(A, 1, blocks, computed_tokens=16)
        (copy,) = [copy for copy in cache.copies(ONLOAD) if copy.group == "far"]
        assert copy.device_ids.tolist() == cache.rows(1, {"far": [4, 5]})["far"][4:6]
        await cache.finish()
        lease.release()


async def test_a_longer_prefix_of_the_server_loads_nothing():
    async with GroupCache("mamba") as cache:
        await cache.store_request(A, mamba=[2])
        lease = await cache.begin_request(A, 1, {}, computed_tokens=16)
        assert lease.cached_tokens == 12
        assert not lease.transfer_ids
        lease.release()
        assert cache.engine.check_invariants() == []


async def test_saves_of_the_servers_own_prefix_and_of_a_new_boundary():
    """Host memory has the blocks of attention, and the state at one boundary only."""
    async with GroupCache("mamba") as cache:
        await cache.store_request(A, mamba=[1])
        lease = await cache.begin_request(A, 1, {"mamba": [1, 4]})
        await cache.finish()
        cache.write_request(A, 1, {"mamba": [1, 4]})
        before = cache.statistics.attention.offloaded_blocks
        lease.commit(len(A))
        await cache.finish()
        lease.release()
        assert cache.statistics.attention.offloaded_blocks == before
        assert cache.counts("offloaded_blocks") == {"mamba": 2}
        assert await cache.check_cached(A, 2) == 5


async def test_evicted_window_is_saved_again_when_it_is_computed_again():
    async with GroupCache("near", host_copies=6) as cache:
        await cache.store_request(A)
        await cache.store_request(B, 1)
        assert await cache.check_cached(A, 2) == 0, "the window of B has taken its place"
        await cache.store_request(A)
        assert await cache.check_cached(A, 2) == 6


async def test_the_last_blocks_are_saved_where_the_host_has_no_room_for_all():
    async with GroupCache("near", host_copies=3) as cache:
        await cache.store_request(A)
        assert cache.counts("offloaded_blocks") == {"near": 3}
        assert await cache.check_cached(A, 1) == 6


async def test_granted_hit_keeps_its_copies_until_they_are_loaded():
    async with GroupCache("near", host_copies=4) as cache:
        await cache.store_request(A)
        lease = await cache.granted(A)
        await cache.store_request(B, 1)
        lease.assign(_ids(2), groups=cache.rows(2, cache.needed(6)))
        await cache.finish()
        cache.check_request(A, 2, 6)
        lease.release()
        assert await cache.check_cached(B, 1) == 6


async def test_released_lease_gives_up_its_copies():
    async with GroupCache("near", host_copies=4) as cache:
        await cache.store_request(A)
        (await cache.granted(A)).release()
        await cache.store_request(B, 1)
        assert cache.counts("offloaded_blocks") == {"near": 8}


async def test_server_may_not_write_a_block_that_it_frees_before_the_lease_is_idle():
    async with GroupCache("near") as cache:
        lease = await cache.compute_request(A, 0)
        await cache.saves_begun()
        (copy,) = [copy for copy in cache.copies(OFFLOAD) if copy.group == "near"]
        for other in cache.copies(OFFLOAD):
            if other is not copy:
                other.complete_all()
        await run_until_idle(lambda: cache.statistics.attention.offloaded_blocks == 6)
        assert not lease.is_idle
        copy.complete_all()
        await lease.idle()
        lease.release()


async def test_saves_of_a_group_wait_for_the_step_that_computes_its_blocks():
    async with GroupCache("near") as cache:
        lease = await cache.begin_request(A, 0, {"near": range(6)})
        cache.write_request(A, 0, {"near": range(6)})
        event = ManualEvent()
        lease.commit(len(A), ready=event)
        await run_until_idle(lambda: len(cache.copies(OFFLOAD)) == 2)
        assert [copy.after for copy in cache.copies(OFFLOAD)] == [event, event]
        event.complete()
        lease.release()
        await cache.finish()


@pytest.mark.parametrize("begun", [False, True])
async def test_block_that_is_assigned_while_a_save_reads_it_is_not_cached(begun):
    """The server frees a block behind the window, and uses it again without waiting."""
    async with GroupCache("near") as cache:
        lease = await cache.compute_request(A, 0)
        if begun:
            await cache.saves_begun()
        freed = cache.rows(0, {"near": [5]})["near"][5]
        other = await cache.begin(prompt(3, 1), [freed, 119])
        cache.memory.write([freed], cache.memory.words(prompt(3, 1)))
        for tensor in cache.groups["near"].memory.tensors:
            tensor[freed] = 0
        await cache.finish()
        assert cache.counts("offloaded_blocks") == {"near": 5}
        await lease.idle()
        lease.release()
        other.release()
        assert await cache.check_cached(A, 1) == 5


async def test_blocks_committed_during_the_load_of_their_lease_are_not_saved_after_it():
    """The server may free them from the commit on."""
    async with GroupCache("near") as cache:
        await cache.store_request(A)
        tokens = prompt(1, 7)
        lease = await cache.granted(tokens)
        blocks = {"near": [4, 5, 6]}
        lease.assign(_ids(1), groups=cache.rows(1, blocks))
        words = cache.memory.words(tokens)
        cache.memory.write(_ids(1)[6:], words[6:])
        lease.commit(28)
        for tensor in cache.groups["near"].memory.tensors:
            tensor[cache.rows(1, blocks)["near"][6]] = 0
        await cache.finish()
        lease.release()
        assert cache.statistics.attention.offloaded_blocks == 7
        assert cache.counts("offloaded_blocks") == {"near": 6}


@pytest.mark.parametrize("name", ["near", "mamba", "full"])
async def test_failed_load_of_a_group_fails_the_lease(name):
    async with GroupCache(name, "far") as cache:
        await cache.store_request(A)
        lease = await cache.begin_request(A, 1, cache.needed(6))
        for copy in cache.copies(ONLOAD):
            if copy.group == name:
                copy.fail_all(block=0)
            else:
                copy.complete_all()
        await run_until_idle(lambda: not lease.transfer_ids)
        assert (lease.state, lease.cached_tokens) == (LeaseState.FAILED, 0)
        with pytest.raises(LeaseError, match="preempt the lease"):
            lease.recompute_from()
        lease.commit(len(A))
        await cache.finish()
        assert cache.engine.check_invariants() == []
        await lease.preempt()
        assert lease.try_allocate(len(A))
        assert lease.cached_tokens < 24, "the copy that could not be read was dropped"
        lease.release()


async def test_failed_load_fails_the_leases_that_share_its_block():
    """B has the blocks of A's window as its own prefix; A's load of them fails."""
    async with GroupCache("near") as cache:
        await cache.store_request(A)
        lease = await cache.begin_request(A, 1, cache.needed(6))
        other = await cache.granted(prompt(1, 7))
        row = cache.rows(1, cache.needed(6))["near"]
        other.assign(
            [*_ids(1)[:6], 110, 111], computed_tokens=24, groups={"near": [*row[:6], 112, -1]}
        )
        (attention,) = [copy for copy in cache.copies(ONLOAD) if copy.group == "attention"]
        attention.complete_all()
        await run_until_idle(lambda: len(lease.transfer_ids) == 1)
        words = cache.memory.words(prompt(1, 7))
        cache.memory.write([110], words[6:])
        other.commit(28)
        assert other.state is LeaseState.GRANTED
        (window,) = cache.copies(ONLOAD)
        window.fail_all(block=1)
        await cache.finish()
        assert other.state is LeaseState.FAILED
        assert cache.statistics.attention.offloaded_blocks == 6
        lease.release()
        other.release()
        assert cache.hit(prompt(1, 7)) == (0, 5), "the wrong copy, and the block behind it"


async def test_failed_load_fails_the_leases_that_share_a_block_computed_from_it():
    """B's own prefix ends with a block that A has computed from the state that A's load writes."""
    async with GroupCache("mamba") as cache:
        await cache.store_request(A)
        lease = await cache.begin_request(prompt(1, 7), 1, {"mamba": [5, 6]})
        other = await cache.granted(prompt(1, 8))
        state = cache.rows(1, {"mamba": [6]})["mamba"]
        other.assign([*_ids(1), 110], computed_tokens=28, groups={"mamba": [*state, -1]})
        (attention,) = [copy for copy in cache.copies(ONLOAD) if copy.group == "attention"]
        attention.complete_all()
        await run_until_idle(lambda: len(lease.transfer_ids) == 1)
        cache.memory.write([_ids(1)[6], 110], cache.memory.words(prompt(1, 8))[6:])
        other.commit(32)
        (load,) = cache.copies(ONLOAD)
        load.fail_all(block=0)
        await cache.finish()
        assert (lease.state, other.state) == (LeaseState.FAILED, LeaseState.FAILED)
        assert cache.statistics.attention.offloaded_blocks == 6, "none of the wrong blocks"
        lease.release()
        other.release()


async def test_preempted_and_released_while_groups_load():
    async with GroupCache("near", "mamba") as cache:
        await cache.store_request(A)
        lease = await cache.begin_request(A, 1, cache.needed(6))
        assert len(lease.transfer_ids) == 3
        await lease.preempt()
        assert not lease.is_idle
        await cache.finish()
        assert lease.is_idle
        assert lease.try_allocate(len(A))
        lease.assign(_ids(2), groups=cache.rows(2, cache.needed(6)))
        lease.release()
        await cache.finish()
        assert await cache.check_cached(A, 1) == 6


async def test_reset_forgets_the_copies_of_all_groups():
    async with GroupCache("near", "mamba") as cache:
        lease = await cache.compute_request(A, 0)
        await cache.saves_begun()
        await complete_during(cache.engine.reset(), cache.device)
        await cache.finish()
        lease.release()
        assert await cache.check_cached(A, 1) == 0
        statistics = cache.engine.statistics().groups
        assert all(statistics[name].host.cached == 0 for name in cache.groups)


async def test_nothing_is_saved_after_a_failed_save_of_a_group_but_the_lease_goes_on():
    async with GroupCache("mamba") as cache:
        lease = await cache.compute_request(A, 0)
        await cache.saves_begun()
        for copy in cache.copies(OFFLOAD):
            if copy.group == "mamba":
                copy.fail_all(block=4)
            else:
                copy.complete_all()
        await cache.finish()
        lease.release()
        assert await cache.check_cached(A, 1) == 4


# -- stores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("near", "far"), ("mamba", "near"), ("full", "mamba")])
async def test_restart_continues_from_groups_on_disk(names, tmp_path):
    def cache() -> GroupCache:
        return GroupCache(*names, stores=[DiskStore(tmp_path / "kv", bytes="64MiB")])

    async with cache() as first:
        await first.store_request(A)
    async with cache() as second:
        lease = await second.granted(A, wait_store=math.inf)
        assert lease.cached_tokens == 24
        lease.assign(_ids(1), groups=second.rows(1, second.needed(6)))
        await second.finish()
        second.check_request(A, 1, 6)
        lease.release()
        needed = {name: len(blocks) for name, blocks in second.needed(6).items()}
        assert second.counts("fetched_blocks") == needed


async def test_copies_that_a_store_brings_during_their_save_are_kept():
    store = ScriptedStore()
    async with GroupCache("near", stores=[store]) as cache:
        await cache.store_request(A)
    async with GroupCache("near", stores=[ScriptedStore(objects=store.objects)]) as cache:
        lease = await cache.compute_request(A, 0)
        await run_until_idle(lambda: len(cache.copies(OFFLOAD)) == 2)
        for copy in cache.copies(OFFLOAD):
            if copy.group == "attention":
                copy.complete_all()
        await run_until_idle(lambda: cache.statistics.attention.offloaded_blocks == 6)
        other = await cache.granted(A, wait_store=math.inf)
        assert other.cached_tokens == 24
        assert len(cache.copies(OFFLOAD)) == 1
        await cache.finish()
        assert cache.counts("fetched_blocks") == {"near": 2}
        assert cache.counts("offloaded_blocks") == {"near": 4}
        lease.release()
        other.release()
        assert await cache.check_cached(A, 1) == 6


async def test_damaged_copy_of_a_group_makes_the_hit_shorter():
    store = ScriptedStore()
    async with GroupCache("mamba", stores=[store]) as cache:
        await cache.store_request(A)
    store = ScriptedStore(objects=store.objects)
    async with GroupCache("mamba", stores=[store]) as cache:
        store.parts["mamba"].corrupt("load", block=0)
        assert await cache.check_cached(A, 1, wait_store=math.inf) < 6


# -- errors ------------------------------------------------------------------------------------


async def test_refused_assign_changes_nothing():
    async with GroupCache("near", "mamba") as cache:
        await cache.store_request(A)
        lease = await cache.granted(A)
        ids, rows = _ids(1), cache.rows(1, cache.needed(6))
        refused: list[tuple[type[Exception], str, dict[str, list[int]]]] = [
            (LeaseError, "group 0 has no id for block 4", {}),
            (LeaseError, "group 1 has no id for block 5", {"near": rows["near"]}),
            (UsageError, "'far' is unknown|group is 'far'", {**rows, "far": rows["near"]}),
            (UsageError, "has 6 ids for 7 blocks", {**rows, "mamba": rows["mamba"][:6]}),
            (UsageError, "listed twice", {**rows, "mamba": rows["near"]}),
            (UsageError, "block id 120 is out of range", {**rows, "mamba": [-1] * 5 + [120, -1]}),
            (UsageError, "block id -2 is out of range", {**rows, "mamba": [-2] * 7}),
        ]
        for error, message, groups in refused:
            with pytest.raises(error, match=message):
                lease.assign(ids, groups=groups)
            assert (lease.transfer_ids, len(lease.block_table)) == ((), 0)
            assert cache.engine.check_invariants() == []
        lease.assign(ids, groups=rows)
        await cache.finish()
        cache.check_request(A, 1, 6)
        with pytest.raises(UsageError, match="a server owns the device blocks"):
            lease.window_table("near")
        lease.release()


async def test_load_into_a_block_that_a_save_of_another_group_reads_is_refused():
    async with GroupCache("near", "mamba") as cache:
        await cache.store_request(A)
        other = await cache.compute_request(B, 1)
        await cache.saves_begun()
        lease = await cache.granted(A)
        rows = cache.rows(2, cache.needed(6))
        rows["mamba"][5] = cache.rows(1, {"near": [5]})["near"][5]
        with pytest.raises(UsageError, match="a save reads block"):
            lease.assign(_ids(2), groups=rows)
        assert not lease.transfer_ids
        await cache.finish()
        lease.release()
        other.release()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device_blocks": 9, "window_tokens": 4, "host_blocks": 4}, "device_blocks=9"),
        ({"device_blocks": 8, "window_tokens": 4}, "host_blocks=0"),
        (
            {"device_blocks": 8, "window_tokens": 4, "host_blocks": 4, "step_tokens": 2},
            "step_tokens=2",
        ),
    ],
)
async def test_groups_of_a_server_have_its_pool_and_host_memory(fields, message):
    group = WindowGroup(**fields)
    with pytest.raises(ConfigError, match=message):
        CacheConfig(device_blocks=8, host_blocks=8, external_device=True, windows={"local": group})


async def test_group_may_have_fewer_ids_than_attention():
    groups = external_groups(("near",), 20, 20)
    async with ExternalCache(device_blocks=30, groups=groups) as cache:
        lease = await cache.granted(prompt(1, 2))
        with pytest.raises(UsageError, match="block id 20 is out of range; the device has 20"):
            lease.assign([28, 29, 0], groups={"near": [18, 20, 19]})
        lease.assign([28, 29, 0], groups={"near": [18, -1, 19]})
        lease.release()


async def test_other_retentions_need_a_server():
    group = WindowGroup(retention="last", device_blocks=8, host_blocks=4)
    with pytest.raises(ConfigError, match="retention='last', and external_device is False"):
        CacheConfig(device_blocks=8, host_blocks=8, windows={"mamba": group})
    with pytest.raises(ConfigError, match="window_tokens is 4, and retention is 'all'"):
        WindowGroup(retention="all", window_tokens=4, device_blocks=8)
    with pytest.raises(ConfigError, match="window_tokens is 0"):
        WindowGroup(device_blocks=8)
