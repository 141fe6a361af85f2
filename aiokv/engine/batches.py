"""The verbs on leases, a batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.engine.leasing import Leasing
from aiokv.errors import UsageError
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from aiokv.lease import Lease
    from aiokv.types import TokenIds


class Batches(Leasing):
    """Match, commit and release many; their layers and block tables together."""

    def match_many(self, prompts: Iterable[TokenIds], *, salt: str = "") -> list[Lease]:
        """``match`` for each; a bad prompt raises after those before it were released."""
        leases: list[Lease] = []
        try:
            leases.extend(self.match(tokens, salt=salt) for tokens in prompts)
        except BaseException:
            self.release_many(leases)
            raise
        return leases

    def commit_many(self, leases: Sequence[Lease], num_tokens: Sequence[int]) -> int:
        """``commit`` for each; returns the blocks that became shareable.

        Raises:
            LeaseError: of the first lease that refuses; those before it are committed.
            UsageError: not one number a lease; nothing changed.
        """
        if len(leases) != len(num_tokens):
            raise UsageError(f"{len(num_tokens)} numbers for {len(leases)} leases")
        for lease in leases:
            self._own_id(lease)
        return sum(
            self._commit(lease, n, None) for lease, n in zip(leases, num_tokens, strict=True)
        )

    def release_many(self, leases: Iterable[Lease]) -> None:
        """``release`` for each."""
        for lease in leases:
            lease.release()

    def layers(self, leases: Sequence[Lease]) -> LayerView:
        """One counter for all transfers that a batch waits for.

        It raises when blocks of a lease of the batch failed. Its errors carry no position: ask
        each lease's ``recompute_from``.
        """
        return LayerView.of_batch(lease.layers for lease in leases) or self._done

    def block_tables(
        self,
        leases: Sequence[Lease],
        out: NDArray[np.int32] | None = None,
        fill: int = -1,
        group: str | None = None,
    ) -> NDArray[np.int32]:
        """The block tables as rows, padded with ``fill``.

        Args:
            leases: B leases.
            out: ``[>= B, >= M]`` C-contiguous int32 to write into, M being the longest table; all
                of it is written. A new ``[B, M]`` array without it.
            fill: what stands behind each table, and in rows without a lease.
            group: a window group, as of ``Lease.window_table``; None for all other layers.

        Raises:
            UsageError: ``out`` is too small, or no such group; nothing was written.
        """
        ids = [self._own_id(lease) for lease in leases]
        if out is None:
            width = max((self._blocks_for(self._core.num_tokens(i)) for i in ids), default=0)
            out = np.empty((len(ids), width), dtype=np.int32)
        self._core.block_tables(ids, out, fill, self._manager.window_index(group))
        return out
