"""PlanTable: each plan is reported exactly once; a random walk beside a naive list."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.base.plan import CLONE, OFFLOAD, ONLOAD, RECEIVE, TransferPlan, TransferReport, id_bytes
from aiokv.errors import TransferError, UsageError
from aiokv.testing import spin
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import RouteCounts, RouteTable
from aiokv.worker.plan_table import CANCELLED, Executor, PlanEntry, PlanTable
from aiokv.worker.poller import EventPoller
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    from aiokv.base.plan import Route
    from aiokv.worker.base import Cancelled

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

BLOCK_BYTES = 10
LAYERS = 2
FAILURE = CopyError(1, "a bad page")


class Scripted(Executor[None]):
    """An executor that the test moves.

    Args:
        answer: to the cancellation of a plan that has not begun; the table does not ask for others.
        ends: ends each plan within ``submit``.
    """

    def __init__(self, plans: PlanTable, answer: Cancelled, *, ends: bool = False) -> None:
        self._plans = plans
        self._answer = answer
        self._ends = ends
        self._counts = RouteTable(RouteCounts)
        self.raised: list[tuple[int, int]] = []

    @property
    def counts(self) -> RouteTable[RouteCounts]:
        return self._counts

    def new_work(self, entry: PlanEntry[None]) -> None:
        return None

    def submit(self, entry: PlanEntry[None]) -> None:
        if self._ends:
            self._plans.end(entry)
            self._plans.report_soon(entry)

    def cancel(self, entry: PlanEntry[None]) -> Cancelled:
        return "too late" if entry.state == "begun" else self._answer

    def raise_priority(self, entry: PlanEntry[None]) -> None:
        self.raised.append((entry.plan.transfer_id, entry.priority))


class Walk:
    """A table, and a naive list of what its plans have to do.

    Attributes:
        plans: by id, those in flight: [executor, state, priority, outcome, moved bytes].
        due: ids and plans that have ended, to be reported in the next pass, in order.
        expected: outcomes of all reports so far.
    """

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.poller = EventPoller()
        self.table = PlanTable(
            lambda plan: (self.executors[plan.route], plan.num_blocks * 10), lambda: 2
        )
        self.executors: dict[Route, Scripted] = {
            ONLOAD: Scripted(self.table, "at once"),
            OFFLOAD: Scripted(self.table, "asked"),
            RECEIVE: Scripted(self.table, "too late", ends=True),
        }
        self.plans: dict[int, list[Any]] = {}
        self.due: list[tuple[int, list[Any]]] = []
        self.expected: list[tuple[int, str]] = []
        self.seen: list[tuple[int, str]] = []
        self.raised: list[tuple[int, int]] = []
        self.counts: Counter[tuple[Route, str]] = Counter()
        self.next_id = 1
        self.drains: list[asyncio.Task[None]] = []
        self.table.open(self.poller, self._on_report)

    def _on_report(self, report: TransferReport) -> None:
        self.seen.append((report.transfer_id, report.outcome))
        if self.choose.random() < 0.1:
            raise ValueError("of the engine")

    def any_id(self) -> int:
        """Return the id of a plan that may be in flight."""
        return self.choose.randrange(max(self.next_id - 8, 1), self.next_id + 1)

    def report(self, transfer_id: int) -> None:
        """Expect the report of a plan now."""
        route, _, _, outcome, moved_bytes = self.plans.pop(transfer_id)
        self.counts[route, outcome.strip("-")] += 1
        self.counts[route, "bytes"] += moved_bytes
        if not outcome.startswith("-"):  # its report is not sent
            self.expected.append((transfer_id, outcome))

    # --- steps ------------------------------------------------------------------------------

    def submit(self) -> None:
        transfer_id = self.any_id() if self.choose.random() < 0.1 else self.next_id
        route = self.choose.choice([ONLOAD, OFFLOAD, RECEIVE])
        blocks = id_bytes(range(self.choose.randrange(1, 5)))
        plan = TransferPlan(
            transfer_id=transfer_id, route=route, source_blocks=blocks, target_blocks=blocks,
            priority=3,
        )  # fmt: skip
        if transfer_id in self.plans:
            with pytest.raises(UsageError, match="in flight already"):
                self.table.submit(plan)
            return
        assert self.table.submit(plan) is self.table.counter(transfer_id)
        self.next_id = max(self.next_id, transfer_id + 1)
        self.plans[transfer_id] = [route, "waiting", 3, "", 0]
        if route == RECEIVE:
            self.plans[transfer_id][1:] = ["ended", 3, "done", plan.num_blocks * BLOCK_BYTES]
            self.due.append((transfer_id, self.plans[transfer_id]))

    def begin(self) -> None:
        if (entry := self.table.get(self.any_id())) is not None:
            self.table.begin(entry)
            plan = self.plans[entry.plan.transfer_id]
            plan[1] = "begun" if plan[1] == "waiting" else plan[1]

    def end(self) -> None:
        transfer_id = self.any_id()
        if (entry := self.table.get(transfer_id)) is None:
            return
        failure = self.choose.choice([None, FAILURE])
        cancelled = self.choose.random() < 0.3
        moved = self.choose.choice([None, 1])
        self.table.end(entry, failure, cancelled=cancelled, moved_blocks=moved)
        plan = self.plans[transfer_id]
        if plan[1] != "ended":
            all_blocks = 0 if failure is not None else entry.plan.num_blocks
            moved_bytes = BLOCK_BYTES * (all_blocks if moved is None else moved)
            outcome = "done" if failure is None else "cancelled" if cancelled else "failed"
            plan[1:] = ["ended", plan[2], outcome, moved_bytes]
        if self.choose.random() < 0.5:
            self.table.send_report(entry)
            self.report(transfer_id)
        else:
            self.table.report_soon(entry)
            self.due.append((transfer_id, self.plans[transfer_id]))

    def cancel(self) -> None:
        transfer_id = self.any_id()
        answer = self.table.cancel(transfer_id)
        plan = self.plans.get(transfer_id)
        if plan is None or plan[1] != "waiting" or plan[0] == RECEIVE:
            assert answer == "too late"
        elif plan[0] == OFFLOAD:
            assert answer == "asked"
        else:
            assert answer == "at once"
            plan[1:] = ["ended", plan[2], "-cancelled", 0]
            self.due.append((transfer_id, self.plans[transfer_id]))

    def cancel_waiting(self) -> None:
        self.table.cancel_waiting(self.executors[ONLOAD])
        for transfer_id, plan in self.plans.items():
            if plan[:2] == [ONLOAD, "waiting"]:
                plan[1:] = ["ended", plan[2], "cancelled", 0]
                self.due.append((transfer_id, self.plans[transfer_id]))

    def raise_priority(self) -> None:
        transfer_id, priority = self.any_id(), self.choose.randrange(4)
        self.table.raise_priority(transfer_id, priority)
        plan = self.plans.get(transfer_id)
        if plan is not None and plan[1] != "ended" and priority < plan[2]:
            plan[2] = priority
            self.raised.append((transfer_id, priority))

    def drain(self) -> None:
        if len(self.drains) < 3:
            self.drains.append(asyncio.get_running_loop().create_task(self.table.drain()))

    async def turn(self) -> None:
        """Let the loop make a pass: what is due is reported, in order."""
        due, self.due = self.due, []
        await spin(2)
        for transfer_id, plan in due:
            if self.plans.get(transfer_id) is plan:  # not reported before
                self.report(transfer_id)
        if not self.plans:
            await spin(2)
            assert all(task.done() for task in self.drains)
        self.drains = [task for task in self.drains if not task.done()]

    def check(self) -> None:
        """Compare the table with the list."""
        assert self.seen == self.expected
        assert [entry.plan.transfer_id for entry in self.table] == list(self.plans)
        assert sorted(self.raised) == sorted(
            raised for executor in self.executors.values() for raised in executor.raised
        )
        for entry in self.table:
            assert entry.state == self.plans[entry.plan.transfer_id][1]
        for route, executor in self.executors.items():
            plan = TransferPlan(transfer_id=0, route=route, source_blocks=b"", target_blocks=b"")
            counts = executor.counts.of(plan).statistics()
            in_flight = sum(plan[0] == route for plan in self.plans.values())
            expected = [
                self.counts[route, name] for name in ("done", "failed", "cancelled", "bytes")
            ]
            assert counts.submitted == in_flight
            assert [counts.done, counts.failed, counts.cancelled, counts.moved_bytes] == expected


@pytest.mark.parametrize("seed", range(20))
async def test_walk_of_the_table_agrees_with_a_naive_list(seed: int) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: None)  # of reports that raise
    choose = random.Random(seed)
    walk = Walk(choose)
    walk.poller.open(loop)
    steps = [
        *[walk.submit] * 4, *[walk.begin] * 2, *[walk.end] * 3, *[walk.cancel] * 2,
        walk.raise_priority, walk.drain, walk.cancel_waiting,
    ]  # fmt: skip
    for _ in range(300):
        choose.choice(steps)()
        walk.check()
        if choose.random() < 0.3:
            await walk.turn()
            walk.check()
    await walk.turn()
    for entry in walk.table:
        walk.table.end(entry, FAILURE)
        walk.table.send_report(entry)
    await asyncio.wait_for(walk.table.drain(), 1.0)
    await asyncio.gather(*walk.drains)
    assert len(walk.seen) > 50
    walk.poller.close()


async def test_waiters_of_a_cancelled_plan_get_their_error_and_no_report_follows() -> None:
    walk = Walk(random.Random(1))
    walk.poller.open(asyncio.get_running_loop())
    blocks = id_bytes([1])
    counter = walk.table.submit(
        TransferPlan(transfer_id=1, route=ONLOAD, source_blocks=blocks, target_blocks=blocks)
    )
    assert walk.table.cancel(1) == "at once"
    assert walk.table.cancel(1) == "too late"
    assert counter.failure == CANCELLED
    with pytest.raises(TransferError, match="cancelled before it was submitted"):
        await LayerView([counter]).wait_all()
    await walk.table.drain()
    assert walk.seen == []
    walk.poller.close()


async def test_copy_that_is_part_of_a_plan_has_an_end_and_no_report() -> None:
    walk = Walk(random.Random(1))
    walk.poller.open(asyncio.get_running_loop())
    blocks, ends = id_bytes([1]), []
    plan = TransferPlan(transfer_id=-1, route=ONLOAD, source_blocks=blocks, target_blocks=blocks)
    for failure in (None, FAILURE):
        entry = walk.table.add(plan, walk.executors[ONLOAD], 0, 10, ends.append)
        walk.table.end(entry, failure)
        walk.table.send_report(entry)
        walk.table.send_report(entry)
    walk.table.add(plan, walk.executors[ONLOAD], 0, 10, ends.append)
    assert walk.table.cancel(-1) == "at once"
    await walk.table.drain()
    assert (ends, walk.seen) == ([None, FAILURE, CANCELLED], [])
    walk.poller.close()


async def test_refused_plan_is_reported_as_failed_in_a_later_callback() -> None:
    walk = Walk(random.Random(1))
    walk.poller.open(asyncio.get_running_loop())
    blocks = id_bytes([1])
    plan = TransferPlan(transfer_id=7, route=CLONE, source_blocks=blocks, target_blocks=blocks)
    counter = walk.table.take(plan)
    assert (walk.seen, list(walk.table), counter.num_layers) == ([], [], LAYERS)
    assert counter.failure == CopyError(0, repr(CLONE)), "gpu_wait raises at once"
    await walk.table.drain()
    assert walk.seen == [(7, "failed")]
    with pytest.raises(TransferError):
        await LayerView([counter]).wait_all()
    walk.poller.close()


async def test_memory_error_of_an_executor_is_no_refusal() -> None:
    def out_of_memory(entry: PlanEntry[None]) -> None:
        raise MemoryError

    walk = Walk(random.Random(1))
    walk.poller.open(asyncio.get_running_loop())
    walk.executors[ONLOAD].submit = out_of_memory  # type: ignore[method-assign]
    blocks = id_bytes([1])
    with pytest.raises(MemoryError):
        walk.table.take(
            TransferPlan(transfer_id=1, route=ONLOAD, source_blocks=blocks, target_blocks=blocks)
        )
    await spin(2)
    assert walk.seen == [], "the bytes may move"
    walk.poller.close()
