"""Calls that cross together: their order, their answers and their errors."""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import Future
from contextlib import suppress
from unittest.mock import Mock

import numpy as np
import pytest

from aiokv import CacheEngine, Item, Lease, LeaseState
from aiokv.errors import AiokvError, ClosedError, LeaseError, UsageError, WouldBlock
from aiokv.sync import Calls, SyncEngine, SyncLease
from aiokv.sync.table import VERBS
from aiokv.sync.verbs import EngineVerbs, LeaseVerbs, RecordedVerbs
from aiokv.testing.loops import PATIENCE_SECONDS

PROMPT = list(range(16))


def test_calls_are_made_in_order_and_use_leases_of_the_same_crossing(engine):
    calls = engine.calls()
    lease = calls.match(PROMPT, owner="first")
    granted = calls.try_allocate(lease, 16)
    published = calls.commit(lease, 16)
    calls.release(lease)
    again = calls.match(PROMPT)
    answers = calls.run()
    assert granted.value is True
    assert published.value == 4
    assert lease.hit.total == 0
    assert again.hit.total == 12
    assert len(answers) == len(calls) == 5
    assert all(answer.done and answer.error is None for answer in answers)
    again.release()


def test_nothing_happens_before_run(engine):
    calls = engine.calls()
    lease = calls.match(PROMPT)
    granted = calls.try_allocate(lease, 16)
    future = calls.allocate(lease, 16)
    assert engine.statistics().leases == 0
    for early in (lambda: granted.value, lambda: lease.hit, lease.commit, lambda: lease.inner):
        with pytest.raises((UsageError, TypeError)):
            early()
    with pytest.raises(UsageError, match="not sent yet"):
        future.result()
    assert "not called yet" in repr(granted)
    assert "not matched yet" in repr(lease)


def test_no_event_of_the_loop_comes_between_two_calls(engine):
    seen = []
    loop = engine.cache.loop
    calls = engine.calls()
    calls.add(loop.call_soon, seen.append, "event")
    calls.add(seen.append, "call")
    calls.run()
    engine.call(lambda: None)
    assert seen == ["call", "event"]


def test_the_error_of_a_call_hides_no_other_answer(engine):
    calls = engine.calls()
    first = calls.match(PROMPT)
    refused = calls.commit(first, 16)  # it is not granted
    granted = calls.try_allocate(first, 32)
    full = calls.match([7] * 8)
    grown = calls.extend([first], 4)
    with pytest.raises(LeaseError, match="commit"):
        calls.run()
    assert isinstance(refused.error, LeaseError)
    assert isinstance(grown.error, WouldBlock)
    assert granted.value is True
    assert full.hit.total == 0
    with pytest.raises(WouldBlock):
        grown.value  # noqa: B018
    for lease in [first, full]:
        lease.release()


def test_traceback_does_not_grow_with_each_reading_of_an_error(engine):
    calls = engine.calls()
    refused = calls.try_allocate(calls.match([]), 4)

    def frames(read):
        with pytest.raises(AiokvError) as caught:
            read()
        return len(caught.traceback)

    calls.run(raise_errors=False)
    assert len({frames(lambda: refused.value) for _ in range(3)}) == 1
    assert len({frames(calls.run) for _ in range(3)}) == 1


def test_errors_are_not_raised_when_they_are_not_asked_for(engine):
    calls = engine.calls()
    calls.match([])
    assert [type(answer.error) for answer in calls.run(raise_errors=False)] == [UsageError]


def test_calls_on_a_lease_whose_match_has_failed_name_the_reason(engine):
    calls = engine.calls()
    lease = calls.match([])
    granted = calls.try_allocate(lease, 4)
    released = calls.release(lease)
    with pytest.raises(UsageError, match="tokens"):
        calls.run()
    assert isinstance(granted.error, LeaseError)
    assert isinstance(granted.error.__cause__, UsageError)
    assert released.value is None
    with pytest.raises(LeaseError, match="tokens"):
        lease.hit  # noqa: B018
    assert repr(lease) == "<SyncLease, not matched>"


def test_run_makes_calls_once_and_then_takes_no_more(engine):
    calls = engine.calls()
    count = calls.add([].append, 1)
    made = []
    calls.add(made.append, 1)
    assert calls.run() is calls.run()
    assert made == [1]
    assert count.done
    with pytest.raises(UsageError, match="run already"):
        calls.step()
    assert engine.calls().run() == []


def test_posted_calls_are_made_before_later_ones_and_nobody_waits(engine):
    gate = threading.Event()
    engine.submit(gate.wait)  # holds the loop
    try:
        calls = engine.calls()
        lease = calls.match(PROMPT)
        granted = calls.try_allocate(lease, 16)
        published = calls.commit(lease, 16)
        idle = calls.idle(lease)
        calls.post()
        with pytest.raises(UsageError, match="run already"):
            calls.release(lease)
        assert not granted.done
        assert not idle.done()
    finally:
        gate.set()
    assert engine.would_hit(PROMPT).total == 12
    assert published.value == 4
    calls.post()
    assert len(calls.run()) == 4
    assert idle.result(PATIENCE_SECONDS) is None
    lease.release()


def test_posted_calls_stay_before_later_ones_when_a_cancelled_wait_ends_between_them(engine):
    thread, made, gate, ended = engine._port.thread, [], threading.Event(), []
    task = Mock(done=bool, add_done_callback=ended.append)
    engine.submit(gate.wait)  # holds the loop
    try:
        thread.post(lambda: thread.cancel_task(task, first=True))
        posted = engine.calls()
        posted.add(made.append, "posted")
        posted.post()
        thread.post(lambda: ended[0](task))
        later = engine.calls()
        later.add(made.append, "later")
        later.post()
    finally:
        gate.set()
    later.run()
    assert made == ["posted", "later"]
    posted.run()


def test_posting_no_calls_sends_nothing(engine):
    calls = engine.calls()
    calls.post()
    assert calls.run() == []


def test_a_with_block_runs_the_calls_unless_it_fails(engine):
    with engine.calls() as calls:
        step = calls.step()
    assert step.value == engine.cache.open_step - 1
    with suppress(KeyError), engine.calls() as calls:
        step = calls.step()
        raise KeyError
    assert not step.done


@pytest.mark.parametrize(
    "record",
    [
        lambda calls, lease: calls.commit("no lease", 4),
        lambda calls, lease: calls.release("no lease"),
        lambda calls, lease: calls.extend([lease, "no lease"], 4),
        lambda calls, lease: calls.try_allocate(lease, "four"),
        lambda calls, lease: calls.begin_computing(["no lease"]),
        lambda calls, lease: calls.end_computing(calls.begin_computing([]), "no event"),
        lambda calls, lease: calls.add(calls.begin, "no function"),
    ],
)
def test_a_wrong_argument_is_a_typed_error_of_its_call(engine, record):
    with engine.match(PROMPT) as lease:
        calls = engine.calls()
        record(calls, lease)
        step = calls.step()
        with pytest.raises(UsageError):
            calls.run()
        assert step.error is None


@pytest.mark.parametrize("leases", [5, None, "lease", [None]])
def test_direct_calls_refuse_what_are_no_leases(engine, leases):
    for call in (
        lambda: engine.extend(leases, 1),
        lambda: engine.layers(leases),
        lambda: engine.block_tables(leases),
        lambda: engine.extend(leases, 1),
        lambda: engine.computing(leases).__enter__(),
    ):
        with pytest.raises(UsageError, match="lease"):
            call()


def test_add_refuses_coroutine_functions(engine):
    calls = engine.calls()
    calls.add(engine.cache.reset)
    with pytest.raises(UsageError, match="coroutine"):
        calls.run()


def test_a_lease_of_another_engine_is_refused(engine, config):
    with SyncEngine(config) as other, engine.match(PROMPT) as lease:
        calls = other.calls()
        calls.commit(lease, 4)
        with pytest.raises(UsageError):
            calls.run()


def test_each_verb_has_a_direct_form(engine):
    with engine.match(PROMPT) as lease:
        assert engine.would_hit(PROMPT).total == 0
        assert lease.can_allocate(16)
        assert lease.try_allocate(16)
        assert lease.cached_tokens == 0
        assert lease.num_tokens == 16
        assert lease.pending_tokens == 0
        assert lease.commit(14) == 3
        lease.truncate(14)
        engine.extend([lease], 1)
        lease.append([50])
        assert lease.commit(15) == 0
        with engine.computing([lease]):
            assert lease.state is LeaseState.GRANTED
        engine.step()
        assert lease.usage.prompt_tokens == 16
        assert lease.recompute_from() is None
        assert engine.block_tables([lease]).shape == (1, 4)
        assert np.array_equal(engine.block_tables([lease])[0], lease.block_table)
        fork = lease.fork(owner="second")
        assert fork.num_tokens == 15
        fork.release()
        lease.preempt()
        assert lease.state is LeaseState.MATCHED
        lease.allocate(16).result()
        assert lease.cached_tokens == 12
        engine.layers([lease]).wait_all()
        assert engine.health().phase == "open"
    lease.release()  # idempotent
    with pytest.raises(LeaseError):
        lease.commit(4)


def test_blocks_stay_with_a_batch_until_its_work_has_ended(engine):
    work = Future()
    computing = engine.computing([lease := engine.match(PROMPT)])
    with pytest.raises(UsageError, match="has not begun"):
        computing.ends_with(work)
    lease.allocate(17).result()
    with computing:
        computing.ends_with(work)
        lease.release()
        assert engine.statistics().attention.device.free == 3
        with pytest.raises(UsageError, match="entered once"):
            computing.__enter__()
    assert engine.statistics().attention.device.free == 3
    work.set_result(None)
    engine.call(engine.cache.quiesce, timeout=PATIENCE_SECONDS)
    engine.call(engine.cache.resume)
    assert engine.statistics().attention.device.free == 8


def test_batch_whose_work_is_refused_has_not_ended(engine):
    lease, work = engine.match(PROMPT), Future()
    lease.allocate(17).result()
    calls = engine.calls()
    batch = calls.begin_computing([lease])
    calls.release(lease)
    calls.run()
    for refused in ("no event", None):
        calls = engine.calls()
        calls.end_computing(batch, work, refused)
        with pytest.raises(UsageError, match="work is"):
            calls.run()
        assert engine.statistics().attention.device.free == 3
    calls = engine.calls()
    calls.end_computing(batch, work)
    calls.run()
    assert engine.statistics().attention.device.free == 3
    work.set_result(None)
    engine.call(engine.cache.quiesce, timeout=PATIENCE_SECONDS)
    engine.call(engine.cache.resume)
    assert engine.statistics().attention.device.free == 8


def test_a_batch_without_other_work_ends_with_its_block(engine):
    with engine.match(PROMPT) as lease:
        lease.allocate(17).result()
        with engine.computing([lease]):
            lease.release()
            assert engine.statistics().attention.device.free == 3
        assert engine.statistics().attention.device.free == 8


def test_a_fork_knows_its_cached_tokens(engine):
    with engine.match(PROMPT) as lease:
        lease.allocate(17).result()
        lease.commit(17)
    with engine.match(PROMPT) as lease:
        lease.allocate(17).result()
        with lease.fork() as fork:
            assert fork.cached_tokens == 12


def test_futures_of_a_lease_that_was_not_matched_have_the_error(engine):
    calls = engine.calls()
    lease = calls.match("no tokens")
    futures = [calls.swap_out(lease), calls.idle(lease), calls.allocate(lease, 4)]
    calls.run(raise_errors=False)
    for future in futures:
        assert isinstance(future.exception(timeout=PATIENCE_SECONDS), LeaseError)


def test_handles_have_the_cached_tokens_of_their_last_grant(engine):
    with engine.match(PROMPT) as lease:
        assert lease.try_allocate(17)
        lease.commit(17)
        assert lease.cached_tokens == 0
        lease.preempt()
        engine.call(engine.cache.pause)
        assert not lease.try_allocate(17)
        assert lease.cached_tokens == 0
        engine.call(engine.cache.resume)
        assert lease.try_allocate(17)
        assert lease.cached_tokens == 12
    calls = engine.calls()
    lease = calls.match(PROMPT)
    calls.try_allocate(lease, 17)
    calls.run()
    assert lease.cached_tokens == 12
    lease.release()


def test_swap_out_keeps_the_table(config):
    config = type(config)(block_tokens=4, device_blocks=8, host_blocks=8)
    with SyncEngine(config) as engine, engine.match(PROMPT) as lease:
        lease.allocate(16).result()
        lease.commit(15)
        engine.step()
        lease.swap_out().result()
        assert lease.state is LeaseState.SWAPPED
        lease.allocate(16).result()
        assert lease.cached_tokens == 15


def public(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def test_threads_have_every_method_of_a_lease():
    elsewhere = {
        "resume",
        "snapshot_points",
        "max_extend_tokens",
        "state_slot",
        "id",
        "owner",
        "salt",
    }
    assert public(Lease) - public(SyncLease) == elsewhere | {"record"}


def parameters(method):
    """Return name, kind and default of each parameter, without the lease of a recorded call."""
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(method).parameters.values()
        if parameter.name not in ("self", "lease")
    ]


def method_of(verb):
    return verb.method.fget if isinstance(verb.method, property) else verb.method


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name or method_of(verb).__name__)
def test_methods_have_the_parameters_and_the_text_of_their_verb(verb):
    method = method_of(verb)
    of_lease, name = method.__qualname__.startswith("Lease."), verb.name or method.__name__
    assert getattr(Lease if of_lease else CacheEngine, method.__name__) is verb.method
    wanted = [entry for entry in parameters(method) if entry[0] not in verb.fixed]
    made = vars(LeaseVerbs if of_lease else EngineVerbs)[name]
    assert isinstance(made, property) == isinstance(verb.method, property)
    called = made.fget if isinstance(made, property) else made
    assert parameters(called) == wanted
    assert called.__doc__.startswith(verb.text or inspect.getdoc(method))
    if verb.answer in ("block", "direct"):
        assert not hasattr(Calls, name)
        return
    recorded = vars(RecordedVerbs)[name]
    assert parameters(recorded) == wanted
    assert ("lease" in inspect.signature(recorded).parameters) == of_lease
    assert f"See ``{method.__qualname__}``." in recorded.__doc__


def test_a_call_with_wrong_arguments_is_refused_where_it_is_made(engine):
    calls = engine.calls()
    lease = calls.match(PROMPT)
    for wrong in (
        lambda: calls.commit(lease),
        lambda: calls.try_allocate(lease, 4, reserve_block=1),
        lambda: calls.preempt(lease, swap=True),
        lambda: lease.preempt(swap=True),
        lambda: engine.extend([lease]),
    ):
        with pytest.raises(TypeError):
            wrong()
    assert len(calls) == 1
    calls.run()
    lease.release()


def test_the_leases_of_a_call_are_those_of_its_recording(engine):
    with engine.match(PROMPT) as lease:
        lease.allocate(16).result()
        running = [lease]
        calls = engine.calls()
        calls.extend(running, 1)
        running.clear()
        calls.run()
        assert lease.num_tokens == 17


def test_calls_after_close_are_refused_and_release_has_nothing_to_do(config):
    with SyncEngine(config) as engine:
        lease = engine.match(PROMPT)
    calls = engine.calls()
    calls.match(PROMPT)
    released = calls.release(lease)
    with pytest.raises(ClosedError):
        calls.run()
    assert released.error is None
    lease.release()
    with pytest.raises(ClosedError):
        engine.call(engine.cache.reset)


def test_futures_of_calls_that_are_not_made_have_the_error(config):
    with SyncEngine(config) as engine:
        lease = engine.match(PROMPT)
        lease.allocate(16).result()
    calls = engine.calls()
    futures = [calls.allocate(lease, 16), calls.idle(lease), calls.begin(engine.cache.drain)]
    cancelled = calls.idle(lease)
    assert cancelled.cancel()
    calls.post()
    for future in futures:
        with pytest.raises(ClosedError):
            future.result(PATIENCE_SECONDS)
    assert cancelled.cancelled()
    with pytest.raises(ClosedError):
        calls.run()
    lease.release()


@pytest.mark.filterwarnings("error")
def test_a_lease_that_is_released_after_close_is_not_reported(config):
    with SyncEngine(config) as engine:
        lease = engine.match(PROMPT)
        lease.allocate(16).result()
    lease.release()
    assert not lease.inner.id


def test_hit_blocks_and_numbers_of_blocks_come_in_the_crossing_of_the_match(engine):
    with engine.match(PROMPT) as first:
        assert first.try_allocate(16)
        first.commit(16)
        calls = engine.calls()
        lease = calls.match(PROMPT)
        ids = calls.hit_blocks(lease)
        grants = calls.allocatable_blocks(reserve_blocks=1)
        grown = calls.extendable_blocks(limit=3)
        refused = calls.can_allocate(lease, 28, reserve_blocks=2)
        calls.run(raise_errors=False)
        assert ids.value.tolist() == first.block_table[:3].tolist()
        assert (grants.value, grown.value) == (3, 3)
        assert "of which reserve_blocks keeps 2" in str(refused.error)
        assert engine.allocatable_blocks() == engine.extendable_blocks() == 4
        assert lease.hit_blocks.tolist() == ids.value.tolist()
        assert not lease.try_allocate(20, reserve_blocks=3)
        assert lease.can_allocate(20, reserve_blocks=2)
        waiting = lease.allocate(20, reserve_blocks=3)
        assert not waiting.done()
        first.release()
        assert waiting.result() is lease
        lease.release()


def test_lease_expires_unless_it_is_used(engine):
    calls = engine.calls()
    kept, lost, used = (calls.match([n] * 8) for n in range(3))
    for lease in (kept, lost, used):
        calls.try_allocate(lease, 8, ttl_seconds=0.0)
    calls.keep(kept)
    calls.commit(used, 8)
    calls.run()
    engine.call(asyncio.sleep, 0)
    assert (kept.state, used.state) == (LeaseState.GRANTED, LeaseState.GRANTED)
    with pytest.raises(LeaseError, match="expired at"):
        lost.keep()
    kept.expire_after(60.0)
    kept.keep()
    kept.expire_after(0.0)
    engine.call(asyncio.sleep, 0)
    assert kept.state is LeaseState.RELEASED
    future = lost_again(engine)
    assert future.state is LeaseState.RELEASED
    assert engine.statistics().expired_leases == 3
    for lease in [kept, lost, used, future]:
        lease.release()


def lost_again(engine: SyncEngine) -> SyncLease:
    lease = engine.match([9] * 8)
    lease.allocate(8, ttl_seconds=0.0).result()
    engine.call(asyncio.sleep, 0)
    return lease


def test_append_takes_items_of_later_turns(engine):
    image = Item(b"cat", 9, 3)
    calls = engine.calls()
    lease = calls.match(PROMPT[:8])
    calls.try_allocate(lease, 16)
    calls.append(lease, PROMPT[8:12], items=[image])
    calls.append(lease, PROMPT[12:])
    calls.commit(lease, 16)
    calls.run()
    assert engine.would_hit(PROMPT, items=[image]).total == 12
    assert engine.would_hit(PROMPT, items=[Item(b"dog", 9, 3)]).total == 8
    assert engine.would_hit(PROMPT).total == 8
    engine.extend([lease], 1)
    with pytest.raises(UsageError, match="first of the appended tokens"):
        lease.append([1], items=[image])
    lease.release()
