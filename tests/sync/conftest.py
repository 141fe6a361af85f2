"""An engine in a thread, with 8 blocks of 4 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv import CacheConfig
from aiokv.sync import SyncEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 8
TOKENS = 4  # per block


@pytest.fixture
def config() -> CacheConfig:
    return CacheConfig(block_tokens=TOKENS, device_blocks=BLOCKS, drain_timeout_seconds=0.0)


@pytest.fixture
def engine(config: CacheConfig) -> Iterator[SyncEngine]:
    """Check the invariants at the end, and that no lease has kept a block."""
    with SyncEngine(config) as engine:
        yield engine
        assert engine.call(engine.cache.check_invariants) == []
