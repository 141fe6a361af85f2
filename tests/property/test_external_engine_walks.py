"""Random walks of an engine on device blocks of a server, with real bytes and a clock.

The walk plays the server: it chooses ids, computes KV, and reuses a block when no request has the
block and all leases that have named it are idle. It mixes salts, items, limits of leases,
preemption, resets, sleep and new weights with copies that are completed, failed and delayed, and
records a trace, the transitions and the observations. Requests go on while the weights are updated:
the bytes of a position depend on the versions that have computed all positions up to it.

With groups beside full attention, whose blocks are of the same pool, the server frees the blocks
that the next position does not need after each commit, while saves still read them.

Checked after every operation: the invariants of the engine hold, no copy accesses a block that the
server may reuse, and the blocks of a hit hold the KV of their prefix, tenant, items and weights.
Checked at the end: every block is free, and all cached bytes are right.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import Item, LeaseState
from aiokv.engine.observers import LeasePhase, TransferSpan
from aiokv.errors import LeaseError
from aiokv.observe.metrics import exposition
from aiokv.stores.labels import label
from aiokv.testing import ScriptedStore, record, replay_transitions, running_clock, spin
from aiokv.trace.format import read_trace
from tests.harness.cache import BLOCK_TOKENS
from tests.harness.closing import complete_during
from tests.harness.external import ExternalCache
from tests.harness.external_groups import GROUPS, external_groups
from tests.models.external_device import ExternalDevice

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from aiokv import Lease

OPERATIONS = 400
DEEP = bool(os.environ.get("AIOKV_DEEP"))
DEVICE_BLOCKS, HOST_BLOCKS = 20, 8
GARBAGE = np.uint64(0xEEEEEEEEEEEEEEEE)


def _ids(rows: dict[str, list[int]]) -> list[int]:
    return [block_id for row in rows.values() for block_id in row if block_id >= 0]


class Request:
    """A lease and the blocks that the server has given it."""

    def __init__(self, lease: Lease, tokens: list[int], tenant: str, weights: int) -> None:
        self.lease = lease
        self.tokens = tokens
        self.tenant = tenant  # salt and item, on which the KV depends besides the tokens
        self.weights = weights  # at the grant
        self.versions: list[int] = []  # of the weights, of the first positions
        self.table: list[int] = []
        self.rows: dict[str, list[int]] = {}  # by group: as `table`, -1 for no block
        self.cached = 0  # full blocks that the lease has not computed
        self.computed = 0  # computed positions
        self.has_computed = False


class Walk:
    def __init__(
        self, cache: ExternalCache, rng: random.Random, store: ScriptedStore | None = None
    ) -> None:
        self.cache, self.engine, self.rng, self.store = cache, cache.engine, rng, store
        self.groups = cache.groups
        self.device_blocks = cache.engine.config.device_blocks
        self.server = ExternalDevice(self.device_blocks)
        self.requests: list[Request] = []
        self.leases: dict[int, Lease] = {}  # by the key of the server's model
        self.prompts: set[tuple[tuple[int, ...], str, int]] = set()
        self.recorded = 0
        self.served_hits = 0
        self.controls = 0.3 if self.groups else 1.0  # weight of resets, sleep, and so on
        self.updates = False  # whether the weights are being updated: allocate waits
        self.failed = 0  # leases whose loads have failed, with groups

    # --- requests -------------------------------------------------------------------------------

    def match(self, tokens: list[int], salt: str, item: int, weights: int) -> Request:
        items = [Item(f"image {item}".encode(), 1, 2)] if item else []
        lease = self.engine.match(tokens, salt=salt, items=items)
        self.leases[id(lease)] = lease
        return Request(lease, tokens, f"{salt}|{item}", weights)

    async def begin(self) -> None:
        rng = self.rng
        if len(self.requests) == 5:
            self.end()
        blocks = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
        tokens = [10 * kind + place for kind in blocks for place in range(BLOCK_TOKENS)]
        tokens += [rng.randrange(2) for _ in range(rng.randint(1, 3))]
        salt, item = rng.choice(["", "", "tenant"]), rng.choice([0, 0, 1, 2])
        self.prompts.add((tuple(tokens), salt, item))
        request = self.match(tokens, salt, item, self.cache.memory.weights)
        ttl = None if self.store is not None else rng.choice([None, None, 1.0])
        if self.store is not None and not self.updates and rng.random() < 0.5:
            fetching = request.lease.allocate(len(tokens), ttl_seconds=ttl, wait_store=math.inf)
            await self.completing(fetching)
        elif not request.lease.try_allocate(len(tokens), ttl_seconds=ttl):
            request.lease.release()
            return
        self.requests.append(request)
        if rng.random() < 0.9:
            self.assign(request)

    def assign(self, request: Request) -> None:
        """Name the first blocks, of which an idle request with the same prefix may have some."""
        shared, shared_rows = self.shared_with(request)
        cached = max(request.lease.cached_tokens // BLOCK_TOKENS, len(shared))
        total = -(-len(request.tokens) // BLOCK_TOKENS)
        if self.groups and self.rng.random() < 0.5:
            total = max(cached, 1)  # the others are named when they are computed
        wanted = {
            name: [block for block in group.needed(cached) if block >= len(shared)]
            for name, group in self.groups.items()
        }
        fresh = self.take(request, shared, shared_rows, total, cached, wanted)
        if fresh is None:
            return
        request.cached = cached
        request.computed = request.cached * BLOCK_TOKENS
        request.versions = [request.weights] * request.computed

    def take(
        self,
        request: Request,
        shared: list[int],
        shared_rows: dict[str, list[int]],
        total: int,
        cached: int = 0,
        wanted: dict[str, list[int]] | None = None,
    ) -> list[int] | None:
        """Name the blocks behind the table up to ``total``; return them, or None without room.

        Args:
            request: gets the blocks.
            shared: computed blocks of another request that it gets first.
            shared_rows: of the groups.
            total: number of blocks of the new table.
            cached: number of cached or shared blocks.
            wanted: cached blocks that each group needs.
        """
        old = len(request.table) + len(shared)
        free = self.server.free
        wanted = wanted or {name: [] for name in self.groups}
        rows: dict[str, list[int]] = {}
        table = [*shared, *free[: total - old]]
        taken = total - old
        for name, group in self.groups.items():
            row = list(shared_rows.get(name, []))
            for block in range(old, total):
                names = block in wanted[name] or (
                    block >= cached and (not group.is_state or self.rng.random() < 0.7)
                )
                row.append(taken if names else -1)  # an index of `free`
                taken += names
            rows[name] = row
        if taken > len(free):
            return None
        fresh = free[:taken]
        for row in rows.values():
            row[len(shared) :] = [-1 if i < 0 else free[i] for i in row[len(shared) :]]
        self.write_garbage(fresh)
        tokens = len(shared) * BLOCK_TOKENS
        request.lease.assign(table, computed_tokens=tokens, groups=rows)
        self.server.share([*shared, *_ids(shared_rows)])
        self.server.take(fresh)
        request.table += table
        for name, row in rows.items():
            request.rows.setdefault(name, []).extend(row)
        return fresh

    def shared_with(self, request: Request) -> tuple[list[int], dict[str, list[int]]]:
        """Return blocks of another request, and those of the groups that a hit of them needs."""
        full = len(request.tokens) // BLOCK_TOKENS
        for other in self.requests:
            if other.tenant != request.tenant or not other.table or not self.has_arrived(other):
                continue
            if {*other.versions, request.weights} != {self.cache.memory.weights}:
                continue
            common = 0
            limit = min(full, other.computed // BLOCK_TOKENS)
            while (
                common < limit
                and other.tokens[: (common + 1) * BLOCK_TOKENS]
                == (request.tokens[: (common + 1) * BLOCK_TOKENS])
            ):
                common += 1
            if not common or self.rng.random() < 0.5:
                continue
            common = self.rng.randint(1, common)
            rows = {}
            for name, group in self.groups.items():
                needed = group.needed(common)
                row = other.rows[name]
                rows[name] = [row[block] if block in needed else -1 for block in range(common)]
            if all(-1 not in [rows[name][i] for i in self.groups[name].needed(common)]
                   for name in rows):  # fmt: skip
                return other.table[:common], rows
        return [], {}

    def has_arrived(self, request: Request) -> bool:
        return not request.lease.transfer_ids and request.lease.state is LeaseState.GRANTED

    def compute(self, request: Request) -> Awaitable[None] | None:
        """Check the cached blocks of the lease, compute the rest, and commit it."""
        lease = request.lease
        if not request.table:
            with suppress(LeaseError):  # its hit was dropped
                self.assign(request)
        if not request.table or lease.transfer_ids:
            return None
        if self.groups and lease.state is LeaseState.FAILED:
            with pytest.raises(LeaseError, match="cannot go back"):
                lease.recompute_from()
            self.failed += 1
            return self.preempt(request)
        if (position := lease.recompute_from()) is not None:
            request.computed = min(request.computed, position)
        self.check(request)
        total = -(-len(request.tokens) // BLOCK_TOKENS)
        if len(request.table) < total and self.take(request, [], {}, total) is None:
            return None
        begin = request.computed // BLOCK_TOKENS
        more = len(request.tokens) - request.computed
        request.versions[request.computed :] = [self.cache.memory.weights] * more
        words = self.words(request, len(request.tokens))
        if self.rng.random() < 0.5:
            with self.engine.computing([lease]):
                self.write(request, begin, words)
        else:
            self.write(request, begin, words)
        request.has_computed |= request.computed < len(request.tokens)
        request.computed = len(request.tokens)
        lease.commit(request.computed)
        self.free_behind(request)
        return None

    def write(self, request: Request, begin: int, words: np.ndarray) -> None:
        self.cache.memory.write(request.table[begin : len(words)], words[begin:])
        for name, group in self.groups.items():
            blocks = [i for i in range(begin, len(words)) if request.rows[name][i] >= 0]
            group.memory.write([request.rows[name][i] for i in blocks], words[blocks])

    def free_behind(self, request: Request) -> None:
        """Free the blocks of groups that the next position does not need."""
        for name, group in self.groups.items():
            row = request.rows[name]
            for block, block_id in enumerate(row):
                if block_id >= 0 and not group.is_kept(block, request.computed):
                    self.give_up(request, [block_id])
                    row[block] = -1

    def check(self, request: Request) -> None:
        full = request.computed // BLOCK_TOKENS
        self.served_hits += full
        words = self.words(request, request.computed)
        self.cache.memory.check(request.table[:full], words, request.tenant)
        for name, group in self.groups.items():
            row = request.rows[name][:full]
            blocks = [block for block, block_id in enumerate(row) if block_id >= 0]
            group.memory.check([row[i] for i in blocks], words[blocks], f"{request.tenant} {name}")
            if full == request.cached and not request.has_computed:
                assert set(group.needed(full)) <= set(blocks)

    def words(self, request: Request, stop: int) -> np.ndarray:
        """Return the words of the full blocks of the first ``stop`` positions."""
        versions = np.array(request.versions[:stop])
        return self.cache.memory.words(request.tokens[:stop], request.tenant, versions)

    def decode(self, request: Request) -> Awaitable[None] | None:
        if not request.table or request.computed < len(request.tokens):
            return None
        more = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 5))]
        total = -(-(len(request.tokens) + len(more)) // BLOCK_TOKENS)
        if total > len(request.table) and self.take(request, [], {}, total) is None:
            return None
        request.lease.append(more)
        request.tokens = [*request.tokens, *more]
        return self.compute(request)

    def truncate(self, request: Request) -> None:
        if not request.table or request.lease.transfer_ids:
            return
        if request.lease.state is not LeaseState.GRANTED:
            return
        least = max(request.computed // BLOCK_TOKENS * BLOCK_TOKENS, 3)  # the end of an item
        if self.groups:  # state and windows cannot go back
            least = max(least, request.computed)
        most = min(len(request.tokens), len(request.table) * BLOCK_TOKENS)
        length = self.rng.randint(min(least, most), most)
        request.lease.truncate(length)
        blocks = -(-length // BLOCK_TOKENS)
        self.give_up(request, request.table[blocks:])
        request.table = request.table[:blocks]
        for name, row in request.rows.items():
            self.give_up(request, [block_id for block_id in row[blocks:] if block_id >= 0])
            request.rows[name] = row[:blocks]
        request.tokens = request.tokens[:length]
        request.computed = min(request.computed, length)

    def give_up(self, request: Request, blocks: list[int]) -> None:
        self.server.give_up(id(request.lease), blocks)

    async def preempt(self, request: Request) -> None:
        await request.lease.preempt()
        self.give_up_all(request)
        request.computed = 0
        request.weights = self.cache.memory.weights
        if request.lease.try_allocate(len(request.tokens)):
            self.assign(request)
        else:
            request.lease.release()
            self.drop(request)

    def end(self) -> None:
        if self.requests:
            request = self.rng.choice(self.requests)
            request.lease.release()
            self.drop(request)

    def drop(self, request: Request) -> None:
        self.recorded += request.has_computed
        self.requests.remove(request)
        self.give_up_all(request)

    def give_up_all(self, request: Request) -> None:
        self.give_up(request, [*request.table, *_ids(request.rows)])
        request.table, request.rows = [], {}

    async def expire(self) -> None:
        """Advance the clock beyond all limits; leases that were used in time have none."""
        if self.requests and self.rng.random() < 0.5:
            request = self.rng.choice(self.requests)
            if request.lease.state is LeaseState.GRANTED:
                request.lease.expire_after(1.0)
        await running_clock().advance(1.1)
        for request in list(self.requests):
            if request.lease.state is LeaseState.RELEASED:
                self.drop(request)

    # --- the server -----------------------------------------------------------------------------

    def write_garbage(self, blocks: list[int]) -> None:
        for memory in (self.cache.memory, *(group.memory for group in self.groups.values())):
            for tensor in memory.tensors:
                tensor[blocks] = GARBAGE

    def collect(self) -> None:
        self.server.collect(lambda key: self.leases[key].is_idle)

    def copy(self) -> None:
        copies = self.cache.device.copies
        if not copies:
            return
        copy = self.rng.choice(copies[:2])
        if self.rng.random() < 0.2:
            copy.fail_all(block=self.rng.randrange(len(copy.device_ids)))
        else:
            copy.complete_all()

    def damage(self) -> None:
        """Let the store have wrong bytes of a group."""
        if self.store is not None:
            part = self.rng.choice([self.store, *self.store.parts.values()])
            part.corrupt("load", block=self.rng.randrange(2))

    async def completing(self, verb: Awaitable[object]) -> None:
        if self.store is None:
            await complete_during(verb, self.cache.device)
            return
        task = asyncio.ensure_future(verb)
        while not task.done():  # a store that was refused is asked again after a while
            self.cache.device.complete_all()
            await running_clock().advance(0.01)
        await task

    async def control(self) -> None:
        verb = self.rng.choice(["reset", "purge", "weights", "sleep", "evict", "drain", "pause"])
        if verb == "reset":
            await self.completing(self.engine.reset())
        elif verb == "purge":
            await self.purge(self.rng.choice(["", "tenant"]))
        elif verb == "weights":
            updating = self.engine.updating_weights()
            await self.completing(updating.__aenter__())
            self.cache.memory.weights += 1
            self.collect()
            self.updates = True
            for _ in range(self.rng.choice((0, 10, 30))):
                await self.act(controls=False)
                self.check_nothing_is_cached()
            self.updates = False
            await self.completing(updating.__aexit__(None, None, None))
        elif verb == "sleep":
            await self.sleep(self.rng.choice([["device"], ["host"], ["device", "host"]]))
        elif verb == "evict":
            await self.engine.evict(self.rng.randint(1, 4), "host")
        elif verb == "drain":
            await self.completing(self.engine.drain())
        else:
            self.engine.pause()
            await spin(2)
            self.engine.resume()

    async def purge(self, purged: str) -> None:
        """Purge a salt while its requests go on, which publish no more."""
        purging = asyncio.ensure_future(self.engine.purge(purged, hold_seconds=0.02))
        await spin(1)
        for _ in range(self.rng.choice((0, 10, 30))):
            await self.act(controls=False)
            self.check_nothing_is_cached(purged)
        await running_clock().advance(0.02)
        await self.completing(purging)
        self.check_nothing_is_cached(purged)
        if self.store is not None:
            end = label("salt", purged)
            for store in (self.store, *self.store.parts.values()):
                assert not any(key.endswith(end) for key in store.objects)

    def check_nothing_is_cached(self, purged: str | None = None) -> None:
        for tokens, salt, item in self.prompts:
            if purged not in (None, salt):
                continue
            items = [Item(f"image {item}".encode(), 1, 2)] if item else []
            assert not self.engine.would_hit(list(tokens), salt=salt, items=items).total

    async def sleep(self, tiers: Any) -> None:
        while self.requests:
            self.end()
        await self.completing(self.engine.sleep(tiers))
        self.collect()
        assert len(self.server.free) == self.device_blocks
        if "device" in tiers:
            self.write_garbage(list(range(self.device_blocks)))
        regions = self.cache.memory.regions if "device" in tiers else None
        await self.completing(self.engine.wake_up(tiers, regions=regions))
        if "host" in tiers:
            assert self.engine.statistics().attention.host.free == HOST_BLOCKS

    # --- the walk -------------------------------------------------------------------------------

    async def act(self, *, controls: bool = True) -> None:
        verb = self.rng.choices(
            [
                "begin",
                "compute",
                "decode",
                "truncate",
                "preempt",
                "end",
                "expire",
                "copy",
                "spin",
                "control",
                "damage",
            ],
            [6, 6, 3, 2, 1, 2, 1, 8 + 4 * len(self.groups), 4, controls * self.controls, 0.3],
        )[0]
        if verb in ("compute", "decode", "truncate", "preempt"):
            if not self.requests:
                return
            request = self.rng.choice(self.requests)
            done = getattr(self, verb)(request)
        else:
            done = spin(self.rng.randint(1, 3)) if verb == "spin" else getattr(self, verb)()
        if done is not None:
            await done
        self.collect()
        self.check_copies()

    def check_copies(self) -> None:
        assert self.engine.check_invariants() == []
        free = set(self.server.free)
        for copy in self.cache.device.copies:
            assert not free & set(copy.device_ids.tolist()), "a copy uses blocks of an idle lease"

    async def finish(self) -> None:
        """Release all leases, and read all cached blocks back."""
        while self.requests:
            self.end()
        await self.completing(self.engine.drain())
        self.collect()
        assert len(self.server.free) == self.device_blocks
        assert self.engine.statistics().leases == 0
        await self.read_back()

    async def read_back(self) -> None:
        """Compare all that is cached of the prompts."""
        for tokens, salt, item in sorted(self.prompts):
            request = self.match(list(tokens), salt, item, self.cache.memory.weights)
            wait_store = 0.0 if self.store is None else math.inf
            await self.completing(request.lease.allocate(len(tokens), wait_store=wait_store))
            self.assign(request)
            await self.completing(self.engine.drain())
            self.check(request)
            request.lease.release()
            self.give_up_all(request)
            self.collect()


@pytest.mark.clock
@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["write_through", "nth_use:2"])
@pytest.mark.parametrize("seed", range(60 if DEEP else 6))
async def test_random_walk_serves_the_right_bytes(policy: str, seed: int, tmp_path: Path):
    cache = ExternalCache(device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, write_policy=policy)
    spans: list[object] = []
    with record(cache.engine) as transitions:
        async with cache:
            walk = Walk(cache, random.Random(f"{policy} {seed}"))
            cache.engine.inspect.add_observer(lambda span, context: spans.append(span))
            async with cache.engine.record_trace(tmp_path / "trace.jsonl"):
                for _ in range(OPERATIONS):
                    await walk.act()
                while walk.requests:
                    walk.end()
                await cache.finish()
            recorded = walk.recorded
            await walk.finish()
            statistics = cache.engine.statistics()
            text = exposition(cache.engine)
    assert walk.served_hits
    assert len(read_trace(tmp_path / "trace.jsonl")) == recorded
    assert replay_transitions(transitions.log) > OPERATIONS
    assert f'aiokv_expired_leases_total{{engine="default"}} {statistics.expired_leases}' in text
    moved = [span for span in spans if isinstance(span, TransferSpan)]
    assert len(moved) == len({span.transfer_id for span in moved})
    assert sum(span.blocks for span in moved if not is_cancelled_onload(span)) == (
        statistics.attention.onloaded_blocks
        + statistics.attention.offloaded_blocks
        + statistics.failed_blocks
    )
    granted = [s for s in spans if isinstance(s, LeasePhase) and s.phase == "granted"]
    assert len(granted) == statistics.grants
    assert {span.outcome for span in granted} == {"released", "preempted"}


@pytest.mark.clock
@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["write_through", "nth_use:2"])
@pytest.mark.parametrize("names", [("near",), ("near", "far"), ("mamba", "far"), tuple(GROUPS)])
@pytest.mark.parametrize("seed", range(30 if DEEP else 3))
async def test_random_walk_of_groups(names: tuple[str, ...], policy: str, seed: int):
    cache = ExternalCache(
        device_blocks=DEVICE_BLOCKS * (1 + len(names)),
        host_blocks=HOST_BLOCKS,
        groups=external_groups(names, DEVICE_BLOCKS * (1 + len(names)), 6),
        write_policy=policy,
    )
    with record(cache.engine) as transitions:
        async with cache:
            walk = Walk(cache, random.Random(f"{names} {policy} {seed}"))
            for _ in range(2 * OPERATIONS):
                await walk.act()
            await walk.finish()
            statistics = cache.engine.statistics()
    assert walk.served_hits
    for name in names:
        assert statistics.groups[name].offloaded_blocks
    assert replay_transitions(transitions.log) > OPERATIONS


@pytest.mark.clock
@pytest.mark.asyncio
@pytest.mark.parametrize("names", [("near", "far"), ("mamba", "far")])
@pytest.mark.parametrize("seed", range(30 if DEEP else 3))
async def test_random_walk_of_groups_with_a_store(names: tuple[str, ...], seed: int):
    """The store has wrong bytes at times; an engine that begins with the store serves the same."""
    store, prompts = ScriptedStore(), set()
    for restarted in (False, True):
        store = ScriptedStore(objects=store.objects)
        cache = ExternalCache(
            device_blocks=DEVICE_BLOCKS * 3,
            host_blocks=HOST_BLOCKS,
            groups=external_groups(names, DEVICE_BLOCKS * 3, 6),
            stores=[store],
        )
        async with cache:
            walk = Walk(cache, random.Random(f"{names} {seed} {restarted}"), store)
            walk.prompts = prompts
            if restarted:
                await walk.read_back()
            for _ in range(OPERATIONS):
                await walk.act()
            await walk.finish()
            groups = cache.engine.statistics().groups
        assert all(groups[name].saved_blocks for name in names)


def is_cancelled_onload(span: TransferSpan) -> bool:
    return (span.route, span.outcome) == ("onload", "cancelled")
