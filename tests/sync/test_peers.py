"""Blocks from one engine in a thread to another one."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv import CacheConfig, Peers, Regions
from aiokv.errors import LeaseError, UsageError
from aiokv.sync import SyncEngine
from aiokv.testing.loops import PATIENCE_SECONDS

SECRET = bytes(range(32))
PROMPT = np.arange(50)


def new_engine(listen: str | None) -> SyncEngine:
    regions = Regions(num_layers=2)
    arrays = [np.zeros((8, 8, 2, 4), np.float32) for _ in range(2)]
    regions.add("kv", layers=arrays, axes=("tokens", "heads", "dim"))
    config = CacheConfig(device_blocks=8, block_tokens=8, model="tiny@1", drain_timeout_seconds=0.0)
    return SyncEngine(config, regions, peers=Peers(secret=SECRET, listen=listen))


@pytest.fixture
def engines():
    with new_engine("127.0.0.1") as decoder, new_engine(None) as prefiller:
        yield decoder, prefiller
        for engine in (decoder, prefiller):
            assert engine.call(engine.cache.check_invariants) == []


def test_threads_send_and_receive(engines):
    decoder, prefiller = engines
    with decoder.match(PROMPT) as target, prefiller.match(PROMPT) as source:
        target.allocate(50).result()
        source.allocate(50).result()
        with target.receive(timeout=PATIENCE_SECONDS) as receiving:
            arrived = receiving.wait()
            with prefiller.send(source, receiving.ticket) as sending:
                source.commit(50)
            assert sending.delivered_tokens == 50
            assert sending.failure is None
            assert arrived.result(PATIENCE_SECONDS) == 50
            assert receiving.statistics.received_tokens == 50
        assert decoder.would_hit(PROMPT).total == 48
        with pytest.raises(UsageError, match="once"), receiving:
            pass


def test_a_receive_that_is_cancelled_keeps_nothing_waiting(engines):
    decoder, _ = engines
    with decoder.match(PROMPT) as target:
        receiving = target.receive(timeout=PATIENCE_SECONDS, open_timeout=PATIENCE_SECONDS)
        with pytest.raises(UsageError, match="`with` block"):
            receiving.wait()
        with pytest.raises(LeaseError), receiving:  # not granted
            pass
        target.allocate(50).result()
        with target.receive(timeout=PATIENCE_SECONDS) as receiving:
            arrived = receiving.wait()
            assert not arrived.done()
            receiving.cancel()
            assert arrived.result(PATIENCE_SECONDS) == 0
            assert "cancel" in receiving.failure
