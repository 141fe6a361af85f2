"""Places in line that wait for a store, fetches and saves of the scheduler without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv import CacheConfig
from aiokv.base.plan import FETCH, SAVE, Priority, TransferReport
from aiokv.base.types import LeaseState
from aiokv.errors import ClosedError, LeaseError, RequestTooLarge
from aiokv.scheduler.scheduler import CacheScheduler

BLOCK_TOKENS = 4


def scheduler_of(device_blocks: int = 8, **config: Any) -> CacheScheduler:
    sizes = {"block_tokens": BLOCK_TOKENS, "device_blocks": device_blocks, "host_blocks": 8}
    return CacheScheduler(CacheConfig(**{**sizes, **config}), has_stores=True)


def matched(scheduler: CacheScheduler, seed: int, blocks: int, **options: Any) -> int:
    tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.int32) + 1000 * seed
    return scheduler.match(tokens, **options)[0]


def allocated(
    scheduler: CacheScheduler,
    seed: int,
    blocks: int,
    priority: int = 0,
    *,
    waits_for_store: bool = False,
    **options: Any,
) -> int:
    """Return a lease that is granted, waits in line, or waits for a store."""
    lease_id = matched(scheduler, seed, blocks, **options)
    scheduler.allocate(lease_id, blocks * BLOCK_TOKENS, priority, waits_for_store)
    return lease_id


def granted_by(result: tuple[Any, Any]) -> list[int]:
    _, effects = result
    lease_ids = [grant.lease_id for grant in effects.granted]
    effects.granted.clear()
    return lease_ids


def submitted_by(result: tuple[Any, Any]) -> list[Any]:
    _, effects = result
    plans = list(effects.submit)
    effects.clear()
    return plans


def completed(scheduler: CacheScheduler, transfer_id: int, **fields: Any) -> tuple[Any, Any]:
    fields = {"outcome": "done", **fields}
    result = scheduler.complete(TransferReport(transfer_id=transfer_id, **fields))
    assert scheduler.violations() == []
    return result


# --- places in line -------------------------------------------------------------------------------


def test_request_that_waits_for_a_store_lets_others_pass():
    scheduler = scheduler_of(8)
    waits = allocated(scheduler, 1, 8, waits_for_store=True)
    assert scheduler.read.state(waits) is LeaseState.WAITING
    assert scheduler.read.num_waiting == 1
    passing = allocated(scheduler, 2, 4)
    assert scheduler.read.is_granted(passing)
    assert not scheduler.read.is_granted(waits)
    assert scheduler.violations() == []


def test_end_of_a_store_wait_grants_at_once_where_there_is_room():
    scheduler = scheduler_of(8)
    waits = allocated(scheduler, 1, 8, waits_for_store=True)
    assert granted_by(scheduler.end_store_wait(waits)) == [waits]
    assert granted_by(scheduler.end_store_wait(waits)) == []
    assert scheduler.read.num_waiting == 0


def test_request_is_served_in_the_place_that_it_had_before_its_store_wait():
    scheduler = scheduler_of(8)
    holder = allocated(scheduler, 1, 8)
    before = allocated(scheduler, 2, 2)
    waits = allocated(scheduler, 3, 2, waits_for_store=True)
    other = allocated(scheduler, 4, 2, waits_for_store=True)
    after = allocated(scheduler, 5, 2)
    urgent = allocated(scheduler, 6, 1, -1)
    assert granted_by(scheduler.end_store_wait(other)) == []
    assert granted_by(scheduler.end_store_wait(waits)) == []
    assert granted_by(scheduler.release(holder)) == [urgent, before, waits, other]
    assert granted_by(scheduler.release(before)) == [after]
    assert scheduler.violations() == []


def test_store_wait_that_ends_with_a_lower_priority_does_not_pass():
    scheduler = scheduler_of(8)
    holder = allocated(scheduler, 1, 8)
    waits = allocated(scheduler, 2, 2, 1, waits_for_store=True)
    urgent = allocated(scheduler, 3, 8, 0)
    scheduler.end_store_wait(waits)
    assert granted_by(scheduler.release(holder)) == [urgent]
    assert granted_by(scheduler.release(urgent)) == [waits]


def test_quota_does_not_count_a_request_that_waits_for_a_store():
    scheduler = scheduler_of(8, salt_quota_blocks=4)
    waits = allocated(scheduler, 1, 4, waits_for_store=True, salt="a")
    passing = allocated(scheduler, 2, 4, salt="a")
    assert scheduler.read.is_granted(passing)
    assert scheduler.read.quota_held("a") == 4
    assert granted_by(scheduler.end_store_wait(waits)) == []
    assert [entry["salt"] for entry in scheduler.read.describe()["waiting_for_quota"]] == ["a"]
    assert granted_by(scheduler.release(passing)) == [waits]
    assert scheduler.violations() == []


def test_request_waits_for_its_quota_in_the_place_that_it_had_before_its_store_wait():
    scheduler = scheduler_of(8, salt_quota_blocks=4)
    waits = allocated(scheduler, 1, 3, waits_for_store=True, salt="a")
    holder = allocated(scheduler, 2, 4, salt="a")
    later = allocated(scheduler, 3, 3, salt="a")
    assert granted_by(scheduler.end_store_wait(waits)) == []
    assert granted_by(scheduler.release(holder)) == [waits]
    assert granted_by(scheduler.release(waits)) == [later]


def test_request_whose_quota_fits_after_its_store_wait_passes_a_later_one_that_does_not_fit():
    scheduler = scheduler_of(8, salt_quota_blocks=4)
    waits = allocated(scheduler, 1, 2, waits_for_store=True, salt="a")
    allocated(scheduler, 2, 2, salt="a")
    later = allocated(scheduler, 3, 4, salt="a")
    assert granted_by(scheduler.end_store_wait(waits)) == [waits]
    assert scheduler.read.state(later) is LeaseState.WAITING


def test_request_does_not_pass_an_earlier_one_of_its_salt_after_its_store_wait():
    scheduler = scheduler_of(8, salt_quota_blocks=4)
    holder = allocated(scheduler, 1, 2, salt="a")
    earlier = allocated(scheduler, 2, 4, salt="a")
    waits = allocated(scheduler, 3, 2, waits_for_store=True, salt="a")
    assert granted_by(scheduler.end_store_wait(waits)) == []
    assert granted_by(scheduler.release(holder)) == [earlier]
    assert granted_by(scheduler.release(earlier)) == [waits]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda scheduler, lease_id: scheduler.close(), ClosedError),
        (lambda scheduler, lease_id: scheduler.release(lease_id), LeaseError),
        (lambda scheduler, lease_id: scheduler.stop_waiting(lease_id), None),
    ],
)
def test_store_wait_ends_with_the_request(end: Any, error: type[Exception] | None):
    scheduler = scheduler_of(8)
    waits = allocated(scheduler, 1, 4, waits_for_store=True)
    _, effects = end(scheduler, waits)
    refused = [(lease_id, type(reason)) for lease_id, reason in effects.refused]
    assert refused == ([(waits, error)] if error else [])
    assert granted_by(scheduler.end_store_wait(waits)) == []
    assert scheduler.read.num_waiting == 0
    assert scheduler.violations() == []


def test_impossible_request_is_refused_before_it_waits_for_a_store():
    scheduler = scheduler_of(8, salt_quota_blocks=6)
    lease_id = matched(scheduler, 1, 4)
    with pytest.raises(RequestTooLarge, match="device_blocks is 8"):
        scheduler.allocate(lease_id, 9 * BLOCK_TOKENS, 0, waits_for_store=True)
    with pytest.raises(RequestTooLarge, match="salt_quota_blocks is 6"):
        scheduler.allocate(lease_id, 7 * BLOCK_TOKENS, 0, waits_for_store=True)
    with pytest.raises(LeaseError, match="between 1 and"):
        scheduler.allocate(lease_id, 0, 0, waits_for_store=True)
    scheduler.allocate(lease_id, 4, 0, waits_for_store=True)
    with pytest.raises(LeaseError, match="already waits"):
        scheduler.allocate(lease_id, 4, 0, waits_for_store=True)
    assert scheduler.read.num_waiting == 1
    assert scheduler.read.describe()["waiting_for_store"] == [
        {"owner": hex(lease_id), "num_tokens": 4}
    ]


# --- fetches --------------------------------------------------------------------------------------


def test_fetched_blocks_are_hit_and_counted():
    scheduler = scheduler_of(8)
    lease_id = allocated(scheduler, 1, 4, waits_for_store=True)
    first, digests = scheduler.read.missing(lease_id)
    assert (first, len(digests)) == (0, 3 * 32)
    transfer_id, effects = scheduler.fetches.begin(lease_id, 3, Priority.DEMAND)
    (plan,) = effects.submit
    assert (plan.route, plan.digests, plan.transfer_id) == (FETCH, digests, transfer_id)
    effects.clear()
    completed(scheduler, transfer_id, outcome="failed", first_bad_block=2)
    assert scheduler.read.missing(lease_id) == (2, digests[64:])
    assert granted_by(scheduler.end_store_wait(lease_id)) == [lease_id]
    assert scheduler.read.hit(lease_id).host_tokens == 8
    assert scheduler.read.cached_store_tokens(lease_id) == 8
    statistics = scheduler.read.statistics()
    assert (statistics.hit_store_tokens, statistics.fetches) == (8, 1)
    assert (statistics.attention.fetched_blocks, statistics.attention.unfetched_blocks) == (2, 1)


def test_long_prompt_is_fetched_in_parts_of_2048_blocks():
    blocks = 2048 + 3
    scheduler = scheduler_of(8, host_blocks=blocks)
    lease_id = matched(scheduler, 1, blocks + 1)
    for first, part in ((0, 2048), (2048, 3)):
        found, digests = scheduler.read.missing(lease_id)
        assert (found, len(digests)) == (first, part * 32)
        transfer_id, effects = scheduler.fetches.begin(lease_id, blocks, Priority.DEMAND)
        assert effects.submit[0].digests == digests
        effects.clear()
        completed(scheduler, transfer_id)
    assert scheduler.read.missing(lease_id) == (blocks, b"")


def test_lease_joins_a_fetch_and_makes_it_more_urgent():
    scheduler = scheduler_of(8)
    first, second = (matched(scheduler, 1, 4) for _ in range(2))
    transfer_id, effects = scheduler.fetches.begin(first, 9, Priority.PREFETCH)
    effects.clear()
    joined, effects = scheduler.fetches.begin(second, 9, Priority.DEMAND)
    assert joined == transfer_id
    assert list(effects.urge) == [(transfer_id, Priority.DEMAND)]
    effects.clear()
    for priority in (Priority.DEMAND, Priority.PREFETCH):
        joined, effects = scheduler.fetches.begin(first, 9, priority)
        assert joined == transfer_id
        assert not effects.urge
    completed(scheduler, transfer_id)
    assert scheduler.fetches.begin(second, 9, Priority.DEMAND)[0] == 0


@pytest.mark.parametrize(
    "options",
    [{"host_blocks": 0}, {"state_slots": 4}],
)
def test_nothing_is_fetched_where_blocks_of_stores_cannot_be_hit(options: dict[str, int]):
    scheduler = scheduler_of(8, **options)
    lease_id = matched(scheduler, 1, 4)
    assert scheduler.read.missing(lease_id)[1] == b""
    assert scheduler.fetches.begin(lease_id, 9, Priority.DEMAND)[0] == 0


def test_nothing_is_fetched_or_saved_while_admission_is_paused():
    scheduler = scheduler_of(8)
    lease_id = allocated(scheduler, 1, 2)
    scheduler.commit(lease_id, 8)
    (backup,) = submitted_by(scheduler.collect_backups())
    scheduler.change_gate("pause")
    _, effects = completed(scheduler, backup.transfer_id)
    effects.clear()
    assert scheduler.store_saver.collect()[0] is False
    assert scheduler.fetches.begin(matched(scheduler, 2, 4), 9, Priority.DEMAND)[0] == 0
    _, effects = scheduler.change_gate("resume")
    assert effects.collect
    assert scheduler.store_saver.collect()[0] is True


# --- saves ----------------------------------------------------------------------------------------


def test_end_of_a_backup_requests_a_save():
    scheduler = scheduler_of(8)
    lease_id = allocated(scheduler, 1, 2)
    _, digests = scheduler.read.missing(matched(scheduler, 1, 3))
    scheduler.commit(lease_id, 8)
    (backup,) = submitted_by(scheduler.collect_backups())
    _, effects = completed(scheduler, backup.transfer_id)
    assert effects.collect
    effects.clear()
    (plan,) = submitted_by(scheduler.store_saver.collect())
    assert (plan.route, plan.priority) == (SAVE, Priority.BACKUP)
    assert (plan.source_blocks, plan.target_ids.tolist()) == (backup.target_blocks, [0, 1])

    assert plan.digests == digests
    completed(scheduler, plan.transfer_id, results=b"\0\3")
    statistics = scheduler.read.statistics()
    assert (
        statistics.attention.saved_blocks,
        statistics.attention.unsaved_by_cause["refused"],
    ) == (1, 1)
    assert scheduler.store_saver.collect()[0] is False


def test_scheduler_without_stores_has_no_digests():
    scheduler = CacheScheduler(CacheConfig(block_tokens=4, device_blocks=8, host_blocks=8))
    lease_id = allocated(scheduler, 1, 2)
    scheduler.commit(lease_id, 8)
    (backup,) = submitted_by(scheduler.collect_backups())
    completed(scheduler, backup.transfer_id)
    assert scheduler.store_saver.collect()[0] is False
    other = matched(scheduler, 2, 4)
    assert scheduler.read.missing(other) == (0, b"")
    assert scheduler.fetches.begin(other, 9, Priority.DEMAND)[0] == 0
