"""Core.lease_state from match to release, and the details of native errors."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv._native import Core, LeaseState, Outcome, SavePolicy
from aiokv.errors import AiokvError, ConfigError, LeaseError, RequestTooLarge, UsageError

PROMPT = np.arange(9, dtype=np.int32)


def saving_core(device_blocks: int = 8) -> Core:
    return Core(
        block_tokens=4,
        device_blocks=device_blocks,
        host_blocks=8,
        write_policy=SavePolicy.WRITE_THROUGH,
    )


def granted(core: Core) -> int:
    lease: int = core.match(PROMPT)[0]
    assert core.lease_state(lease) is LeaseState.MATCHED
    core.allocate(lease, len(PROMPT))
    assert core.lease_state(lease) is LeaseState.GRANTED
    return lease


def swapped(core: Core) -> int:
    lease = granted(core)
    core.commit(lease, len(PROMPT))
    assert core.swap_out(lease)
    assert core.lease_state(lease) is LeaseState.SWAPPING
    core.complete(core.swap_transfer(lease), Outcome.DONE)
    assert core.lease_state(lease) is LeaseState.SWAPPED
    return lease


def test_a_swapped_lease_is_granted_again_or_ends():
    core = saving_core()
    lease = swapped(core)
    core.allocate(lease, len(PROMPT))
    assert core.lease_state(lease) is LeaseState.GRANTED
    core.complete(core.onloads(lease)[0], Outcome.DONE)
    core.retract(lease)
    assert core.lease_state(lease) is LeaseState.MATCHED
    core.release(lease)
    with pytest.raises(LeaseError) as caught:
        core.lease_state(lease)
    assert caught.value.lease_id == lease
    assert core.violations() == []


def test_a_failed_swap_leaves_the_lease_granted():
    core = saving_core()
    lease = granted(core)
    core.commit(lease, len(PROMPT))
    assert core.swap_out(lease)
    core.complete(core.swap_transfer(lease), Outcome.FAILED)
    assert core.lease_state(lease) is LeaseState.GRANTED
    assert core.violations() == []


def test_a_failed_onload_fails_the_lease_until_recompute_from():
    core = saving_core()
    first = granted(core)
    core.commit(first, len(PROMPT))
    core.complete(core.take_backups(), Outcome.DONE)
    core.release(first)
    core.evict_device(8)
    lease = granted(core)
    core.complete(core.onloads(lease)[0], Outcome.FAILED, 1)
    assert core.lease_state(lease) is LeaseState.FAILED
    assert core.is_granted(lease)
    assert core.recompute_from(lease) == 4
    assert core.lease_state(lease) is LeaseState.GRANTED
    assert core.violations() == []


def test_a_failed_lease_that_is_releasing_publishes_nothing():
    core = saving_core()
    first = granted(core)
    core.commit(first, len(PROMPT))
    core.complete(core.take_backups(), Outcome.DONE)
    core.release(first)
    core.evict_device(8)
    lease = granted(core)
    batch = core.begin_batch([lease])
    core.release(lease)
    assert core.lease_state(lease) is LeaseState.RELEASING
    core.complete(core.onloads(lease)[0], Outcome.FAILED, 1)
    assert core.lease_state(lease) is LeaseState.RELEASING
    core.commit(lease, len(PROMPT))
    assert core.match(PROMPT)[1:] == (1, 0), "the block that arrived, and none behind it"
    assert core.end_batch(batch) == [lease]
    assert core.violations() == []


def test_a_lease_is_released_once():
    core = saving_core()
    lease = granted(core)
    batch = core.begin_batch([lease])
    assert not core.release(lease)
    for again in (core.release, core.retract):
        with pytest.raises(LeaseError, match="released already") as caught:
            again(lease)
        assert caught.value.lease_id == lease
    assert core.lease_state(lease) is LeaseState.RELEASING
    assert core.violations() == []
    assert core.end_batch(batch) == [lease]
    assert core.violations() == []


def test_a_swapped_lease_awaits_no_use():
    core = saving_core()
    lease = granted(core)
    core.commit(lease, len(PROMPT))
    core.await_use(lease)
    assert core.awaits_use(lease)
    assert core.swap_out(lease)
    core.complete(core.swap_transfer(lease), Outcome.DONE)
    assert not core.awaits_use(lease)
    assert core.violations() == []


def fails_of_a_lease(core: Core, lease: int) -> None:
    for call in (
        lambda: core.allocate(lease, 9),
        lambda: core.commit(lease, 10),
        lambda: core.truncate(lease, 10),
        lambda: core.append(lease, PROMPT),
        lambda: core.extend([lease, lease], 1),
        lambda: core.begin_batch([lease, lease]),
        lambda: core.snapshot(lease, 4),
        lambda: core.hold_only(lease),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.lease_id == lease


def test_native_errors_name_their_lease():
    core = saving_core()
    lease = granted(core)
    fails_of_a_lease(core, lease)
    assert core.lease_state(lease) is LeaseState.GRANTED
    assert core.violations() == []


def test_native_errors_have_a_hint_and_the_config_field_of_the_limit():
    core = saving_core(device_blocks=2)
    lease = core.match(PROMPT)[0]
    with pytest.raises(RequestTooLarge, match=r"need 3 blocks .*\(hint: raise") as caught:
        core.allocate(lease, 9)
    assert caught.value.config_field == "device_blocks"
    assert caught.value.hint.startswith("raise CacheConfig.device_blocks")
    with pytest.raises(ConfigError, match="block_tokens is 0") as refused:
        Core(block_tokens=0, device_blocks=2)
    assert (refused.value.config_field, refused.value.lease_id) == ("block_tokens", 0)
    assert (AiokvError("plain").config_field, AiokvError("plain").lease_id) == ("", 0)
