"""Model of the write policies: when blocks are saved, and which host copies are reclaimed.

The implementation chooses, within bounds, how many blocks it evicts before others are saved, and
which host copies it reclaims; the model checks these bounds when it adopts the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.models.cached_blocks import Block, CachedBlocks, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.models.cached_blocks import Policy


class Saving(CachedBlocks):
    def __init__(
        self,
        *,
        block_tokens: int,
        device_blocks: int,
        host_blocks: int,
        policy: Policy,
        threshold: int,
        low_watermark: int,
    ) -> None:
        super().__init__(
            block_tokens=block_tokens,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            policy=policy,
        )
        self.threshold = threshold
        self.low_watermark = low_watermark
        self.transfers: dict[int, Transfer] = {}
        self.backups: list[Block] = []

    # --- at use -------------------------------------------------------------------------------

    def _use_once_more(self, block: Block) -> None:
        """Count the computation of a block as its first use."""
        block.uses += 1
        block.given_up = False
        due = self.policy == "write_through" or (
            self.policy == "nth_use" and block.uses >= self.threshold
        )
        if due and block.host is None and not block.wants_backup:
            block.wants_backup = True
            self.backups.append(block)

    def adopt_early_copies(
        self, reclaimed: Sequence[Block], evicted: int, saved: Sequence[int]
    ) -> list[Block]:
        """Check the saves of the implementation at use.

        Args:
            reclaimed: blocks whose host copy was reclaimed for others.
            evicted: host blocks that were evicted for others.
            saved: device ids of what is saved now.

        Returns:
            The blocks behind those ids.
        """
        found = [b for b in self.backups if b.wants_backup and b.device_valid and b.host is None]
        for block in self.backups:
            block.wants_backup = False
        self.backups = []
        if len(found) > len(self.host_free):
            found = self._fit_early_copies(found, reclaimed, evicted)[: len(self.host_free)]
        else:
            assert not reclaimed
            assert not evicted
        assert [block.device for block in found] == list(saved)
        return found

    def _fit_early_copies(
        self, found: list[Block], reclaimed: Sequence[Block], evicted: int
    ) -> list[Block]:
        """Return the blocks for which the host has too little room, in the order of their saves."""
        assert not reclaimed, "early copies take free host blocks alone"
        assert not evicted
        return found

    # --- ahead of eviction --------------------------------------------------------------------

    def reclaimable_copies(self) -> list[Block]:
        """Return the blocks on the device whose host copy can be reclaimed."""
        return [b for b in self.blocks.values() if b.device_valid and b.host_valid and not b.pins]

    def _reclaim(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.host is not None
            self._free_host(block.host)
            block.host, block.host_valid = None, False

    def can_save(self, block: Block) -> bool:
        """Return False if a save would wait for the end of the open step."""
        assert block.device is not None
        return self.policy == "write_back" or self.after_step(block.device) <= self.closed_step

    def has_to_be_saved(self, block: Block) -> bool:
        """Return True if evicting the block would lose KV that the host could keep."""
        if self.policy == "none" or not block.unsaved or not self.can_save(block):
            return False
        host = [b for b in self.idle("host") if not self.blocked(b)]
        return bool(self.host_free or host or self.reclaimable_copies())

    def evict_as_seen(self, count: int, wanted: int, *, drops_unsaved: bool = False) -> bool:
        """Apply ``count`` evictions by the implementation; return True if that is ``wanted``."""
        for _ in range(count):
            victim = self.victim("device")
            assert victim is not None, "something was evicted that could not be"
            assert drops_unsaved or not self.has_to_be_saved(victim), f"{victim} was not saved"
            self.leave_device(victim)
        if count < wanted:
            victim = self.victim("device")
            assert victim is None or (self.policy != "none" and victim.unsaved)
        return count == wanted

    def ready_ahead(self) -> int:
        """Return the blocks that are free or could be evicted next without a new save."""
        ready = len(self.device_free)
        for block in self.in_line("device"):
            if block.unsaved:
                break
            ready += 1
        return ready

    def near_eviction(self, wanted: int) -> list[Block]:
        """Return the victims that make ``wanted`` blocks free, or the number of the watermark."""
        target = max(wanted, self.low_watermark) - len(self.device_free)
        return self.in_line("device")[: max(0, target)]

    def adopt_save_ahead(
        self, wanted: int, reclaimed: Sequence[Block], evicted: int, saved: Sequence[int]
    ) -> list[Block]:
        """Check the saves of the implementation that free ``wanted`` blocks.

        Args:
            wanted: 0 when no request waits.
            reclaimed: blocks whose host copy was reclaimed for others.
            evicted: host blocks that were evicted for others.
            saved: device ids of what is saved now.

        Returns:
            The blocks behind those ids.
        """
        if self.policy == "none":
            assert not any((reclaimed, evicted, saved))
            return []
        near = self.near_eviction(wanted)
        self.deferred_unsaved = [
            b
            for b in self.deferred_unsaved
            if b.attached and b.passed_over and b.device_valid and b.unsaved
        ]
        unsaved = [block for block in near if block.unsaved] + self.deferred_unsaved
        unsaved = [block for block in unsaved if self.can_save(block)]
        copies = self.reclaimable_copies()
        reclaimable = [b for b in copies if b not in near and not b.passed_over]
        assert set(reclaimed) <= set(reclaimable)
        assert (
            not evicted
            or len(reclaimed) == len(reclaimable)
            or len(copies) - len(reclaimed) <= self.low_watermark
        ), "host copies of device blocks are reclaimed first"
        needed = max(0, len(unsaved) - len(self.host_free))
        assert len(reclaimed) + evicted <= needed, "more host blocks were freed than needed"
        self._reclaim(reclaimed)
        for _ in range(evicted):
            assert self.evict_host()
        if len(reclaimed) + evicted < needed:
            assert self.victim("host") is None
            assert len(reclaimed) == len(reclaimable)
        room = min(len(unsaved), len(self.host_free))
        lost, kept = unsaved[: len(unsaved) - room], unsaved[len(unsaved) - room :]
        for block in lost if wanted else ():
            block.given_up = True
        assert [block.device for block in kept] == list(saved), "the oldest give way"
        return kept

    # --- transfers ----------------------------------------------------------------------------

    def start_offload(
        self, transfer_id: int, blocks: Sequence[Block], host_ids: Sequence[int]
    ) -> None:
        assert len(set(host_ids)) == len(host_ids)
        assert self.host_free.issuperset(host_ids)
        self.host_free -= set(host_ids)
        for block, host_id in zip(blocks, host_ids, strict=True):
            block.host = host_id
            block.pins += 1
        after = max(self.after_step(b.device) for b in blocks if b.device is not None)
        self.transfers[transfer_id] = Transfer("offload", list(blocks), after)

    def _end_offload(self, transfer: Transfer, good: int) -> None:
        for index in reversed(range(len(transfer.blocks))):
            block = transfer.blocks[index]
            assert block.host is not None
            if index < good:
                block.host_valid = True
            else:
                self._free_host(block.host)
                block.host = None
                block.given_up = True
            if block.attached:
                self._unblock(block)
            else:
                self._free_if_unowned(block)
