"""The native pools, seen through leases, against sets of ids."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiokv._native import Core, Outcome, SavePolicy
from aiokv.errors import RequestTooLarge
from tests.models.block_pool import PoolModel, runs

PROMPT = np.array([1], np.int32)


@given(
    capacity=st.integers(1, 200),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 250)), max_size=30),
)
def test_each_id_is_allocated_once(capacity, calls):
    core = Core(block_tokens=1, device_blocks=capacity)
    model = PoolModel(capacity)
    tables: dict[int, list[int]] = {}
    for take, number in calls:
        if take:
            lease, _, _ = core.match(PROMPT)
            tables[lease] = []
            try:
                granted = core.allocate(lease, number + 1)
            except RequestTooLarge:
                assert number + 1 > capacity
                continue
            assert bool(granted) == (number + 1 <= len(model.free))
            tables[lease] = core.block_table(lease).tolist()
            model.take(tables[lease])
        elif tables:
            lease = sorted(tables)[number % len(tables)]
            core.release(lease)
            model.give_back(tables.pop(lease))
        assert core.statistics().attention.device.free == len(model.free)
        assert core.violations() == []
    for lease, table in tables.items():
        core.release(lease)
        model.give_back(table)
    assert core.statistics().attention.device.free == capacity == len(model.free)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_host_ids_come_in_runs(sizes):
    """A backup of n blocks into an empty host pool is one run: one copy a layer (design 6)."""
    core = Core(
        block_tokens=1, device_blocks=300, host_blocks=300, write_policy=SavePolicy.WRITE_THROUGH
    )
    for number, size in enumerate(sizes):
        lease, _, _ = core.match(np.full(size, number, np.int32))
        assert core.allocate(lease, size) == 1
        assert core.commit(lease, size) == size
        _, host_blocks, _ = core.transfer(core.take_backups())
        assert runs(np.frombuffer(host_blocks, np.int32).tolist()) == [size]
        core.release(lease)
    assert core.violations() == []


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["save", "touch", "evict"]), st.integers(1, 12)),
        min_size=20,
        max_size=60,
    )
)
def test_host_ids_are_the_lowest_run_that_holds_all_or_else_the_longest(calls):
    """In fragmented pools, equal calls give equal ids (I9)."""
    size = 70
    core = Core(
        block_tokens=1, device_blocks=size, host_blocks=size, write_policy=SavePolicy.WRITE_THROUGH
    )
    for number, (call, blocks) in enumerate(calls):
        if call == "evict":
            core.evict_device(size)
            core.evict_host(blocks)
        elif call == "touch":  # blocks saved earlier are evicted later, so holes are anywhere
            lease, _, _ = core.match(np.full(13, max(0, number - blocks), np.int32))
            core.release(lease)
        else:
            lease, _, _ = core.match(np.full(blocks, number, np.int32))
            assert core.allocate(lease, blocks) == 1
            core.commit(lease, blocks)
            transfer = core.take_backups()
            taken = np.frombuffer(core.transfer(transfer)[1], np.int32).tolist()
            core.complete(transfer, Outcome.DONE)
            core.release(lease)
            pool = PoolModel(size)  # as it was when the ids were chosen
            pool.take(
                [block[3] for block in core.blocks() if block[3] >= 0 and block[3] not in taken]
            )
            assert pool.take_runs(blocks) == taken
        assert core.violations() == []
