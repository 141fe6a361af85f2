"""Updates of the model's weights, from a thread."""

from __future__ import annotations

import os

import numpy as np
import pytest

from aiokv import CacheConfig, Regions
from aiokv.errors import ClosedError, ControlTimeout, UsageError
from aiokv.sync import SyncEngine, weights
from aiokv.testing import ManualDevice
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.sync.conftest import BLOCKS, TOKENS

PROMPT = list(range(2 * TOKENS + 1))


def serve(engine: SyncEngine) -> int:
    """Compute a prompt; return how many of its tokens were cached."""
    with engine.match(PROMPT) as lease:
        lease.allocate(len(PROMPT), timeout=PATIENCE_SECONDS).result()
        lease.commit(len(PROMPT))
    return lease.cached_tokens


def test_an_update_drops_all_blocks_and_grants_nothing_meanwhile(engine):
    serve(engine)
    assert serve(engine) == 2 * TOKENS
    with engine.updating_weights(version="2"):
        waiting = engine.match(PROMPT)
        granted = waiting.allocate(len(PROMPT))
        assert not engine.match([1, 2]).try_allocate(2)
        assert not granted.done()
    assert granted.result().cached_tokens == 0
    waiting.release()
    assert serve(engine) == 0
    assert serve(engine) == 2 * TOKENS


def test_an_exception_in_the_block_ends_the_update(engine):
    serve(engine)
    with pytest.raises(ZeroDivisionError), engine.updating_weights():
        raise ZeroDivisionError
    assert serve(engine) == 0


def test_an_update_is_entered_once_and_not_in_the_engines_thread(engine):
    update = engine.updating_weights()
    with pytest.raises(UsageError, match="was not entered"):
        update.__exit__(None, None, None)
    with update:
        pass
    with pytest.raises(UsageError, match="was entered already"):
        update.__enter__()
    with pytest.raises(UsageError, match="own thread"):
        engine.call(engine.updating_weights().__enter__)
    with pytest.raises(UsageError, match="timeout is 'soon'"):
        engine.updating_weights("soon").__enter__()
    assert serve(engine) == 0


@pytest.mark.parametrize("begins", [False, True])
def test_an_interrupt_of_the_entry_ends_the_update(engine, monkeypatch, begins):
    real_wait = weights.wait

    def interrupted(futures, **options):
        if begins:
            real_wait(futures, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.updating_weights().__enter__()
    assert serve(engine) == 0  # is granted


def test_transfers_in_flight_may_end_before_the_timeout_only():
    device = ManualDevice()
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((BLOCKS, 64), np.int8)])
    config = CacheConfig(
        block_tokens=TOKENS, device_blocks=BLOCKS, host_blocks=BLOCKS, drain_timeout_seconds=0.0,
        write_policy="write_through",
    )  # fmt: skip
    with SyncEngine(config, regions, device) as engine:
        serve(engine)
        engine.step()
        with pytest.raises(ControlTimeout, match="updating_weights"):
            engine.updating_weights(0).__enter__()
        assert serve(engine) == 2 * TOKENS  # nothing changed
        engine.step()
        engine.call(device.complete_all)
        engine.call(engine.cache.drain)
        with engine.updating_weights(30.0):
            pass
        assert serve(engine) == 0
        engine.step()
        engine.call(device.complete_all)


def test_a_close_ends_an_update(config):
    engine = SyncEngine(config)
    engine.open()
    with pytest.raises(ClosedError), engine.updating_weights():
        engine.close()
    with pytest.raises(ClosedError):
        engine.updating_weights().__enter__()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_update_of_the_parent_is_not_ended_by_a_child(config):
    with SyncEngine(config) as engine:
        update = engine.updating_weights()
        with update:
            pid = os.fork()
            if pid == 0:  # the child has no thread of the engine
                try:
                    update.__exit__(None, None, None)
                except ClosedError:
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert not engine.match([1, 2]).try_allocate(2)
        assert serve(engine) == 0
