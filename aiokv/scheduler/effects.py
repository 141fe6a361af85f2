"""Effects: everything that a transition of the scheduler leaves for others to do, as data.

A transition returns ``(value, effects)``. The engine's dispatcher applies the effects; no other
code does, so no caller of a transition has a list of follow-ups to remember.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv.errors import AiokvError
    from aiokv.plan import Priority, TransferPlan


class Grant(NamedTuple):
    """A lease has its blocks; its layers are those of ``onloads``."""

    lease_id: int
    onloads: tuple[int, ...]


class Effects:
    """What is left to do, in the order in which it is to be done.

    The dispatcher removes each entry after it has applied the entry. So an exception such as
    ``KeyboardInterrupt`` between two entries loses none: the next transition returns the rest.

    Attributes:
        computed: blocks whose checksums are to be recorded when the open step has finished.
        submit: plans for the worker.
        urge: transfers in flight that become more urgent, with their new priority.
        granted: leases that waited for capacity and have it now.
        turns: leases that are first in line, and take their blocks with ``take_turn``.
        refused: leases whose wait for capacity has ended, and the error of each.
        resumed: leases that waited for pending blocks and look again; the error, or None.
        unpinned: pins that ended, and why.
        cancel: transfers that no lease needs; the worker cancels them if they have not begun.
        collect: ``collect_backups`` is to be called at the end of this pass of the loop.
        advance: ``advance`` is to be called in a later pass of the loop.
    """

    __slots__ = (
        "advance",
        "cancel",
        "collect",
        "computed",
        "granted",
        "refused",
        "resumed",
        "submit",
        "turns",
        "unpinned",
        "urge",
    )

    def __init__(self) -> None:
        self.submit: deque[TransferPlan] = deque()
        self.urge: deque[tuple[int, Priority]] = deque()
        self.granted: deque[Grant] = deque()
        self.turns: deque[int] = deque()
        self.refused: deque[tuple[int, Exception]] = deque()
        self.resumed: deque[tuple[int, AiokvError | None]] = deque()
        self.unpinned: deque[tuple[int, str]] = deque()
        self.computed: deque[NDArray[np.int32]] = deque()
        self.cancel: deque[int] = deque()
        self.collect = False
        self.advance = False

    def __bool__(self) -> bool:
        return bool(
            self.computed
            or self.submit
            or self.urge
            or self.granted
            or self.turns
            or self.refused
            or self.resumed
            or self.unpinned
            or self.cancel
            or self.collect
            or self.advance
        )

    def clear(self) -> None:
        """Remove all entries, as if they had been applied."""
        for name in Effects.__slots__:
            entries = getattr(self, name)
            if isinstance(entries, deque):
                entries.clear()
            else:
                setattr(self, name, False)


NO_EFFECTS: Final = Effects()
"""Shared by all transitions that leave nothing to do; never changed."""


class Outbox:
    """Collects the effects of the transition under way, in one object that is used again.

    Attributes:
        pending: the effects that the dispatcher has not applied yet; ``NO_EFFECTS`` for none.
    """

    __slots__ = ("_effects", "pending")

    def __init__(self) -> None:
        self._effects = Effects()
        self.pending = NO_EFFECTS

    @property
    def effects(self) -> Effects:
        """The effects to add to."""
        self.pending = self._effects
        return self._effects

    def clear(self) -> None:
        """Note that the dispatcher has applied, and removed, all entries."""
        self.pending = NO_EFFECTS
