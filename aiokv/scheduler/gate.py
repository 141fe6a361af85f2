"""Gate: pauses and holds, which keep the scheduler from granting."""

from __future__ import annotations

from typing import Literal, get_args

from aiokv.errors import UsageError

GateChange = Literal["pause", "resume", "hold", "let_go", "hold_to_pause"]
GATE_CHANGES: tuple[GateChange, ...] = get_args(GateChange)


class Gate:
    """Decides whether leases are granted. Any pause or hold stops that.

    Pauses belong to the user of the engine. Holds belong to the engine itself (sleep, an update of
    the weights, a quiesce under way), and no call of the user ends them.

    Attributes:
        closed: nothing is granted.
    """

    __slots__ = ("_holds", "_pauses", "closed")

    def __init__(self) -> None:
        self._pauses = 0
        self._holds = 0
        self.closed = False

    def change(self, change: GateChange) -> None:
        """Begin or end one pause or hold, or turn a hold into a pause.

        Raises:
            UsageError: ``"resume"`` without a pause. Nothing changed.
        """
        if change == "resume" and not self._pauses:
            raise UsageError(
                "resume: called without pause() or a quiesce() that has returned",
                hint="wake_up() ends sleep(); updating_weights() ends with its block"
                if self._holds
                else "",
            )
        pauses, holds = _CHANGES[change]
        self._pauses += pauses
        self._holds += holds
        self.closed = self._pauses + self._holds > 0


_CHANGES: dict[GateChange, tuple[int, int]] = {
    "pause": (1, 0),
    "resume": (-1, 0),
    "hold": (0, 1),
    "let_go": (0, -1),
    "hold_to_pause": (1, -1),
}
