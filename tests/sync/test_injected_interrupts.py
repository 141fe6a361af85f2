"""An exception at a guarded line of an engine in a thread breaks the engine, and nothing else."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import CacheConfig
from aiokv.errors import BrokenEngineError, ClosedError, LeaseError, TransferError
from aiokv.sync import SyncEngine
from tests.harness.interrupting import Interrupter, first_of_each
from tests.sync.served_ranks import BLOCKS, LONG, PROMPT, TOKENS, new_regions, tensors

if TYPE_CHECKING:
    from aiokv import Regions
    from aiokv.sync import SyncLease

STRIDE = 3  # every line takes 10 s
FULL = len(PROMPT) // TOKENS  # blocks


def content(layer: int, block: int) -> int:
    return 10 * layer + block + 1


def serve(engine: SyncEngine, regions: Regions, leases: list[SyncLease]) -> None:
    """Compute a prompt, evict it to the host and load it again; all bytes are checked."""
    kv = tensors(regions)
    computed = engine.match(PROMPT)
    leases.append(computed)
    computed.allocate(len(PROMPT)).result(LONG)
    for layer, tensor in enumerate(kv):
        for position, block in enumerate(computed.block_table[:FULL]):
            tensor[block] = content(layer, position)
    computed.commit(len(PROMPT))
    computed.release()
    engine.step()
    engine.call(engine.cache.drain)
    engine.call(engine.cache.evict, BLOCKS)
    for tensor in kv:
        tensor[:] = 0
    loaded = engine.match(PROMPT)
    leases.append(loaded)
    loaded.allocate(len(PROMPT) + 1).result(LONG)
    loaded.layers.wait_all(LONG)
    assert loaded.cached_tokens == FULL * TOKENS
    for layer, tensor in enumerate(kv):
        for position, block in enumerate(loaded.block_table[:FULL]):
            assert np.all(tensor[block] == content(layer, position)), (layer, position)
    loaded.append([1])
    loaded.release()
    engine.step()
    engine.call(engine.cache.drain)


def new_engine(regions: Regions) -> SyncEngine:
    config = CacheConfig(block_tokens=TOKENS, device_blocks=BLOCKS, host_blocks=BLOCKS)
    return SyncEngine(config, regions)


def check_broken(engine: SyncEngine, leases: list[SyncLease]) -> None:
    """All calls are refused."""
    for call in (lambda: engine.match(PROMPT), engine.step):
        with pytest.raises(BrokenEngineError):
            call()
    with pytest.raises(BrokenEngineError):
        engine.call(engine.cache.drain)
    for lease in leases:
        with pytest.raises((BrokenEngineError, LeaseError)):
            lease.append([1])
        lease.release()


def play(at: int, exception: type[BaseException] = KeyboardInterrupt) -> Interrupter:
    """Serve, raise the exception in the thread that runs a guarded line, and check what is left."""
    regions, leases = new_regions(), list["SyncLease"]()
    engine, interrupter = new_engine(regions), Interrupter(at, exception)
    is_open = False  # an opening that fails closes the engine
    threading.settrace(interrupter.trace)  # of the thread of the engine
    try:
        with suppress(exception, BrokenEngineError, TransferError), interrupter:
            engine.open()
            is_open = True
            serve(engine, regions, leases)
        if (
            interrupter.has_raised and is_open
        ):  # a run may have fewer lines than the one that counted them
            check_broken(engine, leases)
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
        engine.close(0.0)
    with pytest.raises((BrokenEngineError, ClosedError)):
        engine.match(PROMPT)
    with new_engine(regions) as again:  # the memory of the broken engine is free
        serve(again, regions, leases)
    return interrupter


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
def test_interrupt_at_a_guarded_line_breaks_the_engine_and_it_closes(
    exception: type[BaseException],
) -> None:
    lines = first_of_each(play(0).places)
    assert len(lines) > 200
    played = [play(at, exception) for at in lines[::STRIDE]]
    assert sum(run.has_raised for run in played) > len(played) * 0.9
