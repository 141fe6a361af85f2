"""Verbs of the engine for its ranks."""

from __future__ import annotations

from aiokv.engine.sleeping import Sleeping
from aiokv.errors import ClosedError, UsageError


class Recovery(Sleeping):
    """Steps as the ranks' runners number them, and a new start after a rank was lost."""

    @property
    def open_step(self) -> int:
        """The number that ``step()`` will return; what a rank's runner passes to ``Rank.step``.

        Any thread.
        """
        return self._steps.next if self._entered else 1

    async def restart_ranks(self) -> None:
        """Bring lost ranks back; the cache is empty then, and the engine serves again.

        When a rank is lost, everything that was cached is forgotten at once, and all leases hold
        nothing, as after ``preempt``: their next use raises ``LeaseError``, ``resume`` allocates
        anew, and all their positions are to be computed again. Until this has returned, ``match``,
        ``allocate`` and ``resume`` raise ``BrokenEngineError``.

        Call it when no step runs any more on the ranks that are left.

        Raises:
            UsageError: no rank is lost.
            RankLost: not all came back; nothing changed.

        Cancellation: nothing changed; call it again.
        """
        self._check_loop()
        if self._closing:
            raise ClosedError(f"the engine {self._closing}")
        if self._controller.lost is None:
            raise UsageError("no rank is lost")
        self._steps.close(None)
        await self._controller.restart()
        self._take_back()
        self._broken = None
        self._on_blocks_free()
