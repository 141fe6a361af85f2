"""Gate: pauses and holds, which stop the scheduler from granting."""

from __future__ import annotations

from typing import Literal

from aiokv.errors import UsageError

GateChange = Literal["pause", "resume", "hold", "let_go", "hold_to_pause"]


class Gate:
    """Number of pauses and holds; leases are granted only while both numbers are 0.

    The user of the engine begins and ends pauses. The engine itself begins and ends holds (for
    sleep, an update of the weights, and a quiesce in progress); the user cannot end a hold.

    Attributes:
        closed: True while there is a pause or a hold.
        held: True while there is a hold.
    """

    __slots__ = ("_holds", "_pauses", "closed", "held")

    def __init__(self) -> None:
        self._pauses = 0
        self._holds = 0
        self.closed = False
        self.held = False

    @property
    def has_one_hold(self) -> bool:
        """True while there is one hold, and no pause: nothing else than the holder waits."""
        return self._holds == 1 and not self._pauses

    def change(self, change: GateChange) -> None:
        """Begin or end one pause or hold, or turn a hold into a pause.

        Raises:
            UsageError: ``"resume"`` without a pause. Nothing changed.
        """
        if change == "resume" and not self._pauses:
            raise UsageError(
                "resume: called without pause() or a quiesce() that has returned",
                hint="wake_up() ends sleep(); updating_weights() ends with its `async with` block"
                if self._holds
                else "",
            )
        pauses, holds = _CHANGES[change]
        self._pauses += pauses
        self._holds += holds
        self.held = self._holds > 0
        self.closed = self._pauses + self._holds > 0


_CHANGES: dict[GateChange, tuple[int, int]] = {
    "pause": (1, 0),
    "resume": (-1, 0),
    "hold": (0, 1),
    "let_go": (0, -1),
    "hold_to_pause": (1, -1),
}
