"""RankThread: a rank for worker processes that are plain synchronous code."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Self, final

import uvloop

from aiokv.base.checks import Unique, arguments, integer, sequence
from aiokv.errors import AiokvError, ClosedError, ControlTimeout, TransferTimeout, UsageError
from aiokv.ranks.rank import Rank
from aiokv.sync.crossing import cross
from aiokv.sync.futures import EngineFuture
from aiokv.sync.on_loop import begin
from aiokv.sync.rank_layers import RankLayers
from aiokv.sync.thread import LoopThread
from aiokv.worker.thread_waits import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from aiokv.base.statistics import (
        GuardStatistics,
        LayerWaitStatistics,
        RankPeerStatistics,
        WorkerStatistics,
    )
    from aiokv.layout.regions import Regions
    from aiokv.peers.options import Peers
    from aiokv.stores.base import Store
    from aiokv.stores.use import StoreUse
    from aiokv.sync.rank_layers import Arrived
    from aiokv.worker.device.base import Device, Event
    from aiokv.worker.views import LayerView


@final
@arguments()
class RankThread(Unique):
    """A :class:`aiokv.ranks.Rank` whose loop runs in a thread of its own.

    ::

        rank = aiokv.sync.RankThread(path, rank=tp_rank, regions=regions, device="cuda:0")
        rank.start()  # before or after the engine is opened
        ...
        layers = rank.layers(transfer_ids)  # layers of the onloads of this step
        for layer in range(num_layers):
            layers.gpu_wait(layer, stream, timeout=30.0)
            ...
        failed = [block for failure in layers.failures() for block in failure.block_ids]

    Any thread may call any method. The thread connects, copies and reports while the process runs
    its model; a model runner that holds the GIL for long delays it.

    Args:
        path: the socket of the :class:`aiokv.ranks.RankGroup`.
        rank: 0 <= rank < num_ranks.
        regions: this rank's tensors; as for :class:`aiokv.ranks.Rank`, and so are the others.
        device: device of the tensors; ``"cpu"`` by default.
        stores: stores of this rank's shard of the blocks.
        peers: how this rank exchanges its shard of the blocks with other engines.
        connect_timeout: seconds to wait for the engine to be opened. Servers open it after their
            workers have loaded the model.
        loop_factory: returns the event loop of the rank.

    After ``os.fork``, every method raises ``ClosedError`` in the child, except ``close``, which has
    no effect there. A rank that still runs when the main thread ends is closed then.

    Raises:
        ConfigError: an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        path: Path | str,
        rank: int,
        regions: Regions,
        device: Device | str | None = None,
        *,
        stores: Sequence[Store | StoreUse | str] = (),
        peers: Peers | None = None,
        connect_timeout: float = 600.0,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    ) -> None:
        self._rank = Rank(
            path,
            rank,
            regions,
            device,
            stores=stores,
            peers=peers,
            connect_timeout=connect_timeout,
        )
        self._service = _RankService(self._rank)
        self._thread = LoopThread(self._service, loop_factory)

    # --- opening and closing ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which connects to the group as soon as the group listens.

        Returns before that: see ``wait_ready``.

        Raises:
            UsageError: the rank was started or closed before.
            KeyboardInterrupt: the thread has ended, and the rank cannot be started again.
        """
        self._thread.open()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block the calling thread until the group has begun, with all its ranks.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            ControlTimeout: the group has not begun in time. The rank goes on trying to connect.
            ClosedError: the rank was closed, the group has refused the rank or has ended, or no
                group has listened within ``connect_timeout``.
            UsageError: the thread was not started, or the call is made in the rank's own thread.
        """
        if not self._await_group(Deadline(timeout)):
            raise ControlTimeout(
                f"rank {self.number}: the group has not begun within {timeout} s",
                hint="open the engine, and start all its ranks",
                ranks=(self.number,),
            )

    def close(self) -> None:
        """Finish and report moving transfers, disconnect, and end the thread. Idempotent.

        To an engine that is still open, the rank is lost. Threads that wait for transfers get
        ``TransferError`` or ``ClosedError``.

        Raises:
            UsageError: the call is made in the rank's own thread.
            KeyboardInterrupt: the rank goes on closing; call ``close`` again to wait for the end.
        """
        self._thread.close(None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- state ------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Number of the rank."""
        return self._rank.rank

    @property
    def is_ready(self) -> bool:
        """True after the group has begun, until the rank ends."""
        return self._service.has_begun and not self._thread.has_ended and self.failure is None

    @property
    def failure(self) -> AiokvError | None:
        """Reason why the rank has ended; None before, and when ``close`` has ended it.

        ``ClosedError`` after the end of the group and in a fork of the process;
        ``BrokenEngineError`` after a failure of the rank's thread; the error of the connection if
        the rank never connected.
        """
        if self._thread.has_failed or self._thread.is_abandoned:
            return self._thread.new_error()
        return self._service.failure

    def raise_for_error(self) -> None:
        """Raise if the rank has ended, for any reason but ``close``.

        Raises:
            ClosedError, BrokenEngineError: see ``failure``.
        """
        if self.failure is not None:
            raise self._thread.new_error()

    @property
    def regions(self) -> Regions:
        """The tensors; without memory while the device tier sleeps.

        Set it to new tensors of the same layout before ``engine.wake_up``.
        """
        return self._rank.regions

    @regions.setter
    def regions(self, regions: Regions) -> None:
        self._rank.regions = regions

    @property
    def is_asleep(self) -> bool:
        """True from ``engine.sleep`` of the device tier until ``engine.wake_up``."""
        return self._rank.is_asleep

    # --- transfers --------------------------------------------------------------------------------

    def layers(self, transfer_ids: Iterable[int]) -> RankLayers:
        """Return the transfers of ``lease.layers.transfer_ids`` on this rank. Does not wait.

        Args:
            transfer_ids: ids of onloads; their plans may still be on their way to this rank. The
                rank remembers 4096 transfers that have ended.

        Raises:
            UsageError: an argument is of the wrong type.
            ClosedError: this process is a fork of the process of the rank.
        """
        self._thread.check_process()
        named = _checked_ids(transfer_ids)
        return RankLayers(self, named, self._rank.regions.num_layers, self._rank.layer_waits)

    def is_done(self, transfer_ids: Iterable[int]) -> bool:
        """Return True when no byte of the transfers moves any more on this rank. Does not wait.

        Args:
            transfer_ids: ids of transfers of any route: of onloads, and of offloads that save.

        Returns:
            True after the end of all transfers, also of those that failed: ``layers(ids).failures``
            tells. False while the plan of one has not arrived; True after the rank has ended, for
            plans that have not arrived, too.

        Raises:
            UsageError: an argument is of the wrong type.
            ClosedError: this process is a fork of the process of the rank.
        """
        self._thread.check_process()
        wanted = _checked_ids(transfer_ids)
        is_over = self._thread.is_over
        return all(
            self._rank.is_at_rest(transfer_id)
            or (is_over and self._rank.find_transfer(transfer_id) is None)
            for transfer_id in wanted
        )

    def wait_done(self, transfer_ids: Iterable[int], timeout: float | None = None) -> None:
        """Block the calling thread, without the GIL, until ``is_done(transfer_ids)``.

        Args:
            transfer_ids: as for ``is_done``.
            timeout: seconds, also for the plans to arrive; None for no limit.

        Raises:
            TransferTimeout: a transfer has not ended in time, and goes on.
            ClosedError: the rank or the group has ended before a plan has arrived.
            UsageError: an argument is of the wrong type, the thread was not started, or the call is
                made in the rank's own thread.
            KeyboardInterrupt: the transfers go on.
        """
        deadline = Deadline(timeout)
        self._thread.check_process()
        for transfer_id in _checked_ids(transfer_ids):
            if not self._rank.is_at_rest(transfer_id):
                for _, counter in self.arrived((transfer_id,), deadline):
                    counter.rest(deadline)

    def step(self, step: int, event: Event | None = None) -> None:
        """Close the steps up to ``step`` on this rank; see :meth:`aiokv.ranks.Rank.step`.

        Args:
            step: the engine's ``open_step`` at the time the work was sent.
            event: recorded after the work of this rank; None when it has finished.

        Raises:
            UsageError: as there, or the thread was not started. Nothing changed.
            ClosedError, BrokenEngineError: the rank has ended.
        """
        cross(self._thread, self._rank.step, step, event)

    def layers_done(self, *marks: bytes, event: Event | None = None) -> None:
        """Let named layers be sent by this rank, in one crossing.

        See :meth:`aiokv.ranks.Rank.layers_done`.

        Args:
            marks: what ``SyncSending.layers_done`` has returned, one per prompt and layer.
            event: recorded after the work that computes the layers; None when it has finished.

        Raises:
            UsageError: as there, or the thread was not started. The marks before the wrong one
                count.
            ClosedError, BrokenEngineError: the rank has ended.
        """
        cross(self._thread, self._layers_done, marks, event)

    def _layers_done(self, marks: tuple[bytes, ...], event: Event | None) -> None:
        for mark in marks:
            self._rank.layers_done(mark, event)

    # --- statistics -------------------------------------------------------------------------------

    def layer_wait_statistics(self) -> LayerWaitStatistics:
        """Return how long threads of this process have waited for layers. Does not cross."""
        return self._rank.layer_waits.statistics()

    def statistics(self) -> WorkerStatistics:
        """Return the counts of this rank's transfers; see :meth:`aiokv.ranks.Rank.statistics`."""
        return cross(self._thread, self._rank.statistics)

    def store_statistics(self) -> list[GuardStatistics]:
        """Return the use and the state of each store of this rank."""
        return cross(self._thread, self._rank.store_statistics)

    def peer_statistics(self) -> list[RankPeerStatistics]:
        """Return the use of peers of this rank; empty without peers."""
        return cross(self._thread, self._rank.peer_statistics)

    # --- for RankLayers ---------------------------------------------------------------------------

    def find(self, transfer_id: int) -> Arrived | None:
        """Return a transfer; None before its plan has arrived. Does not cross.

        Raises:
            UsageError: the transfer was forgotten.
            ClosedError, BrokenEngineError: the rank has ended; or this process is a fork of the
                process of the rank.
        """
        self._thread.check_process()
        found = self._rank.find_transfer(transfer_id)
        if found is not None or not self._rank.is_at_rest(transfer_id):
            return found
        # The plan may have arrived, and the transfer ended, after the first lookup.
        if (found := self._rank.find_transfer(transfer_id)) is None:
            self.raise_for_error()
            raise UsageError(
                f"rank {self.number} no longer has transfer {transfer_id}, which ended long ago or "
                "before a restart of the group",
                hint="ask for the layers in the step that uses them",
            )
        return found

    def check_process(self) -> None:
        """Check that this process is that of the rank.

        Raises:
            ClosedError: this process is a fork of the process of the rank.
        """
        self._thread.check_process()

    def arrived(self, transfer_ids: Sequence[int], deadline: Deadline) -> list[Arrived]:
        """Wait until plans have arrived, and return their transfers.

        Raises:
            TransferTimeout, UsageError, ClosedError: as for ``RankLayers.gpu_wait``.
        """
        if not self._await_group(deadline):
            raise TransferTimeout(
                f"rank {self.number}: the group has not begun within {deadline.timeout} s: there "
                "are no transfers",
                hint="open the engine, and start all its ranks",
            )
        future: EngineFuture[LayerView] = EngineFuture(self._thread)
        future.note_sent()
        cross(self._thread, begin, future, self._rank.layers, (transfer_ids, deadline.left()))
        try:
            future.wait()
        except TimeoutError:
            raise TransferTimeout(
                f"rank {self.number}: the plans of the transfers {list(transfer_ids)} have not all "
                f"arrived within {deadline.timeout} s",
                hint="pass the ids of lease.layers.transfer_ids of the engine of this group",
            ) from None
        found = [self.find(transfer_id) for transfer_id in transfer_ids]
        return [transfer for transfer in found if transfer is not None]

    def _await_group(self, deadline: Deadline) -> bool:
        """Wait until the group has begun; return False when it has not begun in time."""
        self._thread.check_process()
        self._thread.check_open()
        if not self._service.settled.is_set() and not self._thread.has_ended:
            self._thread.check_not_current("the wait for the group")
            if not self._service.settled.wait(deadline.left()):
                return False
        if not self.is_ready:
            raise self._thread.new_error()
        return True

    def __repr__(self) -> str:
        return f"<RankThread of {self._rank!r}>"


class _RankService:
    """A rank on the loop of a :class:`LoopThread`, from the connection to the end of its group.

    Attributes:
        settled: set when the group has begun, or the rank has ended.
        has_begun: True after the group has begun.
        failure: reason why the rank has ended; None while it runs, and after ``close``.
    """

    noun = "rank"
    facade = "RankThread"
    opening = "start"

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.settled = threading.Event()
        self.has_begun = False
        self.failure: AiokvError | None = None

    async def serve(self, opened: Future[None], closing: asyncio.Future[float | None]) -> None:
        entering = asyncio.ensure_future(self._rank.__aenter__())  # starts before any call
        opened.set_result(None)
        await asyncio.wait((entering, closing), return_when=asyncio.FIRST_COMPLETED)
        if not entering.done():
            entering.cancel()
            await asyncio.wait((entering,))
        if not entering.cancelled():
            failure = entering.exception()
            if failure is not None:
                self._note_failure(failure)
                return
            await self._serve_group(closing)
        await self._rank.aclose()

    async def _serve_group(self, closing: asyncio.Future[float | None]) -> None:
        self.has_begun = True
        self.settled.set()
        ended = asyncio.ensure_future(self._rank.closed())
        await asyncio.wait((ended, closing), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            self.failure = ClosedError(f"rank {self._rank.rank}: {ended.result()}")
        else:
            ended.cancel()

    def _note_failure(self, failure: BaseException) -> None:
        if isinstance(failure, AiokvError):
            self.failure = failure
        elif isinstance(failure, TimeoutError):
            self.failure = ControlTimeout(str(failure), ranks=(self._rank.rank,))
        else:
            raise failure

    async def abort(self) -> None:
        await self._rank.aclose()

    def note_end(self) -> None:
        """Release threads that wait for the group or for transfers."""
        self.settled.set()
        self._rank.give_up_waits()

    def new_closed_error(self) -> AiokvError:
        if self.failure is None:
            return ClosedError(f"rank {self._rank.rank} is closed")
        error = ClosedError(f"the rank has ended: {self.failure}")
        error.__cause__ = self.failure
        return error


def _checked_ids(transfer_ids: Iterable[int]) -> tuple[int, ...]:
    named = sequence("transfer_ids", transfer_ids)
    return tuple(integer("transfer_ids", transfer_id) for transfer_id in named)
