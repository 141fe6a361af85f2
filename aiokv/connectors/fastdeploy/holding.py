"""Holding: the blocks of one request of FastDeploy's scheduler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from aiokv import Hit
from aiokv.connectors.fastdeploy.requests import prompt_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv import Item
    from aiokv.connectors.fastdeploy.requests import Request
    from aiokv.connectors.fastdeploy.settings import Sizes
    from aiokv.sync import Calls, EngineFuture, SyncLease


class Holding:
    """Blocks that one request holds in the cache.

    ::

        table:  | matched | given to the scheduler | spare |
                                          given ──►|

    Attributes:
        request: the scheduler's object.
        lease: the lease; None before the first block of a request without a hit.
        items: multimodal items of the request.
        hit: cached prefix by tier, as it was granted.
        table: ids of all blocks of the lease.
        given: blocks at the beginning of ``table`` that the scheduler has in its block table.
        named_tokens: positions at the beginning whose tokens the lease knows.
        prefill_tokens: prompt and generated tokens at the time of the match.
        base_outputs: generated tokens among them.
        scheduled_tokens: positions of batches that have been handed to the workers.
        committed_tokens: positions that the lease has committed.
        usable_blocks: blocks at the beginning that are at the same place in the scheduler's block
            table; None while all are.
        last_batch: number of the last batch that computes the prompt; 0 before it, and when the
            first token has arrived.
        is_scheduled: True when a batch has been scheduled that uses the blocks.
        next_outputs: number of generated tokens from which on a look commits or takes blocks; 0
            when each look has to.
        shares_blocks: False when no other request may find the blocks.
        has_failed: True when an onload of the request has failed: its KV is wrong.
        awaited_since: with the role "decode", ``time.monotonic()`` of the first allocation; 0.0
            when the first token of the prefill server has arrived, behind all KV of the prompt.
        kept_until: ``time.monotonic()`` until which an ended request keeps its blocks.
        arrival: end of the onload that the request waits for in the scheduler's queue.
    """

    __slots__ = (
        "arrival",
        "awaited_since",
        "base_outputs",
        "committed_tokens",
        "given",
        "has_failed",
        "hit",
        "is_scheduled",
        "items",
        "kept_until",
        "last_batch",
        "lease",
        "named_tokens",
        "next_outputs",
        "prefill_tokens",
        "request",
        "scheduled_tokens",
        "shares_blocks",
        "table",
        "usable_blocks",
    )

    def __init__(self, request: Request, prefill_tokens: int, items: Sequence[Item] | None) -> None:
        self.request = request
        self.items = () if items is None else items
        self.shares_blocks = items is not None
        self.has_failed = False
        self.arrival: EngineFuture[None] | None = None
        self.lease: SyncLease | None = None
        self.hit = Hit(0, 0)
        self.table: list[int] = []
        self.given = 0
        self.named_tokens = self.prefill_tokens = prefill_tokens
        self.base_outputs = prefill_tokens - prompt_length(request)
        self.scheduled_tokens = 0
        self.committed_tokens = 0
        self.usable_blocks: int | None = None
        self.last_batch = 0
        self.is_scheduled = False
        self.next_outputs = 0
        self.awaited_since = 0.0
        self.kept_until = 0.0

    @property
    def block_ids(self) -> list[int]:
        """Ids of the blocks that the scheduler has in its block table."""
        return self.table[: self.given]

    @property
    def spare(self) -> int:
        """Number of blocks that the scheduler has not taken yet."""
        return len(self.table) - self.given

    @property
    def has_arrived(self) -> bool:
        """True if no onload of the request is in flight. Does not cross."""
        return self.lease is None or not self.table or self.lease.layers.is_done

    @property
    def queued_tokens(self) -> int:
        """Number of positions of the prompt that no batch has computed yet."""
        return max(self.prefill_tokens - self.scheduled_tokens, 0)

    @property
    def batch_end(self) -> int:
        """End of the positions of the prompt that the batch being scheduled, or an earlier one,
        computes."""
        return min(self.request.num_computed_tokens, self.prefill_tokens)

    @property
    def is_prefilling(self) -> bool:
        """True until the prompt is scheduled and its first token has arrived."""
        return self.scheduled_tokens < self.prefill_tokens or self.last_batch > 0

    def record_match(self, calls: Calls, tokens: NDArray[np.int32], *, read: bool) -> SyncLease:
        """Begin a lease. ``read``: False for a lease that finds no cached blocks."""
        shares = self.shares_blocks
        return calls.match(
            tokens,
            items=self.items if shares else (),
            owner=self.request.request_id,
            read=read and shares,
            write=shares,
        )

    def record_release(self, calls: Calls) -> None:
        """Release the lease."""
        if self.lease is not None:
            calls.release(self.lease)

    def note_looked(self, sizes: Sizes) -> None:
        """Set ``next_outputs``, after the end of a ``schedule()`` has looked at the request."""
        self.next_outputs = 0
        if self.is_prefilling:
            return
        size, prompt = sizes.block_tokens, prompt_length(self.request)
        found = sys.maxsize
        if self.shares_blocks:
            usable = len(self.table) if self.usable_blocks is None else self.usable_blocks
            limit = usable * size
            if not sizes.shares_outputs:
                limit = min(limit, self.prefill_tokens)
            end = self.committed_tokens + size
            if end <= limit:
                found = 0 if end <= self.scheduled_tokens else end + sizes.tail_tokens - prompt
        if sizes.decode_blocks and not self.spare and self.usable_blocks is None:
            found = min(found, self.given * size - sizes.decode_slots - prompt)
        self.next_outputs = found

    def check_alignment(self) -> None:
        """Find out if the scheduler uses its blocks in another order than the lease.

        It does when it puts blocks of one allocation into a second table (``extend_block_tables``).
        The blocks behind that place are never shared.
        """
        in_use = len(self.request.block_tables)
        if in_use < self.given and (self.usable_blocks is None or in_use < self.usable_blocks):
            self.usable_blocks = in_use

    def computed_tokens(self, tail_tokens: int) -> int:
        """Return the number of leading positions whose KV later batches find computed.

        These are the positions of batches that the workers got before, and those before a generated
        token that has arrived.
        """
        outputs = len(self.request.output_token_ids)
        computed = self.scheduled_tokens
        if outputs > self.base_outputs:
            computed = max(computed, prompt_length(self.request) + outputs - tail_tokens)
        return computed
