"""Receives and sends of the scheduler without a worker: plans, ends, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.base.plan import (
    RECEIVE,
    SEND,
)
from aiokv.errors import CapacityError, LeaseError, UsageError
from tests.unit.peer_cache import TICKET, Cache

# --- plans and ends -------------------------------------------------------------------------------


def test_receive_plans_name_ticket_prompt_blocks_and_device_blocks():
    cache = Cache()
    lease_id = cache.granted(18)

    transfer_id = cache.receive(lease_id, 2, 3)

    plan = cache.plans[transfer_id]
    assert (plan.route, plan.peer, plan.after_step) == (RECEIVE, TICKET, 0)
    assert plan.source_ids.tolist() == [2, 3, 4]
    assert plan.target_ids.tolist() == cache.table(lease_id)[2:]
    assert cache.read.peer_transfers(lease_id) == [transfer_id]


def test_send_plans_read_computed_blocks_and_the_partial_last_one():
    cache = Cache()
    lease_id = cache.granted(18)
    cache.commit(lease_id, 18)

    transfer_id = cache.send(lease_id, 3, 2)

    plan = cache.plans[transfer_id]
    assert (plan.route, plan.peer) == (SEND, TICKET)
    assert plan.source_ids.tolist() == cache.table(lease_id)[3:]
    assert plan.target_ids.tolist() == [3, 4]


def test_send_waits_for_the_step_that_computes_its_blocks():
    cache = Cache()
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = cache.granted(16)
    cache.commit(lease_id, 8)
    cache.apply(cache.scheduler.close_step())
    cache.commit(lease_id, 12)

    assert cache.plans[cache.send(lease_id, 0, 2)].after_step == 1
    assert cache.plans[cache.send(lease_id, 2, 1)].after_step == 2


def test_receive_waits_for_the_step_that_used_its_blocks():
    cache = Cache(4)
    cache.apply(cache.scheduler.track_steps(True))
    first = cache.granted(16)
    cache.commit(first, 15)
    cache.apply(cache.scheduler.reset("test"))
    cache.apply(cache.scheduler.release(first))
    cache.apply(cache.scheduler.close_step())
    lease_id = cache.granted(16, seed=1)

    assert cache.plans[cache.receive(lease_id, 0, 4)].after_step == 1


def test_received_blocks_are_published_by_commit_received_only():
    cache = Cache()
    lease_id = cache.granted(16)
    transfer_id = cache.receive(lease_id, 0, 4)
    cache.end(transfer_id)

    assert cache.moved == [(transfer_id, lease_id, 4)]
    assert cache.read.cached_blocks() == []
    assert cache.commit_received(lease_id, 12) == 3
    assert len(cache.read.cached_blocks()) == 3
    assert cache.read.usage(lease_id)[3] == 0  # computed blocks
    assert cache.commit(lease_id, 16) == 1
    assert cache.read.usage(lease_id)[3] == 1


def test_received_blocks_belong_to_no_open_step():
    cache = Cache()
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = cache.granted(8)
    cache.end(cache.receive(lease_id, 0, 2))
    cache.commit_received(lease_id, 8)

    assert cache.read.steps_finished
    assert cache.plans[cache.send(lease_id, 0, 2)].after_step == 0


def test_receives_end_in_any_order_and_are_committed_as_far_as_they_reach():
    cache = Cache()
    lease_id = cache.granted(16)
    first, second = cache.receive(lease_id, 0, 2), cache.receive(lease_id, 2, 2)

    cache.end(second)
    with pytest.raises(LeaseError, match="positions from 0 on are still being received"):
        cache.commit_received(lease_id, 16)
    cache.end(first)

    assert cache.commit_received(lease_id, 16) == 4


def test_failed_receive_counts_the_blocks_before_the_first_bad_one():
    cache = Cache()
    lease_id = cache.granted(16)
    transfer_id = cache.receive(lease_id, 0, 4)
    cache.end(transfer_id, "failed", 3)

    assert cache.moved == [(transfer_id, lease_id, 3)]
    with pytest.raises(LeaseError, match="positions from 12 on were not received"):
        cache.commit_received(lease_id, 16)
    assert cache.commit_received(lease_id, 12) == 3
    cache.receive(lease_id, 3, 1)  # once more, of another ticket


def test_second_receive_of_a_block_takes_back_the_first():
    cache = Cache()
    lease_id = cache.granted(20)
    cache.end(cache.receive(lease_id, 0, 5))
    cache.end(cache.receive(lease_id, 1, 2), "failed", 1)

    with pytest.raises(LeaseError, match="positions from 8 on were not received"):
        cache.commit_received(lease_id, 9)
    cache.end(cache.receive(lease_id, 2, 1))
    assert cache.commit_received(lease_id, 20) == 5


def test_receive_takes_only_blocks_of_known_tokens():
    cache = Cache()
    lease_id = cache.granted(6)
    assert cache.apply(cache.scheduler.extend([lease_id], 6))
    with pytest.raises(LeaseError, match="the lease names the tokens of 6 positions"):
        cache.receive(lease_id, 1, 2)
    cache.end(cache.receive(lease_id, 0, 2))
    cache.apply(cache.scheduler.append(lease_id, np.arange(6, dtype=np.int32)))

    with pytest.raises(LeaseError, match="positions from 6 on were not received"):
        cache.commit_received(lease_id, 8)
    assert cache.commit_received(lease_id, 6) == 1


def test_cancelled_receive_publishes_nothing():
    cache = Cache()
    lease_id = cache.granted(16)
    transfer_id = cache.receive(lease_id, 0, 4)
    cache.end(transfer_id, "cancelled")

    assert cache.moved == [(transfer_id, lease_id, 0)]
    with pytest.raises(LeaseError, match="positions from 0 on were not received"):
        cache.commit_received(lease_id, 4)


def test_statistics_count_transfers_and_blocks():
    cache = Cache()
    lease_id = cache.granted(16)
    cache.end(cache.receive(lease_id, 0, 2))
    cache.end(cache.receive(lease_id, 2, 2), "failed", 1)
    cache.commit_received(lease_id, 12)
    cache.end(cache.send(lease_id, 0, 3))
    cache.end(cache.send(lease_id, 0, 2), "failed", 1)
    cache.end(cache.send(lease_id, 0, 1), "cancelled")

    statistics = cache.read.statistics()
    assert (
        statistics.receives,
        statistics.attention.received_blocks,
        statistics.failed_receives,
    ) == (
        2,
        3,
        1,
    )
    assert (statistics.sends, statistics.attention.sent_blocks, statistics.failed_sends) == (
        3,
        4,
        1,
    )


# --- refusals -------------------------------------------------------------------------------------


def test_receive_refuses_computed_and_absent_blocks():
    cache = Cache()
    lease_id = cache.granted(16)
    cache.commit(lease_id, 5)

    with pytest.raises(LeaseError, match="block 1 has computed positions"):
        cache.receive(lease_id, 1, 1)
    for first, num in ((3, 2), (4, 1), (-1, 1), (2, 0), (2, -1), (2, 2**40)):
        with pytest.raises(UsageError, match="not inside the table of 4 blocks"):
            cache.receive(lease_id, first, num)
    cache.receive(lease_id, 2, 1)
    with pytest.raises(LeaseError, match="blocks 2 to 2 are being received already"):
        cache.receive(lease_id, 2, 2)
    cache.receive(lease_id, 3, 1)


def test_send_refuses_blocks_that_are_not_computed():
    cache = Cache()
    lease_id = cache.granted(16)
    cache.commit(lease_id, 5)

    with pytest.raises(LeaseError, match="only 2 blocks are computed"):
        cache.send(lease_id, 1, 2)
    with pytest.raises(UsageError, match="not inside the table"):
        cache.send(lease_id, 0, 5)
    with pytest.raises(UsageError, match="ticket_id has 3 bytes; it must have 16"):
        cache.send(lease_id, 0, 1, ticket=b"abc")


@pytest.mark.parametrize("verb", ["send", "receive"])
def test_transfers_refuse_leases_that_have_no_blocks_or_await_them(verb: str):
    cache = Cache(6, host_blocks=6, write_policy="write_through")
    matched = cache.apply(cache.scheduler.match(np.arange(9, dtype=np.int32)))
    transfer = getattr(cache.scheduler.peers, verb)
    with pytest.raises(LeaseError, match=f"{verb}: the lease is matched"):
        transfer(matched, TICKET, 4)

    lease_id = cache.granted(9, seed=1)
    cache.commit(lease_id, 9)
    cache.apply(cache.scheduler.collect_backups())
    cache.end(next(iter(cache.plans)))
    cache.apply(cache.scheduler.release(lease_id))
    cache.apply(cache.scheduler.evict(9, "device"))
    loading = cache.granted(9, seed=1)
    assert cache.read.onloads(loading)
    with pytest.raises(LeaseError, match=f"{verb}: onloads still write blocks"):
        transfer(loading, TICKET, 4)
    with pytest.raises(LeaseError):
        transfer(10**6, TICKET, 4)


@pytest.mark.parametrize("verb", ["send", "receive"])
def test_transfers_refuse_leases_of_before_a_reset(verb: str):
    cache = Cache()
    lease_id = cache.granted(16)
    cache.commit(lease_id, 8)
    cache.apply(cache.scheduler.reset("new weights"))

    with pytest.raises(LeaseError, match="the cache was reset after the lease was allocated"):
        getattr(cache, verb)(lease_id, 0 if verb == "send" else 2, 1)


def test_receive_and_compute_exclude_each_other():
    cache = Cache()
    lease_id = cache.granted(16)
    batch = cache.apply(cache.scheduler.begin_batch([lease_id]))
    with pytest.raises(LeaseError, match="receive: a batch computes with the lease"):
        cache.receive(lease_id, 0, 1)
    cache.apply(cache.scheduler.end_batch(batch, in_open_step=False))
    transfer_id = cache.receive(lease_id, 1, 2)
    with pytest.raises(LeaseError, match="positions of a lease from 4 on are still being received"):
        cache.scheduler.begin_batch([lease_id])
    with pytest.raises(LeaseError, match="positions from 4 on are still being received"):
        cache.commit(lease_id, 5)
    cache.commit(lease_id, 4)
    cache.end(transfer_id)
    cache.apply(cache.scheduler.begin_batch([lease_id]))


def test_lease_with_transfers_is_not_swapped():
    cache = Cache(host_blocks=8)
    lease_id = cache.granted(8)
    cache.commit(lease_id, 8)
    transfer_id = cache.send(lease_id, 0, 2)
    with pytest.raises(LeaseError, match="transfers between the lease and a peer are in flight"):
        cache.scheduler.swap_out(lease_id)
    cache.end(transfer_id)
    assert cache.apply(cache.scheduler.swap_out(lease_id))


def test_no_room_while_blocks_are_received_is_no_error_of_the_receive():
    cache = Cache(4)
    lease_id = cache.granted(16)
    cache.receive(lease_id, 0, 4)
    with pytest.raises(CapacityError):
        cache.scheduler.fork(lease_id, "child")
