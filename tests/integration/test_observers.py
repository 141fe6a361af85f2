"""Observers: every transfer, wait, grant and batch is recorded once, and no observer disturbs."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections import Counter
from contextvars import ContextVar
from typing import Any

import msgspec
import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import (
    CapacityError,
    ClosedError,
    TransferError,
    UnreleasedLeaseWarning,
    UsageError,
    WouldBlock,
)
from aiokv.statistics import BatchSpan, LeasePhase, TransferSpan
from aiokv.testing import ScriptedDevice, ScriptedStore, running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import BLOCK_TOKENS, Cache
from tests.harness.cache import prompt as tokens_of
from tests.harness.served import Served, computed, resumed, swapped_out
from tests.peers.engines import prompt, two_engines
from tests.ranks.loopback import Ranked

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]  # three full blocks and a partial one
B = [11, 12, 13, 14, 15, 16, 17]

REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


def phases(seen: Any, *names: str) -> list[tuple[str, str, str]]:
    """Return owner, phase and outcome of all phases, or those of some names."""
    return [
        ("unnamed" if p.owner == hex(p.lease_id) else p.owner, p.phase, p.outcome)
        for p in seen.phases
        if not names or p.phase in names
    ]


def check_times(seen: Any) -> None:
    for span in seen.transfers:
        assert span.queued_at <= (span.started_at or span.queued_at) <= span.ended_at
    for record in [*seen.phases, *seen.batches]:
        assert record.began_at <= record.ended_at
    for records in (seen.transfers, seen.phases):
        keys = Counter(
            (r.transfer_id,) if isinstance(r, TransferSpan) else (r.lease_id, r.phase, r.began_at)
            for r in records
        )
        assert max(keys.values(), default=1) == 1


async def test_nothing_is_recorded_without_an_observer():
    async with Served() as served:
        observers = served.engine.inspect.parts.observers
        await served.to_host(A)
        assert not observers.active
        with served.engine.inspect.observing() as seen:
            assert observers.active
        assert not observers.active
        async with served.engine.match(A) as lease:
            await lease.allocate(7)
            served.device.complete_all()
            await lease.layers.wait_all()
        assert seen.seen == 0
        held = [getattr(observers, name) for name in observers.__slots__]
        assert [value for value in held if isinstance(value, dict) and value] == []
        assert not gc.get_referents(observers._queue)


async def test_an_onload_is_a_transfer_of_its_lease_and_two_phases():
    async with Served() as served:
        await served.to_host(A)
        with served.engine.inspect.observing() as seen:
            async with served.engine.match(A, owner="r1") as lease:
                await lease.allocate(7)
                lease_id = lease.id
                (open_onload,) = [r for r in seen.unfinished() if isinstance(r, TransferSpan)]
                (listed,) = served.engine.inspect.in_flight()
                assert listed.transfer_id == open_onload.transfer_id
                assert (open_onload.outcome, open_onload.lease_id) == ("open", lease_id)
                served.device.complete_all()
                await lease.layers.wait_all()
                await spin(2)
                (span,) = seen.transfers
                assert (span.route, span.blocks, span.outcome) == ("onload", 3, "done")
                assert span.num_bytes == 3 * served.memory.regions.block_bytes
                assert span.lease_id == lease_id
                assert span.started_at is not None
                (onload,) = seen.phases
                assert onload.ended_at == span.ended_at
                (granted,) = seen.unfinished()
                assert isinstance(granted, LeasePhase)
                assert (granted.phase, granted.outcome) == ("granted", "open")
        assert phases(seen) == [("r1", "onload", "done"), ("r1", "granted", "released")]
        assert [(p.prompt_tokens, p.cached_tokens) for p in seen.phases] == [(7, 6), (7, 6)]
        check_times(seen)
        assert seen.seen == 3


async def test_backups_belong_to_no_lease():
    async with Served() as served:
        with served.engine.inspect.observing() as seen:
            await served.serve(A)
            await served.complete_offloads()
        (span,) = seen.transfers
        assert (span.route, span.blocks, span.lease_id, span.outcome) == ("offload", 3, 0, "done")
        assert phases(seen) == [("unnamed", "granted", "released")]


async def test_a_failed_onload_names_the_reason():
    async with Served() as served:
        await served.to_host(A)
        with served.engine.inspect.observing() as seen:
            async with served.engine.match(A) as lease:
                await lease.allocate(7)
                served.device.onloads[0].fail_all(block=1, reason="a bad page")
                with pytest.raises(TransferError):
                    await lease.layers.wait_all()
                await served.settle()
        (span,) = seen.transfers
        assert (span.outcome, span.reason) == ("failed", "a bad page")
        assert phases(seen) == [
            ("unnamed", "onload", "failed"), ("unnamed", "granted", "released"),
        ]  # fmt: skip


async def test_a_released_lease_leaves_its_onload():
    async with Served() as served:
        await served.to_host(A)
        with served.engine.inspect.observing() as seen:
            async with served.engine.match(A) as lease:
                await lease.allocate(7)
            await spin(2)
            assert phases(seen) == [
                ("unnamed", "onload", "cancelled"), ("unnamed", "granted", "released"),
            ]  # fmt: skip
            served.device.complete_all()
            await served.settle()
            assert [span.outcome for span in seen.transfers] == ["done"]
        check_times(seen)


async def test_observer_may_remove_itself_and_others():
    async with Served() as served:
        calls: list[str] = []

        def first(record, context):
            calls.append("first")
            served.engine.inspect.remove_observer(second)
            served.engine.inspect.remove_observer(first)

        def second(record, context):
            calls.append("second")

        def third(record, context):
            calls.append("third")

        for observer in (first, second, third):
            served.engine.inspect.add_observer(observer)
        for _ in range(3):  # records of one pass of the loop
            lease = served.engine.match(A)
            assert lease.try_allocate(7)
            lease.release()
        await spin(2)
        assert calls == ["first", "third", "third", "third"]
        served.engine.inspect.remove_observer(third)


async def test_a_queued_transfer_that_is_cancelled_is_recorded():
    async with Served(device_blocks=16, host_blocks=32) as served:
        prompts = [[100 * i + j for j in range(3)] for i in range(3)]
        for tokens in prompts:
            await served.to_host(tokens)
        with served.engine.inspect.observing() as seen:
            leases = [served.engine.match(tokens) for tokens in prompts]
            for lease in leases:
                await lease.allocate(3)
            leases[2].release()  # its transfer waits behind two others
            await spin(3)
            (span,) = seen.transfers
            assert (span.route, span.outcome, span.started_at) == ("onload", "cancelled", None)
            served.device.complete_all()
            await served.settle()
            for lease in leases:
                lease.release()
        assert [span.outcome for span in seen.transfers] == ["cancelled", "done", "done"]
        check_times(seen)


@pytest.mark.parametrize("end", ["done", "timeout", "cancelled", "failed"])
async def test_a_wait_for_capacity_says_how_it_ended(end):
    async with Served(device_blocks=4) as served:
        with served.engine.inspect.observing() as seen:
            holder = served.engine.match(A, owner="holder")
            await holder.allocate(7)
            waiter = served.engine.match(B, owner="waiter")
            timeout = 0.0 if end == "timeout" else None
            task = asyncio.ensure_future(waiter.allocate(7, timeout=timeout))
            await spin(2)
            if end != "timeout":
                (wait,) = [r for r in seen.unfinished() if r.phase == "capacity"]
                assert (wait.owner, wait.outcome) == ("waiter", "open")
            if end == "done":
                holder.release()
            elif end == "cancelled":
                task.cancel()
            elif end == "failed":
                waiter.release()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(result, BaseException) == (end != "done")
            holder.release()
            waiter.release()
        assert phases(seen, "capacity") == [("waiter", "capacity", end)]
        assert ("waiter", "granted", "released") in phases(seen) or end != "done"
        assert seen.unfinished() == []
        check_times(seen)


@pytest.mark.parametrize("wait", ["capacity", "pending"])
async def test_a_wait_is_no_failure_because_its_caller_handles_another_error(wait):
    """A server that has no room often preempts a lease in an ``except`` block, and allocates."""

    async def allocate_after_an_error(waiter, **more):
        try:
            raise WouldBlock("no room")
        except WouldBlock:
            await waiter.allocate(7, **more)

    async with Served(device_blocks=4 if wait == "capacity" else 8) as served:
        with served.engine.inspect.observing() as seen:
            holder = served.engine.match(A)
            await holder.allocate(7)
            waiter = served.engine.match(B if wait == "capacity" else A)
            more = {} if wait == "capacity" else {"wait_pending": 100.0}
            task = asyncio.ensure_future(allocate_after_an_error(waiter, **more))
            await spin(2)
            holder.release()
            await task
            waiter.release()
        assert [phase.outcome for phase in seen.phases if phase.phase == wait] == ["done"]


async def test_a_grant_in_the_pass_of_its_cancellation_ends_at_once():
    async with Served(device_blocks=4) as served:
        with served.engine.inspect.observing() as seen:
            holder = served.engine.match(A, owner="holder")
            await holder.allocate(7)
            waiter = served.engine.match(B, owner="waiter")
            task = asyncio.ensure_future(waiter.allocate(7))
            await spin(2)
            holder.release()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            waiter.release()
        assert phases(seen) == [
            ("holder", "granted", "released"),
            ("waiter", "granted", "cancelled"),
            ("waiter", "capacity", "cancelled"),
        ]


@pytest.mark.parametrize("end", ["done", "timeout"])
async def test_a_wait_for_pending_blocks(end):
    async with Served() as served:
        with served.engine.inspect.observing() as seen:
            first = served.engine.match(A, owner="first")
            await first.allocate(7)
            second = served.engine.match(A, owner="second")
            seconds = math.inf if end == "done" else 1e-9
            task = asyncio.ensure_future(second.allocate(7, wait_pending=seconds))
            await spin(2)
            if end == "done":
                (wait,) = [r for r in seen.unfinished() if r.phase == "pending"]
                assert wait.owner == "second"
                served.compute(first, A)
                first.commit(7)
            await task
            first.release()
            second.release()
        assert phases(seen, "pending") == [("second", "pending", end)]
        await served.complete_offloads()


async def test_preempt_swap_and_resume_are_three_grants():
    async with Served() as served:
        with served.engine.inspect.observing() as seen:
            lease = await computed(served, A, owner="r1")
            await served.complete_offloads()
            await lease.preempt()
            await lease.resume(7)
            served.compute(lease, A, lease.cached_tokens)
            lease.commit(7)
            lease_id = lease.id
            await swapped_out(served, lease)
            (swap,) = [span for span in seen.transfers if span.lease_id == lease_id]
            assert swap.route == "offload"
            await resumed(served, lease, 7)
            lease.release()
        assert phases(seen, "granted") == [
            ("r1", "granted", "preempted"),
            ("r1", "granted", "swapped"),
            ("r1", "granted", "released"),
        ]
        check_times(seen)


async def test_forks_pins_and_collected_leases_end():
    async with Served(manual=False) as served:
        with served.engine.inspect.observing() as seen:
            lease = await computed(served, A, owner="parent")
            lease.fork(owner="child").release()
            lease.release()
            pin = await served.engine.pin(A)
            pin.release()
            lost = served.engine.match(B, owner="lost")
            await lost.allocate(7)
            with pytest.warns(UnreleasedLeaseWarning):
                del lost
            await served.engine.drain()
            await spin(2)
        assert phases(seen, "granted") == [
            ("child", "granted", "released"),
            ("parent", "granted", "released"),
            ("pin", "granted", "released"),
            ("lost", "granted", "released"),
        ]
        assert seen.unfinished() == []


async def test_closing_the_engine_ends_what_is_open_and_what_is_observed():
    engine = CacheEngine(CacheConfig(device_blocks=8, block_tokens=2))
    records: list[Any] = []
    engine.inspect.add_observer(lambda record, context: records.append(record))
    async with engine:
        lease = engine.match(A, owner="r1")
        await lease.allocate(7)
        await engine.aclose(0.0)
        lease.release()
    (phase,) = records
    assert (phase.phase, phase.outcome) == ("granted", "closed")
    with (
        pytest.raises(ClosedError, match="add_observer: the engine is closed"),
        engine.inspect.observing(),
    ):
        pass


async def test_leases_granted_before_the_observation_begin_with_it():
    async with Served(manual=False) as served:
        lease = await computed(served, A, owner="old")
        with served.engine.inspect.observing() as seen:
            (granted,) = seen.unfinished()
            assert isinstance(granted, LeasePhase)
            assert (granted.owner, granted.outcome) == ("old", "open")
            lease.release()
        assert phases(seen) == [("old", "granted", "released")]


async def test_batches_are_recorded_when_their_work_has_ended():
    async with Served(manual=False, host_blocks=0) as served:
        with served.engine.inspect.observing() as seen:
            lease = await computed(served, A)
            with served.engine.computing([lease]) as batch:
                await batch.run(lambda: None)
                (_, running) = seen.unfinished()
                assert isinstance(running, BatchSpan)
                assert (running.leases, running.is_open) == (1, True)
            await spin(2)
            (span,) = seen.batches
            assert (span.batch_id, span.is_open) == (running.batch_id, False)
            lease.release()
        check_times(seen)


async def test_records_carry_the_context_of_the_task_that_matched():
    async with Served(device_blocks=4) as served:
        await served.to_host(A)
        got: list[tuple[str, str]] = []

        def observer(record: Any, context: Any) -> None:
            kind = record.phase if isinstance(record, LeasePhase) else record.route
            got.append((kind, context[REQUEST] if context else "none"))

        async def request(name: str, tokens: list[int]) -> None:
            REQUEST.set(name)
            async with served.engine.match(tokens) as lease:
                await lease.allocate(7)
                await lease.layers.wait_all()

        served.engine.inspect.add_observer(observer)
        tasks = [asyncio.ensure_future(request("first", A))]
        await spin(2)
        tasks.append(asyncio.ensure_future(request("second", B)))
        await spin(2)
        served.device.complete_all()
        await asyncio.gather(*tasks)
        await served.settle()
        served.engine.inspect.remove_observer(observer)
        assert sorted(got) == [
            ("capacity", "second"),
            ("granted", "first"),
            ("granted", "second"),
            ("onload", "first"),
            ("onload", "first"),
        ]


async def test_an_observer_that_raises_is_removed_and_the_others_are_called(loop_errors):
    async with Served(manual=False) as served:
        seen: list[Any] = []

        def broken(record: Any, context: Any) -> None:
            raise ValueError("a bug of the observer")

        served.engine.inspect.add_observer(broken)
        served.engine.inspect.add_observer(lambda record, context: seen.append(record))
        await served.serve(A)
        await served.serve(A)
        await spin(2)
        assert len(seen) >= 2
        (error,) = loop_errors
        assert "was removed" in error["message"]
        assert str(error["exception"]) == "a bug of the observer"
        loop_errors.clear()


async def test_the_only_observer_that_raises_leaves_nothing_behind(loop_errors):
    async with Served(manual=False) as served:
        served.engine.inspect.add_observer(lambda record, context: 1 / 0)
        await served.serve(A)
        await spin(2)
        assert not served.engine.inspect.parts.observers.active
        (error,) = loop_errors
        assert isinstance(error["exception"], ZeroDivisionError)
        loop_errors.clear()


async def test_an_observer_may_use_the_engine():
    async with Served(device_blocks=4, manual=False) as served:
        matched: list[int] = []

        def observer(record: Any, context: Any) -> None:
            with_prefix = served.engine.match(A)
            matched.append(with_prefix.hit.total)
            with_prefix.release()

        served.engine.inspect.add_observer(observer)
        await served.serve(A)
        await served.serve(B)
        await spin(3)
        served.engine.inspect.remove_observer(observer)
        assert matched


async def test_an_observation_keeps_the_newest_records():
    async with Served(manual=False, host_blocks=0) as served:
        with served.engine.inspect.observing(limit=2) as seen:
            for owner in "abc":
                async with served.engine.match(A, owner=owner) as lease:
                    await lease.allocate(7)
        assert (phases(seen), seen.seen) == (
            [("b", "granted", "released"), ("c", "granted", "released")],
            3,
        )
        with pytest.raises(UsageError, match="entered already"), seen:
            pass


@pytest.mark.parametrize("limit", [0, -1, 2.5, None])
async def test_a_wrong_limit_is_refused(limit):
    engine = CacheEngine(CacheConfig(device_blocks=8))
    with pytest.raises(UsageError, match="limit"):
        engine.inspect.observing(limit)


async def test_wrong_observers_are_refused():
    engine = CacheEngine(CacheConfig(device_blocks=8))
    with pytest.raises(UsageError, match="must be a function"):
        engine.inspect.add_observer(None)  # type: ignore[arg-type]
    engine.inspect.add_observer(print)
    with pytest.raises(UsageError, match="was added already"):
        engine.inspect.add_observer(print)
    engine.inspect.remove_observer(print)
    engine.inspect.remove_observer(print)
    assert not engine.inspect.parts.observers.active


@pytest.mark.clock
async def test_fetches_belong_to_the_lease_that_waits_for_the_store():
    tokens = tokens_of(1, 4)
    store = ScriptedStore()
    async with Cache(device=ScriptedDevice(), stores=[store]) as c:
        await c.fill(tokens)
    later = ScriptedStore(objects=store.objects)
    async with Cache(device=ScriptedDevice(), stores=[later]) as c:
        with c.engine.inspect.observing() as seen:
            lease = await c.serve(tokens, wait_store=math.inf)
            assert lease.cached_tokens == 4 * BLOCK_TOKENS
            lease_id = lease.id
            lease.release()
            await spin(2)
            fetch, onload = seen.transfers
            assert (fetch.route, fetch.lease_id, fetch.outcome) == ("fetch", lease_id, "done")
            assert fetch.started_at is not None
            assert (onload.route, onload.lease_id) == ("onload", lease_id)
            ended = sorted(seen.phases, key=lambda phase: phase.ended_at)
            assert [p.phase for p in ended] == ["store", "capacity", "onload", "granted"]
            assert ended[0].ended_at <= ended[1].began_at <= ended[2].began_at
            assert seen.unfinished() == []
        check_times(seen)


@pytest.mark.clock
@pytest.mark.parametrize("end", ["timeout", "cancelled"])
async def test_a_wait_for_a_store_that_ends_early_is_no_wait_for_capacity(end):
    tokens = tokens_of(1, 4)
    store = ScriptedStore()
    async with Cache(device=ScriptedDevice(), stores=[store]) as c:
        await c.fill(tokens)
    later = ScriptedStore(objects=store.objects)
    async with Cache(device=ScriptedDevice(), stores=[later]) as c:
        later.hold("load")
        with c.engine.inspect.observing() as seen:
            lease = c.engine.match(tokens, owner="r1")
            task = asyncio.ensure_future(
                lease.allocate(len(tokens), wait_store=math.inf, timeout=5.0)
            )
            await spin(10)
            (wait,) = [r for r in seen.unfinished() if isinstance(r, LeasePhase)]
            assert wait.phase == "store"
            if end == "timeout":
                await running_clock().advance(6.0)
            else:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            lease.release()
            later.end_script()
        assert phases(seen) == [("r1", "store", end)]
        check_times(seen)


async def test_receives_and_sends_belong_to_their_leases():
    tokens = prompt(30)
    loop = asyncio.get_running_loop()  # uvloop reads its clock once per pass
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        with p.engine.inspect.observing() as sent, d.engine.inspect.observing() as received:
            began_at = loop.time()
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket, step=8))
                assert await receiving.wait() == 30
                arrived_at = loop.time()
            await prefill
            await spin(5)
        sends = [span for span in sent.transfers if span.route == "send"]
        receives = [span for span in received.transfers if span.route == "receive"]
        assert sum(span.blocks for span in sends) == sum(span.blocks for span in receives) == 8
        assert {span.outcome for span in sends + receives} == {"done"}
        assert {span.lease_id for span in receives} == {lease.id}
        assert all(span.lease_id and span.started_at for span in sends)
        assert phases(received, "peer") == [("unnamed", "peer", "done")]
        (wait,) = [phase for phase in received.phases if phase.phase == "peer"]
        assert began_at <= wait.began_at <= arrived_at
        check_times(sent)
        check_times(received)


async def test_transfers_of_ranks_are_recorded_once(tmp_path):
    async with Ranked(tmp_path, num_ranks=2, new_device=None) as ranked:
        with ranked.engine.inspect.observing() as seen:
            await ranked.to_host(A)
            assert await ranked.serve(A) == 6
            await ranked.finish()
        counts = Counter(span.route for span in seen.transfers)
        assert counts["onload"] == 1
        (onload,) = [span for span in seen.transfers if span.route == "onload"]
        assert onload.num_bytes == 3 * 16 * 2
        assert onload.started_at is not None
        check_times(seen)


async def test_records_are_plain():
    async with Served(manual=False) as served:
        with served.engine.inspect.observing() as seen:
            await served.serve(A)
            await spin(3)
        for record in [*seen.transfers, *seen.phases]:
            assert msgspec.convert(msgspec.to_builtins(record), type(record)) == record


@pytest.mark.parametrize("seed", range(4))
async def test_each_grant_ends_once_under_random_cancellations(seed):
    """Requests that are cancelled, time out, are preempted or forked leave nothing behind."""
    rng = random.Random(seed)
    async with Served(device_blocks=6, host_blocks=8, manual=False) as served:
        engine = served.engine

        async def request(i: int) -> None:
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 7))]
            lease = engine.match(tokens, owner=str(i))
            try:
                timeout = rng.choice([None, None, 0.0])
                wait = rng.choice([0.0, math.inf])
                await lease.allocate(len(tokens), timeout=timeout, wait_pending=wait)
                await lease.layers.wait_all()
                served.compute(lease, tokens, lease.cached_tokens)
                lease.commit(len(tokens))
                await spin(rng.randint(0, 3))
                for _ in range(rng.randint(0, 2)):
                    await lease.preempt(swap=rng.random() < 0.5)
                    await lease.resume(len(tokens))
                    await lease.layers.wait_all()
                    served.compute(lease, tokens, lease.cached_tokens)
                    lease.commit(len(tokens))
                if rng.random() < 0.2:
                    lease.fork().release()
            except (CapacityError, TransferError):
                pass
            finally:
                lease.release()

        with engine.inspect.observing() as seen:
            tasks = []
            for i in range(120):
                tasks.append(asyncio.ensure_future(request(i)))
                await spin(rng.randint(0, 2))
                if rng.random() < 0.3:
                    rng.choice(tasks).cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await engine.drain()
            await spin(3)
            assert seen.unfinished() == []
            observers = engine.inspect.parts.observers
            held = [getattr(observers, name) for name in observers.__slots__]
            assert [value for value in held if isinstance(value, dict) and value] == []
        errors = [e for e in results if isinstance(e, Exception)]
        assert errors == []
        check_times(seen)
        grants = Counter(p.lease_id for p in seen.phases if p.phase == "granted")
        assert len(grants) > 30
        moved = engine.statistics().worker
        ends = Counter((span.route, span.outcome) for span in seen.transfers)
        assert ends["onload", "done"] == moved.attention.onload.done
        assert ends["offload", "done"] == moved.attention.offload.done
