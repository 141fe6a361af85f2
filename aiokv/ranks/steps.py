"""GroupSteps: steps of the model, which the ranks of a group close with events of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.errors import UsageError
from aiokv.worker.steps import WorkerStepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import TransferPlan
    from aiokv.ranks.rank_state import RankState
    from aiokv.worker.device.base import Event


class GroupSteps:
    """Steps of a group; see :class:`aiokv.worker.base.Steps`. The tensors are not in this process.

    Args:
        ranks: state of each rank.
        is_lost: returns True while a rank is lost: no step finishes.

    Attributes:
        clock: numbers of the steps; a step has finished when it has finished on all ranks.
        on_step: see ``Worker.open``.
    """

    def __init__(self, ranks: Sequence[RankState], is_lost: Callable[[], bool]) -> None:
        self.clock = WorkerStepClock()
        self.on_step: Callable[[int, BaseException | None], None] = lambda step, error: None
        self._is_lost = is_lost
        self._ranks = ranks

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

    def close(self, step: int, event: Event | None) -> None:
        """Close all steps up to ``step``; they finish when every rank has reported them.

        Raises:
            UsageError: an event, which belongs to one rank; or the step was closed before.
        """
        self.check_event(event)
        self.clock.close(step)
        self.reduce()

    def reduce(self) -> None:
        """Report the steps that have finished on every rank."""
        finished = min(self.finished_on_ranks, self.clock.closed)
        if finished > self.clock.finished and not self._is_lost():
            self.clock.finish(finished)
            self.on_step(finished, None)

    @property
    def finished_on_ranks(self) -> int:
        """Newest step that has finished on all ranks; the manager may not have closed it yet."""
        return min(state.finished_step for state in self._ranks)

    def clone(self, plan: TransferPlan, stream: Any = None) -> None:
        """Raise if there is anything to copy: the runners copy within their devices.

        Raises:
            UsageError: the plan has blocks.
        """
        if plan.num_blocks:
            raise UsageError(
                f"clone: ranks do not copy blocks within their devices ({plan.num_blocks} blocks)",
                hint="fork at the end of a block, or copy the partial block in the model's runner",
            )

    def record_checksums(self, block_ids: NDArray[np.int32], step: int) -> None:
        """Raise: the tensors are not in this process.

        Raises:
            UsageError: always.
        """
        raise UsageError("record_checksums: ranks do not verify checksums")
