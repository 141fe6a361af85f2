"""Looks: what is done for the running requests around a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiokv.connectors.fastdeploy.requests import prompt_length

if TYPE_CHECKING:
    from aiokv.connectors.fastdeploy.commits import Commits
    from aiokv.connectors.fastdeploy.holding import Holding
    from aiokv.connectors.fastdeploy.holdings import Holdings
    from aiokv.sync import Answer, Calls


class Look(NamedTuple):
    """One look at the running requests.

    Attributes:
        requests: those that had to be looked at.
        ahead: those among them for which blocks are taken ahead.
        extended: answer of the engine; None if no blocks are taken.
    """

    requests: list[Holding]
    ahead: list[Holding]
    extended: Answer[Any] | None


NO_LOOK: Final = Look([], [], None)


class Looks:
    """Looks at the requests of one scheduler: their commits, and blocks that they need soon.

    The caller holds the lock of :class:`RequestBlocks`.

    Args:
        holdings: requests with blocks.
        commits: records the commits.
    """

    def __init__(self, holdings: Holdings, commits: Commits) -> None:
        self._holdings = holdings
        self._commits = commits
        self._has_looked = False  # since the last batch ended
        self._batches = 0  # number of batches since the last look

    @property
    def are_due(self) -> bool:
        """True if the batch that has ended is to look at the requests."""
        is_time = self._batches >= self._holdings.sizes.look_schedules
        return is_time and bool(self._holdings.by_id)

    def end_batch(self) -> None:
        """Count a batch that has been scheduled."""
        self._has_looked = False
        self._batches += 1

    def record_once(self, calls: Calls) -> Look:
        """Look at the requests, unless this was done since the last batch ended."""
        if self._has_looked:
            return NO_LOOK
        self._has_looked = True
        return self.record(calls)

    def record(self, calls: Calls) -> Look:
        """Commit what is computed, and take the next blocks of requests that decode."""
        self._batches = 0
        sizes, requests = self._holdings.sizes, self._commits.record_due(calls)
        ahead = [holding for holding in requests if self._needs_blocks(holding)]
        leases = [holding.lease for holding in ahead if holding.lease is not None]
        num_tokens = sizes.decode_blocks * sizes.block_tokens
        return Look(requests, ahead, calls.extend(leases, num_tokens) if leases else None)

    def _needs_blocks(self, holding: Holding) -> bool:
        """Return True for a request that decodes and whose next blocks are due."""
        sizes = self._holdings.sizes
        if not sizes.decode_blocks or holding.spare or holding.usable_blocks is not None:
            return False
        outputs = len(holding.request.output_token_ids)
        total = prompt_length(holding.request) + outputs
        left = holding.given * sizes.block_tokens - total
        return outputs > holding.base_outputs and left <= sizes.decode_slots

    def note(self, look: Look) -> None:
        """Note the blocks that were taken, and when each request is to be looked at again."""
        if look.extended is not None and look.extended.error is None:
            for holding in look.ahead:
                self._holdings.read_table(holding, holding.given)
        for holding in look.requests:
            holding.note_looked(self._holdings.sizes)
