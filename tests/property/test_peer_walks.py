"""Random walks of CacheScheduler with peers, whose transfers write and read simulated memory.

A receive writes wrong bytes into its blocks at random until its report; the positions of a send are
read when it ends. After each transition, each cached block has the bytes of its own tokens (I4,
I11), and ``violations()`` is empty. The blocks, the recurrent state and the windows of a lease are
checked whenever the lease computes. In walks with steps, compute writes when its step has finished.

Bytes depend on the versions of the weights that have computed the positions up to them, too. While
the weights are updated, leases go on; all cached blocks are of the present version alone.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import CacheConfig, LeaseState, WindowGroup
from aiokv.base.groups import ATTENTION, STATE
from aiokv.base.plan import (
    PEER_ROUTES,
    RECEIVE,
    SEND,
    ZEROS,
    TransferReport,
)
from aiokv.errors import AiokvError, InternalError, LeaseError
from aiokv.scheduler.effects import NO_EFFECTS
from aiokv.scheduler.scheduler import CacheScheduler
from aiokv.testing.transitions import Recording, replay_transitions
from tests.property.event_subscriber import MAX_EVENT_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.base.plan import Route, TransferPlan
    from aiokv.scheduler.effects import Effects, Moved

BLOCK_TOKENS = 3
DEVICE_BLOCKS = 20
WINDOWS = {
    "near": WindowGroup(window_tokens=4, device_blocks=16),
    "far": WindowGroup(window_tokens=8, device_blocks=24, sink_tokens=2),
}
WRONG = -1
DEVICE_VALID, HOST_VALID = 1, 4

Bytes = tuple[int, ...]  # of a block: one word per position


def words(tokens: list[int], versions: list[int], start: int, stop: int) -> list[int]:
    """Return what positions hold: a function of all tokens up to each, and of their versions."""
    return [
        hash((*tokens[: position + 1], None, *versions[: position + 1]))
        for position in range(start, stop)
    ]


def pool_of(plan: TransferPlan, tier: str) -> str:
    """Return the key of the memory of a plan's blocks in a tier."""
    return tier if plan.group == ATTENTION else plan.group


def state_word(tokens: list[int], versions: list[int], stop: int) -> int:
    """Return what a state slot holds after the first ``stop`` positions of a prompt."""
    return hash(("state", *tokens[:stop], None, *versions[:stop]))


class Grant:
    """Versions of the weights of what a lease holds.

    Attributes:
        weights: version of the cached blocks, and of those that it receives.
        cached: positions of the hit, before onloads have failed.
        computed: versions that have computed the first positions; those behind were received.
    """

    def __init__(self, weights: int, cached: int) -> None:
        self.weights = weights
        self.cached = cached
        self.computed = [weights] * cached

    def advance(self, start: int, stop: int, weights: int) -> None:
        """Note that positions from ``start`` on were computed."""
        self.computed = self.versions(start) + [weights] * (stop - start)

    def versions(self, stop: int) -> list[int]:
        """Return the versions of the first positions, which are computed or received."""
        return (self.computed + self.received(stop - len(self.computed)))[:stop]

    def received(self, stop: int) -> list[int]:
        """Return the versions of the first positions as a peer sends them."""
        return [self.weights] * stop

    def copy(self) -> Grant:
        copied = Grant(self.weights, 0)
        copied.computed = list(self.computed)
        return copied


class PeerWalk:
    def __init__(self, seed: int, state_slots: int = 0, *, with_windows: bool = False) -> None:
        self.state_slots = state_slots
        self.windows = WINDOWS if with_windows else {}
        self.random = random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.tracked = random.random() < 0.6
        config = CacheConfig(
            block_tokens=BLOCK_TOKENS,
            device_blocks=DEVICE_BLOCKS,
            host_blocks=random.choice((0, 10)),
            write_policy="write_through",
            salt_quota_blocks=random.choice((None, 15)),
            state_slots=state_slots,
            windows=self.windows,
        )
        self.scheduler = CacheScheduler(config)
        self.events = self.scheduler.read.block_events(MAX_EVENT_BLOCKS)  # compared by violations()
        self.events.take(1)
        self.read = self.scheduler.read
        self.recording = Recording(self.scheduler, config, None)
        self.verbs: list[Callable[[], None]] = []
        self.memory: dict[str, list[list[int]]] = {
            "device": [[WRONG] * BLOCK_TOKENS for _ in range(DEVICE_BLOCKS)],
            "host": [[WRONG] * BLOCK_TOKENS for _ in range(10)],
            "state": [[WRONG] for _ in range(state_slots)],
        }
        for name, group in self.windows.items():
            blocks = [[WRONG] * BLOCK_TOKENS for _ in range(group.device_blocks)]
            self.memory[name] = blocks
        self.computing: list[tuple[int, str, int, int, int]] = []  # step, pool, id, offset, word
        self.begun: set[int] = set()  # receives of a state that have written its slot
        self.closed = self.finished = 0
        self.weights = 0
        self.tokens: dict[int, list[int]] = {}  # of the leases with a handle
        self.grants: dict[int, Grant] = {}  # the newest of each
        self.plans: dict[int, TransferPlan] = {}
        self.expected: dict[int, list[Bytes]] = {}  # of receives and sends: the bytes of the prompt
        self.awaited: dict[int, int] = {}  # transfers whose end a lease with a handle waits for
        self.batches: set[int] = set()
        self.stops: dict[int, int] = {}  # of leases that receive windows
        self.apply(self.scheduler.track_steps(self.tracked))

    # --- memory ---------------------------------------------------------------------------------

    def compute(self, lease_id: int, stop: int) -> None:
        start = self.read.computed_tokens(lease_id)
        table = self.read.block_table(lease_id)
        tokens, grant = self.tokens[lease_id], self.grants[lease_id]
        grant.advance(start, stop, self.weights)
        versions = grant.versions(stop)
        for position, word in enumerate(words(tokens, versions, 0, stop)):
            block, offset = int(table[position // BLOCK_TOKENS]), position % BLOCK_TOKENS
            if position < start:
                assert self.content("device", block)[offset] == word, (lease_id, position)
            else:
                self.launch("device", block, offset, word)
        for group in self.windows:
            self.compute_window(lease_id, group, start, stop)
        if self.state_slots:
            slot = self.read.state_slot(lease_id)
            assert self.content("state", slot) == [state_word(tokens, versions, start)]
            self.launch("state", slot, 0, state_word(tokens, versions, stop))

    def compute_window(self, lease_id: int, group: str, start: int, stop: int) -> None:
        """Read the sink and the window of a lease, and write its positions."""
        config, tokens = self.windows[group], self.tokens[lease_id]
        computed = words(tokens, self.grants[lease_id].versions(stop), 0, stop)
        table = self.read.block_table(lease_id, group).tolist()
        seen = range(max(start - config.window_tokens + 1, 0), start)
        for position in {*seen, *range(min(config.sink_tokens, start))} if start < stop else ():
            content = self.content(group, table[position // BLOCK_TOKENS])
            assert content[position % BLOCK_TOKENS] == computed[position]
        for position in range(start, stop):
            block, offset = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            self.launch(group, block, offset, computed[position])

    def launch(self, pool: str, block: int, offset: int, word: int) -> None:
        step = self.closed + 1 if self.tracked else 0
        self.computing.append((step, pool, block, offset, word))
        self.write_computed()

    def write_computed(self) -> None:
        while self.computing and self.computing[0][0] <= self.finished:
            _, pool, block, offset, word = self.computing.pop(0)
            self.memory[pool][block][offset] = word

    def content(self, pool: str, block: int) -> list[int]:
        """Return what a block has when all launched compute has ended."""
        content = list(self.memory[pool][block])
        for _, *place, offset, word in self.computing:
            if place == [pool, block]:
                content[offset] = word
        return content

    def check_cached(self) -> None:
        for _, prefix, device, host, flags, _, _ in self.read.cached_blocks():
            tokens = np.frombuffer(prefix, "<i4").tolist()
            present = [self.weights] * len(tokens)
            right = words(tokens, present, len(tokens) - BLOCK_TOKENS, len(tokens))
            if flags & DEVICE_VALID:
                assert self.content("device", device) == right, (device, tokens)
            if flags & HOST_VALID:
                assert self.memory["host"][host] == right, (host, tokens)

    # --- the dispatcher and the worker ----------------------------------------------------------

    def apply(self, result: tuple[Any, Effects]) -> Any:
        value, effects = result
        if effects is not NO_EFFECTS:
            cancelled = list(effects.cancel)
            for plan in effects.submit:
                self.plans[plan.transfer_id] = plan
            for end in effects.moved:
                self.note_end(end)
            collects = effects.collect
            effects.clear()
            self.scheduler.applied()
            for transfer_id in cancelled:
                self.seen["cancel"] += 1
                if self.random.random() < 0.4 and transfer_id not in self.begun:
                    self.end(transfer_id, "cancelled")
            if collects:
                self.apply(self.scheduler.collect_backups())
        assert self.scheduler.violations() == []
        self.check_cached()
        return value

    def note_end(self, end: Moved) -> None:
        assert self.awaited.pop(end.transfer_id) == end.lease_id
        self.seen["moved"] += 1

    def may_begin(self, plan: TransferPlan) -> bool:
        return plan.after_step <= self.finished

    def disturb(self) -> None:
        """Write wrong bytes into blocks and slots that are being received."""
        for plan in self.plans.values():
            if plan.route != RECEIVE or not self.may_begin(plan):
                continue
            if plan.group == STATE and self.random.random() < 0.5:
                self.begun.add(plan.transfer_id)
                self.memory["state"][int(plan.target_ids[0])] = [WRONG]
            if plan.group in self.windows:
                self.begun.add(plan.transfer_id)
                for target in plan.target_ids.tolist():
                    self.memory[plan.group][target] = [WRONG] * BLOCK_TOKENS
            if plan.group == ATTENTION:
                block = self.random.choice(plan.target_ids.tolist())
                self.memory["device"][block] = [WRONG] * BLOCK_TOKENS

    def end(self, transfer_id: int, outcome: Any = "done", first_bad: int = 0) -> None:
        plan = self.plans.pop(transfer_id)
        good = plan.num_blocks if outcome == "done" else first_bad
        expected = self.expected.pop(transfer_id, [])
        pairs = list(zip(plan.source_ids.tolist(), plan.target_ids.tolist(), strict=True))[:good]
        for index, (source, target) in enumerate(pairs):
            if plan.route == RECEIVE:
                self.memory[pool_of(plan, "device")][target] = list(expected[index])
            elif plan.route == SEND:
                sent = self.memory[pool_of(plan, "device")][source][: len(expected[index])]
                assert tuple(sent) == expected[index], (transfer_id, source)
            elif source == ZEROS:
                self.memory["state"][target] = [state_word([], [], 0)]
            else:
                self.memory[pool_of(plan, plan.route.target)][target] = list(
                    self.memory[pool_of(plan, plan.route.source)][source]
                )
        self.seen[f"{outcome} {plan.direction}"] += 1
        report = TransferReport(transfer_id=transfer_id, outcome=outcome, first_bad_block=good)
        self.apply(self.scheduler.complete(report))
        if self.random.random() < 0.3:
            with pytest.raises(InternalError, match="ended twice"):
                self.scheduler.complete(report)
            assert self.scheduler.violations() == []
            self.seen["second report refused"] += 1

    def transfer(self) -> None:
        ready = [i for i, plan in self.plans.items() if self.may_begin(plan)]
        if not ready:
            return
        transfer_id = self.random.choice(ready)
        draw = self.random.random()
        if draw < 0.75:
            self.end(transfer_id)
        elif draw < 0.8 and transfer_id not in self.begun:
            self.end(transfer_id, "cancelled")
        else:
            bad = self.random.randrange(self.plans[transfer_id].num_blocks)
            self.end(transfer_id, "failed", bad)

    # --- requests -------------------------------------------------------------------------------

    def pick(self, *states: LeaseState) -> int | None:
        found = [i for i in self.tokens if self.read.state(i) in states]
        return self.random.choice(found) if found else None

    def match(self) -> None:
        if len(self.tokens) < 5:
            tokens = [self.random.randint(1, 3)] * self.random.randint(1, 20)
            tokens += [self.random.choice((1, 2))] * self.random.randint(0, 3)
            lease_id = self.apply(self.scheduler.match(np.array(tokens, np.int32), salt="s"))
            self.tokens[lease_id] = tokens

    def allocate(self) -> None:
        lease_id = self.pick(LeaseState.MATCHED, LeaseState.SWAPPED)
        if lease_id is not None:
            num_tokens = len(self.tokens[lease_id]) + self.random.randint(0, 4)
            with suppress(AiokvError):
                if self.apply(self.scheduler.try_allocate(lease_id, num_tokens)):
                    cached = self.read.cached_tokens(lease_id)
                    self.grants[lease_id] = Grant(self.weights, cached)

    def commit(self) -> None:
        if (lease_id := self.pick(LeaseState.GRANTED, LeaseState.FAILED)) is None:
            return
        if self.read.onloads(lease_id):
            return
        try:
            self.apply(self.scheduler.recompute_from(lease_id))
        except LeaseError:  # its state was lost
            self.forget(lease_id)
            self.apply(self.scheduler.preempt(lease_id))
            return
        start, known = self.read.computed_tokens(lease_id), len(self.tokens[lease_id])
        grant = self.grants[lease_id]
        if start < grant.cached and self.weights != grant.weights:
            # Leases that joined the failed onload share its blocks, and their versions.
            self.forget(lease_id)
            self.apply(self.scheduler.preempt(lease_id))
            return
        stop = self.random.randint(
            start, max(start, min(known, self.read.max_extend_tokens(lease_id)))
        )
        try:
            batch = self.apply(self.scheduler.begin_batch([lease_id]))
        except LeaseError:
            if start < self.read.num_tokens(lease_id):
                with pytest.raises(LeaseError):
                    self.scheduler.commit(lease_id, self.read.num_tokens(lease_id))
            return
        self.batches.add(batch)
        self.compute(lease_id, stop)
        self.apply(self.scheduler.commit(lease_id, stop))
        if self.state_slots and stop and stop % BLOCK_TOKENS == 0:
            self.snapshot(lease_id, stop)

    def snapshot(self, lease_id: int, stop: int) -> None:
        copy = self.apply(self.scheduler.snapshot(lease_id, stop))
        if copy is not None:
            source, target = copy
            self.launch("state", target, 0, self.content("state", source)[0])

    def end_batch(self) -> None:
        if self.batches:
            batch = self.random.choice(sorted(self.batches))
            self.batches.remove(batch)
            self.apply(self.scheduler.end_batch(batch, in_open_step=self.tracked))

    def receive(self) -> None:
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        computed, known = self.read.computed_tokens(lease_id), len(self.tokens[lease_id])
        least, last = -(-computed // BLOCK_TOKENS), known // BLOCK_TOKENS
        first = self.random.choice((least, self.random.randint(min(least, last), last)))
        num_blocks = self.random.randint(1, 4)
        with suppress(AiokvError):
            transfer_id = self.apply(
                self.scheduler.peers.receive(
                    lease_id,
                    self.ticket(),
                    (first + num_blocks) * BLOCK_TOKENS,
                    first_block=first,
                )
            )
            self.note_begin(transfer_id, lease_id, first, num_blocks, known)

    def send(self) -> None:
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        computed = self.read.computed_tokens(lease_id)
        first = self.random.randint(0, -(-computed // BLOCK_TOKENS))
        num_blocks = self.random.randint(1, 3)
        with suppress(AiokvError):
            transfer_id = self.apply(
                self.scheduler.peers.send(
                    lease_id,
                    self.ticket(),
                    (first + num_blocks) * BLOCK_TOKENS,
                    first_block=first,
                )
            )
            self.note_begin(transfer_id, lease_id, first, num_blocks, computed)

    def send_early(self) -> None:
        """Send layers of any blocks; those that are not computed have no meaning yet."""
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        first, num_blocks = self.random.randint(0, 4), self.random.randint(1, 3)
        computed = self.read.computed_tokens(lease_id)
        with suppress(AiokvError):
            transfer_id = self.apply(
                self.scheduler.peers.send(
                    lease_id,
                    self.ticket(),
                    (first + num_blocks) * BLOCK_TOKENS,
                    first_block=first,
                    end_range=2,
                    mark=self.random.randint(1, 9),
                )
            )
            self.note_begin(transfer_id, lease_id, first, num_blocks, computed)

    def receive_state(self) -> None:
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        tokens = self.tokens[lease_id]
        stop = self.random.randint(0, len(tokens))
        with suppress(AiokvError):
            transfer_id = self.apply(
                self.scheduler.peers.receive(lease_id, self.ticket(), stop, STATE)
            )
            self.awaited[transfer_id] = lease_id
            sent = self.grants[lease_id].received(stop)
            self.expected[transfer_id] = [(state_word(tokens, sent, stop),)]

    def send_state(self) -> None:
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        computed = self.read.computed_tokens(lease_id)
        with suppress(AiokvError):
            transfer_id = self.apply(
                self.scheduler.peers.send(lease_id, self.ticket(), computed, STATE)
            )
            self.awaited[transfer_id] = lease_id
            tokens, versions = self.tokens[lease_id], self.grants[lease_id].versions(computed)
            self.expected[transfer_id] = [(state_word(tokens, versions, computed),)]

    def receive_window(self) -> None:
        """Receive behind all positions that have been received, mostly."""
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        stop = self.stops.get(lease_id) or self.random.randint(0, len(self.tokens[lease_id]))
        group = self.random.choice(list(self.windows))
        with suppress(AiokvError):
            transfer_id = self.apply(
                self.scheduler.peers.receive(lease_id, self.ticket(), stop, group)
            )
            self.stops[lease_id] = stop
            self.note_window(transfer_id, lease_id, stop)

    def send_window(self) -> None:
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        computed = self.read.computed_tokens(lease_id)
        group = self.random.choice(list(self.windows))
        with suppress(AiokvError):
            transfer_id = self.apply(
                self.scheduler.peers.send(lease_id, self.ticket(), computed, group)
            )
            self.note_window(transfer_id, lease_id, computed)

    def note_window(self, transfer_id: int, lease_id: int, stop: int) -> None:
        plan, tokens = self.plans[transfer_id], self.tokens[lease_id]
        receives = plan.route == RECEIVE
        grant = self.grants[lease_id]
        versions = grant.received(stop) if receives else grant.versions(stop)
        self.expected[transfer_id] = []
        for block in (plan.source_ids if receives else plan.target_ids).tolist():
            end = min((block + 1) * BLOCK_TOKENS, stop)
            known = words(tokens, versions, block * BLOCK_TOKENS, end)
            more = [WRONG] * (BLOCK_TOKENS - len(known)) if receives else []
            self.expected[transfer_id].append((*known, *more))
        self.awaited[transfer_id] = lease_id

    def note_begin(
        self, transfer_id: int, lease_id: int, first: int, num_blocks: int, stop: int
    ) -> None:
        tokens, grant = self.tokens[lease_id], self.grants[lease_id]
        plan = self.plans[transfer_id]
        versions = grant.received(stop) if plan.route == RECEIVE else grant.versions(stop)
        self.expected[transfer_id] = [
            tuple(
                words(
                    tokens,
                    versions,
                    min(block * BLOCK_TOKENS, stop),
                    min((block + 1) * BLOCK_TOKENS, stop),
                )
            )
            for block in range(first, first + num_blocks)
        ]
        if plan.route == RECEIVE:  # what is behind the prompt is of no meaning
            self.expected[transfer_id] = [
                (*block, *[WRONG] * (BLOCK_TOKENS - len(block)))
                for block in self.expected[transfer_id]
            ]
        self.awaited[transfer_id] = lease_id

    def ticket(self) -> bytes:
        return bytes([self.random.randint(1, 2)] * 16)

    def commit_received(self) -> None:
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        stop = self.stops.get(lease_id) or self.random.randint(0, len(self.tokens[lease_id]))
        grant, start = self.grants[lease_id], self.read.computed_tokens(lease_id)
        if grant.versions(start) != grant.received(start):
            return  # what was received does not follow what was computed since
        with suppress(LeaseError):
            published = self.apply(self.scheduler.peers.commit_received(lease_id, stop))
            grant.advance(start, max(start, stop), grant.weights)
            if published:
                self.seen["received"] += 1
                self.seen["windows committed"] += lease_id in self.stops
                self.stops.pop(lease_id, None)

    def end_peer(self) -> None:
        if self.tokens:
            lease_id = self.random.choice(sorted(self.tokens))
            self.apply(self.scheduler.peers.end(lease_id, self.ticket()))

    def forget(self, lease_id: int) -> None:
        """The lease gives its blocks back: nothing waits for its transfers."""
        self.stops.pop(lease_id, None)
        self.awaited = {i: lease for i, lease in self.awaited.items() if lease != lease_id}

    def release(self) -> None:
        if self.tokens:
            lease_id = self.random.choice(sorted(self.tokens))
            del self.tokens[lease_id]
            self.forget(lease_id)
            self.apply(self.scheduler.release(lease_id))

    def preempt(self) -> None:
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        if self.random.random() < 0.5:
            with suppress(LeaseError):
                self.apply(self.scheduler.swap_out(lease_id))
        else:
            self.forget(lease_id)
            self.apply(self.scheduler.preempt(lease_id))

    def truncate(self) -> None:
        """Cut a lease, and give it other tokens."""
        if (lease_id := self.pick(LeaseState.GRANTED)) is None:
            return
        num_tokens = self.read.num_tokens(lease_id) - self.random.randint(0, 6)
        try:
            self.apply(self.scheduler.truncate(lease_id, num_tokens))
        except LeaseError:
            return
        self.tokens[lease_id] = self.tokens[lease_id][:num_tokens]
        del self.grants[lease_id].computed[num_tokens:]
        if self.apply(self.scheduler.extend([lease_id], 3)):
            more = [self.random.randint(4, 5)] * self.random.randint(0, 3)
            self.apply(self.scheduler.append(lease_id, np.array(more, np.int32)))
            self.tokens[lease_id] += more

    def fork(self) -> None:
        lease_id = self.pick(LeaseState.GRANTED)
        if lease_id is None or self.tracked or len(self.tokens) > 5:
            return
        with suppress(AiokvError):
            fork = self.apply(self.scheduler.fork(lease_id, "child"))
            for source, target in zip(fork.source_blocks, fork.target_blocks, strict=True):
                self.memory["device"][target] = list(self.memory["device"][source])
            if fork.state_slots is not None:
                source, target = fork.state_slots
                self.memory["state"][target] = list(self.memory["state"][source])
            self.tokens[fork.lease_id] = list(self.tokens[lease_id])
            self.grants[fork.lease_id] = self.grants[lease_id].copy()

    def step(self) -> None:
        if self.random.random() < 0.5:
            self.closed = self.apply(self.scheduler.close_step())
        elif self.finished < self.closed:
            self.finished = self.random.randint(self.finished + 1, self.closed)
            self.write_computed()
            self.apply(self.scheduler.finish_step(self.finished))

    def update_weights(self) -> None:
        """Update the weights as the engine does, while the leases go on."""
        self.apply(self.scheduler.change_gate("hold"))
        self.end_all(frozenset() if self.random.random() < 0.5 else PEER_ROUTES)
        self.apply(self.scheduler.reset("test"))
        self.weights += 1
        for _ in range(self.random.choice((0, 10, 40))):
            self.disturb()
            self.random.choice(self.verbs)()
            self.seen["steps of updates"] += 1
        self.apply(self.scheduler.change_gate("let_go"))

    def control(self) -> None:
        draw = self.random.random()
        if draw < 0.7:
            self.apply(self.scheduler.evict(self.random.randint(1, 3), "device"))
        elif draw < 0.75:
            self.apply(self.scheduler.reset("test"))
        elif draw < 0.8:
            for lease_id in self.tokens:
                if self.read.is_granted(lease_id) and self.read.state(lease_id) not in (
                    LeaseState.SWAPPING,
                    LeaseState.RELEASED,
                ):
                    self.forget(lease_id)
            self.apply(self.scheduler.lose_blocks("rank 0 was lost"))
            self.apply(self.scheduler.restart())

    def run(self, steps: int) -> None:
        verbs = self.verbs = [
            *[self.match] * 4, *[self.allocate] * 5, *[self.commit] * 2, *[self.end_batch] * 5,
            *[self.receive] * 8, *[self.send] * 6, *[self.send_early] * 3,
            *[self.commit_received] * 5, self.end_peer,
            self.release, self.preempt, *[self.truncate] * 2, self.fork, *[self.step] * 8,
            *[self.transfer] * 16, self.control,
        ]  # fmt: skip
        if self.state_slots:
            verbs += [*[self.receive_state] * 10, *[self.send_state] * 3]
        if self.windows:
            verbs += [*[self.receive_window] * 12, *[self.send_window] * 3]
        for _ in range(steps):
            self.disturb()
            if self.random.random() < 0.003:
                self.update_weights()
            self.random.choice(verbs)()
        self.finish()

    def end_all(self, but: frozenset[Route] = frozenset()) -> None:
        """End all steps, and the transfers of other routes."""
        self.closed = self.finished = self.apply(self.scheduler.close_step())
        self.write_computed()
        self.apply(self.scheduler.finish_step(self.finished))
        while ending := [i for i, plan in self.plans.items() if plan.route not in but]:
            self.end(ending[0])

    def finish(self) -> None:
        while self.tokens:
            self.release()
        while self.batches:
            self.end_batch()
        self.apply(self.scheduler.advance())
        self.end_all()
        assert self.awaited == {}
        statistics = self.read.statistics()
        assert (
            statistics.attention.device.free + statistics.attention.device.cached == DEVICE_BLOCKS
        )
        assert (self.read.num_leases, self.read.quota_held("s")) == (0, 0)
        assert replay_transitions(self.recording.log) == len(self.recording.log.transitions)
        self.seen["received blocks"] += statistics.attention.received_blocks


@pytest.mark.parametrize("seed", range(50))
def test_random_receives_and_sends_never_show_wrong_bytes(seed: int) -> None:
    PeerWalk(seed).run(800)


@pytest.mark.parametrize("seed", range(50))
def test_random_receives_and_sends_never_leave_a_lease_with_the_wrong_state(seed: int) -> None:
    PeerWalk(seed, state_slots=5).run(800)


@pytest.mark.parametrize("seed", range(50))
def test_random_receives_and_sends_never_leave_a_lease_with_the_wrong_windows(seed: int) -> None:
    PeerWalk(seed, state_slots=seed % 3 * 3, with_windows=True).run(800)


def test_walks_reach_receives_and_sends_of_each_outcome() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000, 1040):
        walk = PeerWalk(seed, state_slots=seed % 2 * 5, with_windows=seed % 4 > 1)
        walk.run(800)
        seen += walk.seen
    for name in (
        "done receive", "failed receive", "cancelled receive", "done send", "failed send",
        "cancelled send", "done onload", "done offload", "moved", "received", "cancel",
        "received blocks", "second report refused", "done state clone", "done state receive",
        "failed state receive", "done state send", "done near receive", "failed near receive",
        "done near send", "done far receive", "failed far receive", "done far send",
        "windows committed",
    ):  # fmt: skip
        assert seen[name] > 0, (name, seen)
