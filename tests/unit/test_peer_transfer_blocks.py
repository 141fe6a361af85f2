"""Blocks of receives and sends while leases change: release, truncate, fork, control."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv import LeaseState
from aiokv.base.groups import ATTENTION
from aiokv.base.plan import (
    SEND,
    TransferReport,
)
from aiokv.errors import LeaseError, UsageError
from tests.unit.peer_cache import OTHER_TICKET, TICKET, Cache

# --- blocks that are given back -------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["release", "preempt"])
@pytest.mark.parametrize("outcome", ["done", "failed", "cancelled"])
def test_blocks_given_back_while_received_are_free_after_the_report(verb: str, outcome: str):
    cache = Cache(6, salt_quota_blocks=6)
    lease_id = cache.granted(16)
    transfer_id = cache.receive(lease_id, 1, 2)
    blocks = cache.table(lease_id)

    cache.apply(getattr(cache.scheduler, verb)(lease_id))

    assert cache.cancelled == [transfer_id]
    assert cache.free == 2
    assert cache.read.quota_held("") == 4
    other = cache.granted(8, seed=1)
    assert not set(cache.table(other)) & set(blocks)
    cache.end(transfer_id, outcome, 1)
    assert cache.moved == []
    assert cache.free == 4
    assert cache.read.quota_held("") == 2
    assert cache.read.cached_blocks() == []
    cache.apply(cache.scheduler.release(other))
    assert cache.read.num_leases == (verb == "preempt")


def test_blocks_released_while_sent_are_neither_free_nor_evictable():
    cache = Cache(4)
    lease_id = cache.granted(16)
    cache.commit(lease_id, 16)
    transfers = [cache.send(lease_id, 0, 2), cache.send(lease_id, 2, 2)]
    cache.apply(cache.scheduler.release(lease_id))

    assert sorted(cache.cancelled) == transfers
    assert cache.read.state(lease_id) == LeaseState.RELEASED
    assert cache.apply(cache.scheduler.evict(4, "device")) == (0, 0)
    cache.end(transfers[1])
    assert cache.apply(cache.scheduler.evict(4, "device")) == (0, 0)
    cache.end(transfers[0])
    assert cache.apply(cache.scheduler.evict(4, "device")) == (4, 0)
    assert cache.read.num_leases == 0


def test_released_lease_ends_with_the_last_of_its_batches_and_transfers():
    cache = Cache(4)
    lease_id = cache.granted(16)
    cache.commit(lease_id, 8)
    batch = cache.apply(cache.scheduler.begin_batch([lease_id]))
    transfer_id = cache.send(lease_id, 0, 1)
    cache.apply(cache.scheduler.release(lease_id))

    cache.apply(cache.scheduler.end_batch(batch, in_open_step=False))
    assert (cache.free, cache.read.num_leases) == (0, 1)
    cache.end(transfer_id)
    assert (cache.free, cache.read.num_leases) == (2, 0)


@pytest.mark.parametrize("verb", ["release", "preempt", "truncate"])
def test_blocks_given_back_while_sent_wait_for_the_step_that_was_open(verb: str):
    cache = Cache(2)
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = cache.granted(2)
    assert cache.apply(cache.scheduler.extend([lease_id], 6))
    cache.commit(lease_id, 8)
    cache.apply(cache.scheduler.close_step())
    cache.apply(cache.scheduler.finish_step(1))
    transfer_id = cache.send(lease_id, 0, 2)
    arguments = (0,) if verb == "truncate" else ()
    cache.apply(getattr(cache.scheduler, verb)(lease_id, *arguments))
    cache.end(transfer_id)  # in step 2, which may compute with the lease

    other = cache.granted(8, seed=1)
    assert cache.plans[cache.receive(other, 0, 2)].after_step == 2


def test_resumed_lease_is_not_named_by_transfers_of_its_earlier_grant():
    cache = Cache()
    lease_id = cache.granted(16)
    transfer_id = cache.receive(lease_id, 0, 4)
    cache.apply(cache.scheduler.preempt(lease_id))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 16)) is not None
    again = cache.receive(lease_id, 0, 4)

    cache.end(transfer_id)

    assert cache.moved == []
    with pytest.raises(LeaseError, match="still being received"):
        cache.commit_received(lease_id, 4)
    cache.end(again)
    assert cache.moved == [(again, lease_id, 4)]
    assert cache.commit_received(lease_id, 16) == 4


def test_swap_of_a_lease_forgets_received_blocks_that_were_not_committed():
    cache = Cache(host_blocks=8)
    lease_id = cache.granted(16)
    cache.end(cache.receive(lease_id, 0, 4))
    cache.commit_received(lease_id, 4)
    cache.end(cache.apply(cache.scheduler.swap_out(lease_id)))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 16)) is not None
    for transfer_id in cache.read.onloads(lease_id):
        cache.end(transfer_id)

    with pytest.raises(LeaseError, match="positions from 4 on were not received"):
        cache.commit_received(lease_id, 16)


# --- truncate, fork, extend -----------------------------------------------------------------------


def test_blocks_truncated_while_received_are_not_those_of_the_lease_any_more():
    cache = Cache(6)
    lease_id = cache.granted(20)
    transfer_id = cache.receive(lease_id, 1, 4)
    blocks = cache.table(lease_id)

    cache.apply(cache.scheduler.truncate(lease_id, 12))
    assert cache.free == 1
    assert cache.apply(cache.scheduler.extend([lease_id], 4))
    assert cache.table(lease_id)[3] not in blocks
    with pytest.raises(LeaseError, match="positions from 4 on are still being received"):
        cache.commit(lease_id, 16)
    cache.end(transfer_id)

    assert cache.moved == [(transfer_id, lease_id, 2)]
    assert cache.free == 2
    cache.commit(lease_id, 4)
    with pytest.raises(LeaseError, match="positions from 12 on were not received"):
        cache.commit_received(lease_id, 16)
    cache.commit_received(lease_id, 12)


def test_receive_of_which_all_blocks_are_truncated_is_cancelled():
    cache = Cache()
    lease_id = cache.granted(20)
    transfer_id = cache.receive(lease_id, 3, 2)
    cache.apply(cache.scheduler.truncate(lease_id, 12))
    cache.apply(cache.scheduler.truncate(lease_id, 8))

    assert cache.cancelled == [transfer_id]
    cache.commit(lease_id, 8)
    cache.end(transfer_id)
    assert cache.moved == [(transfer_id, lease_id, 0)]


def test_truncation_behind_all_transfers_frees_its_blocks_at_once():
    cache = Cache(5)
    lease_id = cache.granted(20)
    cache.commit(lease_id, 8)
    cache.send(lease_id, 0, 2)
    cache.apply(cache.scheduler.truncate(lease_id, 8))
    assert cache.free == 3


def test_received_blocks_are_not_those_of_tokens_behind_a_truncation():
    cache = Cache()
    lease_id = cache.granted(16)
    cache.end(cache.receive(lease_id, 0, 4))
    cache.apply(cache.scheduler.truncate(lease_id, 10))
    assert cache.apply(cache.scheduler.extend([lease_id], 6))
    cache.apply(cache.scheduler.append(lease_id, np.arange(6, dtype=np.int32)))

    with pytest.raises(LeaseError, match="positions from 10 on were not received"):
        cache.commit_received(lease_id, 12)
    assert cache.commit_received(lease_id, 10) == 2


def test_block_in_flight_is_not_cut_inside():
    cache = Cache()
    lease_id = cache.granted(18)
    cache.commit(lease_id, 4)
    receiving = cache.receive(lease_id, 1, 2)
    with pytest.raises(LeaseError, match="block 2 would be cut, and a transfer"):
        cache.scheduler.truncate(lease_id, 9)
    cache.apply(cache.scheduler.truncate(lease_id, 17))  # behind the blocks in flight
    cache.end(receiving)
    cache.commit_received(lease_id, 12)
    cache.commit(lease_id, 15)
    cache.send(lease_id, 3, 1)
    with pytest.raises(LeaseError, match="block 3 would be cut, and a transfer"):
        cache.scheduler.truncate(lease_id, 14)
    cache.apply(cache.scheduler.truncate(lease_id, 15))  # only positions that are not computed
    cache.apply(cache.scheduler.truncate(lease_id, 12))


def test_sent_blocks_keep_their_bytes_when_the_lease_is_truncated():
    cache = Cache(5)
    lease_id = cache.granted(10)
    assert cache.apply(cache.scheduler.extend([lease_id], 6))
    cache.commit(lease_id, 16)  # the last two blocks have no tokens, and are not shared
    transfer_id = cache.send(lease_id, 2, 2)
    sent = set(cache.table(lease_id)[2:])
    cache.apply(cache.scheduler.truncate(lease_id, 8))
    assert cache.apply(cache.scheduler.extend([lease_id], 4))

    assert not sent & set(cache.table(lease_id))
    assert cache.free == 0
    cache.end(transfer_id)
    assert cache.moved == [(transfer_id, lease_id, 2)]
    assert cache.free == 2


def test_fork_of_a_receiving_lease_shares_only_what_was_committed():
    cache = Cache(20)
    lease_id = cache.granted(16)
    cache.end(cache.receive(lease_id, 0, 2))
    cache.commit_received(lease_id, 8)
    transfer_id = cache.receive(lease_id, 2, 2)
    fork = cache.apply(cache.scheduler.fork(lease_id, "child"))
    child = fork.lease_id

    assert cache.table(child)[:2] == cache.table(lease_id)[:2]
    assert not set(cache.table(child)[2:]) & set(cache.table(lease_id))
    assert fork.source_blocks.tolist() == []
    cache.end(transfer_id)
    assert cache.moved[-1] == (transfer_id, lease_id, 2)
    with pytest.raises(LeaseError, match="were not received"):
        cache.commit_received(child, 16)


def test_lease_grows_and_decodes_while_its_prompt_is_sent():
    cache = Cache()
    lease_id = cache.granted(10)
    cache.commit(lease_id, 10)
    transfer_id = cache.send(lease_id, 0, 3)
    assert cache.apply(cache.scheduler.extend([lease_id], 4))
    cache.apply(cache.scheduler.append(lease_id, np.arange(4, dtype=np.int32)))
    assert cache.commit(lease_id, 14) == 1
    cache.end(transfer_id)
    assert cache.moved == [(transfer_id, lease_id, 3)]


# --- the end of a ticket, control -----------------------------------------------------------------


def test_end_of_a_ticket_cancels_its_transfers_once():
    cache = Cache()
    lease_id = cache.granted(16)
    transfers = [cache.receive(lease_id, 0, 1), cache.receive(lease_id, 1, 1)]
    other = cache.receive(lease_id, 2, 1, OTHER_TICKET)

    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
    assert cache.cancelled == transfers
    cache.end(transfers[0], "cancelled")
    cache.end(transfers[1])  # too late to be cancelled
    assert cache.moved == [(transfers[0], lease_id, 0), (transfers[1], lease_id, 1)]
    cache.apply(cache.scheduler.release(lease_id))
    assert cache.cancelled == [*transfers, other]
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
    cache.end(other)
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))  # of a lease that has ended


def test_reset_cancels_transfers_and_publishes_nothing_of_them():
    cache = Cache()
    lease_id = cache.granted(16)
    other = cache.granted(8, seed=1)
    cache.commit(other, 8)
    transfers = [cache.receive(lease_id, 0, 4), cache.send(other, 0, 2)]

    cache.apply(cache.scheduler.reset("new weights"))

    assert cache.cancelled == transfers
    for transfer_id in transfers:
        cache.end(transfer_id)
    assert cache.moved == [(transfers[0], lease_id, 4), (transfers[1], other, 2)]
    assert cache.commit_received(lease_id, 16) == 0
    assert cache.read.cached_blocks() == []


def test_device_sleeps_only_after_the_transfers():
    cache = Cache()
    lease_id = cache.granted(16)
    transfer_id = cache.receive(lease_id, 0, 4)
    cache.apply(cache.scheduler.release(lease_id))
    with pytest.raises(UsageError, match="1 transfers are in flight, a lease holds blocks"):
        cache.scheduler.sleep(frozenset(("device",)))
    cache.end(transfer_id, "cancelled")
    cache.apply(cache.scheduler.sleep(frozenset(("device",))))


def test_device_keeps_its_size_while_blocks_of_a_released_lease_are_received():
    cache = Cache(8)
    lease_id = cache.granted(32)
    transfer_id = cache.receive(lease_id, 0, 8)
    cache.apply(cache.scheduler.release(lease_id))
    assert not cache.apply(cache.scheduler.resize(4))
    cache.end(transfer_id, "cancelled")
    assert cache.apply(cache.scheduler.resize(4))


def test_lost_rank_takes_blocks_after_their_transfers():
    cache = Cache()
    lease_id = cache.granted(16)
    transfer_id = cache.receive(lease_id, 0, 4)
    cache.apply(cache.scheduler.lose_blocks("rank 1 was lost"))

    assert cache.read.state(lease_id) == LeaseState.LOST
    assert cache.cancelled == [transfer_id]
    assert cache.free == 8
    cache.end(transfer_id, "failed")
    assert (cache.free, cache.moved) == (12, [])


def test_waiting_lease_is_granted_when_a_transfer_of_a_released_lease_ends():
    cache = Cache(4)
    lease_id = cache.granted(16)
    transfer_id = cache.receive(lease_id, 0, 4)
    cache.apply(cache.scheduler.release(lease_id))
    waiting = cache.apply(cache.scheduler.match(np.arange(500, 516, dtype=np.int32)))
    assert cache.apply(cache.scheduler.allocate(waiting, 16, 0)) is None

    report = TransferReport(transfer_id=transfer_id, outcome="cancelled")
    _, effects = cache.scheduler.complete(report)
    assert [grant.lease_id for grant in effects.granted] == [waiting]


# --- layers of blocks that are being computed -----------------------------------------------------


def send_early(cache: Cache, lease_id: int, first: int, num: int, ranges: Any = (0, 2)) -> int:
    args = lease_id, TICKET, (first + num) * 4, ATTENTION, first, *ranges
    transfer_id: int = cache.apply(cache.scheduler.peers.send(*args, mark=7))
    return transfer_id


def test_early_plan_names_layers_and_blocks_that_are_not_computed():
    cache = Cache()
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = cache.granted(18)
    cache.commit(lease_id, 4)
    plan = cache.plans[send_early(cache, lease_id, 1, 3)]
    assert (plan.route, plan.peer, plan.mark) == (SEND, TICKET, 7)
    assert (plan.first_range, plan.end_range) == (0, 2)
    assert plan.after_step == 1  # the open one, in which they are computed at the latest
    assert plan.source_ids.tolist() == cache.table(lease_id)[1:4]
    assert plan.target_ids.tolist() == [1, 2, 3]

    cache.commit(lease_id, 18)
    sending = cache.scheduler.peers.send(lease_id, TICKET, 16, ATTENTION, 1, 2, 5)
    plan = cache.plans[cache.apply(sending)]
    assert (plan.first_range, plan.end_range, plan.mark) == (2, 5, 0)


@pytest.mark.parametrize("verb", ["release", "preempt"])
def test_blocks_of_an_early_send_are_kept_until_its_end(verb):
    cache = Cache()
    free = cache.free
    lease_id = cache.granted(16)
    transfer_id = send_early(cache, lease_id, 0, 4)
    cache.apply(getattr(cache.scheduler, verb)(lease_id))
    assert cache.cancelled == [transfer_id]
    assert cache.free == free - 4
    cache.end(transfer_id, "cancelled")
    assert cache.free == free
    assert cache.moved == []


def test_early_send_of_wrong_blocks_is_refused():
    cache = Cache()
    lease_id = cache.granted(16)
    with pytest.raises(UsageError, match="not inside the table of 4 blocks"):
        send_early(cache, lease_id, 3, 2)
    with pytest.raises(UsageError, match="the ranges of layers of a mark are 1 to 1"):
        send_early(cache, lease_id, 0, 1, (1, 1))
    cache.receive(lease_id, 1, 2)
    for first in (0, 1, 2):
        with pytest.raises(LeaseError, match="blocks 1 to 2 are being received"):
            send_early(cache, lease_id, first, 2)
    send_early(cache, lease_id, 3, 1)
    with pytest.raises(LeaseError, match="blocks 3 to 3 are being sent"):
        cache.receive(lease_id, 3, 1)


def test_block_of_an_early_send_is_not_cut_before_it_is_computed():
    cache = Cache()
    lease_id = cache.apply(cache.scheduler.match(np.arange(18, dtype=np.int32)))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 20)) is not None
    transfer_id = send_early(cache, lease_id, 3, 2)
    for computed in (0, 17):
        cache.commit(lease_id, computed)
        with pytest.raises(LeaseError, match="block 4 would be cut"):
            cache.apply(cache.scheduler.truncate(lease_id, 19))
    cache.commit(lease_id, 18)  # what the transfer reads does not change any more
    cache.apply(cache.scheduler.truncate(lease_id, 19))
    cache.end(transfer_id)
    assert [moved.blocks for moved in cache.moved] == [2]
