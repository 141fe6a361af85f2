"""RankGroup: the worker of an engine whose blocks are spread over several ranks.

    submit, cancel ─► one TransferBatch per pass of the loop, the same bytes to every rank
    on_report      ◄─ one report per plan: the minimum over the ranks

One scheduler decides for all ranks (I9): a block has the same ids everywhere.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.base.checks import Unique, arguments, flag, integer
from aiokv.base.groups import ATTENTION, retention_of
from aiokv.base.logs import Log
from aiokv.base.plan import PEER_ROUTES
from aiokv.base.statistics import BlockSizes, RankStatistics
from aiokv.errors import ClosedError, ConfigError, RankLost, UsageError
from aiokv.ranks.broadcast import SAVED_ROUTES, SENT_ROUTES, TIER_ROUTES, TransferBroadcast
from aiokv.ranks.control_requests import ControlRequests
from aiokv.ranks.lookups import GroupLookups
from aiokv.ranks.membership import Membership
from aiokv.ranks.messages import ChangeWeights, Sleep, WakeUp
from aiokv.ranks.processes import RankProcesses, check_entry
from aiokv.ranks.rank_socket import RankSocket
from aiokv.ranks.rank_state import MAX_RANKS, RankTimeouts
from aiokv.ranks.requests import RankRequests
from aiokv.ranks.steps import GroupSteps
from aiokv.ranks.tickets import GroupTickets
from aiokv.wire.unix import checked_path
from aiokv.worker.base import UNLIMITED_BLOCKS, Capabilities, WorkerFacts, WorkerState
from aiokv.worker.device.base import CopyError
from aiokv.worker.ids import check_ids
from aiokv.worker.plan_table import PlanTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aiokv.base.plan import AnyTier, TransferPlan
    from aiokv.base.statistics import WorkerStatistics
    from aiokv.base.types import Tier
    from aiokv.config.cache_config import WindowGroup
    from aiokv.layout.regions import Regions
    from aiokv.ranks.messages import Layout, Reports
    from aiokv.ranks.rank_state import RankState
    from aiokv.stores.identity import StoreIdentity
    from aiokv.worker.base import WorkerStart
    from aiokv.worker.plan_table import Executor

log = Log(__name__)


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the messages between manager and ranks.

    Attributes:
        num_ranks: ranks of the group.
        generation: number of restarts, plus 1; 0 before ``open``.
        batches: batches of plans; each was sent to every rank.
        plans: plans in those batches.
        batch_bytes: bytes of those batches, each counted once.
        given_up: transfers that failed because a rank was slow or lost.
        stale_reports: messages of ranks that arrived after their generation, ignored.
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
    """N ranks, each in its own process, behind one engine: ``CacheEngine(config, ranks=...)``.

    Args:
        num_ranks: number of ranks. All have the same blocks, each its own part of their bytes.
        path: path of the Unix socket that the ranks connect to, in a directory that only this
            user may write to. None creates a private directory.
        entry: ``"module:function"``, to start the ranks as processes: an ``async def
            function(path, rank)`` that enters :class:`Rank`. They import it from the ``sys.path``
            of this process, and do not get the terminal's Ctrl-C. Without it the ranks are started
            externally.
        timeouts: see :class:`RankTimeouts`.
        has_stores: True if each rank has stores, ``Rank(..., stores=[...])``, for its shard of the
            blocks. A block is in the stores when all ranks have their shard of it.
        has_peers: True if each rank has peers, ``Rank(..., peers=Peers(...))``, for its shard of
            the blocks. A block has arrived when all ranks have their shard of it.
        clock: returns seconds; tests pass their own, and call ``tick`` themselves.

    Raises:
        ConfigError: an argument is of the wrong type or out of range, neither ``path`` nor
            ``entry`` is given, or ``entry`` is not of the form ``"module:function"``.

    Attributes:
        plans: plans in flight.
        steps: steps of the model.
        stores: lookups in the stores of all ranks.
        tickets: tickets of peers on all ranks.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        path: Path | str | None = None,
        entry: str | None = None,
        timeouts: RankTimeouts | None = None,
        has_stores: bool = False,
        has_peers: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_ranks = integer("num_ranks", num_ranks, minimum=1, maximum=MAX_RANKS, error=ConfigError)
        if path is None and entry is None:
            raise ConfigError("path is required when ranks are started externally (entry is None)")
        if entry is not None:
            check_entry(entry)
        if timeouts is not None and not isinstance(timeouts, RankTimeouts):
            raise ConfigError(f"timeouts is {timeouts!r}; it must be a RankTimeouts")
        flag("has_stores", has_stores, ConfigError)
        flag("has_peers", has_peers, ConfigError)
        if not callable(clock):
            raise ConfigError(f"clock is {clock!r}; it must be a function that returns seconds")
        routes = TIER_ROUTES | SAVED_ROUTES if has_stores else TIER_ROUTES
        self.num_ranks = num_ranks
        self.timeouts = timeouts or RankTimeouts()
        self._capabilities = Capabilities(
            routes=routes | SENT_ROUTES if has_peers else routes,
            checksums=False,
            owns_tensors=False,
            restart=True,
        )
        self._identity: StoreIdentity | None = None
        self._clock = clock
        self._host_blocks = 0
        self._windows: dict[
            str, WindowGroup
        ] = {}  # groups with host blocks; with peers, all groups
        self._failure: RankLost | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._opened = False
        self._closing = False
        self._restarting = False
        self._asleep: frozenset[Tier] = frozenset()
        self._on_lost: Callable[[RankLost], None] = lambda lost: None
        self._num_blocks: dict[AnyTier, int] = {}
        self._socket = RankSocket(None if path is None else checked_path(path))
        self._processes = (
            None if entry is None else RankProcesses(entry, lambda: self._membership.notify())
        )
        self._membership = Membership(
            num_ranks,
            self._socket,
            self.timeouts,
            self._processes,
            clock=clock,
            on_reports=self._on_reports,
            on_reply=lambda state, reply: self._requests.on_reply(state, reply),
            on_ticket_ended=lambda state, message: self.tickets.on_ended(state, message),
            has_stores=has_stores,
            has_peers=has_peers,
            on_lost=self._on_rank_lost,
        )
        self.steps = GroupSteps(self._membership.ranks, lambda: self._failure is not None)
        self._requests = RankRequests(self._membership)
        self._control = ControlRequests(self._membership, self._requests, self.timeouts)
        first = self._membership.ranks[0]
        self.stores = GroupLookups(
            self._requests, self.timeouts, lambda: self._has_answers, lambda: first.filters
        )
        self.plans = PlanTable(self._check_plan, lambda: self._transfers.num_layers)
        self._transfers = TransferBroadcast(
            self._membership, self.timeouts, clock, self.plans, lambda: self._failure
        )
        self.tickets = GroupTickets(
            self._membership, self._requests, self._transfers.flush, self._check_peers
        )

    # --- opening and closing --------------------------------------------------------------------

    async def open(self, start: WorkerStart) -> None:
        """Listen, start the ranks if ``entry`` names them, and wait until all are ready.

        Each rank has a poller for its events, reserves memory for the host tier and the window
        groups, and fills its number into the identity; ``on_step`` is called when a step has
        finished on all ranks, ``on_ticket_end`` when a ticket has ended on one of them.

        Raises:
            UsageError: opened before.
            RankLost: a rank did not connect, or not in time; nothing is left behind.
            ConfigError: the socket cannot be made.

        Cancellation: nothing is left behind.
        """
        if self._opened or self._closing:
            raise UsageError("the RankGroup was opened already; it serves one engine")
        self._opened = True
        self.steps.on_step, self._on_lost = start.on_step, start.on_lost
        self._host_blocks = start.host_blocks
        self._windows = {
            name: group
            for name, group in start.windows.items()
            if group.host_blocks or self._capabilities.peers
        }
        if start.identity is not None:
            self._identity = msgspec.structs.replace(start.identity, num_ranks=self.num_ranks)
        self.plans.open(start.poller, start.on_report)
        self.tickets.on_end = start.on_ticket_end
        try:
            await self._membership.open(start.device_blocks, self._windows)
            await self._membership.begin(
                start.host_blocks, self.steps.clock.closed, [], self._identity, self._windows
            )
        except BaseException:
            try:
                await self.aclose()
            except BaseException:  # after a second cancellation: aclose() is not called again
                self._membership.terminate()
                raise
            raise
        self._membership.device_blocks = self.facts.device_blocks
        self._num_blocks = {
            "device": self._membership.device_blocks,
            "host": start.host_blocks,
            "store": UNLIMITED_BLOCKS,
            "peer": UNLIMITED_BLOCKS,
        }
        self._schedule_tick()

    async def restart(self) -> None:
        """Bring lost ranks back, and start a new generation on all ranks, with nothing cached.

        Ranks that are started externally have to connect again. The others cancel what waits and
        finish what moves, their closed steps included; no step may be open on them.

        Raises:
            UsageError: no rank is lost, or a restart is running.
            RankLost: not all came back; still lost.

        Cancellation: still lost; call it again.
        """
        if self._failure is None or self._restarting:
            raise UsageError("restart: no rank is lost, or a restart is running already")
        self._transfers.flush()
        self._restarting = True
        try:
            await self._membership.begin(
                self._host_blocks,
                self.steps.clock.closed,
                sorted(self._asleep),
                self._identity,
                self._windows,
            )
        finally:
            self._restarting = False
        self._transfers.end_all()
        self._failure = None
        self.steps.reduce()
        log.info("ranks.restarted", ranks=self.num_ranks, generation=self._membership.generation)

    async def aclose(self) -> None:
        """Let all ranks finish moving transfers and close; cancel waiting ones. Idempotent.

        Cancellation: call it again.
        """
        self._closing = True
        self._requests.fail(lambda: ClosedError("the group of ranks is closing"))
        if self._timer is not None:
            self._timer.cancel()
        if self._opened and not self._membership.closed:
            self._transfers.flush()
            await self._membership.aclose()
            self._transfers.give_up_all(CopyError(0, "the group closed"))
            self._transfers.end_all()

    def give_up(self) -> None:
        """Wait for no more reports; see :meth:`Worker.give_up`."""
        self._transfers.give_up_all(CopyError(0, "the engine is broken"))
        self.plans.give_up()

    def close_without_loop(self) -> None:
        """Kill the started processes and remove the socket, after the loop was closed."""
        self._closing = True
        if self._opened and not self._membership.closed:
            self._membership.close_without_loop()

    # --- state ----------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """Path of the socket that ranks connect to.

        A private socket has a new path per start of ranks, and exists only while they start. None
        before the first start.
        """
        return self._socket.path

    @property
    def layout(self) -> Layout | None:
        """Layout of the tensors, equal on all ranks; None before the first rank has connected."""
        return self._membership.layout

    @property
    def facts(self) -> WorkerFacts:
        """Properties of the group. Those of its tensors are known after a rank has connected."""
        layouts = [state.layout for state in self._membership.ranks if state.layout is not None]
        layout = self.layout
        return WorkerFacts(
            capabilities=self._capabilities,
            computes_in_stream=True,  # each rank finishes a step in its own time
            num_layers=0 if layout is None else layout.num_layers,
            device_blocks=min((known.num_blocks for known in layouts), default=UNLIMITED_BLOCKS),
            device_name=f"{self.num_ranks} ranks",
            block_bytes=0
            if layout is None
            else layout.block_bytes.get(ATTENTION, 0) * self.num_ranks,
            pitch_bytes=0 if layout is None else layout.pitch_bytes * self.num_ranks,
        )

    @property
    def failure(self) -> RankLost | None:
        """The loss of the first lost rank, until a restart."""
        return self._failure

    # --- transfers ------------------------------------------------------------------------------

    def _check_plan(self, plan: TransferPlan) -> tuple[Executor[Any], int]:
        """Return the executor of a plan, and the bytes that it moves; see ``PlanTable.submit``."""
        if self._closing or not self._opened:
            state = "closing" if self._closing else "not open"
            raise ClosedError(f"transfer {plan.transfer_id}: the group of ranks is {state}")
        if plan.group_route not in self._capabilities.routes:
            raise UsageError(
                f"transfer {plan.transfer_id}: ranks have no route {plan.route} for the group "
                f"{plan.group!r}"
            )
        num_blocks = self._num_blocks
        if plan.group != ATTENTION:
            group = self._windows.get(plan.group)
            num_blocks = {
                "store": UNLIMITED_BLOCKS,
                "peer": UNLIMITED_BLOCKS,
                "device": 0 if group is None else group.device_blocks,
                "host": 0 if group is None else group.host_blocks,
            }
        may_be_empty = retention_of(plan.group) == "window" and plan.route in PEER_ROUTES
        if plan.num_blocks or not may_be_empty:
            check_ids(plan, num_blocks)
        return self._transfers, self._transfers.check(plan)

    def change_weights(self, version: str) -> None:
        """Use other keys on all ranks; see :meth:`Worker.change_weights`.

        Ranks receive the change before all later plans.
        """
        if self._identity is not None:
            self._identity = msgspec.structs.replace(self._identity, weights_version=version)
            self._membership.ranks[0].filters = None  # of other keys
            self._transfers.flush()
            self._membership.send(ChangeWeights(version=version))

    @property
    def _has_answers(self) -> bool:
        """True while all ranks answer lookups."""
        return self._capabilities.stores and not self._closing and self._failure is None

    def _check_peers(self) -> None:
        """Check that the ranks can receive and send blocks.

        Raises:
            UsageError: they have no peers.
            ClosedError: the group is closing, or is not open.
            RankLost: a rank is lost.
        """
        if not self._capabilities.peers:
            raise UsageError("the ranks have no peers", hint="RankGroup(has_peers=True)")
        if self._closing or not self._opened:
            raise ClosedError("the group of ranks is closing, or is not open")
        self._check_reachable()

    async def sleep(self, tiers: frozenset[Tier]) -> None:
        """Free the memory of these tiers on every rank; no transfer is in flight. Idempotent.

        Raises:
            RankLost: a rank is lost; the others sleep.

        Cancellation: call it again, or ``wake_up``.
        """
        self._check_opened()
        self._asleep |= tiers  # ranks that come back must sleep, too
        self._check_reachable()
        await self._control.send(Sleep, tiers)

    async def wake_up(self, tiers: frozenset[Tier], regions: Regions | None = None) -> None:
        """Reallocate the memory on every rank, with the tensors of its ``Rank.regions``.

        Raises:
            UsageError: ``regions`` was passed; or a rank has no tensors, tensors of another layout
                or with too few blocks, or no memory. Still asleep.
            RankLost: a rank is lost. Still asleep.

        Cancellation: call it again, or ``sleep``.
        """
        if regions is not None:
            raise UsageError(
                "wake_up: regions must be None; with ranks, the tensors are in their processes",
                hint="set Rank.regions on each rank first",
            )
        self._check_reachable()
        await self._control.send(WakeUp, tiers, device_blocks=self._membership.device_blocks)
        self._asleep -= tiers

    def _check_reachable(self) -> None:
        """Raises:
        UsageError: the group is not open.
        RankLost: a rank is lost.
        """
        self._check_opened()
        if self._failure is not None:
            # Otherwise the traceback would grow with each call.
            raise self._failure.with_traceback(None)

    def _check_opened(self) -> None:
        if not self._opened:
            raise UsageError("the group of ranks is not open")

    def statistics(self) -> WorkerStatistics:
        """Return the counts of the group; a transfer counts once, not once per rank."""
        counts, layout = self._transfers.statistics(self._windows), self.layout
        if layout is None or not layout.block_bytes.get(ATTENTION):
            return counts
        facts = self.facts
        sizes = BlockSizes(device=facts.block_bytes, host=facts.pitch_bytes)
        return msgspec.structs.replace(counts, block_sizes={ATTENTION: sizes})

    def inspect(self) -> WorkerState:
        """Return the state of the ranks, and of their parts as of the last heartbeats.

        Ranks answer a heartbeat per ``RankTimeouts.heartbeat``. Before the first one, and for a
        lost rank, there are no statistics of stores and peers; ``Rank.store_statistics`` and
        ``Rank.peer_statistics`` return present ones in its process.
        """
        ranks, now = self._membership.ranks, self._clock()
        silent = self._control.silent_ranks
        return WorkerState(
            stores=[
                msgspec.structs.replace(store, rank=state.rank)
                for state in ranks
                for store in state.stores
            ],
            peers=[statistics for state in ranks for statistics in state.peers],
            ranks=[
                RankStatistics(
                    rank=state.rank,
                    connected=state.ready,
                    state="ready" if state.ready else state.absence_reason,
                    silent_seconds=now - state.heard_at,
                    finished_step=state.finished_step,
                    owes_reply=state.rank in silent,
                    poller=state.poller,
                )
                for state in ranks
                if self._opened
            ],
            unpinned_bytes=sum(state.unpinned_bytes for state in ranks),
        )

    def pids(self) -> list[int]:
        """Return the process ids of the ranks that were started here and run."""
        return [] if self._processes is None else self._processes.pids()

    def group_statistics(self) -> GroupStatistics:
        """Return counts of the messages between manager and ranks."""
        return GroupStatistics(
            num_ranks=self.num_ranks,
            generation=self._membership.generation,
            batches=self._transfers.batches,
            plans=self._transfers.plans,
            batch_bytes=self._transfers.batch_bytes,
            given_up=self._transfers.given_up,
            stale_reports=self._membership.stale_reports,
        )

    # --- from the ranks -------------------------------------------------------------------------

    def _on_reports(self, state: RankState, reports: Reports) -> None:
        self._transfers.on_reports(state, reports)
        self.steps.reduce()

    def _on_rank_lost(self, lost: RankLost) -> None:
        """Fail all transfers; the other ranks still report the ones that they move."""
        self._requests.fail(lambda: RankLost(str(lost), rank=lost.rank))
        if self._failure is None:
            self._failure = lost
            self._transfers.give_up_all(CopyError(0, str(lost), lost.rank))
            self._transfers.cancel_all()
            self._on_lost(lost)
        self._transfers.end_rank(lost)

    # --- deadlines ------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.timeouts.heartbeat, self._on_timer)

    def _on_timer(self) -> None:
        if not self._closing:
            self._schedule_tick()
            self.tick()

    def tick(self) -> None:
        """Find unresponsive and slow ranks; called at every heartbeat."""
        if not self._opened or self._closing:
            return
        if self._membership.tick() and self._failure is None:
            self._transfers.find_slow_ranks()

    def __repr__(self) -> str:
        state = f"generation {self._membership.generation}" if self._opened else "not open"
        if self._failure is not None:
            state = str(self._failure)
        where = os.fspath(self.path) if self.path is not None else "a private directory"
        return f"<RankGroup of {self.num_ranks} at {where}, {state}>"
