"""RankGroup: the worker of an engine whose blocks live on several ranks.

    submit, cancel ─► one TransferBatch a pass of the loop, the same bytes to every rank
    on_report      ◄─ one report a plan: the minimum over the ranks

One scheduler decides for all ranks (I9): a block has the same ids everywhere.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv import _native
from aiokv.checks import Unique, arguments, integer
from aiokv.errors import ClosedError, ConfigError, UsageError
from aiokv.observe.logs import Log
from aiokv.plan import StatePlan, TransferReport
from aiokv.ranks.channel import checked_path
from aiokv.ranks.exchange import Exchange
from aiokv.ranks.listener import Listener
from aiokv.ranks.messages import Sleep, WakeUp
from aiokv.ranks.processes import RankProcesses, check_entry
from aiokv.ranks.questions import Questions
from aiokv.ranks.roster import Roster
from aiokv.ranks.seats import MAX_RANKS, RankTimeouts
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import WorkerStatistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.errors import RankLost
    from aiokv.plan import Plan
    from aiokv.ranks.messages import Layout, Reports
    from aiokv.ranks.seats import Seat
    from aiokv.types import Tier
    from aiokv.worker.base import Cancelled
    from aiokv.worker.device.base import Event
    from aiokv.worker.layers import LayerDoneCounter
    from aiokv.worker.regions import Regions

log = Log(__name__)


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What passed between manager and ranks.

    Attributes:
        generation: 1 more than there were restarts.
        batches: submissions; each went to every rank.
        plans: in those batches.
        batch_bytes: of one rank's copy.
        given_up: transfers that failed because a rank lagged or was lost.
        stale_reports: messages of ranks that came after their generation, ignored.
    """

    num_ranks: int
    generation: int
    batches: int
    plans: int
    batch_bytes: int
    given_up: int
    stale_reports: int


@arguments()
class RankGroup(Unique):
    """N ranks, each in a process of its own, behind one engine: ``CacheEngine(config, ranks=...)``.

    Args:
        num_ranks: all hold the same blocks, each its own part of their bytes.
        path: of the Unix socket where the ranks connect, in a directory that only this user may
            write to. Without one a private directory is made.
        entry: ``"module:function"``, to start the ranks as processes: an ``async def
            function(path, rank)`` that enters :class:`Rank`. They import it from the ``sys.path``
            of this process, and do not get the terminal's Ctrl-C. Without it the ranks are started
            externally.
        timeouts: see :class:`RankTimeouts`.
        clock: seconds; tests bring their own, and call ``tick`` themselves.

    Raises:
        ConfigError: an argument is of the wrong type or out of range, neither ``path`` nor
            ``entry`` is given, or the entry names no function.
    """

    computes_in_stream: Final = True  # each rank finishes a step in its own time

    def __init__(
        self,
        num_ranks: int,
        *,
        path: Path | str | None = None,
        entry: str | None = None,
        timeouts: RankTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_ranks = integer("num_ranks", num_ranks, minimum=1, maximum=MAX_RANKS, error=ConfigError)
        if path is None and entry is None:
            raise ConfigError("path is required when ranks are started externally (entry is None)")
        if entry is not None:
            check_entry(entry)
        if timeouts is not None and not isinstance(timeouts, RankTimeouts):
            raise ConfigError(f"timeouts is {timeouts!r}; it must be a RankTimeouts")
        if not callable(clock):
            raise ConfigError(f"clock is {clock!r}; it must be a function that returns seconds")
        self.num_ranks = num_ranks
        self.timeouts = timeouts or RankTimeouts()
        self._listener = Listener(None if path is None else checked_path(path))
        self._entry = entry
        self._clock = clock
        self._failure: RankLost | None = None
        self._closed_step = 0
        self._reported_step = 0
        self._timer: asyncio.TimerHandle | None = None
        self._roster: Roster | None = None
        self._exchange: Exchange | None = None
        self._processes: RankProcesses | None = None
        self._closing = False
        self._restarting = False
        self._asleep: frozenset[Tier] = frozenset()
        self._questions = Questions(self.timeouts)

    # --- opening and closing --------------------------------------------------------------------

    async def open(
        self,
        *,
        device_blocks: int,
        host_blocks: int,
        on_report: Callable[[TransferReport], None],
        on_step: Callable[[int, BaseException | None], None],
        on_lost: Callable[[RankLost], None],
    ) -> None:
        """Listen, start the ranks where that is ours to do, and wait until all are ready.

        Args:
            device_blocks: every rank has at least so many.
            host_blocks: every rank gets host memory for so many.
            on_report: as a controller's.
            on_step: called when a step is over on all ranks.
            on_lost: called when a rank is gone; no transfer can succeed until ``restart``.

        Raises:
            RankLost: a rank did not come, or not in time; nothing is left behind.
            ConfigError: the socket cannot be made.

        Cancellation: nothing is left behind.
        """
        if self._roster is not None:
            raise UsageError("a RankGroup serves one engine")
        self._loop = asyncio.get_running_loop()
        self._on_step, self._on_lost = on_step, on_lost
        self._host_blocks = host_blocks
        if self._entry is not None:
            self._processes = RankProcesses(self._entry, lambda: roster.notify())
        roster = self._roster = Roster(
            self.num_ranks,
            self._listener,
            self.timeouts,
            self._processes,
            clock=self._clock,
            device_blocks=device_blocks,
            on_reports=self._on_reports,
            on_answer=self._questions.on_answer,
            on_lost=self._on_rank_lost,
        )
        self._exchange = Exchange(roster, self.timeouts, self._clock, on_report)
        try:
            await roster.open()
            await roster.begin(host_blocks, self._closed_step, [])
        except BaseException:
            try:
                await self.aclose()
            except BaseException:  # cancelled once more: aclose() is not called again
                roster.terminate()
                raise
            raise
        roster.device_blocks = self.device_blocks
        self._ids = _native.BlockMap(0, [], 0, 0, host_blocks, self.device_blocks)
        self._schedule_tick()

    async def restart(self) -> None:
        """Bring a lost rank back, and begin anew on all: nothing that was cached is there any more.

        A rank that comes by itself has to come. The others cancel what waits and finish what moves,
        their closed steps included; no step may be open on them.

        Raises:
            UsageError: no rank is lost.
            RankLost: not all came back; still lost.

        Cancellation: still lost; call it again.
        """
        if self._failure is None or self._roster is None or self._restarting:
            raise UsageError("no rank is lost, or a restart is under way")
        self.exchange.flush()
        self._restarting = True
        try:
            await self._roster.begin(self._host_blocks, self._closed_step, sorted(self._asleep))
        finally:
            self._restarting = False
        self.exchange.end_all()
        self._failure = None
        self._fold_steps()

    async def aclose(self) -> None:
        """Let all ranks finish what moves and go; what waits is cancelled. Idempotent.

        Cancellation: call it again.
        """
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._roster is not None and not self._roster.closed:
            self.exchange.flush()
            await self._roster.aclose()
            self.exchange.give_up_all(CopyError(0, "the group closed"))
            self.exchange.end_all()

    # --- what the engine asks of a worker -------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """The socket where ranks connect.

        A private socket has a new path per start of ranks, and exists only while they start. None
        before the first start.
        """
        return self._listener.path

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers

    @property
    def layout(self) -> Layout:
        """Of every rank."""
        if self._roster is None or self._roster.layout is None:
            raise UsageError("the group is not open")
        return self._roster.layout

    @property
    def exchange(self) -> Exchange:
        """The transfers.

        Raises:
            UsageError: the group is not open.
        """
        if self._exchange is None:
            raise UsageError("the group is not open")
        return self._exchange

    @property
    def device_blocks(self) -> int:
        """Blocks of the rank that has the fewest.

        Raises:
            UsageError: the group is not open.
        """
        seats = self._roster.seats if self._roster is not None else []
        blocks = [seat.layout.num_blocks for seat in seats if seat.layout is not None]
        if not blocks:
            raise UsageError("the group is not open")
        return min(blocks)

    @property
    def failure(self) -> RankLost | None:
        """The first rank that was lost, until a restart."""
        return self._failure

    @property
    def silent_ranks(self) -> list[int]:
        """Those that have not answered the newest ``sleep`` or ``wake_up``."""
        return [] if self._roster is None else self._questions.silent_ranks(self._roster)

    def submit(self, plan: Plan) -> LayerDoneCounter:
        """Take a plan; it leaves for all ranks with the others of this pass.

        Raises:
            UsageError: as a controller's. Nothing changed.
            ClosedError: the group is closing.
        """
        if self._closing:
            raise ClosedError("the group of ranks is closing")
        if isinstance(plan, StatePlan):
            raise UsageError("ranks have no recurrent state")  # the engine's config is refused
        self._ids.check_ids(plan.host_ids, plan.device_ids, onload=plan.direction == "onload")
        return self.exchange.submit(plan, self.layout, self._failure)

    def cancel(self, transfer_id: int) -> Cancelled:
        """Ask the ranks to cancel a plan; it is reported ``"cancelled"`` if no rank moves it."""
        return "asked" if self.exchange.cancel(transfer_id) else "too late"

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Submit a plan that still waits on a rank as if it had been given with this priority."""
        self.exchange.raise_priority(transfer_id, priority)

    def check_event(self, event: Event | None) -> None:
        """Raise for any event: an event belongs to one rank.

        Raises:
            UsageError: ``event`` is not None.
        """
        if event is not None:
            raise UsageError(
                "event must be None: each rank closes steps with its own events",
                hint="call Rank.step(number, event) in the rank's process",
            )

    def close_step(self, step: int, event: Event | None) -> None:
        """The engine has closed a step; it is over when every rank says so.

        Raises:
            UsageError: an event, which belongs to one rank; or the step was closed before.
        """
        self.check_event(event)
        if step <= self._closed_step:
            raise UsageError(f"step {step} is closed already, up to {self._closed_step}")
        self._closed_step = step
        self._fold_steps()

    def clone(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], stream: Any = None
    ) -> None:
        """Copies within the ranks' devices are the runner's.

        Raises:
            UsageError: there is something to copy.
        """
        if len(sources):
            raise UsageError(
                "ranks do not copy blocks within their devices",
                hint="fork at a block's border, or copy the partial block in the model's runner",
            )

    def clone_slots(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], stream: Any = None
    ) -> None:
        """Raises:
        UsageError: ranks have no recurrent state.
        """
        raise UsageError("ranks have no recurrent state")

    async def drain(self) -> None:
        """Wait until every plan submitted so far, and since, has been reported.

        Plans wait on each rank for its runner to close their step.

        Cancellation: stops waiting; the transfers go on.
        """
        while self.exchange:
            await self.exchange.settle()

    async def settle(self) -> None:
        """As drain(), but only for the plans submitted so far."""
        await self.exchange.settle()

    async def sleep(self, tiers: frozenset[Tier]) -> None:
        """Every rank frees the memory of these tiers; nothing is under way. Idempotent.

        Raises:
            RankLost: one is gone; the others sleep.

        Cancellation: call it again, or ``wake_up``.
        """
        self._asleep |= tiers  # also of a rank that comes back
        await self._questions.ask(self._asked(), Sleep, tiers)

    async def wake_up(self, tiers: frozenset[Tier], regions: Regions | None = None) -> None:
        """Every rank takes memory again: with the tensors that it was given as ``Rank.regions``.

        Raises:
            UsageError: ``regions``, which are the ranks' own; or a rank has no tensors, or others
                than before, or no memory. Still asleep.
            RankLost: one is gone. Still asleep.

        Cancellation: call it again, or ``sleep``.
        """
        if regions is not None:
            raise UsageError("with ranks, set Rank.regions on each, before they wake up")
        await self._questions.ask(self._asked(), WakeUp, tiers)
        self._asleep -= tiers

    def _asked(self) -> Roster:
        """The ranks, all of them there."""
        if self._roster is None:
            raise UsageError("the group is not open")
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # it would grow with each call
        return self._roster

    def statistics(self) -> WorkerStatistics:
        """Counts of the group: a transfer is one, whatever the number of ranks."""
        exchange = self.exchange
        return WorkerStatistics(
            held=exchange.num_held(),
            onload=exchange.lane("onload").statistics(),
            offload=exchange.lane("offload").statistics(),
            state=exchange.lane("state").statistics(),
        )

    def describe(self) -> list[dict[str, object]]:
        """Return the state of each rank, as plain values."""
        seats = [] if self._roster is None else self._roster.seats
        return [
            {
                "rank": seat.rank,
                "state": "ready" if seat.ready else seat.why_away,
                "silent_seconds": self._clock() - seat.heard_at,
                "finished_step": seat.finished_step,
            }
            for seat in seats
        ]

    def pids(self) -> list[int]:
        """Of the ranks that were started here and run."""
        return [] if self._processes is None else self._processes.pids()

    def group_statistics(self) -> GroupStatistics:
        exchange, roster = self.exchange, self._roster
        return GroupStatistics(
            num_ranks=self.num_ranks,
            generation=roster.generation if roster else 0,
            batches=exchange.batches,
            plans=exchange.plans,
            batch_bytes=exchange.batch_bytes,
            given_up=exchange.given_up,
            stale_reports=roster.stale_reports if roster else 0,
        )

    # --- from the ranks -------------------------------------------------------------------------

    def _on_reports(self, seat: Seat, reports: Reports) -> None:
        self.exchange.on_reports(seat, reports)
        self._fold_steps()

    def _fold_steps(self) -> None:
        """A step is over when it is over on every rank."""
        if self._roster is None or self._failure is not None:
            return
        over = min(self._closed_step, *(seat.finished_step for seat in self._roster.seats))
        if over > self._reported_step:
            self._reported_step = over
            self._on_step(over, None)

    def _on_rank_lost(self, lost: RankLost) -> None:
        """Nothing can succeed any more; what the others still move, they report."""
        if self._failure is None:
            self._failure = lost
            self.exchange.give_up_all(CopyError(0, str(lost), lost.rank))
            self.exchange.cancel_all()
            self._on_lost(lost)
        self.exchange.rank_is_gone(lost)

    # --- deadlines ------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        self._timer = self._loop.call_later(self.timeouts.heartbeat, self._on_timer)

    def _on_timer(self) -> None:
        if not self._closing:
            self._schedule_tick()
            self.tick()

    def tick(self) -> None:
        """Find who is silent and who lags; happens by itself at every heartbeat."""
        if self._roster is None or self._closing:
            return
        if self._roster.tick() and self._failure is None:
            self.exchange.find_laggards()

    def __repr__(self) -> str:
        state = "not open" if self._roster is None else f"generation {self._roster.generation}"
        if self._failure is not None:
            state = str(self._failure)
        where = os.fspath(self.path) if self.path is not None else "a private directory"
        return f"<RankGroup of {self.num_ranks} at {where}, {state}>"
