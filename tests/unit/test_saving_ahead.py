"""Blocks that count for the low watermark are evictable (``Core.wants_write_backs``)."""

from __future__ import annotations

import numpy as np

from aiokv._native import Core, Outcome, SavePolicy


def serve(core: Core, *tokens: int) -> None:
    lease = core.match(np.array(tokens, np.int32))[0]
    assert core.allocate(lease, len(tokens)) == 1
    core.commit(lease, len(tokens))
    core.release(lease)


def save(core: Core, wanted: int) -> None:
    transfer = core.take_write_backs(wanted)
    assert transfer
    core.complete(transfer, Outcome.DONE)


def test_unsaved_block_that_is_out_of_the_queue_joins_the_next_save():
    """The block was out of the eviction queue during an abandoned onload of its child."""
    core = Core(
        block_tokens=1,
        device_blocks=4,
        host_blocks=8,
        write_policy=SavePolicy.WRITE_BACK,
        low_watermark_blocks=3,
    )
    serve(core, 1, 2)
    save(core, 3)  # the second block
    assert core.evict_device(1) == 1
    lease = core.match(np.array([1, 2, 3], np.int32))[0]
    assert core.allocate(lease, 3) == 2
    (onload,) = core.onloads(lease)
    core.release(lease)
    assert core.evict_device(1) == 0, "its child holds the first block up"
    serve(core, 4)
    save(core, 3)  # the first block, and 4
    assert core.statistics().attention.offloaded_blocks == 3
    core.complete(onload, Outcome.DONE)
    assert core.evict_device(3) == 3, "all are saved"
    assert core.match(np.array([1, 2, 3], np.int32))[1:] == (0, 2)
    assert core.violations() == []


def test_block_is_dropped_unsaved_when_no_host_block_can_be_evicted():
    """All host blocks are the table of a preempted lease, which nothing may evict."""
    core = Core(block_tokens=1, device_blocks=8, host_blocks=2, write_policy=SavePolicy.WRITE_BACK)
    lease = core.match(np.array([8, 9], np.int32), writes=False)[0]
    assert core.allocate(lease, 2) == 1
    core.commit(lease, 2)
    assert core.swap_out(lease)
    core.complete(core.swap_transfer(lease), Outcome.DONE)
    assert core.statistics().attention.host.free == 0
    serve(core, 1)
    assert core.evict_device(1) == 1
    assert sum(core.statistics().dropped_by_cause.values()) == 1
    core.release(lease)
    serve(core, 2)
    assert core.evict_device(1) == 0, "a host block is free now: it must be saved first"
    assert core.violations() == []
