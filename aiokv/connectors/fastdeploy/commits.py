"""Commits: the computed blocks of running requests that become shareable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.connectors.fastdeploy.requests import log_unshared, prompt_length
from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from aiokv.connectors.fastdeploy.handovers import Handovers
    from aiokv.connectors.fastdeploy.holding import Holding
    from aiokv.connectors.fastdeploy.holdings import Holdings
    from aiokv.connectors.fastdeploy.room import Room
    from aiokv.connectors.fastdeploy.steps import Steps
    from aiokv.sync import Calls, SyncLease


class Commits:
    """Commits of one scheduler. The caller holds the lock of :class:`RequestBlocks`.

    Args:
        holdings: requests with blocks.
        handovers: prompts that move between servers; the last block of one is sent when committed.
        steps: is told of commits that belong to the next step.
        room: forgets the room that was counted before a commit.
    """

    def __init__(self, holdings: Holdings, handovers: Handovers, steps: Steps, room: Room) -> None:
        self._holdings = holdings
        self._handovers = handovers
        self._steps = steps
        self._room = room
        self._batched: list[Holding] = []

    def add_to_batch(self, holding: Holding) -> None:
        """Note a request with blocks for the batch that is being scheduled."""
        if self._holdings.sizes.shares_in_batch:
            self._batched.append(holding)

    def end_batch(self) -> None:
        """Forget the requests of the batch."""
        self._batched.clear()

    def record_batch(self, calls: Calls) -> None:
        """Commit the blocks of the prompts that the batch being scheduled computes."""
        for holding in self._batched:
            if self._holdings.by_id.get(holding.request.request_id) is holding:
                self.record(calls, holding, in_batch=True)

    def record_due(self, calls: Calls) -> list[Holding]:
        """Commit the computed blocks of all requests; return those that had to be looked at."""
        due = [
            holding
            for holding in self._holdings.by_id.values()
            if len(holding.request.output_token_ids) >= holding.next_outputs
        ]
        for holding in due:
            self.record(calls, holding)
        return due

    def record(self, calls: Calls, holding: Holding, *, in_batch: bool = False) -> None:
        """Commit the full blocks that are computed and not committed yet.

        Args:
            calls: gets the calls.
            holding: the request.
            in_batch: True for blocks that the batch being scheduled computes.
        """
        lease, sizes = holding.lease, self._holdings.sizes
        is_sent = self._handovers.is_sent(holding.request.request_id)
        if lease is None or not holding.table or not (holding.shares_blocks or is_sent):
            return
        holding.check_alignment()
        usable = len(holding.table) if holding.usable_blocks is None else holding.usable_blocks
        computed = holding.batch_end if in_batch else holding.computed_tokens(sizes.tail_tokens)
        computed = min(computed, usable * sizes.block_tokens)
        if not sizes.shares_outputs:
            computed = min(computed, holding.prefill_tokens)
        if not (is_sent and computed == holding.prefill_tokens):
            computed -= computed % sizes.block_tokens
        if computed <= holding.committed_tokens:
            return
        parked = self._holdings.parked
        if parked and holding.committed_tokens <= parked.hit.total < computed:
            self._holdings.record_parked(calls)  # a match may find more
        if computed > holding.named_tokens:
            outputs = holding.request.output_token_ids
            first = holding.named_tokens - prompt_length(holding.request)
            tokens = outputs[first : first + computed - holding.named_tokens]
            holding.named_tokens = computed
            calls.add(_append_and_commit, holding, lease, tokens, computed)
        elif in_batch:
            calls.commit(lease, computed, in_next_step=True)
            self._steps.is_held = True
        else:
            calls.commit(lease, computed)
        holding.committed_tokens = computed
        self._room.certain = 0  # unknown: the blocks before a committed one cannot be evicted


def _append_and_commit(
    holding: Holding, lease: SyncLease, tokens: list[int], computed: int
) -> None:
    """Name generated tokens, and commit. If they are refused, the request shares no further block.

    Tokens that come later would be named at the positions of the refused ones. On the loop.
    """
    try:
        lease.inner.append(tokens)
    except AiokvError as error:
        log_unshared(holding.request, error)
        holding.shares_blocks = False
    lease.inner.commit(computed)
