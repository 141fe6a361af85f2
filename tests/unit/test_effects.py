"""Effects of the scheduler's transitions: none when nothing is left to do, and none are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import CacheConfig
from aiokv.base.plan import OFFLOAD, ONLOAD, Priority, TransferReport
from aiokv.errors import LeaseError
from aiokv.scheduler.effects import NO_EFFECTS, Effects, Grant, Outbox
from aiokv.scheduler.scheduler import CacheScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_TOKENS = 4
LISTS = [name for name in Effects.__slots__ if name not in ("advance", "collect", "has_entries")]


def scheduler_of(device_blocks: int = 16, host_blocks: int = 0, **config: Any) -> CacheScheduler:
    return CacheScheduler(
        CacheConfig(
            block_tokens=BLOCK_TOKENS,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            **config,
        )
    )


def prompt(seed: int, blocks: int) -> np.ndarray:
    """Return a prompt whose blocks can all be hit: one more token follows."""
    return np.arange(blocks * BLOCK_TOKENS + 1, dtype=np.int32) + 1000 * seed


def applied(scheduler: CacheScheduler, effects: Effects) -> dict[str, Any]:
    """Remove all effects, as the dispatcher does, and return them."""
    found: dict[str, Any] = {}
    if effects is not NO_EFFECTS:
        for name in LISTS:
            entries = getattr(effects, name)
            if entries:
                found[name] = list(entries)
                entries.clear()
        for name in ("advance", "collect"):
            if getattr(effects, name):
                found[name] = True
                setattr(effects, name, False)
    scheduler.applied()
    return found


def served(scheduler: CacheScheduler, tokens: np.ndarray) -> None:
    """Compute a prompt and release it."""
    lease_id, effects = scheduler.match(tokens)
    _, effects = scheduler.allocate(lease_id, len(tokens), 0)
    applied(scheduler, effects)
    _, effects = scheduler.commit(lease_id, len(tokens))
    applied(scheduler, effects)
    applied(scheduler, scheduler.release(lease_id)[1])


def on_host(scheduler: CacheScheduler, tokens: np.ndarray) -> None:
    """Let the blocks of a prompt be on the host only; the write policy is write_through."""
    served(scheduler, tokens)
    found = applied(scheduler, scheduler.collect_backups()[1])
    for plan in found["submit"]:
        report = TransferReport(transfer_id=plan.transfer_id, outcome="done")
        applied(scheduler, scheduler.complete(report)[1])
    applied(scheduler, scheduler.evict(16, "device")[1])


# --- nothing to do --------------------------------------------------------------------------------


def test_full_device_hit_returns_the_shared_object_from_each_transition():
    scheduler = scheduler_of()
    tokens = prompt(1, 3)
    served(scheduler, tokens)
    lease_id, effects = scheduler.match(tokens)
    assert effects is NO_EFFECTS
    grant, effects = scheduler.allocate(lease_id, len(tokens), 0)
    assert effects is NO_EFFECTS
    assert grant == Grant(0, ())
    published, effects = scheduler.commit(lease_id, len(tokens))
    assert effects is NO_EFFECTS
    assert published == 0
    assert scheduler.release(lease_id)[1] is NO_EFFECTS


def test_grants_without_onloads_share_one_object():
    scheduler = scheduler_of()
    grants = []
    for seed in (1, 2):
        lease_id, _ = scheduler.match(prompt(seed, 1))
        grants.append(scheduler.try_allocate(lease_id, 4)[0])
    assert grants[0] is grants[1] is not None


QUIET: dict[str, Callable[[CacheScheduler, int], tuple[object, Effects]]] = {
    "append": lambda s, lease_id: s.append(lease_id, np.array([1], np.int32)),
    "extend": lambda s, lease_id: s.extend([lease_id], 1),
    "truncate": lambda s, lease_id: s.truncate(lease_id, 5),
    "recompute_from": lambda s, lease_id: s.recompute_from(lease_id),
    "fork": lambda s, lease_id: s.fork(lease_id, "child"),
    "begin_batch": lambda s, lease_id: s.begin_batch([lease_id]),
    "close_step": lambda s, lease_id: s.close_step(),
    "finish_step": lambda s, lease_id: s.finish_step(1),
    "wait_pending": lambda s, lease_id: s.wait_pending(lease_id),
    "stop_waiting": lambda s, lease_id: s.stop_waiting(lease_id),
    "stop_wait_pending": lambda s, lease_id: s.stop_wait_pending(lease_id),
    "collect_backups": lambda s, lease_id: s.collect_backups(),
    "save": lambda s, lease_id: s.save(3),
    "evict": lambda s, lease_id: s.evict(3, "device"),
    "preempt": lambda s, lease_id: s.preempt(lease_id),
    "pause": lambda s, lease_id: s.change_gate("pause"),
    "reset": lambda s, lease_id: s.reset("test"),
    "resize": lambda s, lease_id: s.resize(20),
    "close": lambda s, lease_id: s.close(),
    "fail": lambda s, lease_id: s.fail("test"),
    "lose_blocks": lambda s, lease_id: s.lose_blocks("test"),
    "advance": lambda s, lease_id: s.advance(),
}


@pytest.mark.parametrize("name", QUIET)
def test_transition_that_leaves_nothing_to_do_has_no_effects(name: str):
    scheduler = scheduler_of()
    lease_id, _ = scheduler.match(prompt(1, 1))
    scheduler.allocate(lease_id, 6, 0)
    value, effects = QUIET[name](scheduler, lease_id)
    assert not effects, value
    assert not NO_EFFECTS
    assert scheduler.violations() == []


def test_shared_object_is_never_changed():
    """After a run with effects of many kinds the shared object is still empty."""
    scheduler = scheduler_of(4, 8, write_policy="write_through")
    on_host(scheduler, prompt(1, 2))
    first, _ = scheduler.match(prompt(1, 2))
    scheduler.allocate(first, 9, 0)
    second, _ = scheduler.match(prompt(2, 3))
    scheduler.allocate(second, 13, 0)
    _, effects = scheduler.release(first)
    assert effects is not NO_EFFECTS
    assert not NO_EFFECTS


# --- effects --------------------------------------------------------------------------------------


def test_unapplied_effects_are_returned_by_the_next_transition():
    scheduler = scheduler_of(4)
    holder, _ = scheduler.match(prompt(1, 3))
    scheduler.allocate(holder, 13, 0)
    waiting, _ = scheduler.match(prompt(2, 1))
    scheduler.allocate(waiting, 4, 0)
    scheduler.release(holder)
    other, again = scheduler.match(prompt(3, 1))
    assert [grant.lease_id for grant in again.granted] == [waiting]
    _, again = scheduler.try_allocate(other, 4)
    found = applied(scheduler, again)
    assert [grant.lease_id for grant in found["granted"]] == [waiting]
    assert scheduler.stop_wait_pending(other)[1] is NO_EFFECTS


def test_transition_that_raises_keeps_the_effects_of_the_one_before():
    scheduler = scheduler_of(4)
    holder, _ = scheduler.match(prompt(1, 3))
    scheduler.allocate(holder, 13, 0)
    waiting, _ = scheduler.match(prompt(2, 1))
    scheduler.allocate(waiting, 4, 0)
    scheduler.release(holder)
    with pytest.raises(LeaseError):
        scheduler.commit(holder, 4)
    _, effects = scheduler.advance()
    assert [grant.lease_id for grant in effects.granted] == [waiting]


def test_commit_requests_backups_once_and_collecting_submits_them():
    scheduler = scheduler_of(8, 8, write_policy="write_through")
    lease_id, _ = scheduler.match(prompt(1, 3))
    scheduler.allocate(lease_id, 13, 0)
    assert applied(scheduler, scheduler.commit(lease_id, 12)[1]) == {"collect": True}
    collected, effects = scheduler.collect_backups()
    assert collected
    (plan,) = applied(scheduler, effects)["submit"]
    assert (plan.route, plan.num_blocks, plan.priority) == (OFFLOAD, 3, Priority.BACKUP)
    assert scheduler.collect_backups() == (False, NO_EFFECTS)


def test_grant_from_the_host_submits_one_onload_that_others_join():
    scheduler = scheduler_of(16, 8, write_policy="write_through")
    on_host(scheduler, prompt(1, 3))
    first, _ = scheduler.match(prompt(1, 3))
    grant, effects = scheduler.try_allocate(first, 13, onload_priority=Priority.PREFETCH)
    (plan,) = applied(scheduler, effects)["submit"]
    assert (plan.route, plan.num_blocks, plan.priority) == (ONLOAD, 3, Priority.PREFETCH)
    assert grant == Grant(first, (plan.transfer_id,))
    second, _ = scheduler.match(prompt(1, 3))
    grant, effects = scheduler.allocate(second, 13, 0)
    assert grant == Grant(second, (plan.transfer_id,))
    assert applied(scheduler, effects) == {"urge": [(plan.transfer_id, Priority.DEMAND)]}
    third, _ = scheduler.match(prompt(1, 3))
    assert scheduler.allocate(third, 13, 0)[1] is NO_EFFECTS
    for lease_id in (first, second):
        assert applied(scheduler, scheduler.release(lease_id)[1]) == {}
    found = applied(scheduler, scheduler.release(third)[1])
    assert found == {"cancel": [plan.transfer_id]}
    report = TransferReport(transfer_id=plan.transfer_id, outcome="cancelled")
    applied(scheduler, scheduler.complete(report)[1])
    assert scheduler.violations() == []
    assert scheduler.read.statistics().attention.device.in_flight == 0


def test_verified_commits_name_the_blocks_that_were_computed():
    scheduler = scheduler_of(16, 8, verify="checksum")
    lease_id, _ = scheduler.match(prompt(1, 3))
    scheduler.allocate(lease_id, 13, 0)
    table = scheduler.read.block_table(lease_id).tolist()
    for num_tokens, blocks in ((4, table[:1]), (12, table[1:3])):
        (computed,) = applied(scheduler, scheduler.commit(lease_id, num_tokens)[1])["computed"]
        assert computed.tolist() == blocks


def test_swap_names_the_partial_block_and_submits_the_table():
    scheduler = scheduler_of(16, 8, verify="checksum", write_policy="none")
    lease_id, _ = scheduler.match(prompt(1, 3))
    scheduler.allocate(lease_id, 13, 0)
    table = scheduler.read.block_table(lease_id).tolist()
    applied(scheduler, scheduler.commit(lease_id, 13)[1])
    transfer_id, effects = scheduler.swap_out(lease_id)
    found = applied(scheduler, effects)
    (plan,) = found["submit"]
    assert (plan.transfer_id, plan.num_blocks) == (transfer_id, 4)
    assert [blocks.tolist() for blocks in found["computed"]] == [table[3:]]


def test_effects_are_truthy_when_any_field_is_set():
    for name in (*LISTS, "collect", "advance"):
        outbox = Outbox()
        assert not outbox.pending
        if name in LISTS:
            getattr(outbox.effects, name).append(1)
        elif name == "collect":
            outbox.request_collect()
        else:
            outbox.request_advance(True)
        assert outbox.pending, name
        outbox.pending.clear()
        assert not outbox.pending, name


# --- cancelled onloads ----------------------------------------------------------------------------


def test_no_grant_joins_an_onload_while_its_cancellation_is_not_answered():
    """The worker may cancel the onload at once, so the grant comes after its answer."""
    scheduler = scheduler_of(8, 8, write_policy="write_through")
    on_host(scheduler, prompt(1, 3))
    filler, _ = scheduler.match(prompt(9, 4)[:-1])
    assert scheduler.try_allocate(filler, 16)[0] is not None
    holder, _ = scheduler.match(prompt(1, 3))
    grant, effects = scheduler.try_allocate(holder, 13)
    (plan,) = applied(scheduler, effects)["submit"]
    waiting, _ = scheduler.match(prompt(1, 3))
    grant, effects = scheduler.allocate(waiting, 16, 0)
    assert grant is None
    applied(scheduler, effects)
    found = applied(scheduler, scheduler.release(holder)[1])
    assert found == {"cancel": [plan.transfer_id], "advance": True}
    report = TransferReport(transfer_id=plan.transfer_id, outcome="cancelled")
    assert "granted" not in applied(scheduler, scheduler.complete(report)[1])
    found = applied(scheduler, scheduler.advance()[1])
    (grant,) = found["granted"]
    (again,) = found["submit"]
    assert grant == Grant(waiting, (again.transfer_id,))
    assert again.transfer_id != plan.transfer_id
    assert scheduler.violations() == []
