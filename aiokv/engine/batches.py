"""Batches: the methods of ``CacheEngine`` on many leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.base import checks
from aiokv.engine.computing import ComputeBatch
from aiokv.engine.lease import Lease
from aiokv.errors import UsageError, WouldBlock
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from aiokv.base.types import TokenIds
    from aiokv.engine.computing import Computing
    from aiokv.engine.expiries import Expiries
    from aiokv.engine.leases import Leases
    from aiokv.engine.parts import Parts


class Batches:
    """Calls a method of :class:`Leases` for each lease; see ``CacheEngine`` for the methods."""

    def __init__(
        self, parts: Parts, leases: Leases, computing: Computing, expiries: Expiries
    ) -> None:
        self._lifetime = parts.lifetime
        self._read = parts.scheduler.read
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._leases = leases
        self._computing = computing
        self._expiries = expiries

    def match(self, prompts: Iterable[TokenIds], *, salt: str) -> list[Lease]:
        """See ``CacheEngine.match_many``."""
        prompts = checks.sequence("prompts", prompts)
        leases: list[Lease] = []
        try:
            leases.extend(self._leases.match(tokens, salt=salt) for tokens in prompts)
        except BaseException:
            self.release(leases)
            raise
        return leases

    def commit(self, leases: Sequence[Lease], num_tokens: Sequence[int]) -> int:
        """See ``CacheEngine.commit_many``."""
        self._lifetime.check_loop()
        leases = checks.sequence("leases", leases)
        self._leases.lease_ids(leases)
        counts = [
            checks.integer("num_tokens", n) for n in checks.sequence("num_tokens", num_tokens)
        ]
        if len(leases) != len(counts):
            raise UsageError(
                f"commit_many: num_tokens has {len(counts)} numbers for {len(leases)} leases; pass "
                "one number per lease"
            )
        return sum(lease.commit(n) for lease, n in zip(leases, counts, strict=True))

    def extend(self, leases: Sequence[Lease], num_tokens: int) -> None:
        """See ``CacheEngine.extend``."""
        self._lifetime.check_loop()
        lease_ids = self._leases.lease_ids(leases)
        num_tokens = checks.integer("num_tokens", num_tokens)
        if not self._dispatcher.apply(self._scheduler.extend(lease_ids, num_tokens)):
            raise WouldBlock(
                f"extend: no room for {num_tokens} more positions of {len(lease_ids)} leases",
                hint="preempt a lease, or raise CacheConfig.reserve_blocks",
            )
        if self._expiries.timers:
            for lease_id in lease_ids:
                self._expiries.stop(lease_id)

    def release(self, leases: Iterable[Lease]) -> None:
        """See ``CacheEngine.release_many``."""
        if self._lifetime.is_usable:
            self._lifetime.check_thread()
        leases = checks.sequence("leases", leases)
        for lease in leases:
            if not isinstance(lease, Lease):
                raise UsageError(f"lease is {lease!r}; it must be a Lease")
        for lease in leases:
            lease.release()

    def computing(self, leases: Iterable[Lease]) -> ComputeBatch:
        """See ``CacheEngine.computing``."""
        self._lifetime.check_loop()
        named = checks.sequence("leases", leases)
        return ComputeBatch(self._computing, lambda: self._leases.lease_ids(named))

    def layers(self, leases: Sequence[Lease]) -> LayerView:
        """See ``CacheEngine.layers``."""
        self._lifetime.check_loop()
        leases = checks.sequence("leases", leases)
        self._leases.lease_ids(leases)
        return LayerView.of_batch(lease.record.layers for lease in leases) or self._leases.done

    def block_tables(
        self,
        leases: Sequence[Lease],
        out: NDArray[np.int32] | None,
        fill: int,
        group: str | None,
    ) -> NDArray[np.int32]:
        """See ``CacheEngine.block_tables``."""
        self._lifetime.check_loop()
        ids = self._leases.lease_ids(leases)
        fill = checks.integer("fill", fill, minimum=-(2**31), maximum=checks.MAX_INT32)
        if group is not None:
            checks.text("group", group)
        if out is None:
            read = self._read
            width = max((read.blocks_for(read.num_tokens(i)) for i in ids), default=0)
            out = np.empty((len(ids), width), dtype=np.int32)
        try:
            self._read.block_tables(ids, out, fill, group)
        except TypeError:
            raise UsageError(
                f"block_tables: out is {_described(out)}; it must be a writable C-contiguous int32 "
                "array of two dimensions in host memory"
            ) from None
        return out


def _described(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return repr(array)
    order = "C" if array.flags.c_contiguous else "not C"
    access = "writable" if array.flags.writeable else "read-only"
    return f"{array.dtype} of shape {array.shape}, {order}-contiguous, {access}"
