"""Batches of an engine in a thread: a decode step in one crossing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import LeaseError, UsageError

if TYPE_CHECKING:
    from aiokv.sync import SyncEngine


def granted(engine: SyncEngine, *prompts: list[int]):
    leases = [engine.match(prompt) for prompt in prompts]
    for lease, prompt in zip(leases, prompts, strict=True):
        lease.allocate(len(prompt)).result()
    return leases


def test_a_decode_step_is_one_crossing(engine):
    leases = granted(engine, [1, 2, 3], [11, 12])
    batch = engine.batch(leases)
    with engine.calls() as calls:
        refused = calls.advance(batch, np.array([4, 13], np.int32))
        calls.step()
        computing = calls.begin_computing(batch)
        tables, lengths = calls.block_tables(batch), calls.lengths(batch)
    assert refused.value == ()
    assert lengths.value.tolist() == [4, 3]
    assert tables.value.tolist() == [lease.block_table.tolist() for lease in leases]
    with engine.calls() as calls:
        calls.end_computing(computing)
        calls.advance(computing, [5, 14])
    assert engine.would_hit([1, 2, 3, 4, 0]).total == 4
    for lease in leases:
        lease.release()
    with engine.computing(batch):
        assert len(batch) == 0


def test_leases_without_room_are_those_of_the_thread(engine):
    leases = granted(engine, list(range(16)), list(range(100, 111)), [7])
    batch = engine.batch(leases)
    assert engine.advance(batch, [[1], [1], [1]], draft_tokens=0) == (leases[0],)
    batch.remove(leases[0])
    assert list(batch) == leases[1:]
    with pytest.raises(UsageError, match="must have 2, one per lease"):
        engine.advance(batch, [1])
    with pytest.raises(UsageError, match="must be a SyncLease"):
        engine.batch([leases[0].inner])  # type: ignore[list-item]
    leases[0].release()
    with pytest.raises(LeaseError, match="released"):
        batch.add(leases[0])
    for lease in leases:
        lease.release()


def test_a_batch_of_leases_that_are_not_matched_yet_is_refused(engine):
    calls = engine.calls()
    lease = calls.match([1, 2])
    with pytest.raises(UsageError, match="not matched yet"):
        engine.batch([lease])
    calls.run()
    assert list(engine.batch([lease])) == [lease]
    lease.release()
