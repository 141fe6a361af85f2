"""LandingRing: which landing slot may be written by which connection. Pure; no I/O, no memory.

::

            grant              land                landed             free
    free ─────────► granted ─────────► landing ─────────► landed ─────────► free
     ▲                │  │                │
     │   give_back    │  │ revoke         │ revoke
     ├────────────────┘  ▼                ▼
     │ confirm        quarantined (one-sided transports only; otherwise free at once)
     └──────────────────┘

Each grant raises the generation of the slot. A fragment names slot and generation: one that arrives
after its credit ended is stale, and is discarded (I11).

Conservation: free + granted + landing + landed + quarantined == num_slots.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from aiokv.base.checks import MAX_INT32, integer
from aiokv.errors import InternalError
from aiokv.peers.messages import SlotCredit

if TYPE_CHECKING:
    from collections.abc import Hashable

C = TypeVar("C", bound="Hashable")  # a connection


class SlotState(IntEnum):
    """State of a landing slot."""

    FREE = 0
    GRANTED = 1
    LANDING = 2
    LANDED = 3
    QUARANTINED = 4


class RingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Slots by state now, and counters since the ring was made.

    Attributes:
        free: slots without an owner.
        granted: slots that a connection has a credit for.
        landing: slots that a fragment is being read into.
        landed: slots whose fragment is being verified or copied.
        quarantined: slots that a lost connection may still write.
        wanted: credits that connections wait for.
        credits: credits given.
        returned: credits that came back without a fragment.
        stale: fragments whose credit had ended, or that never had one.
    """

    free: int
    granted: int
    landing: int
    landed: int
    quarantined: int
    wanted: int
    credits: int
    returned: int
    stale: int


class _Slot(Generic[C]):
    __slots__ = ("generation", "owner", "state")

    def __init__(self) -> None:
        self.state = SlotState.FREE
        self.generation = 0
        self.owner: C | None = None  # connection with the credit; None if FREE or LANDED


class _Demand:
    """Numbers of slots that a connection requests and has."""

    __slots__ = ("held", "wanted")

    def __init__(self) -> None:
        self.wanted = 0
        self.held = 0  # number of slots that are GRANTED or LANDING


class LandingRing(Generic[C]):
    """Credits of all connections for the landing slots of one rank.

    A connection is any hashable object. The ring gives a free slot to the connection that has the
    fewest credits of those that want one; among equals, to the one that waits longest. So a
    connection that stalls with its credits does not get more, and each other one gets some.

    Args:
        num_slots: number of slots, at least 1.

    Raises:
        UsageError: ``num_slots`` is out of range.

    Attributes:
        num_slots: number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = integer("num_slots", num_slots, minimum=1, maximum=MAX_INT32)
        self._slots: list[_Slot[C]] = [_Slot() for _ in range(self.num_slots)]
        # The slot that was freed first is granted first, so that a late write into a freed slot is
        # most likely detected as stale.
        self._free = deque(range(self.num_slots))
        # Connections with credits or requests; the longest waiting first.
        self._demands: dict[C, _Demand] = {}
        self._counts = [0] * len(SlotState)
        self._counts[SlotState.FREE] = self.num_slots
        self._credits = 0
        self._returned = 0
        self._stale = 0

    # --- credits ----------------------------------------------------------------------------------

    def want(self, connection: C, count: int) -> None:
        """Note that a connection can use ``count`` more credits; ``grant`` gives them."""
        self._demand(connection).wanted += count

    def unwant(self, connection: C, count: int) -> int:
        """Forget up to ``count`` wishes of a connection; return how many there were."""
        demand = self._demands.get(connection)
        if demand is None:
            return 0
        forgotten = min(count, demand.wanted)
        demand.wanted -= forgotten
        self._drop_idle(connection, demand)
        return forgotten

    def grant(self) -> list[tuple[C, list[SlotCredit]]]:
        """Give free slots to connections that want some; send each its list as a ``Credit``."""
        waiting = {c: demand for c, demand in self._demands.items() if demand.wanted}
        granted: dict[C, list[SlotCredit]] = {}
        while self._free and waiting:
            connection = min(waiting, key=lambda c: waiting[c].held)  # of equal ones, the first
            demand = waiting[connection]
            granted.setdefault(connection, []).append(self._grant_one(connection, demand))
            # It becomes the last of those with as many credits.
            self._demands[connection] = self._demands.pop(connection)
            del waiting[connection]
            if demand.wanted:
                waiting[connection] = demand
        return list(granted.items())

    def _grant_one(self, connection: C, demand: _Demand) -> SlotCredit:
        index = self._free.popleft()
        slot = self._slots[index]
        slot.generation += 1
        slot.owner = connection
        self._change(slot, SlotState.GRANTED)
        demand.wanted -= 1
        demand.held += 1
        self._credits += 1
        return SlotCredit(index, slot.generation)

    def give_back(self, connection: C, credit: SlotCredit) -> bool:
        """End a credit whose slot is not, and will not be, written; the slot is free.

        Returns:
            False if the connection does not have the credit; nothing changed then.
        """
        slot = self._granted(connection, credit)
        if slot is None:
            return False
        self._returned += 1
        self._end_credit(connection)
        self._release(credit.slot, slot)
        return True

    # --- fragments --------------------------------------------------------------------------------

    def land(self, connection: C, credit: SlotCredit) -> bool:
        """Begin to receive a fragment into the slot of a credit.

        Returns:
            False if the fragment is stale: the connection does not have the credit, or has used it.
            Nothing changed then; the bytes of the fragment must not be written to the slot.
        """
        slot = self._granted(connection, credit)
        if slot is None:
            self._stale += 1
            return False
        self._change(slot, SlotState.LANDING)
        return True

    def landed(self, slot: int) -> None:
        """Record that all bytes of a fragment are in its slot. Nothing writes the slot any more.

        The slot belongs to the caller until ``free``; ``revoke`` does not affect it.

        Raises:
            InternalError: no fragment was landing in the slot.
        """
        entry = self._in_state(slot, SlotState.LANDING)
        if entry.owner is not None:
            self._end_credit(entry.owner)
        entry.owner = None
        self._change(entry, SlotState.LANDED)

    def free(self, slot: int) -> None:
        """Free a slot whose fragment was copied or dropped.

        Raises:
            InternalError: the slot has no fragment that has landed.
        """
        self._release(slot, self._in_state(slot, SlotState.LANDED))

    # --- the end of a connection ------------------------------------------------------------------

    def revoke(self, connection: C, *, may_write: bool) -> list[int]:
        """End all credits and wishes of a connection that has ended. Idempotent.

        Args:
            may_write: the peer may still write the slots, as with a one-sided transport: they
                are quarantined until ``confirm``.

        Returns:
            The quarantined slots of the connection, also those of an earlier call.
        """
        self._demands.pop(connection, None)
        quarantined = []
        for index, slot in enumerate(self._slots):
            if slot.owner != connection:
                continue
            if slot.state is SlotState.QUARANTINED:  # an earlier call has done so
                quarantined.append(index)
            elif may_write:
                self._change(slot, SlotState.QUARANTINED)
                quarantined.append(index)
            else:
                self._release(index, slot)
        return quarantined

    def confirm(self, connection: C) -> int:
        """Free the quarantined slots of a connection that can no longer write; return how many."""
        confirmed = 0
        for index, slot in enumerate(self._slots):
            if slot.owner == connection and slot.state is SlotState.QUARANTINED:
                self._release(index, slot)
                confirmed += 1
        return confirmed

    # --- observation ------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    @property
    def is_idle(self) -> bool:
        """True if no connection has, or wants, a credit, and all slots are free."""
        return len(self._free) == self.num_slots and not self._demands

    def statistics(self) -> RingStatistics:
        """Return slots by state, and counters."""
        return RingStatistics(
            **{state.name.lower(): self._counts[state] for state in SlotState},
            wanted=sum(demand.wanted for demand in self._demands.values()),
            credits=self._credits,
            returned=self._returned,
            stale=self._stale,
        )

    def violations(self) -> list[str]:
        """Return a description of each violated invariant, computed from the slots alone."""
        problems = []
        free = list(self._free)
        listed = set(free)
        if len(listed) != len(free):
            problems.append(f"free slots are listed twice: {sorted(free)}")
        counts = [0] * len(SlotState)
        held: dict[C, int] = {}
        owned = (SlotState.GRANTED, SlotState.LANDING, SlotState.QUARANTINED)
        for index, slot in enumerate(self._slots):
            counts[slot.state] += 1
            if (index in listed) != (slot.state is SlotState.FREE):
                problems.append(f"slot {index} is {slot.state.name}, but listed otherwise")
            if (slot.owner is None) != (slot.state not in owned):
                problems.append(f"slot {index} is {slot.state.name}, owned by {slot.owner!r}")
            if slot.owner is not None and slot.state is not SlotState.QUARANTINED:
                held[slot.owner] = held.get(slot.owner, 0) + 1
        if counts != self._counts:
            problems.append(f"slots by state are {counts}, but counted as {self._counts}")
        for connection in held.keys() | self._demands.keys():
            demand = self._demands.get(connection, _Demand())
            if demand.held != held.get(connection, 0) or demand.wanted < 0:
                problems.append(
                    f"{connection!r} has {held.get(connection, 0)} credits, but is counted as "
                    f"having {demand.held} and wanting {demand.wanted}"
                )
            if not demand.held and not demand.wanted:
                problems.append(f"{connection!r} is listed without a credit or a wish")
        return problems

    # --- one place per change ---------------------------------------------------------------------

    def _demand(self, connection: C) -> _Demand:
        demand = self._demands.get(connection)
        if demand is None:
            demand = self._demands[connection] = _Demand()
        return demand

    def _granted(self, connection: C, credit: SlotCredit) -> _Slot[C] | None:
        if not 0 <= credit.slot < self.num_slots:
            return None
        slot = self._slots[credit.slot]
        is_current = slot.state is SlotState.GRANTED and slot.generation == credit.generation
        return slot if is_current and slot.owner == connection else None

    def _in_state(self, slot: int, state: SlotState) -> _Slot[C]:
        entry = self._slots[slot] if 0 <= slot < self.num_slots else None
        if entry is None or entry.state is not state:
            found = "no slot" if entry is None else entry.state.name.lower()
            raise InternalError(f"landing slot {slot} is {found}; it must be {state.name.lower()}")
        return entry

    def _end_credit(self, connection: C) -> None:
        demand = self._demands[connection]
        demand.held -= 1
        self._drop_idle(connection, demand)

    def _drop_idle(self, connection: C, demand: _Demand) -> None:
        if not demand.held and not demand.wanted:
            del self._demands[connection]

    def _release(self, index: int, slot: _Slot[C]) -> None:
        slot.owner = None
        self._change(slot, SlotState.FREE)
        self._free.append(index)

    def _change(self, slot: _Slot[C], state: SlotState) -> None:
        self._counts[slot.state] -= 1
        slot.state = state
        self._counts[state] += 1
