"""Core.await_use: a lease that holds its hit until another one hits all of it."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv._native import Core
from aiokv.errors import LeaseError

PROMPT = np.arange(13, dtype=np.int32)


def filled() -> Core:
    """Return a core with three cached blocks of PROMPT."""
    core = Core(block_tokens=4, device_blocks=16)
    use(core)
    return core


def use(core: Core, tokens: int = 13) -> None:
    lease = core.match(PROMPT[:tokens])[0]
    core.allocate(lease, tokens)
    core.commit(lease, tokens)
    core.release(lease)
    assert core.violations() == []


def held(core: Core, tokens: int = 13) -> int:
    lease: int = core.match(PROMPT[:tokens])[0]
    core.hold_only(lease)
    core.allocate(lease, (tokens - 1) // 4 * 4)
    core.await_use(lease)
    assert core.violations() == []
    return lease


def test_use_is_reported_once_to_each_lease_whose_hit_it_covers():
    core = filled()
    short, whole, same = held(core, 9), held(core), held(core)
    assert core.take_used() == []
    use(core, 9)
    assert core.take_used() == [short]
    use(core)
    assert sorted(core.take_used()) == sorted([whole, same])
    assert not any(map(core.awaits_use, (short, whole, same)))
    use(core)
    assert core.take_used() == []


def test_released_or_retracted_lease_gets_no_use_report():
    core = filled()
    released, retracted, reported = held(core), held(core), held(core)
    core.release(released)
    core.retract(retracted)
    use(core)
    assert core.violations() == []
    assert core.take_used() == [reported]
    gone = held(core)
    use(core)
    core.release(gone)
    core.match(PROMPT)  # takes its slot
    assert core.take_used() == []


def test_reset_ends_all_expected_uses():
    core = filled()
    lease = held(core)
    assert core.is_current(lease)
    core.reset()
    assert not core.is_current(lease)
    use(core)
    use(core)
    assert core.take_used() == []
    core.release(lease)
    assert core.violations() == []


def test_a_lease_without_a_hit_awaits_nothing_and_one_without_a_grant_is_refused():
    core = filled()
    lease = core.match(PROMPT + 100)[0]
    with pytest.raises(LeaseError):
        core.await_use(lease)
    core.allocate(lease, 13)
    core.await_use(lease)
    assert not core.awaits_use(lease)


def test_a_whole_hold_hits_the_last_block_of_its_prompt():
    core = filled()
    lease = core.match(PROMPT[:12])[0]
    assert core.hit(lease) == (2, 0)
    core.hold_only(lease, whole=True)
    assert core.hit(lease) == (3, 0)
    core.allocate(lease, 12)
    assert core.cached_tokens(lease) == 12
    core.release(lease)
    again = core.match(PROMPT[:12])[0]
    assert core.hit(again) == (2, 0), "its slot was used for the hold"
