"""Worker: what the engine requires of the part that moves the bytes.

A :class:`~aiokv.worker.controller.CacheController` in this process, or a
:class:`~aiokv.ranks.group.RankGroup` of one controller a rank, each in a process of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv.plan import Plan
    from aiokv.types import Tier
    from aiokv.worker.device.base import Event
    from aiokv.worker.lanes import WorkerStatistics
    from aiokv.worker.layers import LayerDoneCounter
    from aiokv.worker.regions import Regions

Cancelled = Literal["at once", "asked", "too late"]


class Worker(Protocol):
    """Executes plans; never decides. Used on one loop.

    It reports through two callbacks of the loop: ``on_report(report)`` once a plan, never from
    inside a call, and ``on_step(step, error)`` when a closed step, and all before it, are over.
    """

    @property
    def num_layers(self) -> int:
        """Of the model."""

    @property
    def device_blocks(self) -> int:
        """What the tensors hold; very many when there are none."""

    @property
    def computes_in_stream(self) -> bool:
        """What is committed may still have to be computed: transfers wait for its step."""

    @property
    def failure(self) -> BaseException | None:
        """The error after which no transfer can succeed."""

    @property
    def silent_ranks(self) -> list[int]:
        """Those that have not answered the newest ``sleep`` or ``wake_up``."""

    def submit(self, plan: Plan) -> LayerDoneCounter:
        """Take a plan; its blocks are the transfer's until its report.

        Raises:
            UsageError: no blocks, unequal lists, ids out of range, a destination named twice, or
                a transfer id that is in use. Nothing changed.
            ClosedError: the worker is closing.
        """

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan that no device has yet.

        Returns:
            ``"at once"``: it is cancelled, its waiters get their error, and no report follows;
            ``"asked"``: other processes have been asked, and the report says how it ended;
            ``"too late"``: the device moves it, or it has ended.
        """

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Submit a plan that still waits as if it had been given with this priority.

        Without effect on a plan that a device has, on unknown ids, and when ``priority`` is not
        lower than the plan's.
        """

    def check_event(self, event: Event | None) -> None:
        """Raise unless ``close_step`` can take the event; None always can. Changes nothing.

        Raises:
            UsageError: ``event`` is no event, one of another device, or was never recorded; or
                the worker takes no events.
        """

    def close_step(self, step: int, event: Event | None) -> None:
        """Steps up to ``step`` are submitted; plans after them start when ``event`` is done.

        Raises:
            UsageError: the step was closed before, or ``check_event`` refuses the event. The step
                stays open; nothing changed.
        """

    def clone(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], stream: Any = None
    ) -> None:
        """Copy blocks within the device; as ``clone_blocks``."""

    def clone_slots(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], stream: Any = None
    ) -> None:
        """Copy slots of recurrent state within the device; as ``clone_slots``."""

    async def drain(self) -> None:
        """Wait until every plan submitted so far, and since, has been reported.

        Cancellation: stops waiting; the transfers go on.
        """

    async def settle(self) -> None:
        """As drain(), but only for the plans submitted so far."""

    async def sleep(self, tiers: frozenset[Tier]) -> None:
        """Free the memory of these tiers; nothing is under way. Idempotent.

        Cancellation: call it again, or ``wake_up``.
        """

    async def wake_up(self, tiers: frozenset[Tier], regions: Regions | None = None) -> None:
        """Take memory for these tiers again; those that are awake stay as they are.

        Args:
            tiers: to be woken.
            regions: the device tier's new tensors, where they live in this process.

        Raises:
            LayoutError: the tensors do not hold what the old ones held. Still asleep.
            ConfigError: no memory for the host tier. Still asleep.

        Cancellation: call it again, or ``sleep``.
        """

    async def aclose(self) -> None:
        """Cancel what waits, wait for what moves, free the memory. Idempotent."""

    def statistics(self) -> WorkerStatistics:
        """Counts since it was made, and what it has to do now."""
