"""Leases of finished requests, until vLLM is about to reuse their blocks.

vLLM's prefix cache keeps the blocks of a finished request until it gives them to others, in the
order of its queue of free blocks. So a copy in host memory is of no use before. While a lease is
retired, its copies are evicted first, and blocks for which host memory has no room wait. With
stores, blocks wait only while their request runs: its end copies them, and the copies are evicted
first when the stores have saved them.

vLLM reuses the last block of a request first. When this block comes near the front of the queue,
host memory gets the blocks that it lacks, except those that newer requests share, and the lease
ends.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv.connectors.vllm.blocks import VllmBlocks
    from aiokv.sync import SyncLease

# A load of a hit gets all of its blocks at once, so that many have to be copied before.
_LOADS_AHEAD: Final = 1.5
_MOST_AHEAD: Final = 0.25  # of vLLM's blocks: host memory has copies of blocks that vLLM has, too


class Ending(NamedTuple):
    """Blocks of a retired lease that vLLM reuses soon.

    Attributes:
        lease: the lease.
        block_ids: vLLM's blocks of the lease.
        kept: leading blocks that newer requests share.
        valid: leading blocks that vLLM has given to no other request yet.
    """

    lease: SyncLease
    block_ids: list[int]
    kept: int
    valid: int


class _Retired(NamedTuple):
    lease: SyncLease
    ids: NDArray[np.int32]
    number: int


class RetiredLeases:
    """The retired leases, in the order in which vLLM reuses their blocks.

    Args:
        pool: vLLM's blocks.
        step_blocks: most blocks whose positions one step computes.
        host_blocks: capacity of host memory in blocks; None to retire no lease.
    """

    def __init__(self, pool: VllmBlocks, step_blocks: int, host_blocks: int | None) -> None:
        self._pool = pool
        self._step_blocks = self._most_given = step_blocks
        self._host_blocks = host_blocks
        self._saved = 0  # blocks that host memory was to get
        self._numbers = count(1)  # of retired leases and of allocations, in order
        self._retired: dict[int, _Retired] = {}  # by last block
        self._reused: list[_Retired] = []  # whose last block has another use
        self._given_at: NDArray[np.int64] | None = None  # by block: number of the last allocation
        self._retired_at: NDArray[np.int64] | None = None  # by block: newest retired lease
        self._given = 0  # blocks since the queue was looked at

    @property
    def is_active(self) -> bool:
        """True if leases may be retired: host memory was full, so that a choice matters."""
        capacity = self._host_blocks
        return capacity is not None and self._saved >= capacity and self._pool.has_order

    def note_saved(self, blocks: int) -> None:
        """Note computed blocks that host memory gets."""
        self._saved += blocks

    @property
    def _ahead(self) -> int:
        """Number of blocks at the front of vLLM's queue to have in host memory."""
        return int(min(_LOADS_AHEAD * self._most_given, _MOST_AHEAD * self._pool.size))

    @property
    def should_retire(self) -> bool:
        """False if vLLM reuses a block soon after the request has ended."""
        return self.is_active and self._pool.num_free >= self._ahead

    @property
    def keeps(self) -> bool:
        """False if vLLM may reuse a block in the step after the request has ended."""
        return self.is_active and self._pool.num_free >= min(self._step_blocks, self._ahead)

    def stop(self) -> None:
        """Retire no lease any more."""
        self._host_blocks = None

    def note_given(self, block_ids: Sequence[int], *, is_counted: bool = True) -> None:
        """Note blocks that vLLM has given to requests, before anything writes to them.

        Args:
            block_ids: the blocks.
            is_counted: False for blocks that are noted again with their step.
        """
        if not block_ids or not (self._retired or self._reused):
            return
        assert self._given_at is not None
        if is_counted:
            self._given += len(block_ids)
            self._most_given = max(self._most_given, len(block_ids))
        self._given_at[block_ids] = next(self._numbers)
        for block_id in self._retired.keys() & block_ids:
            self._reused.append(self._retired.pop(block_id))

    def add(self, lease: SyncLease, block_ids: list[int]) -> None:
        """Add a lease that is being retired.

        Args:
            lease: the lease.
            block_ids: vLLM's blocks of the lease, at least one, which are computed.
        """
        if self._given_at is None or self._retired_at is None:
            self._given_at = np.zeros(self._pool.size, np.int64)
            self._retired_at = np.zeros(self._pool.size, np.int64)
        retired = _Retired(lease, np.array(block_ids, np.int32), next(self._numbers))
        self._retired_at[retired.ids] = retired.number
        # The leases of earlier turns of a conversation end: this one has all of their blocks.
        for block_id in self._retired.keys() & block_ids:
            self._reused.append(self._retired.pop(block_id))
        self._retired[block_ids[-1]] = retired

    def remove(self, lease: SyncLease, block_ids: list[int]) -> None:
        """Remove a lease that was not retired."""
        last = block_ids[-1]
        if last in self._retired and self._retired[last].lease is lease:
            del self._retired[last]
        self._reused = [other for other in self._reused if other.lease is not lease]

    def take_ending(self) -> list[Ending]:
        """Remove and return the leases whose blocks vLLM reuses soon, in this order."""
        ending, self._reused = self._reused, []
        ahead = self._ahead if self._retired else 0
        if self._given >= ahead // 2:
            self._given = 0
            known = self._retired
            near = [block for block in self._pool.next_to_reuse(ahead) if block in known]
            ending += [known.pop(block) for block in near]
        return [self._ending(retired) for retired in ending]

    def take_all(self) -> list[SyncLease]:
        """Remove and return all leases."""
        leases = [other.lease for other in (*self._reused, *self._retired.values())]
        self._reused.clear()
        self._retired.clear()
        return leases

    def _ending(self, retired: _Retired) -> Ending:
        assert self._given_at is not None
        assert self._retired_at is not None
        block_ids = retired.ids.tolist()
        given = np.flatnonzero(self._given_at[retired.ids] > retired.number)
        valid = int(given[0]) if len(given) else len(block_ids)
        newer = self._retired_at[retired.ids[:valid]] > retired.number
        kept = valid if newer.all() else int(newer.argmin())
        # Requests that run share leading blocks, too.
        kept = bisect_left(
            range(valid), True, lo=kept, key=lambda i: not self._pool.is_used(block_ids[i])
        )
        return Ending(retired.lease, block_ids, kept, valid)
