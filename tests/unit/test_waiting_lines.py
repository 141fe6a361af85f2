"""Waiting lines of the scheduler without an engine: their results and their checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv import CacheConfig
from aiokv.base.plan import TransferReport
from aiokv.base.state_guard import StateGuard
from aiokv.errors import BrokenEngineError, ClosedError, LeaseError, RequestTooLarge
from aiokv.scheduler.admission import WaitingRequest
from aiokv.scheduler.effects import NO_EFFECTS, Outbox
from aiokv.scheduler.guarded import TransitionErrors
from aiokv.scheduler.owners import Owners
from aiokv.scheduler.pins import Pins
from aiokv.scheduler.plans import new_core
from aiokv.scheduler.quota import SaltQuota
from aiokv.scheduler.scheduler import CacheScheduler
from aiokv.scheduler.waits import PER_CALL

BLOCK_TOKENS = 4


def scheduler_of(device_blocks: int = 8, **config: Any) -> CacheScheduler:
    return CacheScheduler(
        CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=device_blocks, **config)
    )


def matched(scheduler: CacheScheduler, seed: int, blocks: int, **options: Any) -> int:
    tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.int32) + 1000 * seed
    return scheduler.match(tokens, **options)[0]


def granted(scheduler: CacheScheduler, seed: int, blocks: int, **options: Any) -> int:
    lease_id = matched(scheduler, seed, blocks, **options)
    grant, _ = scheduler.allocate(lease_id, blocks * BLOCK_TOKENS, 0)
    assert grant is not None
    return lease_id


def waiting(
    scheduler: CacheScheduler, seed: int, blocks: int, priority: int = 0, **options: Any
) -> int:
    lease_id = matched(scheduler, seed, blocks, **options)
    assert scheduler.allocate(lease_id, blocks * BLOCK_TOKENS, priority)[0] is None
    return lease_id


def granted_by(effects: Any) -> list[int]:
    """Return the leases that an effect grants, and mark them as applied."""
    lease_ids = [grant.lease_id for grant in effects.granted]
    effects.granted.clear()
    return lease_ids


# --- the lines ------------------------------------------------------------------------------------


def test_release_grants_in_order_of_priority_then_of_arrival():
    scheduler = scheduler_of(8)
    holder = granted(scheduler, 1, 8)
    late = waiting(scheduler, 2, 2, priority=1)
    first, second = waiting(scheduler, 3, 4), waiting(scheduler, 4, 2)
    _, effects = scheduler.release(holder)
    assert granted_by(effects) == [first, second, late]
    assert scheduler.read.num_waiting == 0
    assert scheduler.violations() == []


def test_first_in_line_that_does_not_fit_keeps_smaller_requests_waiting():
    scheduler = scheduler_of(8)
    holders = [granted(scheduler, seed, 4) for seed in (1, 2)]
    large, small = waiting(scheduler, 3, 8), waiting(scheduler, 4, 1)
    _, effects = scheduler.release(holders[0])
    assert granted_by(effects) == []
    _, effects = scheduler.release(large)
    assert granted_by(effects) == [small]
    assert [type(error) for _, error in effects.refused] == [LeaseError]


def test_quota_admits_a_request_and_grants_it_in_one_call():
    scheduler = scheduler_of(8, salt_quota_blocks=4)
    holder = granted(scheduler, 1, 4, salt="a")
    request = waiting(scheduler, 2, 4, salt="a")
    assert [entry["salt"] for entry in scheduler.read.describe()["waiting_for_quota"]] == ["a"]
    _, effects = scheduler.release(holder)
    assert granted_by(effects) == [request]
    assert scheduler.read.quota_held("a") == 4


def test_one_call_serves_a_bounded_number_and_requests_the_next():
    scheduler = scheduler_of(100)
    holder = granted(scheduler, 1, 100)
    requests = [waiting(scheduler, 2, 1) for _ in range(2 * PER_CALL)]
    _, effects = scheduler.release(holder)
    counts = []
    while effects.advance:
        effects.advance = False
        counts.append(granted_by(effects))
        scheduler.applied()
        _, effects = scheduler.advance()
    counts.append(granted_by(effects))
    assert [lease_id for lease_ids in counts for lease_id in lease_ids] == requests
    assert max(map(len, counts)) == PER_CALL


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda s: s.close(), ClosedError),
        (lambda s: s.fail("the device was lost"), BrokenEngineError),
    ],
)
def test_close_and_failure_refuse_all_lines_with_one_error_each(end, error):
    scheduler = scheduler_of(4, salt_quota_blocks=4)
    holder = granted(scheduler, 1, 4, salt="a")
    for_quota, for_room = waiting(scheduler, 2, 2, salt="a"), waiting(scheduler, 3, 2, salt="b")
    _, effects = end(scheduler)
    refused = dict(effects.refused)
    assert set(refused) == {for_quota, for_room}
    assert {type(error) for error in refused.values()} == {error}
    assert len({id(error) for error in refused.values()}) == 2
    assert scheduler.read.num_waiting == 0
    assert scheduler.read.quota_held("b") == 0
    assert scheduler.read.quota_held("a") == 4
    scheduler.release(holder)
    assert scheduler.violations() == []


def test_request_that_can_never_fit_is_refused_and_nothing_changes():
    scheduler = scheduler_of(8, salt_quota_blocks=4)
    lease_id = matched(scheduler, 1, 8, salt="a")
    for num_tokens, error in ((0, LeaseError), (20, RequestTooLarge), (4000, RequestTooLarge)):
        with pytest.raises(error):
            scheduler.allocate(lease_id, num_tokens, 0)
    assert scheduler.read.num_waiting == 0
    assert scheduler.read.quota_held("a") == 0
    assert scheduler.violations() == []


def test_lease_that_waits_cannot_wait_twice():
    scheduler = scheduler_of(4)
    granted(scheduler, 1, 4)
    request = waiting(scheduler, 2, 2, owner="r1")
    for transition in (
        lambda: scheduler.allocate(request, 8, -1),
        lambda: scheduler.preempt(request),
        lambda: scheduler.swap_out(request),
    ):
        with pytest.raises(LeaseError, match="'r1' already waits for capacity"):
            transition()
    assert scheduler.read.num_waiting == 1
    assert scheduler.violations() == []


def test_stop_waiting_retracts_a_grant_made_in_the_meantime():
    scheduler = scheduler_of(4, salt_quota_blocks=4)
    holder = granted(scheduler, 1, 4, salt="a")
    request, behind = waiting(scheduler, 2, 4, salt="b"), waiting(scheduler, 3, 4, salt="c")
    _, effects = scheduler.release(holder)
    assert granted_by(effects) == [request]
    _, effects = scheduler.stop_waiting(request)
    assert granted_by(effects) == [behind]
    assert [scheduler.read.quota_held(salt) for salt in "abc"] == [0, 0, 4]
    assert scheduler.violations() == []


def test_stop_waiting_of_a_released_lease_leaves_its_blocks_with_the_batch():
    """Another task computed with the lease and released it before the waiting task ran."""
    scheduler = scheduler_of(4, salt_quota_blocks=4)
    holder = granted(scheduler, 1, 4, salt="a")
    request = waiting(scheduler, 2, 4, salt="b")
    _, effects = scheduler.release(holder)
    assert granted_by(effects) == [request]
    batch_id, _ = scheduler.begin_batch([request])
    scheduler.release(request)
    scheduler.stop_waiting(request)
    assert scheduler.violations() == []
    assert scheduler.read.statistics().attention.device.free == 0
    assert scheduler.read.quota_held("b") == 4
    scheduler.end_batch(batch_id, in_open_step=False)
    assert scheduler.violations() == []
    assert scheduler.read.num_leases == 0
    assert scheduler.read.quota_held("b") == 0
    assert scheduler.read.statistics().attention.device.free == 4


# --- pending blocks -------------------------------------------------------------------------------


def test_commit_resumes_the_leases_whose_blocks_are_indexed():
    scheduler = scheduler_of(32)
    tokens = np.arange(9 * BLOCK_TOKENS, dtype=np.int32)
    owner = scheduler.match(tokens)[0]
    scheduler.allocate(owner, len(tokens), 0)
    requests = [scheduler.match(tokens[: blocks * BLOCK_TOKENS + 1])[0] for blocks in (2, 4, 8)]
    for request in requests:
        assert scheduler.wait_pending(request)[0]
        with pytest.raises(LeaseError, match="in another task"):
            scheduler.wait_pending(request)
    assert scheduler.read.num_waiting == 3
    for blocks, resumed in ((1, []), (3, requests[:1]), (4, requests[1:2]), (8, requests[2:])):
        _, effects = scheduler.commit(owner, blocks * BLOCK_TOKENS)
        assert [lease_id for lease_id, _ in effects.resumed] == resumed
        effects.resumed.clear()
    assert scheduler.read.num_waiting == 0
    assert scheduler.violations() == []


# --- reports of the checks ------------------------------------------------------------------------


def test_violations_report_a_waiting_lease_that_is_released():
    scheduler = scheduler_of(4)
    granted(scheduler, 1, 4)
    request = waiting(scheduler, 2, 4)
    assert scheduler.violations() == []
    del scheduler._owners[request]
    assert scheduler.violations() == [
        f"capacity line: lease {request:#x} waits, but it is released",
        "leases: the core has 2, the scheduler 1",
    ]


def test_violations_report_a_granted_lease_that_waits():
    scheduler = scheduler_of(8)
    holder = granted(scheduler, 1, 4)
    scheduler._admission.join(WaitingRequest(holder, "", 16, 4, 0), counted=True)
    assert scheduler.violations() == [f"capacity line: lease {holder:#x} waits, but it is granted"]


def test_violations_report_waiting_leases_of_a_closed_engine():
    scheduler = scheduler_of(4)
    granted(scheduler, 1, 4)
    scheduler.close()
    request = matched(scheduler, 2, 4)
    scheduler._admission.join(WaitingRequest(request, "", 16, 4, 0), counted=True)
    assert scheduler.violations() == ["lines: leases wait for capacity of a closed engine"]


def counted_quota() -> SaltQuota:
    quota = SaltQuota(8)
    quota.count(1, "a", 4)
    return quota


def test_quota_check_accepts_the_blocks_of_granted_and_of_waiting_leases():
    quota = counted_quota()
    quota.count(2, "a", 3)
    assert quota.check({1: 4}, {1, 2}) == []


def test_quota_check_reports_sums_that_differ():
    quota = counted_quota()
    quota._held["a"] += 1
    assert quota.check({1: 4}, {1}) == [
        "quota: salts count {'a': 5}, the sums over leases are {'a': 4}"
    ]


def test_quota_check_reports_a_lease_that_is_counted_with_other_blocks():
    quota = counted_quota()
    assert quota.check({1: 5}, {1}) == ["quota: lease 0x1 holds 5 blocks, 4 count"]
    quota.give_back(1)
    assert quota.check({1: 4}, {1}) == ["quota: lease 0x1 holds 4 blocks, 0 count"]


def test_quota_check_reports_a_released_lease_that_counts():
    quota = counted_quota()
    assert quota.check({}, set()) == ["quota: 4 blocks of released lease 0x1 count"]


def test_no_quota_has_nothing_to_check():
    quota = SaltQuota(None)
    quota.count(1, "a", 4)
    assert quota.check({1: 9}, set()) == []
    assert quota.held("a") == 0


def pinned(scheduler: CacheScheduler, seed: int, blocks: int, *, until_used: bool = False) -> int:
    """Return a pin of a cached prompt."""
    lease_id = granted(scheduler, seed, blocks)
    scheduler.commit(lease_id, blocks * BLOCK_TOKENS)
    scheduler.release(lease_id)
    pin = matched(scheduler, seed, blocks, holds="whole prompt")
    scheduler.try_allocate(pin, blocks * BLOCK_TOKENS)
    if until_used:
        scheduler.pins.await_use(pin)
    assert scheduler.pins.pin(pin, until_used=until_used)[0] == (blocks * BLOCK_TOKENS, "")
    return pin


def pins_of(core: Any) -> tuple[Pins, list[int]]:
    """Return pins of a core, and the list of the leases that they release."""
    released: list[int] = []

    class Noted:
        def release(self, lease_id: int) -> None:
            released.append(lease_id)

    releases: Any = Noted()
    no_grants: Any = None
    errors = TransitionErrors(Owners(), StateGuard())
    pins = Pins(core, Outbox(), errors, releases, no_grants, no_grants, lambda: NO_EFFECTS)
    return pins, released


def test_grant_ends_the_pins_that_it_uses_and_queries_all_of_them_at_once():
    queries = []

    class Used:
        def is_current(self, lease_id: int) -> bool:
            return True

        def awaits_use(self, lease_id: int) -> bool:
            return True

        def cached_tokens(self, lease_id: int) -> int:
            return BLOCK_TOKENS

        def take_used(self) -> list[int]:
            queries.append(len(queries))
            return [1, 7, 5000]

    pins, released = pins_of(Used())
    pins.pin(1, until_used=False)
    assert pins.num_until_used == 0, "the scheduler does not query the core"
    for pin in range(2, 1000):
        pins.pin(pin, until_used=True)
    assert pins.num_until_used == 998
    assert pins.end_used()
    assert released == [7], "those that do not end with a use are kept"
    assert pins.num_until_used == 997
    assert queries == [0]


def test_pin_that_waits_for_a_use_ends_with_it():
    scheduler = scheduler_of(8)
    kept, awaiting = pinned(scheduler, 1, 2), pinned(scheduler, 2, 2, until_used=True)
    for seed, ended in ((1, []), (2, [(awaiting, "a lease used it")])):
        lease_id = matched(scheduler, seed, 3)
        _, effects = scheduler.try_allocate(lease_id, 3 * BLOCK_TOKENS)
        assert list(effects.unpinned) == ended
        effects.unpinned.clear()
        scheduler.release(lease_id)
    assert scheduler.violations() == []
    _, effects = scheduler.pins.unpin(kept, "the test ends")
    assert list(effects.unpinned) == [(kept, "the test ends")]
    assert scheduler.read.num_leases == 0


def test_violations_report_a_pin_whose_blocks_cannot_be_hit():
    scheduler = scheduler_of(8)
    pin = pinned(scheduler, 1, 2)
    assert scheduler.violations() == []
    scheduler._core.reset()
    assert scheduler.violations() == [f"pin {pin:#x} holds blocks that no match can find"]


def test_pin_check_reports_a_pin_whose_blocks_cannot_be_hit():
    core = new_core(CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=8))
    tokens = np.arange(8, dtype=np.int32)
    owner = core.match(tokens, "")[0]
    core.allocate(owner, 8)
    core.commit(owner, 8, 0)
    core.release(owner, 0)
    pin = core.match(tokens, "")[0]
    core.hold_only(pin, whole=True)
    core.allocate(pin, 8)
    pins, released = pins_of(core)
    pins.pin(pin, until_used=False)
    assert pins.check() == []
    core.reset()
    assert pins.check() == [f"pin {pin:#x} holds blocks that no match can find"]
    pins.unpin(pin, "the test ends")
    pins.unpin(pin, "the test ends")
    assert released == [pin]
    assert pins.check() == []


def test_refused_request_lets_the_next_request_of_its_salt_follow():
    """The device has shrunk below the first request, which gives back its quota."""
    scheduler = scheduler_of(8, salt_quota_blocks=7)
    granted(scheduler, 1, 2, salt="other")
    too_large = waiting(scheduler, 2, 7, salt="a")
    follower = waiting(scheduler, 3, 2, salt="a")
    _, effects = scheduler.resize(6)
    assert [lease_id for lease_id, _ in effects.refused] == [too_large]
    while effects.advance:
        effects.advance = False
        _, effects = scheduler.advance()
    assert granted_by(effects) == [follower]
    assert scheduler.violations() == []


def test_lease_whose_wait_is_being_ended_is_not_granted_in_another_task():
    scheduler = scheduler_of(2 * PER_CALL)
    scheduler.change_gate("pause")
    leases = [waiting(scheduler, seed, 1) for seed in range(PER_CALL + 1)]
    _, effects = scheduler.fail("the device failed")
    assert len(effects.refused) == PER_CALL
    scheduler.change_gate("resume")
    assert scheduler.try_allocate(leases[-1], BLOCK_TOKENS)[0] is None
    _, effects = scheduler.advance()
    assert [lease_id for lease_id, _ in effects.refused] == leases
    assert scheduler.violations() == []


def test_end_of_a_swap_that_a_preemption_has_ended_keeps_the_quota_of_the_next_wait():
    scheduler = scheduler_of(8, host_blocks=8, salt_quota_blocks=6)
    lease_id = granted(scheduler, 1, 4, salt="a")
    scheduler.commit(lease_id, 16)
    transfer_id, effects = scheduler.swap_out(lease_id)
    assert transfer_id
    scheduler.preempt(lease_id)
    scheduler.change_gate("pause")
    assert scheduler.allocate(lease_id, 16, 0)[0] is None
    assert scheduler.read.quota_held("a") == 4
    scheduler.complete(TransferReport(transfer_id=transfer_id, outcome="done", first_bad_block=4))
    assert scheduler.read.quota_held("a") == 4
    _, effects = scheduler.change_gate("resume")
    assert granted_by(effects) == [lease_id]
    assert scheduler.violations() == []
