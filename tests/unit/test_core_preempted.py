"""Preempted leases: the blocks and state that they keep, and when these are freed (I3)."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv._native import Core, Outcome, SavePolicy
from aiokv.base.plan import id_bytes
from aiokv.errors import LeaseError

NO_ROOM, READY, LOADING = range(3)
DONE = Outcome.DONE


def match(core: Core, *tokens: int) -> int:
    return core.match(np.array(tokens, np.int32))[0]


def arrive(core: Core, lease_id: int) -> None:
    for transfer_id in core.onloads(lease_id):
        core.complete(transfer_id, DONE)


def saving_core(device_blocks: int = 16, state_slots: int = 0) -> Core:
    return Core(
        block_tokens=2,
        device_blocks=device_blocks,
        host_blocks=16,
        write_policy=SavePolicy.WRITE_THROUGH,
        state_slots=state_slots,
    )


def granted(core: Core, *tokens: int) -> int:
    lease_id = match(core, *tokens)
    assert core.allocate(lease_id, len(tokens)) != NO_ROOM
    arrive(core, lease_id)
    return lease_id


def swapped(core: Core, *tokens: int, step: int = 0) -> int:
    """Swap out a lease that has computed all but the last token."""
    lease_id = granted(core, *tokens)
    core.commit(lease_id, len(tokens) - 1, step)
    assert core.swap_out(lease_id, step)
    if transfer_id := core.swap_transfer(lease_id):
        core.complete(transfer_id, DONE)
    assert core.is_swapped(lease_id)
    return lease_id


def pinned(core: Core, *tokens: int) -> int:
    """Pin a prompt of which all but the last token are cached, with their state."""
    first = granted(core, *tokens)
    core.commit(first, len(tokens) - 1)
    assert core.snapshot(first, len(tokens) - 1)[1] >= 0
    core.release(first)
    pin = match(core, *tokens)
    core.hold_only(pin)
    assert core.allocate(pin, len(tokens) - 1) == READY
    return pin


def test_the_slot_of_a_swapped_lease_is_written_only_when_its_last_step_is_over():
    core = saving_core(state_slots=1)
    first = granted(core, 1, 2, 3, 4, 5)
    core.commit(first, 4)
    core.complete(core.take_backups(), DONE)
    core.release(first)
    preempted = swapped(core, 1, 2, 3, 4, 5, step=7)  # at once: all blocks have host copies
    other = match(core, 9, 9, 9)
    assert core.allocate(other, 3) == LOADING
    (move,) = core.onloads(other)
    _, _, sources, targets, after_step = core.move(move)
    assert (sources, targets, after_step) == (id_bytes([-1]), id_bytes([0]), 7), "step 7 writes it"
    core.finish_step(7)
    arrive(core, other)
    for lease_id in (preempted, other):
        core.release(lease_id)
    assert core.violations() == []


def test_table_cannot_be_truncated_while_it_is_swapped_in():
    core = saving_core()
    lease_id = swapped(core, 1, 2, 3, 4)
    assert core.allocate(lease_id, 4) == LOADING
    with pytest.raises(LeaseError, match="transfer"):
        core.truncate(lease_id, 2)
    arrive(core, lease_id)
    core.truncate(lease_id, 2)
    core.release(lease_id)
    assert core.violations() == []


def test_preempted_lease_frees_its_state_despite_a_pin():
    core = saving_core(state_slots=2)
    pin = pinned(core, 1, 2, 3, 4, 5)
    preempted = swapped(core, 9, 8, 7, 6, 5)
    other = match(core, 6, 6, 6)
    assert core.allocate(other, 3) == LOADING, "a pin never ends by itself"
    arrive(core, other)
    for lease_id in (other, preempted, pin):
        core.release(lease_id)
    assert core.violations() == []


def test_preempted_lease_keeps_its_state_when_dropping_it_frees_too_few_blocks():
    core = saving_core(state_slots=2, device_blocks=6)
    pin = pinned(core, 1, 2, 3, 4, 5)
    preempted = swapped(core, 9, 8, 7, 6, 5)
    other = match(core, *range(20, 30))
    assert core.allocate(other, 10) == NO_ROOM, "the pin has 2 blocks of 6"
    assert core.state_slot(preempted) >= 0
    assert core.computed_tokens(preempted) == 4
    for lease_id in (other, preempted, pin):
        core.release(lease_id)
    assert core.violations() == []


def test_swap_that_exceeds_the_host_evicts_no_host_block():
    """Host copies of a preempted lease are not evictable, even without a transfer."""
    core = Core(
        block_tokens=1, device_blocks=16, host_blocks=6, write_policy=SavePolicy.WRITE_THROUGH
    )

    def compute(*tokens: int, writes: bool = True) -> int:
        lease_id, *_ = core.match(np.array(tokens, np.int32), writes=writes)
        assert core.allocate(lease_id, len(tokens)) == READY
        core.commit(lease_id, len(tokens))
        if transfer_id := core.take_backups():
            core.complete(transfer_id, DONE)
        return lease_id

    core.release(compute(1, 2))
    assert core.evict_device(2) == 2
    held = compute(11, 12)
    assert core.swap_out(held)
    assert core.evict_device(2) == 2
    five = compute(21, 22, 23, 24, 25, writes=False)
    before = core.statistics().attention.host
    assert (before.free, before.cached) == (2, 4)
    assert not core.swap_out(five)
    after = core.statistics().attention.host
    assert (after.free, after.cached, after.evicted_blocks) == (2, 4, 0)
    assert core.violations() == []
    four = compute(31, 32, 33, 34, writes=False)
    assert core.swap_out(four)
    assert core.statistics().attention.host.evicted_blocks == 2
    core.complete(core.swap_transfer(four), DONE)
    for lease_id in (held, five, four):
        core.release(lease_id)
    assert core.violations() == []
