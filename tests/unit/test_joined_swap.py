"""A lease joins again the onload of its own swapped table, whose tail it has given back."""

from __future__ import annotations

import numpy as np

from aiokv._native import Core, Outcome


def test_lease_that_joins_the_onload_of_its_swapped_table_again_loses_no_block() -> None:
    core = Core(block_tokens=2, device_blocks=8, host_blocks=8)
    lease = core.match(np.arange(5, dtype=np.int32))[0]
    core.allocate(lease, 5)
    core.commit(lease, 3)  # one full block, and a tail of one position
    assert core.swap_out(lease)
    core.complete(core.swap_transfer(lease), Outcome.DONE, 2)
    assert core.evict_device(8) == 1
    assert core.allocate(lease, 5) == 2
    (onload,) = core.onloads(lease)
    core.retract(lease)  # the onload owns the block of the tail now
    assert core.allocate(lease, 5) == 2
    assert core.onloads(lease) == [onload]
    core.truncate(lease, 3)  # the onload writes no block behind the first one
    core.retract(lease)
    assert core.violations() == []
    core.complete(onload, Outcome.DONE, 2)
    core.release(lease)
    assert core.violations() == []
    statistics = core.statistics()
    assert statistics.attention.device.free + statistics.attention.device.cached == 8
