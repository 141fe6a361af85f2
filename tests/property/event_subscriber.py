"""Subscriber of the block events of a core: the digests that it knows of, by tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.scheduler.events import BlockEvents
from tests.models.prompt_digests import block_digests

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv._native import Core
    from aiokv.scheduler.events import BlockRun
    from tests.models.cached_blocks import Block

DIGEST_BYTES = 32
MAX_EVENT_BLOCKS = 1 << 20  # of a stream that is never full


class Subscriber:
    """View of the tiers that is made of events.

    Args:
        core: core of the cache.
        block_tokens: tokens per block.
        max_blocks: limit of the queue; small ones overflow.

    Attributes:
        stored: blocks that were reported as stored.
        removed: blocks that were reported as removed.
        in_stores: blocks that were reported as stored in the stores.
    """

    def __init__(self, core: Core, block_tokens: int, max_blocks: int) -> None:
        self.events = BlockEvents(core, max_blocks, with_stores=True)
        self.block_tokens = block_tokens
        self.tiers: dict[str, set[bytes]] = {"device": set(), "host": set()}
        self.in_stores = 0
        self.contexts: dict[bytes, str] = {}  # by digest
        self.stored = 0
        self.removed = 0

    def take(self, max_blocks: int) -> None:
        """Take one part of the events."""
        for run in self.events.take(max_blocks):
            self._apply(run)

    def take_all(self) -> None:
        """Take events until none is due."""
        while self.events.is_due:
            self.take(8)

    def _apply(self, run: BlockRun) -> None:
        digests = {
            run.digests[i : i + DIGEST_BYTES] for i in range(0, len(run.digests), DIGEST_BYTES)
        }
        if run.change == "cleared":
            self.tiers = {"device": set(), "host": set()}
        elif run.change == "removed":
            self.tiers[run.place] -= digests
            self.removed += len(digests)
        else:
            known = self.tiers["device"] | self.tiers["host"]
            assert run.parent is None or run.parent in known, "reported before its parent"
            assert len(run.tokens) == 4 * self.block_tokens * len(digests)
            assert len(run.items) in (0, len(digests))
            if run.place == "store":
                assert digests <= known
                self.in_stores += len(digests)
                return
            self.tiers[run.place] |= digests
            self.contexts |= dict.fromkeys(digests, run.context)
            self.stored += len(digests)

    def check(self, blocks: Iterable[Block]) -> None:
        """Compare the view with the blocks of the model."""
        expected: dict[str, set[bytes]] = {"device": set(), "host": set()}
        for block in blocks:
            context, tokens, items = block.key
            digest = block_digests(self.block_tokens, context, tokens, items)[-1]
            assert self.contexts.get(digest, context) == context
            for tier, valid in (("device", block.device_valid), ("host", block.host_valid)):
                if valid:
                    expected[tier].add(digest)
        assert self.tiers == expected
