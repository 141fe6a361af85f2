"""Effects: all follow-ups of a scheduler transition, as data.

A transition returns ``(value, effects)``. Only the engine's dispatcher applies effects, so callers
of transitions need not know the follow-ups.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import TransferPlan
    from aiokv.errors import AiokvError


class Grant(NamedTuple):
    """Grant of a lease, which waits for the layers of the transfers ``onloads``."""

    lease_id: int
    onloads: tuple[int, ...]


class Fork(NamedTuple):
    """Second lease on the positions of another lease, and the blocks to copy on the device.

    Attributes:
        lease_id: id of the new lease.
        source_blocks: ``[N]`` int32 ids of the blocks to copy.
        target_blocks: ``[N]`` int32 ids of their copies.
        state_slots: (source, target) rows of the recurrent state; None for models without it.
    """

    lease_id: int
    source_blocks: NDArray[np.int32]
    target_blocks: NDArray[np.int32]
    state_slots: tuple[int, int] | None


class Moved(NamedTuple):
    """End of a transfer between a lease and a peer.

    Attributes:
        transfer_id: the transfer.
        lease_id: its lease, which has a handle.
        blocks: number of leading blocks of the plan that have moved: they were received into
            the lease, or acknowledged by the receiver.
    """

    transfer_id: int
    lease_id: int
    blocks: int


class Effects:
    """Follow-ups of transitions; the dispatcher applies the fields in the order listed here.

    Attributes:
        computed: blocks whose checksums the worker records when the open step has finished.
        submit: plans for the worker.
        urge: transfers in flight that become more urgent, and the new priority of each.
        granted: leases that waited for capacity and are granted now.
        turns: leases that are first in line and must call ``take_turn``.
        refused: leases whose wait for capacity has ended, and the error of each.
        resumed: leases that must call ``wait_pending`` again, and the error of each, or None.
        unpinned: pins that have ended, and the reason of each.
        moved: ends of transfers from and to peers; none for a lease that was released or preempted.
        idle: leases, also released ones, whose device blocks no transfer uses any more; only with
            ``CacheConfig.external_device``.
        cancel: transfers that no lease needs; the worker cancels them if they have not begun.
        collect: True if ``collect_backups`` and, with stores, ``store_saver.collect`` must be
            called at the end of this pass of the loop.
        advance: True if ``advance`` must be called in a later pass of the loop.
        has_entries: False if there is nothing but ``collect`` and ``advance``.
    """

    __slots__ = (
        "advance",
        "cancel",
        "collect",
        "computed",
        "granted",
        "has_entries",
        "idle",
        "moved",
        "refused",
        "resumed",
        "submit",
        "turns",
        "unpinned",
        "urge",
    )

    def __init__(self) -> None:
        self.submit: deque[TransferPlan] = deque()
        self.urge: deque[tuple[int, int]] = deque()
        self.granted: deque[Grant] = deque()
        self.turns: deque[int] = deque()
        self.refused: deque[tuple[int, Exception]] = deque()
        self.resumed: deque[tuple[int, AiokvError | None]] = deque()
        self.unpinned: deque[tuple[int, str]] = deque()
        self.moved: deque[Moved] = deque()
        self.computed: deque[NDArray[np.int32]] = deque()
        self.idle: deque[int] = deque()
        self.cancel: deque[int] = deque()
        self.collect = False
        self.advance = False
        self.has_entries = False

    def __bool__(self) -> bool:
        return self.has_entries or self.collect or self.advance

    def clear(self) -> None:
        """Remove all entries without applying them."""
        for name in Effects.__slots__:
            entries = getattr(self, name)
            if isinstance(entries, deque):
                entries.clear()
            else:
                setattr(self, name, False)


Done: TypeAlias = tuple[None, Effects]
"""Result of a transition that returns no value."""

NO_EFFECTS: Final = Effects()
"""Effects of all transitions without follow-ups; never changed."""


class Outbox:
    """Collects the effects of the current transition in one reused object.

    Attributes:
        pending: effects that the dispatcher has not applied; ``NO_EFFECTS`` for none.
    """

    __slots__ = ("_effects", "pending")

    def __init__(self) -> None:
        self._effects = Effects()
        self.pending = NO_EFFECTS

    @property
    def effects(self) -> Effects:
        """Effects to which the current transition adds an entry."""
        self.pending = self._effects
        self._effects.has_entries = True
        return self._effects

    def request_collect(self) -> None:
        """Let backups and saves be collected at the end of this pass of the loop."""
        self.pending = self._effects
        self._effects.collect = True

    def request_advance(self, requested: bool) -> None:
        """Let ``advance`` be called in a later pass of the loop, or withdraw that."""
        self.pending = self._effects
        self._effects.advance = requested

    def clear(self) -> None:
        """Note that the dispatcher has applied and removed all entries."""
        self.pending = NO_EFFECTS
