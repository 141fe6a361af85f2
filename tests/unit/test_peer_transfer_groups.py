"""Receives and sends of recurrent state and of sliding windows."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from aiokv import LeaseState, WindowGroup
from aiokv.base.groups import STATE
from aiokv.base.plan import (
    RECEIVE,
    SEND,
)
from aiokv.errors import LeaseError, UsageError
from tests.unit.peer_cache import OTHER_TICKET, TICKET, Cache, receive_group, send_group

# --- recurrent state ------------------------------------------------------------------------------


def recurrent(**config: Any) -> tuple[Cache, int]:
    """Return a cache of a model with recurrent state, and a granted lease of 18 tokens."""
    cache = Cache(16, state_slots=3, **config)
    return cache, state_granted(cache)


def state_granted(cache: Cache) -> int:
    lease_id = cache.granted(18)
    for transfer_id in cache.read.onloads(lease_id):
        cache.plans.setdefault(transfer_id, None)
        cache.end(transfer_id)
    return lease_id


def test_received_state_commits_the_positions_before_it():
    cache, lease_id = recurrent(verify="checksum")
    cache.end(cache.receive(lease_id, 0, 5))
    with pytest.raises(LeaseError, match="the recurrent state after 16 positions was not received"):
        cache.commit_received(lease_id, 16)

    transfer_id = receive_group(cache, lease_id, STATE, 18)
    plan = cache.plans[transfer_id]
    assert (plan.route, plan.group, plan.peer) == (RECEIVE, STATE, TICKET)
    assert plan.source_ids.tolist() == [0]
    assert plan.target_ids.tolist() == [cache.read.state_slot(lease_id)]
    cache.end(transfer_id)

    assert cache.moved[-1] == (transfer_id, lease_id, 1)
    assert cache.read.computed_tokens(lease_id) == 18
    assert len(cache.read.cached_blocks()) == 4
    assert cache.read.statistics().groups["state"].received_blocks == 1
    assert cache.commit_received(lease_id, 18) == 0


def test_state_is_received_behind_all_blocks_only():
    cache, lease_id = recurrent()
    cache.end(cache.receive(lease_id, 0, 2))
    cache.end(cache.receive(lease_id, 3, 2))
    for num_tokens in (-1, 0, 9, 18):
        with pytest.raises(LeaseError, match="received those before 8"):
            receive_group(cache, lease_id, STATE, num_tokens)
    transfer_id = receive_group(cache, lease_id, STATE, 7)
    with pytest.raises(LeaseError, match="a window of a lease is being received"):
        cache.receive(lease_id, 0, 1)
    cache.end(transfer_id)
    assert cache.read.computed_tokens(lease_id) == 7


@pytest.mark.parametrize("verb", ["receive", "send"])
def test_lease_whose_state_is_in_flight_is_not_changed(verb: str):
    cache, lease_id = recurrent()
    cache.commit(lease_id, 4)
    cache.end(cache.receive(lease_id, 1, 4))
    if verb == "receive":
        receive_group(cache, lease_id, STATE, 18)
    else:
        send_group(cache, lease_id, STATE, 4)

    refused = [
        lambda: cache.scheduler.begin_batch([lease_id]),
        lambda: cache.scheduler.commit(lease_id, 5),
        lambda: cache.scheduler.peers.commit_received(lease_id, 18),
        lambda: cache.scheduler.peers.receive(lease_id, TICKET, 18, STATE),
        lambda: cache.scheduler.swap_out(lease_id),
    ]
    if verb == "receive":
        refused += [
            lambda: cache.scheduler.snapshot(lease_id, 4),
            lambda: cache.scheduler.fork(lease_id, "child"),
            lambda: cache.scheduler.peers.send(lease_id, TICKET, 4, STATE),
            lambda: cache.scheduler.truncate(lease_id, 17),
        ]
    for call in refused:
        with pytest.raises(LeaseError):
            call()
    assert cache.scheduler.violations() == []
    cache.commit(lease_id, 4)


def test_cancelled_state_is_the_one_before_and_failed_state_is_lost():
    cache, lease_id = recurrent()
    cache.end(cache.receive(lease_id, 0, 5))
    cache.end(receive_group(cache, lease_id, STATE, 18), "cancelled")
    assert cache.read.state(lease_id) == LeaseState.GRANTED
    assert cache.read.computed_tokens(lease_id) == 0
    batch = cache.apply(cache.scheduler.begin_batch([lease_id]))
    cache.apply(cache.scheduler.end_batch(batch, in_open_step=False))

    cache.end(receive_group(cache, lease_id, STATE, 18), "failed")
    assert cache.read.state(lease_id) == LeaseState.FAILED
    assert cache.read.cached_blocks() == []
    with pytest.raises(LeaseError, match="recompute_from"):
        cache.scheduler.recompute_from(lease_id)
    cache.apply(cache.scheduler.preempt(lease_id))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 18)) is not None


@pytest.mark.parametrize("verb", ["release", "preempt"])
def test_slot_given_back_while_its_state_is_received_is_free_after_the_report(verb: str):
    cache, lease_id = recurrent()
    cache.end(cache.receive(lease_id, 0, 5))
    transfer_id = receive_group(cache, lease_id, STATE, 18)
    assert cache.read.statistics().groups["state"].device.free == 2
    cache.apply(getattr(cache.scheduler, verb)(lease_id))

    assert cache.cancelled == [transfer_id]
    assert cache.read.statistics().groups["state"].device.free == 2
    cache.end(transfer_id)
    assert cache.read.statistics().groups["state"].device.free == 3
    assert cache.read.cached_blocks() == []


def test_sent_state_is_the_one_after_the_computed_positions():
    cache = Cache(16, state_slots=3)
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = state_granted(cache)
    cache.commit(lease_id, 17)
    for num_tokens in (0, 16, 18):
        with pytest.raises(LeaseError, match="the lease has computed 17 positions"):
            send_group(cache, lease_id, STATE, num_tokens)
    transfer_id = send_group(cache, lease_id, STATE, 17)

    plan = cache.plans[transfer_id]
    assert (plan.route, plan.group, plan.peer, plan.after_step) == (SEND, STATE, TICKET, 1)
    assert plan.source_ids.tolist() == [cache.read.state_slot(lease_id)]
    assert plan.target_ids.tolist() == [0]
    cache.end(transfer_id)
    assert cache.moved == [(transfer_id, lease_id, 1)]
    assert cache.read.statistics().groups["state"].sent_blocks == 1
    cache.commit(lease_id, 18)


def test_state_transfers_refuse_models_without_state_and_leases_that_compute_nothing():
    cache = Cache()
    lease_id = cache.granted(8)
    for call in (receive_group, send_group):
        with pytest.raises(UsageError, match="group is 'state'; it must be one of"):
            call(cache, lease_id, STATE, 8)


# --- sliding windows ------------------------------------------------------------------------------

WINDOWS = {
    "near": WindowGroup(window_tokens=5, device_blocks=9, step_tokens=4),
    "far": WindowGroup(window_tokens=9, device_blocks=12, step_tokens=4, sink_tokens=3),
}


def windowed(num_tokens: int = 26, **config: Any) -> tuple[Cache, int]:
    """Return a cache of a model with two window groups, and a granted lease."""
    cache = Cache(16, windows=WINDOWS, **config)
    return cache, cache.granted(num_tokens)


def entries(cache: Cache, lease_id: int, group: str) -> dict[int, int]:
    """Return the blocks that the lease has in a window group, and their ids."""
    table = cache.read.block_table(lease_id, group).tolist()
    return {block: block_id for block, block_id in enumerate(table) if block_id >= 0}


def test_received_windows_are_the_sink_and_the_window_behind_the_positions():
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    with pytest.raises(LeaseError, match="the windows behind 26 positions were not received"):
        cache.commit_received(lease_id, 26)
    near = receive_group(cache, lease_id, "near", 26)
    far = receive_group(cache, lease_id, "far", 26)

    for transfer_id, group, blocks in ((near, "near", [5, 6]), (far, "far", [0, 4, 5, 6])):
        plan = cache.plans[transfer_id]
        table = entries(cache, lease_id, group)
        assert (plan.route, plan.peer, plan.group) == (RECEIVE, TICKET, group)
        assert plan.source_ids.tolist() == blocks
        assert plan.target_ids.tolist() == [table[block] for block in blocks]
        assert sorted(table) == blocks
    cache.end(far)
    with pytest.raises(LeaseError, match="a window of a lease is being received"):
        cache.commit_received(lease_id, 26)
    cache.end(near)
    assert cache.moved[-2:] == [(far, lease_id, 4), (near, lease_id, 2)]
    assert cache.commit_received(lease_id, 26) == 6
    groups = cache.read.statistics().groups
    assert (groups["far"].received_blocks, groups["near"].received_blocks) == (4, 2)
    batch = cache.apply(cache.scheduler.begin_batch([lease_id]))
    cache.apply(cache.scheduler.end_batch(batch, in_open_step=False))
    assert cache.apply(cache.scheduler.extend([lease_id], 4))
    cache.commit(lease_id, 30)


def test_received_windows_let_another_lease_hit_behind_them():
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    for group in WINDOWS:
        cache.end(receive_group(cache, lease_id, group, 26))
    cache.commit_received(lease_id, 26)

    other = cache.granted(28)
    assert cache.read.cached_tokens(other) == 24
    for group in WINDOWS:
        cached = {b: i for b, i in entries(cache, lease_id, group).items() if b < 6}
        assert cached.items() <= entries(cache, other, group).items()


def test_windows_are_received_behind_a_hit_that_has_some_of_them():
    cache, first = windowed(8)
    for position in (4, 8):
        cache.commit(first, position)
    cache.apply(cache.scheduler.release(first))
    lease_id = cache.granted(14)
    assert cache.read.cached_tokens(lease_id) == 8
    cache.end(cache.receive(lease_id, 2, 2))
    near = receive_group(cache, lease_id, "near", 14)
    far = receive_group(cache, lease_id, "far", 14)

    assert cache.plans[near].source_ids.tolist() == [2, 3]
    assert cache.plans[far].source_ids.tolist() == [2, 3]
    assert sorted(entries(cache, lease_id, "far")) == [0, 1, 2, 3]  # 0 and 1 are cached
    for transfer_id in (near, far):
        cache.end(transfer_id)
    assert cache.commit_received(lease_id, 14) == 1


def test_window_blocks_that_a_lease_gives_back_wait_for_the_step_that_is_open():
    near = WindowGroup(window_tokens=5, device_blocks=3, step_tokens=4)
    cache = Cache(16, windows={"near": near})
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = cache.granted(22)
    for position in (4, 8):
        cache.commit(lease_id, position)
    cache.apply(cache.scheduler.close_step())
    cache.apply(cache.scheduler.finish_step(1))
    cache.end(cache.receive(lease_id, 2, 4))

    transfer_id = receive_group(cache, lease_id, "near", 22)
    assert cache.plans[transfer_id].after_step == 2  # which may compute with the lease


def test_lease_that_waits_for_windows_is_not_changed():
    cache, lease_id = windowed(host_blocks=8)
    cache.end(cache.receive(lease_id, 0, 7))
    for group in WINDOWS:
        cache.end(receive_group(cache, lease_id, group, 26))

    for call in (
        lambda: cache.scheduler.begin_batch([lease_id]),
        lambda: cache.scheduler.commit(lease_id, 26),
        lambda: cache.scheduler.peers.commit_received(lease_id, 25),
        lambda: cache.scheduler.truncate(lease_id, 25),
        lambda: cache.scheduler.swap_out(lease_id),
        lambda: cache.scheduler.peers.send(lease_id, TICKET, 26, "near"),
        lambda: cache.scheduler.peers.receive(lease_id, TICKET, 25, "near"),
    ):
        with pytest.raises(LeaseError):
            call()
    assert cache.scheduler.violations() == []
    cache.commit_received(lease_id, 26)


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_lease_whose_windows_did_not_arrive_must_be_preempted(outcome: str):
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    near = receive_group(cache, lease_id, "near", 26)
    far = receive_group(cache, lease_id, "far", 26)
    cache.end(far, outcome, 1)
    assert cache.read.state(lease_id) == LeaseState.FAILED
    cache.end(near)
    with pytest.raises(LeaseError, match="the windows behind 26 positions were not received"):
        cache.commit_received(lease_id, 26)
    with pytest.raises(LeaseError, match="recompute_from"):
        cache.scheduler.recompute_from(lease_id)
    cache.apply(cache.scheduler.preempt(lease_id))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 26)) is not None
    cache.commit(lease_id, 4)
    assert len(cache.read.cached_blocks()) == 1


@pytest.mark.parametrize("verb", ["release", "preempt"])
def test_window_blocks_given_back_while_received_are_free_after_the_report(verb: str):
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    transfer_id = receive_group(cache, lease_id, "far", 26)
    blocks = set(cache.plans[transfer_id].target_ids.tolist())
    cache.apply(getattr(cache.scheduler, verb)(lease_id))
    other = cache.granted(8, seed=1)
    assert not blocks & set(entries(cache, other, "far").values())
    cache.end(transfer_id)
    assert cache.moved[1:] == []
    assert cache.read.cached_blocks() == []


def test_sent_windows_are_those_behind_the_computed_positions():
    cache = Cache(16, windows=WINDOWS)
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = cache.granted(26)
    for position in (*range(4, 26, 4), 26):
        cache.commit(lease_id, position)
    with pytest.raises(LeaseError, match="the lease has computed 26 positions"):
        send_group(cache, lease_id, "near", 25)
    with pytest.raises(UsageError, match="group is 'other'"):
        send_group(cache, lease_id, "other", 26)
    near, far = (send_group(cache, lease_id, group, 26) for group in WINDOWS)

    for transfer_id, group, blocks in ((near, "near", [5, 6]), (far, "far", [0, 4, 5, 6])):
        plan = cache.plans[transfer_id]
        assert (plan.route, plan.group, plan.after_step) == (SEND, group, 1)
        assert plan.target_ids.tolist() == blocks
        table = entries(cache, lease_id, group)
        assert plan.source_ids.tolist() == [table[block] for block in blocks]
    for call in (
        lambda: cache.scheduler.begin_batch([lease_id]),
        lambda: cache.scheduler.peers.receive(lease_id, TICKET, 28, first_block=6),
    ):
        with pytest.raises(LeaseError):
            call()
    cache.end(near)
    cache.end(far)
    groups = cache.read.statistics().groups
    assert (groups["far"].sent_blocks, groups["near"].sent_blocks) == (4, 2)
    cache.send(lease_id, 0, 7)


def test_state_is_received_behind_all_windows_only():
    cache = Cache(16, windows=WINDOWS, state_slots=2)
    lease_id = cache.granted(26)
    for transfer_id in cache.read.onloads(lease_id):
        cache.plans[transfer_id] = None
        cache.end(transfer_id)
    cache.end(cache.receive(lease_id, 0, 7))
    cache.end(receive_group(cache, lease_id, "near", 26))
    with pytest.raises(LeaseError, match="the windows behind 26 positions were not received"):
        receive_group(cache, lease_id, STATE, 26)
    cache.end(receive_group(cache, lease_id, "far", 26))
    cache.end(receive_group(cache, lease_id, STATE, 26))
    assert cache.read.computed_tokens(lease_id) == 26
    cache.apply(cache.scheduler.begin_batch([lease_id]))


@pytest.mark.parametrize("ended", ["before", "between", "after"])
def test_lease_whose_ticket_ends_before_its_windows_are_committed_must_be_preempted(ended: str):
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    transfers = [receive_group(cache, lease_id, group, 26) for group in WINDOWS]
    for number, transfer_id in enumerate(transfers):
        if number == {"before": 0, "between": 1}.get(ended):
            cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
        cache.end(transfer_id)
    assert cache.read.state(lease_id) == (
        LeaseState.GRANTED if ended == "after" else LeaseState.FAILED
    )
    cache.apply(cache.scheduler.peers.end(lease_id, OTHER_TICKET))
    assert (cache.read.state(lease_id) == LeaseState.FAILED) == (ended != "after")
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))

    assert cache.read.state(lease_id) == LeaseState.FAILED
    with suppress(LeaseError):
        cache.commit_received(lease_id, 26)
    assert cache.read.computed_tokens(lease_id) == 0
    assert cache.read.cached_blocks() == []
    cache.apply(cache.scheduler.preempt(lease_id))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 26)) is not None


def test_end_of_a_ticket_leaves_windows_that_are_committed():
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    for group in WINDOWS:
        cache.end(receive_group(cache, lease_id, group, 26))
    cache.commit_received(lease_id, 26)
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
    assert cache.read.state(lease_id) == LeaseState.GRANTED
    cache.apply(cache.scheduler.begin_batch([lease_id]))


def test_cancelled_state_behind_received_windows_fails_the_lease():
    cache = Cache(16, windows=WINDOWS, state_slots=2)
    lease_id = cache.granted(26)
    for transfer_id in cache.read.onloads(lease_id):
        cache.plans[transfer_id] = None
        cache.end(transfer_id)
    cache.end(cache.receive(lease_id, 0, 7))
    for group in WINDOWS:
        cache.end(receive_group(cache, lease_id, group, 26))
    state = receive_group(cache, lease_id, STATE, 26)
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
    assert cache.read.state(lease_id) == LeaseState.GRANTED  # its end will tell
    cache.end(state, "cancelled")
    assert cache.read.state(lease_id) == LeaseState.FAILED
    assert cache.read.computed_tokens(lease_id) == 0
