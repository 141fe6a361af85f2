"""``can_allocate`` is True exactly when an attempt would succeed, and changes nothing; and
``extendable_blocks`` and ``allocatable_blocks`` are the numbers up to which attempts succeed.

Random walks over one core in small pools: every write policy, both eviction policies, reserves,
shares of salts, recurrent state, windows, swapped leases, transfers that end late or fail,
unfinished steps.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv._native import Core, Outcome, SavePolicy
from aiokv.errors import LeaseError, RequestTooLarge, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

BT = 2


class Walk:
    """One core whose attempts are made as the engine makes them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        choice = self.random.choice
        self.policy = choice(
            [SavePolicy.NONE, SavePolicy.WRITE_THROUGH, SavePolicy.NTH_USE]
            + 4 * [SavePolicy.WRITE_BACK]
        )
        sides = choice(["none", "none", "none", "state", "window"])
        self.core = Core(
            block_tokens=BT,
            device_blocks=self.random.randint(4, 12),
            host_blocks=choice([0, 1, 2, 3, 5, 16]),
            reserve_blocks=choice([0, 0, 1, 2]),
            write_policy=self.policy,
            write_uses=choice([1, 2]),
            low_watermark_blocks=choice([0, 0, 2]),
            history_blocks=choice([0, 3, 50]),
            min_onload_blocks=choice([0, 0, 2]),
            eviction=choice(["lru", "lru", "adaptive"]),
            state_slots=2 if sides == "state" else 0,
            windows=[(6, 4, 2, 0, 0)] if sides == "window" else [],
            shares=choice([{}, {"a": 0.5, "b": 0.3}, {"": 0.33, "a": 0.34, "b": 0.33}]),
        )
        self.has_windows = sides == "window"
        self.has_sides = sides != "none"
        self.saves = self.policy != SavePolicy.NONE
        self.saves_before_extend = self.policy == SavePolicy.WRITE_BACK
        self.leases: list[int] = []
        self.salts: dict[int, str] = {}  # by lease
        self.transfers: list[int] = []
        self.step = 0
        self.seen: Counter[str] = Counter()

    def some_lease(self, *, granted: bool) -> int | None:
        among = [x for x in self.leases if self.core.is_granted(x) == granted]
        return self.random.choice(among) if among else None

    def match(self) -> None:
        tokens = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 14))]
        if len(self.leases) < 8:
            self.add_lease(tokens, self.context())

    def add_lease(self, tokens: list[int], context: str) -> int:
        lease_id = self.core.match(np.array(tokens, np.int32), context)[0]
        self.leases.append(lease_id)
        self.salts[lease_id] = salt_of(context)
        return lease_id

    def context(self) -> str:
        return self.random.choice(["", "", "1:a", "1:b"])

    def prefer(self) -> None:
        prompt = np.ones(self.random.randint(1, 12), np.int32)
        verb = self.random.choice(["retain", "retain", "demote", "forget"])
        more = (self.random.randint(0, 3), self.step + 2) if verb == "retain" else ()
        getattr(self.core, verb)(prompt, self.context(), [], *more)
        self.core.end_retentions(self.step)

    def attempt(self, verb: Callable[[], int], wanted: int, saves: bool) -> bool:
        """Grant or extend as the engine does."""
        if verb():
            return True
        if not saves:
            return False
        while True:
            if transfer_id := self.core.take_write_backs(wanted):
                self.transfers.append(transfer_id)
                return False
            evicted = self.core.statistics().attention.device.evicted_blocks
            if verb():
                self.seen["later attempt"] += 1
                return True
            if not self.core.must_look_further():
                return False
            if self.core.statistics().attention.device.evicted_blocks == evicted:
                if wanted >= self.core.device_blocks:
                    return False
                wanted = min(2 * wanted, self.core.device_blocks)

    def allocate(self) -> None:
        lease_id = self.some_lease(granted=False)
        if lease_id is None:
            return
        num_tokens = max(1, self.core.computed_tokens(lease_id)) + self.random.randint(0, 9)
        before = self.core.blocks(), counted(self.core)
        try:
            expected = self.core.can_allocate(lease_id, num_tokens, self.saves)
        except (RequestTooLarge, LeaseError) as error:
            with pytest.raises(type(error)):
                self.core.allocate(lease_id, num_tokens)
            return
        assert self.core.violations() == []
        if not self.core.is_swapped(lease_id):
            assert (self.core.blocks(), counted(self.core)) == before
        free, evictable, _ = self.core.room()
        granted = self.attempt(
            lambda: self.core.allocate(lease_id, num_tokens), -(-num_tokens // BT), self.saves
        )
        assert granted == expected
        self.seen["granted" if granted else "refused"] += 1
        self.seen["overestimate"] += not granted and free + evictable >= -(-num_tokens // BT)
        if granted:
            self.transfers += [t for t in self.core.onloads(lease_id) if t not in self.transfers]

    def allocate_uncached(self) -> None:
        """Grant a prompt that is not cached all blocks that there are, or one more."""
        context = self.context()
        forecast = partial(self.core.allocatable_blocks, saves=self.saves, salt=salt_of(context))
        blocks = forecast(self.core.device_blocks) + self.random.randint(0, 1)
        if len(self.leases) >= 8 or self.has_sides or not 0 < blocks <= self.core.device_blocks:
            return
        fits = forecast(blocks) == blocks
        lease_id = self.add_lease([2 + self.random.randrange(1_000)] * 2, context)
        granted = self.attempt(
            lambda: self.core.allocate(lease_id, blocks * BT, 0), blocks, self.saves
        )
        assert granted == fits
        self.seen["uncached granted" if granted else "uncached refused"] += 1

    def commit(self) -> None:
        if (lease_id := self.some_lease(granted=True)) is not None:
            limit = min(self.core.num_tokens(lease_id), self.core.max_extend_tokens(lease_id))
            self.refusable(self.core.commit, lease_id, self.random.randint(0, limit), self.step)

    def grow(self) -> None:
        if (lease_id := self.some_lease(granted=True)) is None:
            return
        before = self.core.blocks(), counted(self.core)
        salt = self.salts[lease_id]
        room = self.core.extendable_blocks(self.core.device_blocks, self.saves, salt)
        assert (self.core.blocks(), counted(self.core)) == before
        held = self.core.num_tokens(lease_id)
        if self.has_windows or self.random.random() < 0.3:
            num_tokens = self.random.randint(1, 4)
        else:  # to the limit, or by one more block
            num_tokens = -held % BT + (room + self.random.randint(0, 1)) * BT
        needed = -(-(held + num_tokens) // BT) - -(-held // BT)
        fits = self.core.extendable_blocks(needed, self.saves, salt) == needed
        with contextlib.suppress(LeaseError):
            grown = self.attempt(
                lambda: self.core.extend([lease_id], num_tokens), needed, self.saves_before_extend
            )
            assert self.has_windows or grown == fits
            assert self.has_windows or grown or needed > room
            self.seen["grown" if grown else "not grown"] += 1

    def give_back(self) -> None:
        if self.leases:
            lease_id = self.leases.pop(self.random.randrange(len(self.leases)))
            self.core.release(lease_id, self.step)

    def retract(self) -> None:
        if (lease_id := self.some_lease(granted=True)) is not None:
            self.core.retract(lease_id, self.step)

    def swap(self) -> None:
        lease_id = self.some_lease(granted=True)
        if lease_id is None or self.core.saving(lease_id) or self.core.swap_transfer(lease_id):
            return
        self.refusable(self.core.swap_out, lease_id, self.step)
        if transfer_id := self.core.swap_transfer(lease_id):
            self.transfers.append(transfer_id)

    def save(self) -> None:
        if transfer_id := self.core.take_backups():
            self.transfers.append(transfer_id)

    def end_transfer(self) -> None:
        if self.transfers:
            transfer_id = self.transfers.pop(self.random.randrange(len(self.transfers)))
            outcome = Outcome.FAILED if self.random.random() < 0.1 else Outcome.DONE
            self.core.complete(transfer_id, outcome, 0)

    def next_step(self) -> None:
        self.core.finish_step(self.step)
        self.step += self.random.randint(0, 1)

    def snapshot(self) -> None:
        if (lease_id := self.some_lease(granted=True)) is not None:
            position = self.core.computed_tokens(lease_id)
            self.refusable(self.core.snapshot, lease_id, position, self.step)

    @staticmethod
    def refusable(verb, *args) -> None:
        with contextlib.suppress(LeaseError, UsageError):
            verb(*args)

    def run(self, steps: int) -> None:
        verbs = 4 * [self.match, self.commit, self.end_transfer] + 6 * [self.allocate]
        verbs += [self.grow, self.give_back, self.give_back, self.retract, self.swap, self.swap]
        verbs += [self.save, self.next_step, self.snapshot, self.prefer, self.allocate_uncached]
        for _ in range(steps):
            self.random.choice(verbs)()
        assert self.core.violations() == []


def salt_of(context: str) -> str:
    return context.removeprefix("1:")


def counted(core: Core) -> tuple[int, ...]:
    s = core.statistics()
    device, host = s.attention.device, s.attention.host
    return (device.free, device.leased, host.free, device.evicted_blocks, s.grants)


def test_forecasts_equal_attempts():
    seen: Counter[str] = Counter()
    for seed in range(1000):
        walk = Walk(seed)
        walk.run(160)
        seen += walk.seen
    assert seen["granted"] > 1000
    assert seen["refused"] > 1000
    assert seen["overestimate"] > 100, "free + evictable overestimates"
    assert min(seen["grown"], seen["not grown"]) > 300
    assert min(seen["uncached granted"], seen["uncached refused"]) > 100
    assert seen["later attempt"] > 2, "the host was full, so blocks were dropped unsaved"
