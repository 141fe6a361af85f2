"""Sliding-window groups among leases, eviction and swaps, against a naive model, bytes simulated.

What every id of a group holds is kept position by position: the tokens up to that position. Before
each step the model reads the whole window of every position that it computes, and finds exactly its
tokens there (I3, I4). After every rule ``violations()`` is empty (I1: ids of a group are free, a
node's, a lease's or a move's), and a hit is the deepest boundary with a whole window before it, of
the windows that the model finds by their contents. Blocks that moves copy to host memory and back
keep their contents; sources and targets of a move are not written by anything else (I3).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv._native import Core, EventStream, MoveRoute, Outcome, SavePolicy
from aiokv.base.plan import ID_DTYPE
from aiokv.errors import ConfigError, LeaseError, RequestTooLarge, UsageError
from tests.property.event_subscriber import MAX_EVENT_BLOCKS

MAX_LEASES = 4
POLICIES = [
    SavePolicy.WRITE_THROUGH,
    SavePolicy.NTH_USE,
    SavePolicy.WRITE_BACK,
]
pick = st.integers(0, 7)
prompts = st.one_of(
    st.integers(3, 14).map(lambda n: [0] * n), st.lists(st.integers(0, 1), min_size=1, max_size=14)
)
sinks = st.sampled_from([0, 0, 1, 3, 5])
windows = st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 6), sinks)


class WindowMove:
    """Blocks of a group on their way, and the contents that the sources had when it began."""

    def __init__(self, machine: WindowMachine, transfer_id: int) -> None:
        route, group, sources, targets, _ = machine.core.move(transfer_id)
        self.ids = list(
            zip(*(np.frombuffer(ids, ID_DTYPE).tolist() for ids in (sources, targets)), strict=True)
        )
        tiers = machine.bytes[group], machine.host_bytes[group]
        self.is_save = route == MoveRoute.TO_HOST
        self.source, self.target = tiers if self.is_save else reversed(tiers)
        self.places = range(machine.bt)
        self.begun = self.read()
        self.erase(0)

    def read(self) -> list[list[Any]]:
        return [[self.source.get((block, p)) for p in self.places] for block, _ in self.ids]

    def erase(self, first: int) -> None:
        for _, block in self.ids[first:]:
            for place in self.places:
                self.target[block, place] = "garbage"

    def end(self, good: int) -> None:
        assert self.read() == self.begun, "the sources were overwritten (I3)"
        for (_, block), contents in zip(self.ids[:good], self.begun, strict=False):
            for place in self.places:
                assert self.target[block, place] == "garbage", "the targets were reused (I3)"
                self.target[block, place] = contents[place]


class Caller:
    def __init__(self, lease_id: int, tokens: list[int]) -> None:
        self.id = lease_id
        self.tokens = tokens
        self.computed = 0
        self.failed = False


class WindowMachine(RuleBasedStateMachine):
    @initialize(
        block_tokens=st.integers(1, 3),
        device_blocks=st.integers(8, 16),
        host_blocks=st.sampled_from([0, 12]),
        groups=st.lists(windows, min_size=1, max_size=2),
        state_slots=st.sampled_from([0, 0, 3]),
        host_windows=st.lists(st.sampled_from([0, 2, 5, 9]), min_size=2, max_size=2),
        policy=st.sampled_from(POLICIES),
    )
    def begin(
        self,
        block_tokens: int,
        device_blocks: int,
        host_blocks: int,
        groups: list[tuple[int, int, int, int]],
        state_slots: int,
        host_windows: list[int],
        policy: SavePolicy,
    ) -> None:
        self.bt = block_tokens
        self.windows = [window for window, _, _, _ in groups]
        self.steps = [step for _, step, _, _ in groups]
        self.sinks = [sink for _, _, _, sink in groups]
        least = [
            -(-sink // block_tokens) + -(-(window - 1 + step) // block_tokens) + 1
            for window, step, _, sink in groups
        ]
        sizes = [needed + more for needed, (_, _, more, _) in zip(least, groups, strict=True)]
        self.sizes = sizes
        self.has_state = state_slots > 0
        self.on_host = [blocks if host_blocks else 0 for blocks in host_windows[: len(groups)]]
        self.core = Core(
            block_tokens=block_tokens,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            write_policy=policy if host_blocks else SavePolicy.NONE,
            state_slots=state_slots,
            history_blocks=device_blocks // 2,
            windows=list(
                zip(sizes, self.windows, self.steps, self.sinks, self.on_host, strict=True)
            ),
        )
        self.events = EventStream(self.core, MAX_EVENT_BLOCKS)  # violations() compares it
        self.events.drain(1)
        self.bytes: list[dict[tuple[int, int], Any]] = [{} for _ in groups]
        self.host_bytes: list[dict[tuple[int, int], Any]] = [{} for _ in groups]
        self.moves: dict[int, WindowMove] = {}  # of window blocks, in flight
        self.callers: list[Caller] = []
        self.step = 1

    # --- the model ----------------------------------------------------------------------------

    def read_window(self, caller: Caller, position: int) -> None:
        """Run the attention of every group for one position."""
        for g, window in enumerate(self.windows):
            table = self.core.block_table(caller.id, g)
            first = max(position - window + 1, 0)
            sink = range(min(self.sinks[g], first))
            for seen in (*sink, *range(first, position)):
                block, place = divmod(seen, self.bt)
                held = self.bytes[g].get((int(table[block]), place))
                assert held == tuple(caller.tokens[: seen + 1]), (g, position, seen)

    def write(self, caller: Caller, position: int) -> None:
        for g in range(len(self.windows)):
            block, place = divmod(position, self.bt)
            id_ = int(self.core.block_table(caller.id, g)[block])
            assert id_ >= 0
            self.bytes[g][id_, place] = tuple(caller.tokens[: position + 1])

    def among(self, *, granted: bool) -> list[Caller]:
        return [
            c
            for c in self.callers
            if self.core.is_granted(c.id) == granted and not self.core.swap_transfer(c.id)
        ]

    # --- leases -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.callers) < MAX_LEASES)
    @rule(tokens=prompts, stay=st.booleans(), chunk=st.integers(1, 5), saves=st.booleans())
    def serve(self, tokens: list[int], stay: bool, chunk: int, saves: bool) -> None:
        self.match(tokens)
        caller = self.callers[-1]
        self.allocate_for(caller)
        self.end_transfers()
        while self.core.is_granted(caller.id) and caller.computed < len(tokens):
            self.compute_for(caller, chunk)
        if not stay:
            self.release(len(self.callers) - 1)
        if saves:
            self.close_step()
            self.back_up()
            self.save()
            for transfer_id in list(self.moves):
                self.complete_one(transfer_id, Outcome.DONE)

    @precondition(lambda self: len(self.callers) < MAX_LEASES)
    @rule(tokens=prompts, other=prompts, chunk=st.integers(1, 5))
    def serve_again_after_others(self, tokens: list[int], other: list[int], chunk: int) -> None:
        for prompt in (tokens, [2, *other], [3, *other]):
            self.serve(prompt, stay=False, chunk=chunk, saves=True)
        self.match(tokens)
        self.allocate_for(self.callers[-1])

    @precondition(lambda self: len(self.callers) < MAX_LEASES)
    @rule(tokens=prompts)
    def match(self, tokens: list[int]) -> None:
        lease_id, *_ = self.core.match(np.array(tokens, np.int32))
        self.callers.append(Caller(lease_id, tokens))

    @precondition(lambda self: self.among(granted=False))
    @rule(which=pick)
    def allocate(self, which: int) -> None:
        among = self.among(granted=False)
        self.allocate_for(among[which % len(among)])

    def allocate_for(self, caller: Caller) -> None:
        swapped = self.core.is_swapped(caller.id)
        kept = self.core.computed_tokens(caller.id)
        try:
            expected = self.core.can_allocate(caller.id, len(caller.tokens))
            granted = self.core.allocate(caller.id, len(caller.tokens))
        except RequestTooLarge:
            return
        assert bool(granted) == expected
        if not granted:
            return
        for transfer_id in self.core.onloads(caller.id):
            self.note_move(transfer_id)
        caller.failed = False
        caller.computed = self.core.cached_tokens(caller.id)
        assert caller.computed <= (kept if swapped else len(caller.tokens) - 1)

    def note_move(self, transfer_id: int) -> None:
        is_new = self.core.is_move(transfer_id) and transfer_id not in self.moves
        if is_new and self.core.move(transfer_id)[1] >= 0:
            self.moves[transfer_id] = WindowMove(self, transfer_id)

    @precondition(lambda self: self.among(granted=True))
    @rule(which=pick, more=st.integers(1, 6))
    def compute(self, which: int, more: int) -> None:
        among = self.among(granted=True)
        self.compute_for(among[which % len(among)], more)

    def compute_for(self, caller: Caller, more: int) -> None:
        core = self.core
        if caller.failed or core.onloads(caller.id):
            return
        reach = core.max_extend_tokens(caller.id)
        assert reach >= min(caller.computed + min(self.steps), len(caller.tokens)), "progress"
        if reach < len(caller.tokens):
            with pytest.raises(LeaseError):
                core.commit(caller.id, reach + 1, self.step)
        end = min(caller.computed + more, reach)
        for position in range(caller.computed, end):
            self.read_window(caller, position)
            self.write(caller, position)
        caller.computed = end
        before = [core.block_table(caller.id, g) for g in range(len(self.windows))]
        core.commit(caller.id, end, self.step)
        for g, table in enumerate(before):
            after = core.block_table(caller.id, g)
            moved = [i for i in range(len(after)) if after[i] != table[i]]
            assert all(table[i] == -1 or after[i] == -1 for i in moved), "ids do not change"
        if self.has_state and end and end % self.bt == 0:
            core.snapshot(caller.id, end, self.step)

    @precondition(lambda self: self.callers)
    @rule(which=pick)
    def release(self, which: int) -> None:
        caller = self.callers.pop(which % len(self.callers))
        self.core.release(caller.id, self.step)
        self.release_nothing_but_transfers()

    @precondition(lambda self: self.among(granted=True))
    @rule(which=pick, swap=st.booleans())
    def preempt(self, which: int, swap: bool) -> None:
        among = self.among(granted=True)
        caller = among[which % len(among)]
        core = self.core
        if not swap:
            core.retract(caller.id, self.step)
            self.release_nothing_but_transfers()
            caller.failed = False
        elif not (core.onloads(caller.id) or caller.failed or core.saving(caller.id)):
            core.swap_out(caller.id, self.step)

    def release_nothing_but_transfers(self) -> None:
        for transfer_id in self.core.take_abandoned():
            if transfer_id not in self.moves or transfer_id % 2:  # the others move already
                self.complete_one(transfer_id, Outcome.CANCELLED)

    @precondition(lambda self: self.among(granted=True))
    @rule(which=pick, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def extend(self, which: int, tokens: list[int]) -> None:
        among = self.among(granted=True)
        caller = among[which % len(among)]
        if self.core.extend([caller.id], len(tokens)):
            self.core.append(caller.id, np.array(tokens, np.int32))
            caller.tokens = caller.tokens + tokens

    @precondition(lambda self: self.among(granted=True))
    @rule(which=pick, back=st.integers(0, 5))
    def truncate(self, which: int, back: int) -> None:
        among = self.among(granted=True)
        caller = among[which % len(among)]
        target = max(len(caller.tokens) - back, 1)
        if caller.failed:
            return
        if target < max(caller.computed, self.core.computed_tokens(caller.id)):
            with pytest.raises(LeaseError):
                self.core.truncate(caller.id, target, self.step)
            return
        self.core.truncate(caller.id, target, self.step)
        caller.tokens = caller.tokens[:target]

    # --- everything else ------------------------------------------------------------------------

    def end_transfers(self, outcome: Outcome = Outcome.DONE) -> None:
        for caller in list(self.callers):
            for transfer_id in [*self.core.onloads(caller.id), self.core.swap_transfer(caller.id)]:
                if transfer_id and transfer_id in (
                    *self.core.onloads(caller.id),
                    self.core.swap_transfer(caller.id),
                ):
                    self.complete_one(transfer_id, outcome)

    def complete_one(self, transfer_id: int, outcome: Outcome, first_bad: int = 0) -> None:
        joined = [c for c in self.callers if transfer_id in self.core.onloads(c.id)]
        if move := self.moves.pop(transfer_id, None):
            move.end({Outcome.DONE: len(move.ids), Outcome.FAILED: first_bad}.get(outcome, 0))
        self.core.complete(transfer_id, outcome, first_bad)
        if outcome == Outcome.FAILED:
            for caller in joined:
                caller.failed = True
                assert self.core.cached_tokens(caller.id) == 0

    @rule(outcome=st.sampled_from([Outcome.DONE] * 4 + [Outcome.FAILED]))
    def complete(self, outcome: Outcome) -> None:
        self.end_transfers(outcome)

    @precondition(lambda self: any(self.on_host))
    @rule()
    def save(self) -> None:
        while transfer_id := self.core.take_group_save():
            self.note_move(transfer_id)

    @precondition(lambda self: self.moves)
    @rule(
        which=pick,
        outcome=st.sampled_from([Outcome.DONE] * 4 + [Outcome.FAILED]),
        first_bad=st.integers(0, 2),
    )
    def end_move(self, which: int, outcome: Outcome, first_bad: int) -> None:
        self.complete_one(sorted(self.moves)[which % len(self.moves)], outcome, first_bad)

    @rule()
    def back_up(self) -> None:
        transfer_id = self.core.take_backups()
        if transfer_id:
            self.core.complete(transfer_id, Outcome.DONE)

    @rule()
    def close_step(self) -> None:
        self.core.finish_step(self.step)
        self.step += 1

    @rule(blocks=st.integers(1, 4), on_host=st.booleans())
    def evict(self, blocks: int, on_host: bool) -> None:
        (self.core.evict_host if on_host else self.core.evict_device)(blocks)

    @precondition(lambda self: not self.callers and not self.moves)
    @rule()
    def forget_device(self) -> None:
        with suppress(UsageError):  # the table of a released lease is still being swapped
            self.core.forget_device()

    @rule(tokens=prompts, verb=st.sampled_from(["demote", "forget"]))
    def prefer(self, tokens: list[int], verb: str) -> None:
        getattr(self.core, verb)(np.array(tokens, np.int32), "", [])

    @rule(purges=st.booleans())
    def reset(self, purges: bool) -> None:
        self.core.purge("") if purges else self.core.reset()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.violations() == []
        for caller in self.callers:
            caller.computed = min(caller.computed, self.core.computed_tokens(caller.id))
            if self.core.is_granted(caller.id) and not caller.failed:
                if not self.core.onloads(caller.id) and caller.computed < len(caller.tokens):
                    self.read_window(caller, caller.computed)
                ids = max(
                    int((self.core.block_table(caller.id, g) >= 0).sum())
                    for g in range(len(self.windows))
                )
                assert ids <= max(self.sizes)


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=max(settings().max_examples, 150))


class Cache:
    """One group, 2-token blocks; hits are compared with windows that are listed by hand."""

    def __init__(
        self, *, device_blocks: int, window_tokens: int, step_tokens: int, sink_tokens: int = 0
    ) -> None:
        window = (device_blocks, window_tokens, step_tokens, sink_tokens, 0)
        self.core = Core(block_tokens=2, device_blocks=64, windows=[window])

    def granted(self, tokens: list[int]) -> int:
        lease_id, *_ = self.core.match(np.array(tokens, np.int32))
        assert self.core.allocate(lease_id, len(tokens)) == 1
        return lease_id

    def serve(self, tokens: list[int], chunk: int = 2) -> int:
        """Return the number of blocks hit."""
        lease_id = self.granted(tokens)
        computed = cached = self.core.cached_tokens(lease_id)
        while computed < len(tokens):
            computed = min(computed + chunk, len(tokens))
            self.core.commit(lease_id, computed)
        self.core.release(lease_id)
        assert self.core.violations() == []
        return cached // 2

    def hit(self, tokens: list[int]) -> int:
        lease_id, blocks, _ = self.core.match(np.array(tokens, np.int32))
        self.core.release(lease_id)
        return blocks

    def table(self, lease_id: int) -> list[int]:
        return [int(id_ >= 0) for id_ in self.core.block_table(lease_id, 0)]


def window_blocks(core: Core) -> tuple[int, int, int]:
    """Return the numbers of free, cached and set aside blocks of the first window group."""
    group = core.group_statistics(0)
    return group.device.free, group.device.cached, group.set_aside_blocks


def test_blocks_behind_the_window_are_freed_and_indices_do_not_change():
    cache = Cache(device_blocks=6, window_tokens=5, step_tokens=2)
    tokens = list(range(20))
    lease_id = cache.granted(tokens)
    assert cache.table(lease_id) == [1] * 4 + [0] * 6
    assert cache.core.max_extend_tokens(lease_id) == 8
    for end, expected in [
        (2, [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]),
        (6, [0, 1, 1, 1, 1, 0, 0, 0, 0, 0]),  # position 6 sees 2 to 6
        (7, [0, 1, 1, 1, 1, 0, 0, 0, 0, 0]),
        (8, [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]),
    ]:
        cache.core.commit(lease_id, end)
        assert cache.table(lease_id) == expected, end
        assert len(cache.core.block_table(lease_id)) == 10, "other layers keep all"
    assert cache.core.violations() == []
    cache.core.release(lease_id)


def test_blocks_behind_a_window_of_four_blocks_are_freed_exactly():
    """Blocks of 16, a window of 64: after 512 positions those before 448 are gone."""
    core = Core(block_tokens=16, device_blocks=64, windows=[(64, 65, 512, 0, 0)])
    lease_id, *_ = core.match(np.arange(512, dtype=np.int32))
    core.allocate(lease_id, 512)
    core.commit(lease_id, 511)
    assert (core.block_table(lease_id, 0) >= 0).sum() == 5, "position 511 sees 447"
    core.commit(lease_id, 512)
    table = core.block_table(lease_id, 0)
    assert (len(table), (table >= 0).nonzero()[0].tolist()) == (32, [28, 29, 30, 31])
    core.commit(lease_id, 512)
    assert (core.block_table(lease_id, 0) == table).all(), "nothing new"
    core.release(lease_id)
    assert core.violations() == []


def test_a_hit_needs_a_whole_window_before_its_end():
    cache = Cache(device_blocks=8, window_tokens=5, step_tokens=2)  # a window is 2 blocks
    tokens = list(range(17))
    assert cache.serve(tokens) == 0
    assert [cache.hit([*tokens[:end], 99]) for end in (2, 4, 6)] == [0, 0, 3], (
        "the first block of the group was evicted for the ninth"
    )
    assert cache.serve(tokens) == 8
    assert cache.serve([*tokens[:8], 99, 99]) == 4
    other = list(range(100, 117))
    assert cache.serve(other) == 0
    assert cache.serve([*tokens[:4], 99]) == 0, "their windows went first"
    assert cache.serve(tokens) == 2, "as far as those that were computed again"


def test_reserved_window_blocks_let_every_lease_continue():
    cache = Cache(device_blocks=8, window_tokens=4, step_tokens=2)  # 4 blocks a lease
    first, second = (cache.granted([seed, *range(30)]) for seed in (1, 2))
    third, *_ = cache.core.match(np.arange(50, dtype=np.int32))
    assert cache.core.allocate(third, 20) == 0, "no block is left to reserve"
    assert window_blocks(cache.core) == (0, 0, 8)
    for end in range(2, 31, 2):
        for lease_id in (first, second):
            cache.core.commit(lease_id, end)
            assert cache.core.violations() == []
    cache.core.release(first)
    assert cache.core.allocate(third, 20) == 1
    for lease_id in (second, third):
        cache.core.release(lease_id)
    assert cache.core.violations() == []


def test_the_blocks_of_the_sink_stay_while_the_window_moves_on():
    cache = Cache(device_blocks=7, window_tokens=5, step_tokens=2, sink_tokens=3)
    tokens = list(range(20))
    lease_id = cache.granted(tokens)
    sink = cache.core.block_table(lease_id, 0)[:2].tolist()
    assert window_blocks(cache.core) == (1, 0, 6), "a sink of 2, a window and a step of 4"
    for end, expected in [
        (2, [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]),
        (8, [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]),  # position 8 sees 4 to 8
        (10, [1, 1, 0, 1, 1, 1, 1, 0, 0, 0]),
        (12, [1, 1, 0, 0, 1, 1, 1, 1, 0, 0]),
        (16, [1, 1, 0, 0, 0, 0, 1, 1, 1, 1]),
        (20, [1, 1, 0, 0, 0, 0, 0, 0, 1, 1]),
    ]:
        cache.core.commit(lease_id, end)
        assert cache.table(lease_id) == expected, end
        assert cache.core.block_table(lease_id, 0)[:2].tolist() == sink
        assert cache.core.violations() == []
    cache.core.release(lease_id)
    assert cache.core.violations() == []


def test_a_sink_of_two_blocks_is_kept_exactly():
    """Blocks of 16, a sink of 32, a window of 64: 26 blocks, [2, 28), go back."""
    core = Core(block_tokens=16, device_blocks=64, windows=[(64, 65, 512, 32, 0)])
    lease_id, *_ = core.match(np.arange(512, dtype=np.int32))
    core.allocate(lease_id, 512)
    core.commit(lease_id, 511)
    assert (core.block_table(lease_id, 0) >= 0).sum() == 7, "position 511 sees 447"
    core.commit(lease_id, 512)
    table = core.block_table(lease_id, 0)
    assert (len(table), (table < 0).nonzero()[0].tolist()) == (32, list(range(2, 28)))
    core.release(lease_id)
    assert core.violations() == []


def test_a_hit_needs_the_blocks_of_the_sink():
    cache = Cache(device_blocks=12, window_tokens=5, step_tokens=2, sink_tokens=4)
    tokens = list(range(17))
    assert cache.serve(tokens) == 0
    assert [cache.hit([*tokens[:end], 99]) for end in (2, 4, 8, 16)] == [1, 2, 4, 8]
    assert cache.serve(tokens) == 8
    lease_id = cache.granted(tokens)
    held = cache.table(lease_id)
    assert held == [1, 1, 0, 0, 0, 0, 1, 1, 1], "the sink, the window, and what is computed next"
    other = cache.granted(list(range(100, 109)))
    for end in range(2, 10, 2):
        cache.core.commit(other, end)
    cache.core.commit(lease_id, 17)
    cache.core.release(lease_id)
    cache.core.release(other)
    assert cache.core.violations() == []
    assert cache.hit([*tokens[:16], 99]) == 8, "used last, so it is whole"
    for seed in (200, 300, 400):
        cache.serve(list(range(seed, seed + 9)))
    assert [cache.hit([*tokens[:end], 99]) for end in (2, 4, 16)] == [0, 0, 0], "the sink is gone"


@pytest.mark.parametrize(("sink_tokens", "hit_blocks"), [(0, 5), (2, 0)])
def test_window_without_its_sink_is_hit_only_when_sink_tokens_is_zero(
    sink_tokens: int, hit_blocks: int
):
    core = Core(block_tokens=2, device_blocks=64, windows=[(9, 3, 0, sink_tokens, 0)])
    tokens = np.arange(11, dtype=np.int32)

    def serve(length: int) -> None:
        lease_id, *_ = core.match(tokens[:length], reads=False)
        core.allocate(lease_id, length)
        core.commit(lease_id, length)
        core.release(lease_id)

    serve(5)  # indexes blocks 0 and 1, and
    serve(11)  # blocks 2 to 4, which are newer than the first block: that is not evicted last
    assert window_blocks(core)[:2] == (4, 5)
    hog, *_ = core.match(np.arange(100, 112, dtype=np.int32))
    assert core.allocate(hog, 12) == 1
    assert window_blocks(core)[:2] == (0, 3), "blocks 0 and 1 have no window ids now"
    lease_id, hit, _ = core.match(tokens)
    assert hit == hit_blocks
    core.release(lease_id)
    core.release(hog)
    assert core.violations() == []


def test_impossible_windows_are_refused():
    with pytest.raises(ConfigError, match="need 4 blocks"):
        Core(block_tokens=2, device_blocks=9, windows=[(3, 4, 2, 0, 0)])
    with pytest.raises(ConfigError, match=r"a sink of 5 tokens, .* need 7 blocks; the group has 6"):
        Core(block_tokens=2, device_blocks=9, windows=[(6, 4, 2, 5, 0)])
    with pytest.raises(ConfigError, match="need 2147483652 blocks"):
        Core(block_tokens=2, device_blocks=9, windows=[(6, 4, 2, 2**32 - 1, 0)])
    cache = Cache(device_blocks=8, window_tokens=4, step_tokens=2)
    lease_id = cache.granted([1, 2, 3])
    with pytest.raises(UsageError, match="fork"):
        cache.core.fork(lease_id)
    with pytest.raises(UsageError, match="group"):
        cache.core.block_table(lease_id, 1)
    cache.core.release(lease_id)
