"""Recovery: reports of the worker, failures of the device or a rank, and the restart of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.logs import Log
from aiokv.errors import ClosedError, RankLost, UsageError

if TYPE_CHECKING:
    from aiokv.base.plan import TransferReport
    from aiokv.engine.parts import Parts
    from aiokv.engine.peers import PeerTickets
    from aiokv.engine.steps import Steps

log = Log(__name__)


class Recovery:
    """Receives the reports of the worker, and breaks or restarts the engine."""

    def __init__(self, parts: Parts, steps: Steps, peer_tickets: PeerTickets) -> None:
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._transfers = parts.transfers
        self._observers = parts.observers
        self._steps = steps
        self._peer_tickets = peer_tickets

    def on_report(self, report: TransferReport) -> None:
        """Account for the end of a transfer."""
        failure = self._worker.failure if report.outcome == "failed" else None
        if failure is not None and self._lifetime.failure is None:
            self.fail(failure)  # the device failed, not only this transfer
        self._peer_tickets.note_report(report)
        self._dispatcher.apply(self._scheduler.complete(report))
        self._transfers.forget(report)
        self._transfers.announce(report)
        self._peer_tickets.after_report()

    def on_step(self, step: int, error: BaseException | None) -> None:
        """Account for the end of a step and of all earlier steps."""
        if error is not None:
            self.fail(error)
        else:
            self._steps.finish(step)

    def on_lost(self, lost: RankLost) -> None:
        """Take all blocks from the leases: the part of a lost rank is missing."""
        self.fail(lost)
        self._dispatcher.apply(self._scheduler.lose_blocks(str(lost)))
        self._peer_tickets.lose_all(str(lost))
        if self._observers.active:
            self._observers.end_grants("lost")

    def fail(self, error: BaseException) -> None:
        """Refuse all calls and fail all waiters: the device or a rank has failed."""
        self._lifetime.fail(error)
        self._dispatcher.apply(self._scheduler.fail(str(error)))
        self._peer_tickets.end_all(str(error))
        if isinstance(error, RankLost) and error.has_left:
            log.info("engine.rank_left", rank=error.rank)
        else:
            log.error("engine.broken", reason=str(error))

    def give_up(self, error: BaseException) -> None:
        """Refuse all calls: ``error`` has left the state of the engine unknown.

        Called inside a transition, the application of its effects, or a pass of the poller.
        """
        self._lifetime.give_up(error)
        self._dispatcher.stop()
        log.error("engine.broken", reason=repr(error))
        self._lifetime.loop.call_soon(self.end_waits)

    def end_waits(self) -> None:
        """End all waits with ``BrokenEngineError``, after ``give_up``. Idempotent."""
        self._worker.give_up()
        self._dispatcher.fail_waits(self._lifetime.new_error)
        self._transfers.fail_waits(self._lifetime.new_error)
        self._peer_tickets.lose_all(str(self._lifetime.new_error()))

    async def restart_ranks(self) -> None:
        """See ``CacheEngine.restart_ranks``."""
        self._lifetime.check_loop()
        if self._lifetime.is_closing:
            raise ClosedError(f"the engine {self._lifetime.phase.value}")
        worker = self._worker
        if not worker.facts.capabilities.restart or worker.failure is None:
            raise UsageError("restart_ranks: no rank is lost; call it after RankLost only")
        self._steps.close(None)
        await worker.restart()
        self._lifetime.repair()
        self._dispatcher.apply(self._scheduler.restart())
        self._peer_tickets.renew()
