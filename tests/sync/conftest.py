"""An engine in a thread, with 8 blocks of 4 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import uvloop

from aiokv import CacheConfig
from aiokv.sync import SyncEngine
from aiokv.sync.loop import SharedLoop

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 8
TOKENS = 4  # per block


@pytest.fixture
def config() -> CacheConfig:
    return CacheConfig(block_tokens=TOKENS, device_blocks=BLOCKS, drain_timeout_seconds=0.0)


@pytest.fixture(params=[SharedLoop, uvloop.new_event_loop], ids=["shared", "uvloop"])
def engine(request: pytest.FixtureRequest, config: CacheConfig) -> Iterator[SyncEngine]:
    """An engine on a loop of each kind; its invariants are checked at the end."""
    with SyncEngine(config, loop_factory=request.param) as engine:
        yield engine
        assert engine.call(engine.cache.check_invariants) == []
