"""Queries, event destruction, allocations and copies from several threads: no deadlock."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from aiokv.base.plan import OFFLOAD, ONLOAD

from .pools import Pools, finish

SECONDS = float(os.environ.get("AIOKV_GPU_LOCK_SECONDS", "60"))
ROUNDS = 10  # of each kind, however long they take


@pytest.mark.timeout(SECONDS + 600)
def test_no_deadlock_between_the_gil_and_the_driver():
    import cupy

    errors: list[BaseException] = []
    rounds = dict.fromkeys(("copy", "query", "event", "memory"), 0)
    ends_at = time.monotonic() + SECONDS
    with Pools(sizes=(16384, 16384), layers=4) as pools:
        ids = np.arange(32, dtype=np.int32)
        current = [pools.device.copy(ONLOAD, ids, ids, None)]

        def has_more_to_do():
            return min(rounds.values()) <= ROUNDS

        def repeat(name, work):
            try:
                stream = cupy.cuda.Stream(non_blocking=True)
                with stream:
                    while not errors and (time.monotonic() < ends_at or has_more_to_do()):
                        work(stream)
                        rounds[name] += 1
            except BaseException as error:
                errors.append(error)

        def copy(stream):
            moves = (
                pools.device.copy(ONLOAD, ids, ids, None),
                pools.device.copy(OFFLOAD, ids, ids, None),
            )
            current[0] = moves[0]
            finish(*moves)

        def query(stream):
            for event in current[0].layer_events:
                _ = event.done
            current[0].stream_wait(3, stream)

        def event(stream):
            cupy.cuda.Event(disable_timing=True).record(stream)

        def memory(stream):
            cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(1 << 20))
            cupy.cuda.alloc_pinned_memory(1 << 16)

        threads = [
            threading.Thread(target=repeat, args=(name, work))
            for name, work in (
                ("copy", copy),
                ("query", query),
                ("query", query),
                ("event", event),
                ("memory", memory),
            )
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
