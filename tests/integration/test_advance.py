"""``advance``: a decode step of a batch in one call, and the rows of the batch."""

from __future__ import annotations

import base64
import logging
import warnings
from array import array
from typing import Any

import numpy as np
import pytest

from aiokv import Batch, CacheConfig, CacheEngine, Hit
from aiokv.errors import LeaseError, UncoveredCommitWarning, UsageError
from aiokv.testing import record, spin
from tests.harness.served import Served, computed

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

A = [1, 2, 3]
B = [11, 12, 13, 14]


def state(lease: Any) -> tuple[object, ...]:
    engine_lengths = lease.record.leases.read.lengths([lease.id]).tolist()
    return lease.block_table.tolist(), lease.num_tokens, engine_lengths, lease.usage


# --- what a step does -----------------------------------------------------------------------------


async def test_decode_loop_shares_the_blocks_of_prompt_and_answer():
    async with Served(device_blocks=16, write_policy="none") as served:
        engine = served.engine
        lease = engine.match(A)
        await lease.allocate(len(A))
        batch, tokens = engine.batch([lease]), list(A)
        for token in (4, 5, 6, 7):
            with engine.computing(batch) as step:
                served.compute(lease, tokens)
            assert engine.advance(step, [token]) == ()
            engine.step()
            tokens.append(token)
            assert engine.lengths(batch).tolist() == [len(tokens)] == [lease.num_tokens]
        assert engine.match([*tokens, 0]).hit == Hit(6, 0)  # all but the last token are committed
        lease.release()
        async with engine.match([*tokens, 0]) as later:
            await later.allocate(8)
            served.check(later, tokens, 6)


async def test_commits_belong_to_the_open_step():
    served = Served(device_blocks=16)
    served.device.computes_in_stream = True
    async with served:
        engine = served.engine
        lease = await computed(served, A)
        engine.step()
        await served.complete_offloads()
        engine.advance(engine.batch([lease]), [4])
        engine.advance(engine.batch([lease]), [5])  # completes the second block
        await spin(3)
        assert served.device.offloads == []  # a copy would read a block that the step may write
        engine.step()
        await served.complete_offloads()
        lease.release()


async def test_completed_blocks_are_saved_at_the_end_of_the_pass():
    async with Served(device_blocks=16) as served:
        lease = await computed(served, A)
        await served.complete_offloads()
        before = len(served.device.copies)
        batch = served.engine.batch([lease])
        served.engine.advance(batch, [4])
        served.engine.advance(batch, [5])  # completes the second block; no step is closed
        await spin(3)
        assert len(served.device.copies) == before + 1
        await served.complete_offloads()
        lease.release()


async def test_checksums_of_completed_blocks_are_recorded():
    engine = CacheEngine(CacheConfig(block_tokens=2, device_blocks=8, verify="checksum"))
    with record(engine) as recording:
        async with engine, engine.match(A) as lease:
            await lease.allocate(3)
            lease.commit(3)
            batch = engine.batch([lease])
            engine.advance(batch, [4])
            engine.advance(batch, [5])
            second = lease.block_table[1]
    advances = [t for t in recording.log.transitions if t.name == "advance_batch"]
    assert [len(advance.effects.get("computed", ())) for advance in advances] == [0, 1]
    block = np.array([second], "<i4").tobytes()
    assert advances[1].effects["computed"] == [{"int32": base64.b64encode(block).decode()}]


async def test_position_that_is_allocated_already_takes_no_block():
    async with Served(device_blocks=4, write_policy="none") as served:
        lease = served.engine.match(A)
        await lease.allocate(8)  # all blocks of the device
        batch = served.engine.batch([lease])
        for token in range(5):
            assert served.engine.advance(batch, [token]) == ()
        assert lease.num_tokens == 8
        assert served.engine.advance(batch, [9]) == (lease,)
        lease.release()


async def test_rows_come_in_each_form_of_integers():
    async with Served(device_blocks=32, write_policy="none") as served:
        leases = [await computed(served, tokens) for tokens in (A, B)]
        batch = served.engine.batch(leases)
        forms: list[Any] = [
            [5, 6],
            (5, 6),
            np.array([5, 6], np.int32),
            np.array([5, 6]),
            np.array([5, 6, 7, 8], np.uint16)[::2],
            array("i", [5, 6]),
            np.array([[5], [6]]),
            [[5], [6]],
        ]
        for number, tokens in enumerate(forms, 1):
            assert served.engine.advance(batch, tokens) == ()
            assert served.engine.lengths(batch).tolist() == [3 + number, 4 + number]
        assert served.engine.advance(served.engine.batch(), []) == ()
        for lease in leases:
            lease.release()


# --- speculative decoding -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["counts", "lists"])
async def test_accepted_drafts_are_committed_and_rejected_ones_computed_anew(form):
    async with Served(device_blocks=32, write_policy="none") as served:
        engine = served.engine
        leases = [await computed(served, tokens) for tokens in (A, B)]
        batch = engine.batch(leases)
        engine.advance(batch, [4, 15], draft_tokens=2)
        assert [lease.num_tokens for lease in leases] == [3 + 1 + 2, 4 + 1 + 2]
        served.compute(leases[0], [*A, 4, 5, 99])  # the second draft is rejected
        served.compute(leases[1], [*B, 15, 98, 98])  # both are
        rows: dict[str, tuple[Any, ...]] = {
            "counts": (np.array([[5, 6, -1], [16, -1, -1]]), [2, 1]),
            "lists": ([[5, 6], [16]],),
        }
        assert engine.advance(batch, *rows[form], draft_tokens=2) == ()
        assert engine.lengths(batch).tolist() == [6, 6]
        assert [lease.num_tokens for lease in leases] == [8, 8]
        assert engine.match([*A, 4, 5, 6, 0]).hit == Hit(4, 0)  # five positions are committed
        assert engine.match([*B, 15, 16, 0]).hit == Hit(4, 0)
        served.compute(leases[0], [*A, 4, 5, 6])
        served.compute(leases[1], [*B, 15, 16])
        engine.advance(batch, [7, 17])
        for lease, tokens in zip(leases, ([*A, 4, 5, 6], [*B, 15, 16]), strict=True):
            async with engine.match([*tokens, 0]) as later:
                await later.allocate(7)
                assert later.cached_tokens == 6
                served.check(later, tokens, 6)
            lease.release()


async def test_lease_without_tokens_is_left_as_it_is():
    async with Served(device_blocks=32) as served:
        leases = [await computed(served, tokens) for tokens in (A, B)]
        batch = served.engine.batch(leases)
        before = state(leases[1])
        assert served.engine.advance(batch, np.array([[5], [0]]), [1, 0]) == ()
        assert served.engine.advance(batch, [[6], []]) == ()
        assert state(leases[1]) == before
        assert leases[0].num_tokens == 5
        for lease in leases:
            lease.release()
        await served.complete_offloads()


async def test_tokens_whose_positions_the_lease_does_not_have_are_refused():
    async with Served(device_blocks=32) as served:
        lease = await computed(served, A, owner="r1")
        batch = served.engine.batch([lease])
        before = state(lease)
        with pytest.raises(LeaseError, match=r"2 tokens behind position 3 .* has 3 positions") as e:
            served.engine.advance(batch, [[4, 5]])
        assert (e.value.lease_id, e.value.owner) == (lease.id, "r1")
        assert state(lease) == before
        lease.release()
        await served.complete_offloads()


# --- leases without room --------------------------------------------------------------------------


async def test_leases_without_room_are_unchanged_and_can_advance_later():
    async with Served(device_blocks=7, host_blocks=0) as served:
        engine = served.engine
        leases = [await computed(served, tokens) for tokens in (B, [*A, 4], [21, 22, 23])]
        batch = engine.batch(leases)  # the device has a block left, and the last needs none
        before = state(leases[1])
        assert engine.advance(batch, [15, 5, 24]) == (leases[1],)
        assert state(leases[1]) == before
        assert engine.lengths(batch).tolist() == [5, 4, 4]
        assert [len(lease.block_table) for lease in leases] == [3, 2, 2]
        leases[0].release()
        batch.remove(leases[1])
        assert engine.advance(engine.batch([leases[1]]), [5]) == ()
        assert engine.lengths([leases[1]]).tolist() == [5]
        for lease in leases:
            lease.release()
        assert engine.check_invariants() == []


async def test_write_back_saves_blocks_before_they_make_room():
    async with Served(device_blocks=4, host_blocks=8, write_policy="write_back") as served:
        await served.serve(A)
        await served.serve([31, 32, 33, 34, 35])
        engine = served.engine
        lease = await computed(served, [1])
        batch, refused = engine.batch([lease]), 0
        for token in range(2, 8):
            while engine.advance(batch, [token]):
                refused += 1
                assert refused < 10
                await served.complete_offloads()
        assert refused > 0
        lease.release()
        await served.complete_offloads()
        assert engine.match([31, 32, 33, 34, 35]).hit.total == 4  # it was saved, not dropped


# --- wrong arguments ------------------------------------------------------------------------------

WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "negative": (([4, -1],), "a token of a lease is -1"),
    "too large": (([4, 2**31],), "outside int32"),
    "float": (([4, 5.0],), "float64"),
    "text": (("ab",), "token"),
    "none": ((None,), "rows|integers|sequence"),
    "few rows": (([4],), "tokens has 1 rows; it must have 2"),
    "many rows": ((np.zeros((3, 2), np.int32),), "tokens has 3 rows"),
    "many rows of the same size": ((np.zeros((4, 1), np.int32),), "tokens has 4 rows"),
    "few lists": (([[4]],), "tokens has 1 rows"),
    "three dimensions": ((np.zeros((2, 1, 1), np.int32),), "dimensions"),
    "count above the width": (([[4], [5]], [1, 2]), "the count of a lease is 2"),
    "negative count": (([[4], [5]], [1, -1]), "the count of a lease is -1"),
    "few counts": (([[4], [5]], [1]), "counts has 1 numbers"),
    "counts of lists": (([[4], [5]], [1, 1]), "counts must be None"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_tokens_change_nothing_in_any_lease(name):
    (tokens, *counts), message = WRONG[name]
    if counts and name != "counts of lists":
        tokens = np.array(tokens)
    async with Served(device_blocks=32) as served:
        leases = [await computed(served, prompt) for prompt in (A, B)]
        await served.complete_offloads()
        before = [state(lease) for lease in leases]
        with pytest.raises(UsageError, match=message):
            served.engine.advance(served.engine.batch(leases), tokens, *counts)
        assert [state(lease) for lease in leases] == before
        assert served.engine.check_invariants() == []
        for lease in leases:
            lease.release()


async def test_error_of_one_lease_names_it_and_changes_no_other():
    async with Served(device_blocks=32) as served:
        first = await computed(served, A, owner="first")
        second = served.engine.match(B, owner="second")  # not granted
        batch = served.engine.batch([first, second])
        before = state(first)
        with pytest.raises(LeaseError, match="the lease is matched") as caught:
            served.engine.advance(batch, [4, 5])
        assert (caught.value.lease_id, caught.value.owner) == (second.id, "second")
        with pytest.raises(UsageError, match="a token of a lease is -5") as wrong:
            served.engine.advance(batch, [-5, 5])
        assert (wrong.value.lease_id, wrong.value.owner) == (first.id, "first")
        with pytest.raises(UsageError, match="draft_tokens is -1"):
            served.engine.advance(batch, [4, 5], draft_tokens=-1)
        assert state(first) == before
        first.release()
        second.release()
        await served.complete_offloads()


# --- rows -----------------------------------------------------------------------------------------


async def test_released_lease_keeps_its_row_until_the_next_computing():
    async with Served(device_blocks=32, write_policy="none") as served:
        engine = served.engine
        leases = [await computed(served, tokens) for tokens in (A, B, [21, 22, 23])]
        batch = engine.batch(leases)
        with engine.computing(batch) as step:
            leases[1].release()  # a client has left; the batch keeps its blocks
            assert list(batch) == leases
            assert engine.block_tables(batch)[1].tolist() == [-1, -1]
            assert engine.lengths(batch).tolist() == [3, 0, 3]
            assert engine.advance(step, [4, 15, 24]) == ()
        assert engine.lengths(batch).tolist() == [4, 0, 4]
        assert engine.advance(step, [5, 16, 25]) == ()  # its blocks are free now
        with engine.computing(batch):
            assert list(batch) == [leases[0], leases[2]]
        assert engine.lengths(batch).tolist() == [5, 5]
        for lease in leases:
            lease.release()
        batch.drop_released()
        assert len(batch) == 0


async def test_tokens_find_the_leases_of_their_step_when_the_batch_has_changed():
    async with Served(device_blocks=32, write_policy="none") as served:
        engine = served.engine
        prompts = [A, B, [21, 22, 23], [31, 32], [41, 42, 43]]
        leases = [await computed(served, prompt) for prompt in prompts]
        batch = engine.batch(leases[:4])
        with engine.computing(batch) as step:
            leases[0].release()
            batch.remove(leases[2])
            batch.add(leases[4])
            batch.remove(leases[3])
            batch.add(leases[3])  # computed again, from another position perhaps
        with engine.computing(batch) as next_step:  # drops the first lease
            assert list(batch) == [leases[1], leases[4], leases[3]]
        before = [state(lease) for lease in leases[2:]]
        assert engine.advance(step, [1, 15, 24, 33]) == ()
        assert engine.lengths(leases[1:]).tolist() == [5, 3, 2, 3]
        assert [state(lease) for lease in leases[2:]] == before
        with pytest.raises(UsageError, match="counts has 1 numbers; it must have 4"):
            engine.advance(step, [1, 16, 24, 33], [1])
        assert engine.advance(step, np.array([[1], [16], [24], [33]]), [1, 1, 1, 1]) == ()
        assert engine.advance(next_step, [17, 44, 34]) == ()
        assert engine.lengths(leases[1:]).tolist() == [7, 3, 3, 4]
        for lease in leases:
            lease.release()


async def test_batch_that_was_computed_is_advanced_by_its_step():
    async with Served(device_blocks=32) as served:
        engine = served.engine
        lease = await computed(served, A)
        batch = engine.batch([lease])
        step = engine.computing(batch)
        with pytest.raises(UsageError, match="has no rows"):
            engine.advance(step, [4])
        with step, engine.computing([lease]) as of_a_list:
            pass
        for refused, message in ((batch, "may have changed"), (of_a_list, "has no rows")):
            with pytest.raises(UsageError, match=message):
                engine.advance(refused, [4])
        assert lease.num_tokens == 3
        assert engine.advance(step, [4]) == ()
        lease.release()
        await served.complete_offloads()


async def test_rows_follow_adds_and_removes():
    async with Served(device_blocks=64) as served, Served() as other:
        engine = served.engine
        leases = [engine.match([number, 1]) for number in range(70)]
        batch: Batch[Any] = engine.batch(leases[:60])
        for lease in leases[60:]:
            batch.add(lease)
        expected = list(leases)
        for lease in (leases[0], leases[40], leases[69]):
            batch.remove(lease)
            expected.remove(lease)
        assert list(batch) == expected
        assert [batch[row] for row in range(len(batch))] == expected
        assert leases[0] not in batch
        assert leases[1] in batch
        ids = batch.ids_for(leases[0].record.leases).tolist()
        assert ids == [lease.id for lease in expected]
        wrong: list[tuple[Any, type[Exception], str]] = [
            (lambda: batch.add(leases[1]), UsageError, "in the batch already"),
            (lambda: batch.remove(leases[0]), UsageError, "does not have"),
            (lambda: batch.add("x"), UsageError, "must be a Lease"),
            (lambda: batch.add(other.engine.match(A)), LeaseError, "another engine"),
            (lambda: other.engine.computing(batch).__enter__(), LeaseError, "another engine"),
            (lambda: other.engine.advance(batch, []), LeaseError, "another engine"),
            (lambda: engine.advance(leases, []), UsageError, "must be a ComputeBatch or a Batch"),
        ]
        for call, error, message in wrong:
            with pytest.raises(error, match=message):
                call()
        leases[0].release()
        with pytest.raises(LeaseError, match="released"):
            batch.add(leases[0])
        assert list(batch) == expected
        for lease in leases:
            lease.release()


async def test_batch_is_taken_where_leases_are():
    async with Served(device_blocks=32) as served:
        engine = served.engine
        leases = [await computed(served, tokens) for tokens in (A, B)]
        await served.complete_offloads()
        batch = engine.batch(leases)
        assert np.array_equal(engine.block_tables(batch), engine.block_tables(leases))
        assert engine.layers(batch).is_done
        engine.extend(batch, 2)
        assert [lease.num_tokens for lease in leases] == [5, 6]
        for lease in leases:
            lease.release()


# --- other states of the engine -------------------------------------------------------------------


async def test_lease_of_older_weights_shares_nothing():
    async with Served(device_blocks=32, write_policy="none") as served:
        lease = await computed(served, A)
        batch = served.engine.batch([lease])
        async with served.engine.updating_weights():
            pass
        for token in (4, 5, 6):
            assert served.engine.advance(batch, [token]) == ()
        assert served.engine.match([*A, 4, 5, 6]).hit.total == 0
        lease.release()


async def test_strict_mode_warns_of_positions_that_no_batch_covers(caplog):
    caplog.set_level(logging.WARNING, "aiokv.engine.coverage")
    engine = CacheEngine(CacheConfig(device_blocks=8, strict=True))
    async with engine, engine.match(range(3), owner="r1") as lease:
        await lease.allocate(3)
        batch = engine.batch([lease])
        with pytest.warns(UncoveredCommitWarning, match="positions 0 to 2 of lease 'r1'"):
            engine.advance(batch, [7])
    async with engine_of() as strict, strict.match(range(3)) as lease:
        await lease.allocate(3)
        batch = strict.batch([lease])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for token in range(4):
                with strict.computing(batch) as step:
                    pass
                strict.advance(step, [token])


def engine_of() -> CacheEngine:
    return CacheEngine(CacheConfig(device_blocks=8, strict=True))


async def test_server_names_the_device_blocks_itself():
    config = CacheConfig(block_tokens=2, device_blocks=8, host_blocks=8, external_device=True)
    async with CacheEngine(config) as engine, engine.match([1, 2, 3]) as lease:
        await lease.allocate(3)
        lease.assign([0, 1])
        batch = engine.batch([lease])
        assert engine.advance(batch, [4]) == ()
        assert engine.advance(batch, [5]) == ()  # its position has no block yet
        with pytest.raises(LeaseError, match="has 4 positions"):
            engine.advance(batch, [6])
        lease.assign([2])
        assert engine.advance(batch, [6]) == ()
        assert engine.lengths(batch).tolist() == [6]
