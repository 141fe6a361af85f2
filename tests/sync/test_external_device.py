"""Device blocks of a server, from a thread."""

from __future__ import annotations

from concurrent.futures import wait

import numpy as np
import pytest

from aiokv import CacheConfig, Regions
from aiokv.errors import UsageError
from aiokv.sync import SyncEngine
from aiokv.testing.loops import PATIENCE_SECONDS

PROMPT = list(range(17))
CONFIG = CacheConfig(block_tokens=4, device_blocks=16, host_blocks=32, external_device=True)


@pytest.fixture
def tensors():
    return [np.zeros((16, 64), np.uint8) for _ in range(2)]


@pytest.fixture
def engine(tensors):
    regions = Regions(num_layers=2)
    regions.add("kv", layers=tensors)
    with SyncEngine(CONFIG, regions) as engine:
        yield engine
        assert engine.call(engine.cache.check_invariants) == []


def serve(engine, tensors, ids):
    calls = engine.calls()
    lease = calls.match(PROMPT)
    granted = calls.try_allocate(lease, 17)
    calls.assign(lease, ids)
    calls.run()
    assert granted.value
    for number, block in enumerate(ids, 1):
        for tensor in tensors:
            tensor[block] = number
    return lease


def test_a_step_of_a_scheduler_is_one_crossing(engine, tensors):
    lease = serve(engine, tensors, [1, 2, 3, 4, 5])
    calls = engine.calls()
    committed = calls.commit(lease, 17)
    calls.release(lease)
    idle = calls.idle(lease)
    calls.run()
    assert committed.value == 4
    assert idle.result() is None
    assert lease.is_idle
    again = engine.match(PROMPT)
    assert again.hit.host_tokens == 16
    assert again.try_allocate(17)
    again.assign(np.array([11, 12, 13, 14, 15]), computed_tokens=4)
    again.layers.wait_all()
    again.idle().result()
    assert again.transfer_ids == ()
    assert [tensor[12:15, 9].tolist() for tensor in tensors] == [[2, 3, 4]] * 2
    again.release()


def test_the_idle_future_of_an_idle_lease_is_done_at_once(engine, tensors):
    with engine.match(PROMPT) as lease:
        calls = engine.calls()
        future = calls.idle(lease)
        calls.run()
        assert future.done()


def test_an_idle_future_that_is_cancelled_before_it_is_sent_has_ended(engine, tensors):
    lease = serve(engine, tensors, [1, 2, 3, 4, 5])
    calls = engine.calls()
    calls.commit(lease, 17)
    future = calls.idle(lease)
    assert future.cancel()
    calls.run()
    assert wait([future], timeout=PATIENCE_SECONDS).not_done == set()
    lease.idle().result()
    lease.release()


def test_a_cancelled_idle_future_changes_nothing(engine, tensors):
    lease = serve(engine, tensors, [1, 2, 3, 4, 5])
    calls = engine.calls()
    calls.commit(lease, 17)
    future = calls.idle(lease)
    calls.run()
    future.cancel()
    lease.idle().result()
    lease.release()


def test_the_error_of_an_assign_is_that_of_its_answer(engine):
    lease = engine.match(PROMPT)
    calls = engine.calls()
    calls.try_allocate(lease, 17)
    wrong = calls.assign(lease, [1, 1])
    right = calls.assign(lease, [1, 2])
    calls.run(raise_errors=False)
    assert isinstance(wrong.error, UsageError)
    assert right.value is None
    assert lease.block_table.tolist() == [1, 2]
    lease.release()


def test_waits_for_layers_check_their_arguments_when_all_have_arrived(engine, tensors):
    lease = serve(engine, tensors, [1, 2, 3, 4, 5])
    lease.commit(17)
    lease.release()
    lease.idle().result()
    again = engine.match(PROMPT)
    again.try_allocate(17)
    again.assign([11, 12, 13, 14, 15])
    layers = again.layers
    layers.wait_all(float("inf"))
    assert layers.has_arrived
    for layer in (-1, 2, 0.0, None, True):
        with pytest.raises(UsageError, match="layer is"):
            layers.wait(layer)
    for timeout in ("soon", float("nan"), True):
        with pytest.raises(UsageError, match="timeout is"):
            layers.wait(0, timeout)
        with pytest.raises(UsageError, match="timeout is"):
            layers.wait_all(timeout)
    layers.wait(np.int64(1), -1)
    again.release()
