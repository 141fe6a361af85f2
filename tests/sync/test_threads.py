"""Several threads on one engine: order, layers, garbage, and a stress test."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from aiokv import CacheConfig, LeaseState, Regions
from aiokv.errors import (
    AllocateTimeout,
    LeaseError,
    RequestTooLarge,
    TransferError,
    UncoveredCommitWarning,
    UnreleasedLeaseWarning,
    UsageError,
    WouldBlock,
)
from aiokv.sync import SyncEngine
from aiokv.testing import ManualDevice
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.testing.manual import ManualStream

PROMPT = list(range(17))


@pytest.fixture
def device():
    return ManualDevice()


@pytest.fixture
def loading(device):
    """An engine whose device tier was evicted to host memory, and a lease that loads 4 blocks."""
    regions = Regions(num_layers=2)
    regions.add("kv", layers=[np.zeros((8, 64), np.int8) for _ in range(2)])
    config = CacheConfig(block_tokens=4, device_blocks=8, host_blocks=8, drain_timeout_seconds=0.0)
    with SyncEngine(config, regions, device) as engine:
        with engine.match(PROMPT) as lease:
            lease.allocate(17).result()
            lease.commit(17)
        engine.step()
        engine.call(device.complete_all)
        engine.call(engine.cache.drain)
        engine.call(engine.cache.evict, 8)
        with engine.match(PROMPT) as lease:
            lease.allocate(17).result()
            yield engine, lease
            engine.call(device.complete_all)
            engine.call(engine.cache.drain)
        assert engine.call(engine.cache.check_invariants) == []


def test_a_runner_thread_waits_for_layers(loading, device):
    engine, lease = loading
    layers = lease.layers
    assert lease.cached_tokens == 16
    assert not layers.is_done
    for wait in (lambda: layers.wait(0, timeout=0), lambda: layers.wait_all(timeout=0)):
        with pytest.raises(TimeoutError):
            wait()
    with ThreadPoolExecutor(1) as runner:
        arrived = []
        done = runner.submit(lambda: [arrived.append(layer) for layer in layers])
        engine.call(device.onloads[-1].complete, 0)
        layers.wait(0)
        assert done.running() or arrived == [0]
        engine.call(device.onloads[-1].complete, 1)
        done.result(PATIENCE_SECONDS)
    assert arrived == [0, 1]
    layers.wait_all()
    layers.raise_for_error()
    assert layers.is_done
    statistics = engine.statistics().layer_waits
    assert statistics.layer_seconds == [layers.wait_seconds(layer) for layer in range(2)]
    assert statistics.waits.count >= 1
    with pytest.raises(UsageError):
        layers.wait(2)


def test_a_stream_waits_for_the_layers_of_a_lease(loading, device):
    _, lease = loading
    stream, copy = ManualStream(), device.onloads[-1]
    lease.layers.gpu_wait(1, stream)
    assert stream.waits == [(copy, 1)]
    lease.layers.gpu_wait_all(stream)
    assert stream.waits == [(copy, 1), (copy, 0), (copy, 1)]


def test_a_failed_layer_raises_in_the_thread_that_waits(loading, device):
    engine, lease = loading
    engine.call(device.onloads[-1].fail, 1, block=2)
    engine.call(device.complete_all)
    with pytest.raises(TransferError) as caught:
        lease.layers.wait(1)
    assert caught.value.first_bad_token == 8
    with pytest.raises(TransferError):
        lease.layers.raise_for_error()
    assert lease.recompute_from() == 8
    assert lease.cached_tokens == 8


def test_a_close_ends_a_wait_for_layers(config):
    with SyncEngine(config) as engine, engine.match(PROMPT) as lease:
        lease.layers.wait_all()  # no transfer: no crossing
        assert list(lease.layers) == list(range(lease.layers.num_layers))


def test_any_thread_may_collect_a_lease(engine):
    lease = engine.match(PROMPT)
    lease.allocate(17).result()
    leases = [lease]
    del lease

    def drop():
        with pytest.warns(UnreleasedLeaseWarning):
            leases.clear()  # the last reference

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    engine.call(lambda: None)
    assert engine.statistics().attention.device.leased == 0
    assert engine.statistics().leases == 0


def test_errors_keep_no_lease(engine):
    """A lease with failed calls is collected with its last reference, not by the collector."""
    gc.disable()
    try:
        calls = engine.calls()
        lease = calls.match(PROMPT)
        failed = calls.commit(lease, 99)
        calls.run(raise_errors=False)
        assert isinstance(failed.error, LeaseError)
        del calls, failed
        with suppress(LeaseError):
            lease.commit(99)
        with suppress(RequestTooLarge):
            lease.allocate(99).result()
        del lease
        for _ in range(2):
            engine.call(lambda: None)
        assert engine.statistics().leases == 0
    finally:
        gc.enable()


def test_the_calls_of_one_thread_are_not_mixed_with_those_of_another(engine):
    log = []

    def work(name):
        for _ in range(100):
            calls = engine.calls()
            for part in range(4):
                calls.add(log.append, (name, part))
            calls.run()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert len(log) == 1600
    for first in range(0, len(log), 4):
        name = log[first][0]
        assert log[first : first + 4] == [(name, part) for part in range(4)]


def serve(engine, seed, shared):
    """Serve requests with random calls, errors and cancellations; return the number of grants."""
    dice = random.Random(seed)
    grants = 0
    for _ in range(60):
        prompt = [dice.randrange(3)] * dice.randrange(1, 20)
        calls = engine.calls()
        lease = calls.match(prompt, salt=dice.choice(["", "tenant"]))
        granted = calls.try_allocate(lease, len(prompt))
        calls.run(raise_errors=False)
        if granted.error is None and not granted.value:
            future = lease.allocate(len(prompt), timeout=dice.choice([0.0, 0.01]))
            if dice.random() < 0.5:
                future.cancel()
            try:
                future.result()
            except (AllocateTimeout, Exception) as error:
                if not future.cancelled() and not isinstance(error, AllocateTimeout):
                    raise
        if lease.state is LeaseState.GRANTED:
            grants += 1
            calls = engine.calls()
            calls.commit(lease, len(prompt))
            grown = calls.extend([lease], dice.randrange(6))
            calls.step()
            calls.run(raise_errors=False)
            assert grown.error is None or isinstance(grown.error, WouldBlock)
            if dice.random() < 0.3:
                lease.preempt()
        with shared[0]:  # any thread releases the lease that another thread has left
            shared[1].append(lease)
            other = shared[1].pop(dice.randrange(len(shared[1])))
        if dice.random() < 0.8:
            other.release()
        else:
            with shared[0]:
                shared[1].append(other)
            for lease in list(shared[1]):
                lease.release()
    return grants


@pytest.mark.parametrize("seed", range(3))
def test_random_threads_leave_the_engine_whole(engine, seed):
    shared = threading.Lock(), []
    with ThreadPoolExecutor(4) as threads:
        grants = sum(threads.map(lambda i: serve(engine, 100 * seed + i, shared), range(4)))
    assert grants > 0
    for lease in shared[1]:
        lease.release()
    engine.call(engine.cache.quiesce, timeout=PATIENCE_SECONDS)
    engine.call(engine.cache.resume)
    statistics = engine.statistics()
    assert (statistics.leases, statistics.waiting, statistics.attention.device.leased) == (0, 0, 0)
    assert (
        statistics.attention.device.free + statistics.attention.device.cached
        == statistics.attention.device.blocks
    )


@pytest.mark.filterwarnings("error::aiokv.errors.UncoveredCommitWarning")
def test_strict_mode_sees_the_batches_of_the_thread():
    with SyncEngine(CacheConfig(device_blocks=8, strict=True)) as engine:
        lease = engine.match(range(40))
        lease.allocate(40).result()
        with engine.computing([lease]):
            pass
        lease.commit(40)
        lease.release()
        lease = engine.match(range(100, 140))
        lease.allocate(40).result()
        with pytest.raises(UncoveredCommitWarning):
            lease.commit(40)
        lease.release()
