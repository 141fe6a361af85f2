"""Receives and sends of the scheduler without a worker: holds, refusals, and what is published."""

from __future__ import annotations

import hashlib
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from aiokv import CacheConfig, LeaseState, WindowGroup
from aiokv.base.groups import STATE
from aiokv.base.plan import (
    RECEIVE,
    SEND,
    TransferReport,
)
from aiokv.errors import CapacityError, LeaseError, UsageError
from aiokv.scheduler.effects import NO_EFFECTS, Moved
from aiokv.scheduler.scheduler import CacheScheduler

BLOCK_TOKENS = 4
TICKET = bytes(range(16))
OTHER_TICKET = bytes(16)


class Cache:
    """A scheduler, and the effects of its transitions.

    Attributes:
        plans: submitted plans that have not ended, by transfer.
        moved: ends of transfers that were reported.
        cancelled: transfers that were cancelled.
    """

    def __init__(self, device_blocks: int = 12, **config: Any) -> None:
        config = {"block_tokens": BLOCK_TOKENS, "device_blocks": device_blocks, **config}
        self.scheduler = CacheScheduler(CacheConfig(**config))
        self.read = self.scheduler.read
        self.plans: dict[int, Any] = {}
        self.moved: list[Moved] = []
        self.cancelled: list[int] = []

    def apply(self, result: tuple[Any, Any]) -> Any:
        value, effects = result
        if effects is not NO_EFFECTS:
            self.plans |= {plan.transfer_id: plan for plan in effects.submit}
            self.moved += effects.moved
            self.cancelled += effects.cancel
            effects.clear()
            self.scheduler.applied()
        assert self.scheduler.violations() == []
        return value

    def granted(self, num_tokens: int, seed: int = 0, **match: Any) -> int:
        tokens = np.arange(num_tokens, dtype=np.int32) + 1000 * seed
        lease_id = self.apply(self.scheduler.match(tokens, **match))
        assert self.apply(self.scheduler.try_allocate(lease_id, num_tokens)) is not None
        return lease_id

    def receive(self, lease_id: int, first: int, num: int, ticket: bytes = TICKET) -> int:
        return self.apply(self.scheduler.peers.receive(lease_id, ticket, first, num))

    def send(self, lease_id: int, first: int, num: int, ticket: bytes = TICKET) -> int:
        return self.apply(self.scheduler.peers.send(lease_id, ticket, first, num))

    def end(self, transfer_id: int, outcome: Any = "done", first_bad: int = 0) -> None:
        del self.plans[transfer_id]
        report = TransferReport(transfer_id=transfer_id, outcome=outcome, first_bad_block=first_bad)
        self.apply(self.scheduler.complete(report))

    def commit(self, lease_id: int, num_tokens: int) -> int:
        return self.apply(self.scheduler.commit(lease_id, num_tokens))

    def commit_received(self, lease_id: int, num_tokens: int) -> int:
        return self.apply(self.scheduler.peers.commit_received(lease_id, num_tokens))

    def table(self, lease_id: int) -> list[int]:
        return self.read.block_table(lease_id).tolist()

    @property
    def free(self) -> int:
        return self.read.statistics().attention.device.free


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
        transfer(matched, TICKET, 0, 1)

    lease_id = cache.granted(9, seed=1)
    cache.commit(lease_id, 9)
    cache.apply(cache.scheduler.collect_backups())
    cache.end(next(iter(cache.plans)))
    cache.apply(cache.scheduler.release(lease_id))
    cache.apply(cache.scheduler.evict(9, "device"))
    loading = cache.granted(9, seed=1)
    assert cache.read.onloads(loading)
    with pytest.raises(LeaseError, match=f"{verb}: onloads still write blocks"):
        transfer(loading, TICKET, 0, 1)
    with pytest.raises(LeaseError):
        transfer(10**6, TICKET, 0, 1)


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


# --- digests --------------------------------------------------------------------------------------


def digest_of(context: str, tokens: np.ndarray, items: list[tuple[bytes, int, int]]) -> bytes:
    """Return the digest of a prompt, as digest.hpp defines it."""
    text = context.encode()
    data = b"aiokv prompt 1\0" + struct.pack("<I", len(text)) + text
    data += struct.pack("<Q", len(tokens)) + tokens.astype("<i4").tobytes()
    key = b"".join(
        struct.pack("<q", len(name)) + name + struct.pack("<qq", offset, length)
        for name, offset, length in items
        if offset < len(tokens)
    )
    return hashlib.sha256(data + (struct.pack("<I", len(key)) + key if key else b"")).digest()


@pytest.mark.parametrize("block_tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("num_tokens", [1, 9, 10, 37, 70])
def test_digest_of_a_prompt_is_the_same_for_any_block_tokens(block_tokens: int, num_tokens: int):
    items = [(b"\1\2", 2, 5), (b"cat", 9, 30), (b"dog", 39, 1), (b"dog", 60, 10)]
    tokens = np.arange(70, dtype=np.int32) - 7
    scheduler = CacheScheduler(CacheConfig(block_tokens=block_tokens, device_blocks=80))
    lease_id, _ = scheduler.match(tokens, "tenant", items=items)
    plain, _ = scheduler.match(tokens, "tenant")

    digest = scheduler.read.digest(lease_id, num_tokens)

    assert digest == digest_of("tenant", tokens[:num_tokens], items)
    assert scheduler.read.digest(plain, num_tokens) == digest_of("tenant", tokens[:num_tokens], [])


def test_digest_covers_appended_tokens_and_refuses_unknown_ones():
    cache = Cache()
    lease_id = cache.granted(6)
    assert cache.apply(cache.scheduler.extend([lease_id], 2))
    for num_tokens in (-1, 0, 7):
        with pytest.raises(LeaseError, match="must be between 1 and the 6 positions"):
            cache.read.digest(lease_id, num_tokens)
    cache.apply(cache.scheduler.append(lease_id, np.array([8], np.int32)))
    tokens = np.array([0, 1, 2, 3, 4, 5, 8], np.int32)
    assert cache.read.digest(lease_id, 7) == digest_of("", tokens, [])


def test_no_room_while_blocks_are_received_is_no_error_of_the_receive():
    cache = Cache(4)
    lease_id = cache.granted(16)
    cache.receive(lease_id, 0, 4)
    with pytest.raises(CapacityError):
        cache.scheduler.fork(lease_id, "child")


# --- recurrent state ------------------------------------------------------------------------------


def recurrent(**config: Any) -> tuple[Cache, int]:
    """Return a cache of a model with recurrent state, and a granted lease of 18 tokens."""
    cache = Cache(16, state_slots=3, **config)
    return cache, state_granted(cache)


def state_granted(cache: Cache) -> int:
    lease_id = cache.granted(18)
    for transfer_id in cache.read.onloads(lease_id):
        cache.plans.setdefault(transfer_id, None)
        cache.end(transfer_id)
    return lease_id


def receive_group(cache: Cache, lease_id: int, group: str, num_tokens: int) -> int:
    return cache.apply(cache.scheduler.peers.receive_group(lease_id, TICKET, group, num_tokens))


def send_group(cache: Cache, lease_id: int, group: str, num_tokens: int) -> int:
    return cache.apply(cache.scheduler.peers.send_group(lease_id, TICKET, group, num_tokens))


def test_received_state_commits_the_positions_before_it():
    cache, lease_id = recurrent(verify="checksum")
    cache.end(cache.receive(lease_id, 0, 5))
    with pytest.raises(LeaseError, match="the recurrent state after 16 positions was not received"):
        cache.commit_received(lease_id, 16)

    transfer_id = receive_group(cache, lease_id, STATE, 18)
    plan = cache.plans[transfer_id]
    assert (plan.route, plan.group, plan.peer) == (RECEIVE, STATE, TICKET)
    assert plan.source_ids.tolist() == [0]
    assert plan.target_ids.tolist() == [cache.read.state_slot(lease_id)]
    cache.end(transfer_id)

    assert cache.moved[-1] == (transfer_id, lease_id, 1)
    assert cache.read.computed_tokens(lease_id) == 18
    assert len(cache.read.cached_blocks()) == 4
    assert cache.read.statistics().groups["state"].received_blocks == 1
    assert cache.commit_received(lease_id, 18) == 0


def test_state_is_received_behind_all_blocks_only():
    cache, lease_id = recurrent()
    cache.end(cache.receive(lease_id, 0, 2))
    cache.end(cache.receive(lease_id, 3, 2))
    for num_tokens in (-1, 0, 9, 18):
        with pytest.raises(LeaseError, match="received those before 8"):
            receive_group(cache, lease_id, STATE, num_tokens)
    transfer_id = receive_group(cache, lease_id, STATE, 7)
    with pytest.raises(LeaseError, match="a window of a lease is being received"):
        cache.receive(lease_id, 0, 1)
    cache.end(transfer_id)
    assert cache.read.computed_tokens(lease_id) == 7


@pytest.mark.parametrize("verb", ["receive", "send"])
def test_lease_whose_state_is_in_flight_is_not_changed(verb: str):
    cache, lease_id = recurrent()
    cache.commit(lease_id, 4)
    cache.end(cache.receive(lease_id, 1, 4))
    if verb == "receive":
        receive_group(cache, lease_id, STATE, 18)
    else:
        send_group(cache, lease_id, STATE, 4)

    refused = [
        lambda: cache.scheduler.begin_batch([lease_id]),
        lambda: cache.scheduler.commit(lease_id, 5),
        lambda: cache.scheduler.peers.commit_received(lease_id, 18),
        lambda: cache.scheduler.peers.receive_group(lease_id, TICKET, STATE, 18),
        lambda: cache.scheduler.swap_out(lease_id),
    ]
    if verb == "receive":
        refused += [
            lambda: cache.scheduler.snapshot(lease_id, 4),
            lambda: cache.scheduler.fork(lease_id, "child"),
            lambda: cache.scheduler.peers.send_group(lease_id, TICKET, STATE, 4),
            lambda: cache.scheduler.truncate(lease_id, 17),
        ]
    for call in refused:
        with pytest.raises(LeaseError):
            call()
    assert cache.scheduler.violations() == []
    cache.commit(lease_id, 4)


def test_cancelled_state_is_the_one_before_and_failed_state_is_lost():
    cache, lease_id = recurrent()
    cache.end(cache.receive(lease_id, 0, 5))
    cache.end(receive_group(cache, lease_id, STATE, 18), "cancelled")
    assert cache.read.state(lease_id) == LeaseState.GRANTED
    assert cache.read.computed_tokens(lease_id) == 0
    batch = cache.apply(cache.scheduler.begin_batch([lease_id]))
    cache.apply(cache.scheduler.end_batch(batch, in_open_step=False))

    cache.end(receive_group(cache, lease_id, STATE, 18), "failed")
    assert cache.read.state(lease_id) == LeaseState.FAILED
    assert cache.read.cached_blocks() == []
    with pytest.raises(LeaseError, match="recompute_from"):
        cache.scheduler.recompute_from(lease_id)
    cache.apply(cache.scheduler.preempt(lease_id))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 18)) is not None


@pytest.mark.parametrize("verb", ["release", "preempt"])
def test_slot_given_back_while_its_state_is_received_is_free_after_the_report(verb: str):
    cache, lease_id = recurrent()
    cache.end(cache.receive(lease_id, 0, 5))
    transfer_id = receive_group(cache, lease_id, STATE, 18)
    assert cache.read.statistics().groups["state"].device.free == 2
    cache.apply(getattr(cache.scheduler, verb)(lease_id))

    assert cache.cancelled == [transfer_id]
    assert cache.read.statistics().groups["state"].device.free == 2
    cache.end(transfer_id)
    assert cache.read.statistics().groups["state"].device.free == 3
    assert cache.read.cached_blocks() == []


def test_sent_state_is_the_one_after_the_computed_positions():
    cache = Cache(16, state_slots=3)
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = state_granted(cache)
    cache.commit(lease_id, 17)
    for num_tokens in (0, 16, 18):
        with pytest.raises(LeaseError, match="the lease has computed 17 positions"):
            send_group(cache, lease_id, STATE, num_tokens)
    transfer_id = send_group(cache, lease_id, STATE, 17)

    plan = cache.plans[transfer_id]
    assert (plan.route, plan.group, plan.peer, plan.after_step) == (SEND, STATE, TICKET, 1)
    assert plan.source_ids.tolist() == [cache.read.state_slot(lease_id)]
    assert plan.target_ids.tolist() == [0]
    cache.end(transfer_id)
    assert cache.moved == [(transfer_id, lease_id, 1)]
    assert cache.read.statistics().groups["state"].sent_blocks == 1
    cache.commit(lease_id, 18)


def test_state_transfers_refuse_models_without_state_and_leases_that_compute_nothing():
    cache = Cache()
    lease_id = cache.granted(8)
    for call in (receive_group, send_group):
        with pytest.raises(UsageError, match="group is 'state'; it must be one of"):
            call(cache, lease_id, STATE, 8)


# --- sliding windows ------------------------------------------------------------------------------

WINDOWS = {
    "near": WindowGroup(window_tokens=5, device_blocks=9, step_tokens=4),
    "far": WindowGroup(window_tokens=9, device_blocks=12, step_tokens=4, sink_tokens=3),
}


def windowed(num_tokens: int = 26, **config: Any) -> tuple[Cache, int]:
    """Return a cache of a model with two window groups, and a granted lease."""
    cache = Cache(16, windows=WINDOWS, **config)
    return cache, cache.granted(num_tokens)


def entries(cache: Cache, lease_id: int, group: str) -> dict[int, int]:
    """Return the blocks that the lease has in a window group, and their ids."""
    table = cache.read.block_table(lease_id, group).tolist()
    return {block: block_id for block, block_id in enumerate(table) if block_id >= 0}


def test_received_windows_are_the_sink_and_the_window_behind_the_positions():
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    with pytest.raises(LeaseError, match="the windows behind 26 positions were not received"):
        cache.commit_received(lease_id, 26)
    near = receive_group(cache, lease_id, "near", 26)
    far = receive_group(cache, lease_id, "far", 26)

    for transfer_id, group, blocks in ((near, "near", [5, 6]), (far, "far", [0, 4, 5, 6])):
        plan = cache.plans[transfer_id]
        table = entries(cache, lease_id, group)
        assert (plan.route, plan.peer, plan.group) == (RECEIVE, TICKET, group)
        assert plan.source_ids.tolist() == blocks
        assert plan.target_ids.tolist() == [table[block] for block in blocks]
        assert sorted(table) == blocks
    cache.end(far)
    with pytest.raises(LeaseError, match="a window of a lease is being received"):
        cache.commit_received(lease_id, 26)
    cache.end(near)
    assert cache.moved[-2:] == [(far, lease_id, 4), (near, lease_id, 2)]
    assert cache.commit_received(lease_id, 26) == 6
    groups = cache.read.statistics().groups
    assert (groups["far"].received_blocks, groups["near"].received_blocks) == (4, 2)
    batch = cache.apply(cache.scheduler.begin_batch([lease_id]))
    cache.apply(cache.scheduler.end_batch(batch, in_open_step=False))
    assert cache.apply(cache.scheduler.extend([lease_id], 4))
    cache.commit(lease_id, 30)


def test_received_windows_let_another_lease_hit_behind_them():
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    for group in WINDOWS:
        cache.end(receive_group(cache, lease_id, group, 26))
    cache.commit_received(lease_id, 26)

    other = cache.granted(28)
    assert cache.read.cached_tokens(other) == 24
    for group in WINDOWS:
        cached = {b: i for b, i in entries(cache, lease_id, group).items() if b < 6}
        assert cached.items() <= entries(cache, other, group).items()


def test_windows_are_received_behind_a_hit_that_has_some_of_them():
    cache, first = windowed(8)
    for position in (4, 8):
        cache.commit(first, position)
    cache.apply(cache.scheduler.release(first))
    lease_id = cache.granted(14)
    assert cache.read.cached_tokens(lease_id) == 8
    cache.end(cache.receive(lease_id, 2, 2))
    near = receive_group(cache, lease_id, "near", 14)
    far = receive_group(cache, lease_id, "far", 14)

    assert cache.plans[near].source_ids.tolist() == [2, 3]
    assert cache.plans[far].source_ids.tolist() == [2, 3]
    assert sorted(entries(cache, lease_id, "far")) == [0, 1, 2, 3]  # 0 and 1 are cached
    for transfer_id in (near, far):
        cache.end(transfer_id)
    assert cache.commit_received(lease_id, 14) == 1


def test_window_blocks_that_a_lease_gives_back_wait_for_the_step_that_is_open():
    near = WindowGroup(window_tokens=5, device_blocks=3, step_tokens=4)
    cache = Cache(16, windows={"near": near})
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = cache.granted(22)
    for position in (4, 8):
        cache.commit(lease_id, position)
    cache.apply(cache.scheduler.close_step())
    cache.apply(cache.scheduler.finish_step(1))
    cache.end(cache.receive(lease_id, 2, 4))

    transfer_id = receive_group(cache, lease_id, "near", 22)
    assert cache.plans[transfer_id].after_step == 2  # which may compute with the lease


def test_lease_that_waits_for_windows_is_not_changed():
    cache, lease_id = windowed(host_blocks=8)
    cache.end(cache.receive(lease_id, 0, 7))
    for group in WINDOWS:
        cache.end(receive_group(cache, lease_id, group, 26))

    for call in (
        lambda: cache.scheduler.begin_batch([lease_id]),
        lambda: cache.scheduler.commit(lease_id, 26),
        lambda: cache.scheduler.peers.commit_received(lease_id, 25),
        lambda: cache.scheduler.truncate(lease_id, 25),
        lambda: cache.scheduler.swap_out(lease_id),
        lambda: cache.scheduler.peers.send_group(lease_id, TICKET, "near", 26),
        lambda: cache.scheduler.peers.receive_group(lease_id, TICKET, "near", 25),
    ):
        with pytest.raises(LeaseError):
            call()
    assert cache.scheduler.violations() == []
    cache.commit_received(lease_id, 26)


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_lease_whose_windows_did_not_arrive_must_be_preempted(outcome: str):
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    near = receive_group(cache, lease_id, "near", 26)
    far = receive_group(cache, lease_id, "far", 26)
    cache.end(far, outcome, 1)
    assert cache.read.state(lease_id) == LeaseState.FAILED
    cache.end(near)
    with pytest.raises(LeaseError, match="the windows behind 26 positions were not received"):
        cache.commit_received(lease_id, 26)
    with pytest.raises(LeaseError, match="recompute_from"):
        cache.scheduler.recompute_from(lease_id)
    cache.apply(cache.scheduler.preempt(lease_id))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 26)) is not None
    cache.commit(lease_id, 4)
    assert len(cache.read.cached_blocks()) == 1


@pytest.mark.parametrize("verb", ["release", "preempt"])
def test_window_blocks_given_back_while_received_are_free_after_the_report(verb: str):
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    transfer_id = receive_group(cache, lease_id, "far", 26)
    blocks = set(cache.plans[transfer_id].target_ids.tolist())
    cache.apply(getattr(cache.scheduler, verb)(lease_id))
    other = cache.granted(8, seed=1)
    assert not blocks & set(entries(cache, other, "far").values())
    cache.end(transfer_id)
    assert cache.moved[1:] == []
    assert cache.read.cached_blocks() == []


def test_sent_windows_are_those_behind_the_computed_positions():
    cache = Cache(16, windows=WINDOWS)
    cache.apply(cache.scheduler.track_steps(True))
    lease_id = cache.granted(26)
    for position in (*range(4, 26, 4), 26):
        cache.commit(lease_id, position)
    with pytest.raises(LeaseError, match="the lease has computed 26 positions"):
        send_group(cache, lease_id, "near", 25)
    with pytest.raises(UsageError, match="group is 'other'"):
        send_group(cache, lease_id, "other", 26)
    near, far = (send_group(cache, lease_id, group, 26) for group in WINDOWS)

    for transfer_id, group, blocks in ((near, "near", [5, 6]), (far, "far", [0, 4, 5, 6])):
        plan = cache.plans[transfer_id]
        assert (plan.route, plan.group, plan.after_step) == (SEND, group, 1)
        assert plan.target_ids.tolist() == blocks
        table = entries(cache, lease_id, group)
        assert plan.source_ids.tolist() == [table[block] for block in blocks]
    for call in (
        lambda: cache.scheduler.begin_batch([lease_id]),
        lambda: cache.scheduler.peers.receive(lease_id, TICKET, 6, 1),
    ):
        with pytest.raises(LeaseError):
            call()
    cache.end(near)
    cache.end(far)
    groups = cache.read.statistics().groups
    assert (groups["far"].sent_blocks, groups["near"].sent_blocks) == (4, 2)
    cache.send(lease_id, 0, 7)


def test_state_is_received_behind_all_windows_only():
    cache = Cache(16, windows=WINDOWS, state_slots=2)
    lease_id = cache.granted(26)
    for transfer_id in cache.read.onloads(lease_id):
        cache.plans[transfer_id] = None
        cache.end(transfer_id)
    cache.end(cache.receive(lease_id, 0, 7))
    cache.end(receive_group(cache, lease_id, "near", 26))
    with pytest.raises(LeaseError, match="the windows behind 26 positions were not received"):
        receive_group(cache, lease_id, STATE, 26)
    cache.end(receive_group(cache, lease_id, "far", 26))
    cache.end(receive_group(cache, lease_id, STATE, 26))
    assert cache.read.computed_tokens(lease_id) == 26
    cache.apply(cache.scheduler.begin_batch([lease_id]))


@pytest.mark.parametrize("ended", ["before", "between", "after"])
def test_lease_whose_ticket_ends_before_its_windows_are_committed_must_be_preempted(ended: str):
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    transfers = [receive_group(cache, lease_id, group, 26) for group in WINDOWS]
    for number, transfer_id in enumerate(transfers):
        if number == {"before": 0, "between": 1}.get(ended):
            cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
        cache.end(transfer_id)
    assert cache.read.state(lease_id) == (
        LeaseState.GRANTED if ended == "after" else LeaseState.FAILED
    )
    cache.apply(cache.scheduler.peers.end(lease_id, OTHER_TICKET))
    assert (cache.read.state(lease_id) == LeaseState.FAILED) == (ended != "after")
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))

    assert cache.read.state(lease_id) == LeaseState.FAILED
    with suppress(LeaseError):
        cache.commit_received(lease_id, 26)
    assert cache.read.computed_tokens(lease_id) == 0
    assert cache.read.cached_blocks() == []
    cache.apply(cache.scheduler.preempt(lease_id))
    assert cache.apply(cache.scheduler.try_allocate(lease_id, 26)) is not None


def test_end_of_a_ticket_leaves_windows_that_are_committed():
    cache, lease_id = windowed()
    cache.end(cache.receive(lease_id, 0, 7))
    for group in WINDOWS:
        cache.end(receive_group(cache, lease_id, group, 26))
    cache.commit_received(lease_id, 26)
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
    assert cache.read.state(lease_id) == LeaseState.GRANTED
    cache.apply(cache.scheduler.begin_batch([lease_id]))


def test_cancelled_state_behind_received_windows_fails_the_lease():
    cache = Cache(16, windows=WINDOWS, state_slots=2)
    lease_id = cache.granted(26)
    for transfer_id in cache.read.onloads(lease_id):
        cache.plans[transfer_id] = None
        cache.end(transfer_id)
    cache.end(cache.receive(lease_id, 0, 7))
    for group in WINDOWS:
        cache.end(receive_group(cache, lease_id, group, 26))
    state = receive_group(cache, lease_id, STATE, 26)
    cache.apply(cache.scheduler.peers.end(lease_id, TICKET))
    assert cache.read.state(lease_id) == LeaseState.GRANTED  # its end will tell
    cache.end(state, "cancelled")
    assert cache.read.state(lease_id) == LeaseState.FAILED
    assert cache.read.computed_tokens(lease_id) == 0


# --- layers of blocks that are being computed -----------------------------------------------------


def send_early(cache: Cache, lease_id: int, first: int, num: int, ranges: Any = (0, 2)) -> int:
    args = lease_id, TICKET, first, num, *ranges
    transfer_id: int = cache.apply(cache.scheduler.peers.send_early(*args, 7))
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
    plan = cache.plans[cache.apply(cache.scheduler.peers.send(lease_id, TICKET, 1, 3, 2, 5))]
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
    with pytest.raises(UsageError, match="the ranges of layers are 1 to 1"):
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
