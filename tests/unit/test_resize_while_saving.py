"""The device tier shrinks only when no save to a store keeps a dropped block beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv._native import Core, Outcome, SavePolicy, StoreConfig
from aiokv.errors import UsageError


def test_resize_is_refused_while_a_save_keeps_dropped_blocks() -> None:
    core = Core(
        block_tokens=2,
        device_blocks=4,
        host_blocks=4,
        write_policy=SavePolicy.WRITE_THROUGH,
        stores=StoreConfig(),
    )
    lease = core.match(np.arange(6, dtype=np.int32))[0]
    core.allocate(lease, 6)
    core.commit(lease, 6)
    core.release(lease)
    core.complete(core.take_backups(), Outcome.DONE, 3)
    save = core.take_saves()
    core.reset()
    with pytest.raises(UsageError, match="being copied"):
        core.resize_device(1)
    assert core.violations() == []
    core.complete(save, Outcome.DONE, 3)
    core.resize_device(1)
    assert core.statistics().attention.device.free == 1
    assert core.violations() == []
