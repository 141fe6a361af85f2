"""An engine in a thread starts ranks, waits for their layers, and ends them."""

from __future__ import annotations

from aiokv import CacheConfig
from aiokv.ranks import RankGroup
from aiokv.sync import SyncEngine


def test_an_engine_in_a_thread_has_ranks():
    config = CacheConfig(block_tokens=4, device_blocks=8, host_blocks=8)
    ranks = RankGroup(1, entry="tests.sync.rank_program:rank_main")
    with SyncEngine(config, ranks=ranks) as engine:
        with engine.match(range(17)) as lease:
            lease.allocate(17).result()
            lease.commit(17)
        engine.call(engine.cache.pause)
        engine.call(engine.cache.resume)
        assert engine.would_hit(range(17)).device_tokens == 16
        assert engine.call(engine.cache.check_invariants) == []
