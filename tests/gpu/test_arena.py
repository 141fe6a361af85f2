"""The host arena: pinned in the background, usable before it is whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv import _native
from aiokv.base.plan import ONLOAD
from aiokv.errors import DeviceError, UsageError
from aiokv.worker.arena import HostArena

from .pools import Pools, finish

_cuda: Any = getattr(_native, "cuda", None)  # absent when aiokv was built without a CUDA compiler

CHUNK = 4 << 20


def test_a_transfer_of_low_blocks_does_not_wait_for_the_whole_arena():
    blocks = 4096
    with Pools(
        sizes=(65536,), layers=4, device_blocks=4, host_blocks=blocks, touch_threads=1
    ) as pools:
        ids = np.arange(4, dtype=np.int32)
        finish(pools.device.copy(ONLOAD, ids, ids, None))
        assert pools.device.pinned_bytes > 0
        assert pools.device.wait_pinned() > 0
        assert pools.device.pinned_bytes == pools.arena.nbytes
        last = np.arange(blocks - 4, blocks, dtype=np.int32)
        finish(pools.device.copy(ONLOAD, last, ids, None))
        pools.expect("onload", last, ids)
        pools.check()


def test_pinning_keeps_the_bytes_and_can_be_cancelled():
    arena = HostArena(num_blocks=1024, pitch_bytes=1 << 20)
    arena.blocks[::100] = 3
    registration = _cuda.HostRegistration(
        arena.pointer, arena.nbytes, device=0, chunk_bytes=CHUNK, touch_threads=2
    )
    registration.wait_ready(1)
    registration.cancel()
    with pytest.raises(DeviceError, match="stopped growing at"):
        registration.wait_ready(arena.nbytes)
    assert 0 < registration.ready_bytes < arena.nbytes
    registration.close()
    assert (arena.blocks[::100] == 3).all()
    assert registration.ready_bytes == 0
    arena.close()


def test_pinning_failure_names_the_limit_to_change():
    arena = HostArena(num_blocks=8, pitch_bytes=1 << 20)
    first = _cuda.HostRegistration(arena.pointer, arena.nbytes, device=0, chunk_bytes=CHUNK)
    first.wait_ready(arena.nbytes)
    second = _cuda.HostRegistration(arena.pointer, arena.nbytes, device=0, chunk_bytes=CHUNK)
    with pytest.raises(DeviceError, match=r"memlock limit is .* lower host_blocks") as caught:
        second.wait_ready(arena.nbytes)
    assert f"of {arena.nbytes} bytes" in str(caught.value)
    assert caught.value.cuda_code != 0
    second.close()
    first.close()
    arena.close()


def test_odd_addresses_and_chunks_are_refused():
    with pytest.raises(UsageError, match="page boundary"):
        _cuda.HostRegistration(4096 + 8, CHUNK, device=0)
    with pytest.raises(UsageError, match="multiple of"):
        _cuda.HostRegistration(4096, CHUNK, device=0, chunk_bytes=CHUNK + 4096)
