"""Random walks of CacheScheduler alone: each wait ends once, and all blocks are freed.

A walk calls transitions in random order and applies their effects as the dispatcher does; the
worker is a set of plans that end at random. After each transition ``violations()`` is empty.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import CacheConfig, LeaseState
from aiokv.base.plan import FETCH, SAVE, Priority, TransferReport
from aiokv.errors import (
    AiokvError,
    InternalError,
    LeaseError,
    RequestTooLarge,
    UsageError,
    WouldBlock,
)
from aiokv.scheduler.effects import NO_EFFECTS
from aiokv.scheduler.scheduler import CacheScheduler
from aiokv.stores.base import Result
from aiokv.testing.transitions import Recording, replay_transitions
from tests.property.event_subscriber import MAX_EVENT_BLOCKS

if TYPE_CHECKING:
    from aiokv.base.plan import TransferPlan
    from aiokv.scheduler.effects import Effects

BLOCK_TOKENS = 2
DEVICE_BLOCKS = 12
HOST_BLOCKS = 10
GRANTED = (LeaseState.GRANTED,)
UNGRANTED = (LeaseState.MATCHED, LeaseState.SWAPPED)


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


class Walk:
    def __init__(
        self,
        seed: int,
        *,
        has_stores: bool = False,
        has_state: bool = False,
        has_peers: bool = False,
        has_reserves: bool = False,
    ) -> None:
        self.random = random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.has_stores = has_stores
        self.has_peers = has_peers
        config = CacheConfig(
            block_tokens=BLOCK_TOKENS,
            device_blocks=DEVICE_BLOCKS,
            host_blocks=random.choice((0, HOST_BLOCKS, HOST_BLOCKS)),
            write_policy=random.choice(("none", "write_through", "write_through", "write_back")),
            eviction_policy="lru",
            salt_quota_blocks=random.choice((None, 7)),
            verify=random.choice(("off", "checksum")),
        )
        if has_stores:
            config = dataclasses.replace(
                config,
                store_policy=random.choice(("write_through", "nth_use:2", "write_back")),
                store_queue_blocks=random.choice((2, 64)),
            )
        if has_state:
            config = dataclasses.replace(
                config,
                host_blocks=HOST_BLOCKS,
                state_slots=random.choice((2, 4, 6)),
                host_state_slots=random.choice((1, 2, 5)),
            )
        if has_reserves:
            config = dataclasses.replace(
                config,
                write_policy=random.choice(
                    ("none", "write_through", "nth_use:2", *["write_back"] * 3)
                ),
                host_blocks=random.choice((0, 1, 2, 3, HOST_BLOCKS)),
                reserve_blocks=random.choice((0, 1, 3)),
                low_watermark_blocks=random.choice((0, 2)),
                miss_history_blocks=(0, 3, 100)[config.device_blocks % 3],
                eviction_policy=random.choice(("lru", "adaptive")),
            )
        self.config = config
        self.has_reserves = has_reserves
        self.has_state = has_state
        self.scheduler = CacheScheduler(config, has_stores)
        self.events = self.scheduler.read.block_events(MAX_EVENT_BLOCKS)  # compared by violations()
        self.events.take(1)
        self.recording = Recording(self.scheduler, config, None)
        self.tracked = random.random() < 0.5
        self.tokens: dict[int, np.ndarray] = {}  # of the leases with a handle
        self.in_line: set[int] = set()
        self.store_waits: set[int] = set()  # of the leases in line
        self.pending: set[int] = set()
        self.in_flight: dict[int, TransferPlan] = {}
        self.batches: dict[int, list[int]] = {}
        self.pins: set[int] = set()
        self.purged: set[str] = set()
        self.step = 0  # the newest closed one
        self.advances = self.collects = False
        self.apply(self.scheduler.track_steps(self.tracked))

    # --- the dispatcher -------------------------------------------------------------------------

    def apply(self, result: tuple[Any, Effects]) -> Any:
        value, effects = result
        if effects is not NO_EFFECTS:
            self.apply_effects(effects)
            self.scheduler.applied()
        assert self.scheduler.violations() == []
        return value

    def apply_effects(self, effects: Effects) -> None:
        for name in effects.__slots__:
            if getattr(effects, name):
                self.seen[name] += 1
        cancelled = list(effects.cancel)
        effects.cancel.clear()
        effects.computed.clear()
        effects.urge.clear()
        effects.moved.clear()
        while effects.submit:
            plan = effects.submit.popleft()
            assert plan.transfer_id not in self.in_flight
            self.in_flight[plan.transfer_id] = plan
        while effects.granted:
            grant = effects.granted.popleft()
            self.in_line.remove(grant.lease_id)
            assert grant.lease_id not in self.store_waits
            assert set(grant.onloads) <= set(self.in_flight) - set(cancelled)
            assert self.scheduler.read.is_granted(grant.lease_id)
        while effects.refused:
            lease_id, error = effects.refused.popleft()
            assert isinstance(error, AiokvError)
            self.in_line.remove(lease_id)
            self.store_waits.discard(lease_id)
        while effects.resumed:
            self.pending.remove(effects.resumed.popleft()[0])
        while effects.unpinned:
            lease_id, reason = effects.unpinned.popleft()
            assert reason
            self.pins.remove(lease_id)
        turns = list(effects.turns)
        effects.turns.clear()
        self.collects |= effects.collect
        self.advances |= effects.advance
        effects.collect = effects.advance = False
        self.scheduler.applied()
        for lease_id in turns:
            assert lease_id in self.in_line - self.store_waits
            try:
                grant = self.apply(self.scheduler.take_turn(lease_id))
            except RequestTooLarge:  # since a resize; the task of the lease gets the error
                grant = None
                self.in_line.remove(lease_id)
                self.apply(self.scheduler.stop_waiting(lease_id))
            if grant is not None:
                self.in_line.remove(lease_id)
        for transfer_id in cancelled:
            if self.random.random() < 0.5:
                self.end(transfer_id, "cancelled")

    def later(self) -> None:
        """Apply the effects of the end of a pass or of a later pass of the loop."""
        if self.collects:
            self.collects = False
            self.apply(self.scheduler.collect_backups())
            if self.apply(self.scheduler.store_saver.collect()):
                self.seen["saves"] += 1
        if self.advances:
            self.advances = False
            self.apply(self.scheduler.advance())
        elif self.config.write_policy != "write_back" or self.config.host_blocks == HOST_BLOCKS:
            # With less host memory, a grant waits for the save of some blocks although others have
            # been given up meanwhile.
            self.check_progress()

    def check_progress(self) -> None:
        """No lease waits for what it could get already: a call that nothing requests finds none."""
        _, effects = self.scheduler.advance()
        for name in ("granted", "refused", "resumed", "unpinned", "advance"):
            assert not getattr(effects, name), (name, getattr(effects, name))
        self.apply((None, effects))

    def end(self, transfer_id: int, outcome: Any = "done", first_bad: int = 0) -> None:
        plan = self.in_flight.pop(transfer_id)
        report = TransferReport(
            transfer_id=transfer_id,
            outcome=outcome,
            first_bad_block=plan.num_blocks if outcome == "done" else first_bad,
            results=self.results(plan),
        )
        self.apply(self.scheduler.complete(report))
        if self.random.random() < 0.3:
            with pytest.raises(InternalError, match="ended twice"):
                self.scheduler.complete(report)
            assert self.scheduler.violations() == []
            self.seen["second report refused"] += 1

    def results(self, plan: TransferPlan) -> bytes:
        if plan.route != SAVE or self.random.random() < 0.5:
            return b""
        return bytes(self.random.choice(list(Result)) for _ in range(plan.num_blocks))

    # --- actions of requests --------------------------------------------------------------------

    def prompt(self) -> np.ndarray:
        """Draw prompts that share prefixes: equal tokens, and one or two more."""
        same, more = self.random.randint(0, 10), self.random.randint(1, 2)
        tokens = [self.random.randint(1, 4)] * same
        tokens += [self.random.choice((1, 2)) for _ in range(more)]
        return np.array(tokens, np.int32)

    def pick(self, *, granted: bool | None = None, waiting: bool = False) -> int | None:
        read = self.scheduler.read
        found = [
            lease_id
            for lease_id in self.tokens
            if (waiting or lease_id not in self.in_line | self.pending)
            and (granted is None or read.state(lease_id) in (GRANTED if granted else UNGRANTED))
        ]
        return self.random.choice(found) if found else None

    def match(self) -> None:
        if len(self.tokens) < 6:
            tokens = self.prompt()
            lease_id = self.apply(self.scheduler.match(tokens, salt=self.random.choice("ab")))
            self.tokens[lease_id] = tokens

    def allocate(self) -> None:
        if (lease_id := self.pick(granted=False)) is None:
            return
        num_tokens = self.random.randint(1, len(self.tokens[lease_id]) + 3)
        with suppress(RequestTooLarge, LeaseError):  # the latter: fewer than a swap has kept
            waits_for_store = self.has_stores and self.random.random() < 0.3
            reserve = self.random.choice((None, 0, 4)) if self.has_reserves else None
            grant, effects = self.scheduler.allocate(
                lease_id, num_tokens, self.random.randint(0, 2), waits_for_store, reserve
            )
            if grant is None:
                self.in_line.add(lease_id)
            if waits_for_store:
                assert grant is None
                self.store_waits.add(lease_id)
            self.apply((grant, effects))

    def try_allocate(self) -> None:
        if (lease_id := self.pick(granted=False)) is None:
            return
        num_tokens = self.random.randint(1, len(self.tokens[lease_id]) + 3)
        with suppress(RequestTooLarge, LeaseError):
            expected = self.scheduler.can_allocate(lease_id, num_tokens)
            urgency = self.random.choice((Priority.DEMAND, Priority.PREFETCH))
            grant = self.apply(
                self.scheduler.try_allocate(lease_id, num_tokens, onload_priority=urgency)
            )
            assert (grant is not None) == expected

    def end_store_wait(self) -> None:
        if self.store_waits:
            lease_id = self.random.choice(sorted(self.store_waits))
            self.store_waits.remove(lease_id)
            self.apply(self.scheduler.end_store_wait(lease_id))

    def fetch(self) -> None:
        """Fetch for a lease, also while it waits in line."""
        if (lease_id := self.pick(waiting=True)) is not None:
            urgency = self.random.choice((Priority.DEMAND, Priority.PREFETCH))
            num_blocks = self.random.randint(0, 6)
            _, digests = self.scheduler.read.missing(lease_id)
            late = self.random.choice((0, 0, *self.in_flight))
            fetched = self.apply(self.scheduler.fetches.begin(lease_id, num_blocks, urgency, late))
            assert not fetched or digests
            if fetched:
                assert self.in_flight[fetched].group_route == ("all", FETCH)
                self.seen["fetches"] += 1

    def fetch_snapshot(self) -> None:
        """Fetch the snapshot behind some cached block, also while the lease waits in line."""
        if (lease_id := self.pick(waiting=True)) is not None:
            boundaries = self.scheduler.read.boundaries(lease_id)
            num_blocks = self.random.randint(0, boundaries.cached + 1)
            fetching = self.scheduler.fetches.begin(
                lease_id, num_blocks, Priority.DEMAND, group="state"
            )
            if fetched := self.apply(fetching):
                assert 0 < num_blocks <= boundaries.cached
                assert self.in_flight[fetched].group_route == ("last", FETCH)
                self.seen["snapshot_fetches"] += 1

    def snapshot(self) -> None:
        """Save the state behind all full blocks of a lease, if that is where it stands."""
        if (lease_id := self.pick(granted=True)) is not None:
            with suppress(LeaseError):
                self.apply(
                    self.scheduler.snapshot(lease_id, self.scheduler.read.computed_tokens(lease_id))
                )

    def wait_pending(self) -> None:
        if (lease_id := self.pick(granted=False)) is None:
            return
        waits, effects = self.scheduler.wait_pending(lease_id)
        if waits:
            self.pending.add(lease_id)
        self.apply((waits, effects))

    def stop(self) -> None:
        if self.in_line and self.random.random() < 0.5:
            lease_id = self.random.choice(sorted(self.in_line))
            self.in_line.remove(lease_id)
            self.store_waits.discard(lease_id)
            self.apply(self.scheduler.stop_waiting(lease_id))
        elif self.pending:
            lease_id = self.random.choice(sorted(self.pending))
            self.pending.remove(lease_id)
            self.apply(self.scheduler.stop_wait_pending(lease_id))

    def commit(self) -> None:
        if (lease_id := self.pick(granted=True)) is not None:
            read = self.scheduler.read
            if read.onloads(lease_id):
                return
            with suppress(LeaseError):  # state cannot go back
                self.apply(self.scheduler.recompute_from(lease_id))
            last = min(read.num_tokens(lease_id), len(self.tokens[lease_id]))
            with suppress(LeaseError):  # some of these positions are being received
                self.apply(self.scheduler.commit(lease_id, self.random.randint(0, last)))
            # A lease in line with the same prefix needs fewer blocks now; the next blocks that
            # become free let it try again.
            self.apply(self.scheduler.advance())

    def move_to_peer(self) -> None:
        """Receive or send blocks of a lease, or commit what it has received."""
        if (lease_id := self.pick(granted=True)) is None:
            return
        first, ticket = self.random.randint(0, 4), bytes(16)
        with suppress(LeaseError, UsageError):
            draw = self.random.random()
            if draw < 0.6:
                verb = self.random.choice((self.scheduler.peers.receive, self.scheduler.peers.send))
                end = (first + self.random.randint(1, 3)) * BLOCK_TOKENS
                self.apply(verb(lease_id, ticket, end, first_block=first))
                self.seen["peer transfers"] += 1
            elif draw < 0.9:
                self.apply(self.scheduler.peers.commit_received(lease_id, first * BLOCK_TOKENS))
                self.seen["commit_received"] += 1
            else:
                self.apply(self.scheduler.peers.end(lease_id, ticket))

    def extend(self) -> None:
        if (lease_id := self.pick(granted=True)) is not None:
            num_tokens = self.random.randint(1, 3)
            held = self.scheduler.read.num_tokens(lease_id)
            needed = blocks_for(held + num_tokens) - blocks_for(held)
            fits = needed == self.scheduler.extendable_blocks("", needed)
            assert self.apply(self.scheduler.extend([lease_id], num_tokens)) == fits

    def extend_to_the_limit(self) -> None:
        """Extend some leases by all blocks that there are, or by one more."""
        granted = [x for x in self.tokens if self.scheduler.read.state(x) in GRANTED]
        named = self.random.sample(granted, min(len(granted), self.random.randint(1, 2)))
        if not named:
            return
        room = self.scheduler.extendable_blocks("", 1000)
        surplus = self.random.random() < 0.5
        if len(named) == 1:
            num_tokens = (room + surplus) * BLOCK_TOKENS
        else:  # two leases of which some have room in their last block
            num_tokens = self.random.randint(1, BLOCK_TOKENS * (room + 1))
            read = self.scheduler.read
            held = [read.num_tokens(x) for x in named]
            needed = sum(blocks_for(n + num_tokens) - blocks_for(n) for n in held)
            surplus = self.scheduler.extendable_blocks("", needed) < needed
        assert self.apply(self.scheduler.extend(named, num_tokens)) == (not surplus)
        self.seen["refused extension" if surplus else "extension"] += 1

    def allocate_to_the_limit(self) -> None:
        """Grant a prompt that is not cached all blocks that there are, or one more."""
        if len(self.tokens) > 7:
            return
        salt, reserve = self.random.choice("ab"), self.random.choice((None, 0, 2, 5))
        room = self.scheduler.allocatable_blocks(salt, reserve, 1000)
        blocks = room + 1 if room == 0 or self.random.random() < 0.5 else room
        tokens = np.full(blocks * BLOCK_TOKENS, self.random.randint(100, 1_000_000), np.int32)
        lease_id = self.apply(self.scheduler.match(tokens, salt=salt))
        self.tokens[lease_id] = tokens
        granted = False
        with suppress(RequestTooLarge):
            expected = self.scheduler.can_allocate(lease_id, len(tokens), reserve)
            assert expected == (blocks == room)
            granted = bool(
                self.apply(
                    self.scheduler.try_allocate(lease_id, len(tokens), reserve_blocks=reserve)
                )
            )
        assert granted == (blocks == room)
        self.seen["request" if granted else "refused request"] += 1

    def truncate(self) -> None:
        if (lease_id := self.pick(granted=True)) is not None:
            num_tokens = self.scheduler.read.num_tokens(lease_id) - self.random.randint(0, 3)
            with suppress(LeaseError):
                self.apply(self.scheduler.truncate(lease_id, num_tokens))
                self.tokens[lease_id] = self.tokens[lease_id][:num_tokens]

    def fork(self) -> None:
        if (lease_id := self.pick(granted=True)) is not None and len(self.tokens) < 8:
            with suppress(WouldBlock, LeaseError):
                fork = self.apply(self.scheduler.fork(lease_id, "child"))
                self.tokens[fork.lease_id] = self.tokens[lease_id]

    def preempt(self) -> None:
        if (lease_id := self.pick()) is not None:
            with suppress(LeaseError):
                if self.random.random() < 0.6:
                    self.apply(self.scheduler.swap_out(lease_id))
                else:
                    self.apply(self.scheduler.preempt(lease_id))

    def release(self) -> None:
        """Release a lease, also a waiting one: an effect ends the wait of its task."""
        if (lease_id := self.pick(waiting=True)) is not None:
            del self.tokens[lease_id]
            end = self.scheduler.release
            if self.has_reserves and self.random.random() < 0.3:
                end = self.scheduler.expire
            self.apply(end(lease_id))
            assert lease_id not in self.in_line | self.pending

    def begin_batch(self) -> None:
        if (lease_id := self.pick(granted=True)) is not None:
            with suppress(LeaseError):
                batch_id = self.apply(self.scheduler.begin_batch([lease_id]))
                self.batches[batch_id] = [lease_id]

    def end_batch(self) -> None:
        if self.batches:
            batch_id = self.random.choice(sorted(self.batches))
            del self.batches[batch_id]
            in_open_step = self.random.random() < 0.5
            self.apply(self.scheduler.end_batch(batch_id, in_open_step=in_open_step))

    def close_step(self) -> None:
        self.step = self.apply(self.scheduler.close_step())
        if self.random.random() < 0.7:
            self.apply(self.scheduler.finish_step(self.step))

    def transfer(self) -> None:
        ready = [
            transfer_id
            for transfer_id, plan in self.in_flight.items()
            if plan.after_step <= self.step
        ]
        if ready:
            transfer_id = self.random.choice(ready)
            if self.random.random() < 0.8:
                self.end(transfer_id)
            else:
                blocks = self.in_flight[transfer_id].num_blocks
                self.end(transfer_id, "failed", self.random.randrange(blocks))

    def evict(self) -> None:
        tier = self.random.choice(("device", "host"))
        self.apply(self.scheduler.evict(self.random.randint(1, 4), tier))

    def hold(self) -> None:
        """Pin or prefetch the cached part of a prompt."""
        if len(self.pins) > 2:
            self.apply(self.scheduler.pins.unpin(self.random.choice(sorted(self.pins)), "test"))
            return
        prompt = self.prompt()
        first = self.random.choice((2, 4, len(prompt)))  # tokens of the first part
        lease_id = self.apply(self.scheduler.match(prompt[:first], holds="whole prompt"))
        hit = self.scheduler.read.hit(lease_id).total
        grant = hit and self.apply(self.scheduler.try_allocate(lease_id, hit))
        if not grant:
            self.apply(self.scheduler.release(lease_id))
            return
        if first < len(prompt) and not self.has_state and self.config.salt_quota_blocks is None:
            self.random.choice((self.evict, self.transfer, self.release))()
            if self.apply(self.scheduler.pins.prolong(lease_id, prompt[first:])):
                self.seen["prolonged"] += 1
        until_used = self.random.random() < 0.5
        if until_used:
            self.apply(self.scheduler.pins.await_use(lease_id))
        while onloads := self.scheduler.read.onloads(lease_id):
            if self.in_flight[onloads[0]].after_step > self.step:
                self.close_step()
            self.end(onloads[0])
        (_, reason), effects = self.scheduler.pins.pin(lease_id, until_used=until_used)
        if not reason:
            self.pins.add(lease_id)
        self.apply((None, effects))

    def gate(self) -> None:
        """End a pause, after which waiting leases are granted."""
        self.apply(self.scheduler.change_gate("pause"))
        for _ in range(3):
            self.random.choice((self.match, self.allocate, self.release, self.transfer))()
        self.apply(self.scheduler.change_gate("resume"))

    def resize(self) -> None:
        """Requests in line may be too large for the smaller device."""
        blocks = self.random.choice((DEVICE_BLOCKS // 2, DEVICE_BLOCKS, DEVICE_BLOCKS))
        self.apply(self.scheduler.resize(blocks))

    def reset(self) -> None:
        if self.random.random() < 0.1:
            self.apply(self.scheduler.reset("test"))

    def purge(self) -> None:
        """Begin or end a purge of a salt."""
        salt = self.random.choice(("a", "b", ""))
        if salt in self.purged:
            self.purged.remove(salt)
            self.apply(self.scheduler.end_purge(salt))
        elif self.random.random() < 0.2:
            self.purged.add(salt)
            self.apply(self.scheduler.begin_purge(salt))

    # --- the end --------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        verbs = [
            *[self.match] * 4, *[self.allocate] * 5, *[self.try_allocate] * 3, self.wait_pending,
            self.wait_pending, self.stop, *[self.commit] * 5, self.extend, self.truncate, self.fork,
            *[self.preempt] * 2, *[self.release] * 5, self.begin_batch, *[self.end_batch] * 2,
            *[self.close_step] * 2, *[self.transfer] * 4, *[self.evict] * 3, self.hold, self.gate,
            self.reset, self.resize, self.purge,
        ]  # fmt: skip
        if self.has_stores:
            verbs += [*[self.fetch] * 4, *[self.end_store_wait] * 2]
        if self.has_state:
            verbs += [*[self.fetch_snapshot] * 4, *[self.snapshot] * 5]
        if self.has_reserves:
            verbs += [*[self.extend_to_the_limit] * 3, *[self.allocate_to_the_limit] * 3]
            verbs += [*[self.transfer] * 2, *[self.release] * 4]
        if self.has_peers:
            verbs += [*[self.move_to_peer] * 6, *[self.transfer] * 2]
        for _ in range(steps):
            verb = self.random.choice(verbs)
            self.seen[verb.__name__] += 1
            verb()
            if self.random.random() < 0.7:
                self.later()
        self.finish()

    def finish(self) -> None:
        """End all requests; only cached blocks remain."""
        for lease_id in list(self.tokens):
            del self.tokens[lease_id]
            self.apply(self.scheduler.release(lease_id))
        assert self.apply(self.scheduler.resize(DEVICE_BLOCKS))
        for pin in list(self.pins):
            self.apply(self.scheduler.pins.unpin(pin, "test"))
        while self.batches:
            self.end_batch()
        busy = True
        while busy:
            self.step = self.apply(self.scheduler.close_step())
            self.apply(self.scheduler.finish_step(self.step))
            self.later()
            busy = bool(self.in_flight)
            for transfer_id in list(self.in_flight):
                if transfer_id in self.in_flight:
                    self.end(transfer_id)
        assert (self.in_line, self.pending, self.pins) == (set(), set(), set())
        assert not self.store_waits
        read = self.scheduler.read
        assert (read.num_leases, read.num_waiting) == (0, 0)
        assert [read.quota_held(salt) for salt in ("a", "b", "")] == [0, 0, 0]
        statistics = read.statistics()
        assert (
            statistics.attention.device.free + statistics.attention.device.cached == DEVICE_BLOCKS
        )
        assert (statistics.attention.device.in_flight, statistics.attention.host.in_flight) == (
            0,
            0,
        )
        assert read.steps_finished
        self.fall_asleep()
        assert replay_transitions(self.recording.log) == len(self.recording.log.transitions)

    def fall_asleep(self) -> None:
        """With all transfers ended, both tiers can be forgotten, and nothing begins until then."""
        self.match()
        self.apply(self.scheduler.sleep(frozenset(("device", "host"))))
        (lease_id,) = self.tokens
        assert not self.apply(self.scheduler.fetches.begin(lease_id, 9, Priority.DEMAND))
        assert not self.apply(self.scheduler.store_saver.collect())
        self.apply(self.scheduler.release(lease_id))
        statistics = self.scheduler.read.statistics()
        assert (statistics.attention.host.free, statistics.attention.device.free) == (
            statistics.attention.host.blocks,
            statistics.attention.device.blocks,
        )
        self.apply(self.scheduler.wake_up())


@pytest.mark.parametrize("seed", [*range(40), 1219, 1259, 1578])
def test_random_transitions_end_each_wait_once_and_free_all_blocks(seed: int) -> None:
    Walk(seed).run(400)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_transitions_with_stores_end_each_wait_once_and_free_all_blocks(
    seed: int, has_state: bool
) -> None:
    Walk(seed, has_stores=True, has_state=has_state).run(400)


@pytest.mark.parametrize("seed", range(60))
def test_extend_and_try_allocate_succeed_up_to_the_number_of_blocks_that_is_told(seed: int) -> None:
    Walk(seed, has_reserves=True, has_peers=seed % 3 == 0).run(400)


def test_walks_reach_the_limits() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100, 110):
        walk = Walk(seed, has_reserves=True)
        walk.run(400)
        seen += walk.seen
    for name in ("extension", "refused extension", "request", "refused request"):
        assert seen[name] > 20, (name, seen)


@pytest.mark.parametrize("seed", range(40))
def test_random_transitions_with_peers_end_each_wait_once_and_free_all_blocks(seed: int) -> None:
    Walk(seed, has_stores=seed % 2 == 0, has_peers=True).run(400)


def test_walks_reach_the_effects() -> None:
    seen: Counter[str] = Counter()
    offloads = 0
    for seed in range(100, 130):
        walk = Walk(seed, has_stores=seed % 2 == 0, has_state=seed % 4 == 0, has_peers=seed >= 120)
        walk.run(400)
        seen += walk.seen
        offloads += walk.scheduler.read.statistics().attention.offloaded_blocks
    for name in (
        "submit", "granted", "turns", "refused", "resumed", "unpinned", "computed",
        "cancel", "collect", "urge", "fetches", "saves", "end_store_wait", "snapshot_fetches",
        "peer transfers", "commit_received", "moved", "second report refused", "prolonged",
    ):  # fmt: skip
        assert seen[name] > 0, (name, seen)
    assert offloads > 0
