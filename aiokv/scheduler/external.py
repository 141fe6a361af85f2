"""ExternalBlocks: leases on device blocks that a server owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.types import as_block_ids, as_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv._native import Core
    from aiokv.base.types import TokenIds
    from aiokv.scheduler.effects import Grant, Outbox
    from aiokv.scheduler.granting import Granting
    from aiokv.scheduler.pending import PendingBlocks
    from aiokv.scheduler.releases import Releases


class ExternalBlocks:
    """Gives leases the blocks that the server names, and reports the ends of their transfers.

    Args:
        core: state of the leases.
        outbox: effects of the current transition.
        granting: submits the onloads.
        pending: leases that wait for blocks of other leases.
        releases: ends the leases that waited for their saves.
        records_checksums: True if the worker records the checksums of computed blocks.
    """

    def __init__(
        self,
        core: Core,
        outbox: Outbox,
        granting: Granting,
        pending: PendingBlocks,
        releases: Releases,
        *,
        records_checksums: bool,
    ) -> None:
        self._core = core
        self._outbox = outbox
        self._granting = granting
        self._pending = pending
        self._releases = releases
        self._records_checksums = records_checksums

    def assign(
        self,
        lease_id: int,
        block_ids: NDArray[np.int32],
        computed_tokens: int,
        priority: int,
        group_ids: NDArray[np.int32] | None,
    ) -> Grant:
        """Append blocks to the table of a lease, and submit the onloads that this begins."""
        self._core.assign(lease_id, block_ids, computed_tokens, group_ids)
        return self._granting.loading(lease_id, priority)

    def commit_blocks(
        self,
        lease_id: int,
        block_ids: TokenIds,
        tokens: TokenIds,
        group_ids: NDArray[np.int32] | None,
        step: int,
        kept_blocks: int,
    ) -> int:
        """Append computed blocks and tokens to a lease, and commit all its blocks."""
        commit = self._core.commit_blocks
        try:
            published = commit(lease_id, block_ids, tokens, group_ids, step, kept_blocks)  # type: ignore[arg-type]
        except TypeError:  # neither arrays of int32 nor lists of such integers
            ids = as_block_ids(block_ids)
            published = commit(lease_id, ids, as_tokens(tokens), group_ids, step, kept_blocks)
        self.settle()
        return published

    def retire(self, lease_id: int, returns: str) -> bool:
        """Drop the refs of a lease, and keep its blocks; return False if it has to be released."""
        retires = self._core.retire(lease_id, returns)
        self._pending.withdrawn(lease_id)
        return retires

    def settle(self) -> None:
        """Report the blocks that the last call of the core has queued, and the ended leases."""
        core = self._core
        if self._records_checksums and len(queued := core.take_queued_ids()):
            self._outbox.effects.computed.append(queued)
        if (settled := core.settle()) is None:
            return
        ended, advanced, idle = settled
        self._releases.forget(ended)
        if self._pending.waiters:
            for lease_id in advanced:
                self._pending.advanced(lease_id)
        self._outbox.effects.idle.extend(idle)
