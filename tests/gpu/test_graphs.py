"""A captured decode step replays while transfers go on beside it."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.base.plan import OFFLOAD, ONLOAD
from aiokv.errors import UsageError

from .pools import Pools, finish


def test_a_captured_step_replays_beside_transfers():
    import cupy

    with Pools(sizes=(65536, 65536), layers=4, device_blocks=64, host_blocks=64) as pools:
        pools.device.wait_pinned()
        stream = cupy.cuda.Stream(non_blocking=True)
        private = pools.tensors[0][0][60:64]  # blocks of the decode: no transfer touches them
        total = cupy.zeros(4, cupy.uint64)

        def decode():
            cupy.sum(private, axis=1, dtype=cupy.uint64, out=total)
            private[:, :16] += np.uint8(1)

        with stream:
            decode()  # compiles
            stream.synchronize()
            stream.begin_capture()
            decode()
            graph = stream.end_capture()
        expected = private.get()
        ids = np.arange(0, 48, dtype=np.int32)
        for step in range(30):
            moves = (
                pools.device.copy(ONLOAD, ids[:24], ids[:24], None),
                pools.device.copy(OFFLOAD, ids[24:], ids[24:], None),
            )
            for layer in range(4):
                moves[0].stream_wait(layer, stream)  # gpu_wait_all, before the launch
            graph.launch(stream)
            wanted = expected.sum(axis=1, dtype=np.uint64)
            expected[:, :16] += np.uint8(1)
            finish(*moves)
            stream.synchronize()
            np.testing.assert_array_equal(total.get(), wanted, err_msg=f"step {step}")
        np.testing.assert_array_equal(private.get(), expected)


def test_gpu_wait_during_capture_is_refused():
    import cupy

    with Pools(sizes=(4096,)) as pools:
        ids = np.arange(4, dtype=np.int32)
        copy = pools.device.copy(ONLOAD, ids, ids, None)
        finish(copy)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(UsageError, match="gpu_wait_all"):
                copy.stream_wait(0, stream)
            pools.tensors[0][0].fill(0)
            stream.end_capture()
