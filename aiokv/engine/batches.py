"""The verbs on leases, a batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv import checks
from aiokv.engine.leasing import Leasing
from aiokv.errors import UsageError
from aiokv.lease import Lease
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from aiokv.types import TokenIds


class Batches(Leasing):
    """Match, commit and release many; their layers and block tables together."""

    def match_many(self, prompts: Iterable[TokenIds], *, salt: str = "") -> list[Lease]:
        """``match`` for each; a bad prompt raises after those before it were released."""
        prompts = checks.sequence("prompts", prompts)
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
            UsageError: not one number per lease; nothing changed.
        """
        self._check_loop()
        leases = checks.sequence("leases", leases)
        self._own_ids(leases)
        counts = [
            checks.integer("num_tokens", n) for n in checks.sequence("num_tokens", num_tokens)
        ]
        if len(leases) != len(counts):
            raise UsageError(
                f"num_tokens has {len(counts)} numbers for {len(leases)} leases; pass one per lease"
            )
        return sum(self._commit(lease, n, None) for lease, n in zip(leases, counts, strict=True))

    def release_many(self, leases: Iterable[Lease]) -> None:
        """``release`` for each."""
        self._check_thread()
        leases = checks.sequence("leases", leases)
        for lease in leases:
            if not isinstance(lease, Lease):
                raise UsageError(f"lease is {lease!r}; it must be a Lease")
        for lease in leases:
            lease.release()

    def layers(self, leases: Sequence[Lease]) -> LayerView:
        """One counter for all transfers that a batch waits for.

        It raises when blocks of a lease of the batch failed. Its errors have no position: call
        ``recompute_from`` of each lease.
        """
        self._check_loop()
        leases = checks.sequence("leases", leases)
        self._own_ids(leases)
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
            out: ``[>= B, >= M]`` C-contiguous int32 array, M being the longest table; all of it is
                written. None for a new ``[B, M]`` array.
            fill: the value behind each table, and in rows without a lease.
            group: a window group, as of ``Lease.window_table``; None for all other layers.

        Raises:
            UsageError: ``out`` is too small or of another kind, or no such group; nothing was
                written.
        """
        self._check_loop()
        ids = self._own_ids(leases)
        fill = checks.integer("fill", fill, minimum=-(2**31), maximum=checks.MAX_INT32)
        if group is not None:
            checks.text("group", group)
        group_index = self._manager.window_index(group)
        if out is None:
            width = max((self._blocks_for(self._core.num_tokens(i)) for i in ids), default=0)
            out = np.empty((len(ids), width), dtype=np.int32)
        try:
            self._core.block_tables(ids, out, fill, group_index)
        except TypeError:
            raise UsageError(
                f"out is {_described(out)}; it must be a writable C-contiguous int32 array of two "
                "dimensions on the cpu"
            ) from None
        return out


def _described(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return repr(array)
    order = "C" if array.flags.c_contiguous else "not C"
    access = "writable" if array.flags.writeable else "read-only"
    return f"{array.dtype} of shape {array.shape}, {order}-contiguous, {access}"
