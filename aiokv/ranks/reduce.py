"""One plan on all ranks, and the reduction of its reports: the minimum. No loop, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.base.plan import FETCH, SAVE
from aiokv.stores.base import Result
from aiokv.wire.frames import ProtocolError
from aiokv.worker.device.base import CopyError
from aiokv.worker.plan_table import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.base.plan import TransferPlan, TransferReport
    from aiokv.worker.layers import LayerDoneCounter

_ANNOUNCED: Final = -1  # replaces the set of ranks of an announced layer


class GroupTransfer:
    """A transfer that every rank executes.

    It is done when all ranks have done it; otherwise its blocks are valid up to the first one that
    failed on any rank.

    Attributes:
        plan: the same on all ranks.
        counter: announces a layer when all ranks have it.
        num_bytes: bytes that it moves on one rank.
        since: time from which its deadline counts.
        owing: ranks that have not reported its end. Its blocks belong to the transfer until this
            is empty (I3).
        results: result per block of a save; see :class:`TransferReport`.
        given_up: the reason for which waiters were released early; the transfer has failed,
            whatever the ranks report.
    """

    __slots__ = (
        "_all_ranks",
        "_arrived",
        "_bad",
        "_cancelled",
        "_done",
        "_left",
        "counter",
        "given_up",
        "num_bytes",
        "owing",
        "plan",
        "results",
        "since",
    )

    def __init__(
        self,
        plan: TransferPlan,
        counter: LayerDoneCounter,
        *,
        num_ranks: int,
        num_bytes: int,
        since: float,
    ) -> None:
        self.plan = plan
        self.counter = counter
        self.num_bytes = num_bytes
        self.since = since
        self.owing = set(range(num_ranks))
        self.given_up: CopyError | None = None
        self._all_ranks = (1 << num_ranks) - 1  # one bit per rank; so are the next two
        self._arrived = [0] * counter.num_layers
        self._done = 0
        self._left = counter.num_layers  # number of layers that were not announced
        self._bad: dict[int, tuple[int, str]] = {}  # by rank: first bad block, reason
        self._cancelled = False
        self.results = bytes(plan.num_blocks) if plan.route == SAVE else b""

    def arrive(self, rank: int, layers: Sequence[int]) -> None:
        """Note that these layers have arrived on a rank.

        Raises:
            ProtocolError: there is no such layer.
        """
        for layer in layers:
            if not 0 <= layer < len(self._arrived):
                raise ProtocolError(
                    f"rank {rank} reports layer {layer}; it is not in [0, {len(self._arrived)})"
                )
            self._arrived[layer] |= 1 << rank  # no effect on an announced one
        self._announce(layers)

    def _announce(self, layers: Sequence[int]) -> None:
        """Announce the layers that all ranks have; the last one waits for the end (I4)."""
        for layer in layers:
            if self._arrived[layer] | self._done == self._all_ranks and self._left > 1:
                self._arrived[layer] = _ANNOUNCED
                self._left -= 1
                self.counter.mark_layer_done(layer)

    def end(self, rank: int, report: TransferReport) -> bool:
        """Note the report of a rank; return True when it was the last one."""
        if report.outcome == "failed":
            self.fail(rank, report.first_bad_block, report.reason)
        elif report.outcome == "cancelled":
            self._cancelled = True
        else:
            self._done |= 1 << rank
        if self.plan.route == SAVE:
            self._reduce_results(report)
        self.owing.discard(rank)
        if self.owing:
            self._announce(range(len(self._arrived)))
        return not self.owing

    def _reduce_results(self, report: TransferReport) -> None:
        """Note the results of a save: a block is stored when all ranks have stored it."""
        results = report.results
        if len(results) != self.plan.num_blocks:
            results = bytes([Result.FAILED]) * self.plan.num_blocks
        self.results = bytes(map(max, self.results, results))

    def fail(self, rank: int, first_bad_block: int, reason: str) -> None:
        """Note that the blocks from ``first_bad_block`` on did not arrive on the rank."""
        if not 0 <= first_bad_block < self.plan.num_blocks:
            first_bad_block = 0  # the report names no block of the plan
        self._bad[rank] = (first_bad_block, reason)

    def release(self, rank: int, report: TransferReport) -> None:
        """Release the waiters of a fetch: a store of the rank has exceeded its deadline.

        The blocks stay the transfer's until all ranks have reported its end (I3); the leading
        blocks that all of them have are valid then.

        Raises:
            ProtocolError: the transfer is not a fetch.
        """
        if self.plan.route != FETCH:
            raise ProtocolError(
                f"rank {rank} reports that transfer {self.plan.transfer_id} is overdue; it must be "
                f"a fetch, and is a {self.plan.route}"
            )
        self.counter.give_up(
            CopyError(report.first_bad_block, f"rank {rank}: {report.reason}", rank)
        )

    @property
    def may_give_up(self) -> bool:
        """True for a fetch whose waiters are not released yet. A rank whose store is stuck is not
        lost: its loop runs, and the plan's blocks stay its own until the store has ended."""
        return self.plan.route == FETCH and not self.counter.given_up

    def give_up(self, failure: CopyError) -> None:
        """Fail all waiters, though bytes may still move. The first reason is kept."""
        if self.given_up is None:
            self.given_up = failure
            self.counter.give_up(failure)

    def reduced(self) -> CopyError | None:
        """Return the failure, or None; it does not depend on the order of the ranks.

        Announces the layers of a transfer that has not failed.
        """
        failure = self._failure()
        if failure is None:
            for layer in self.counter.pending_layers:
                self.counter.mark_layer_done(layer)
        return failure

    def _failure(self) -> CopyError | None:
        if self.given_up is not None:
            return self.given_up
        if self._bad:
            block, rank = min((block, rank) for rank, (block, _) in self._bad.items())
            reason = f"rank {rank}: {self._bad[rank][1]}"
            return CopyError(0 if self._cancelled else block, reason, rank)
        return CANCELLED if self._cancelled else None
