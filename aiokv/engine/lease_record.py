"""LeaseRecord: state of one lease that the parts of an engine share, without the user's handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.base.types import lease_name
from aiokv.base.usage import Waits
from aiokv.errors import LeaseError

if TYPE_CHECKING:
    from types import CodeType

    from aiokv.engine.leases import Leases
    from aiokv.worker.views import LayerView


class LeaseRecord(msgspec.Struct, eq=False):
    """Identity, layers and waiting times of a lease.

    A ``Struct``, because it is made several times faster than an object with ``__init__``.

    The record keeps no :class:`Lease` alive: a lease that the application drops is
    garbage-collected, although timers, waits and transfers have its record. Pins and prefetches
    have a record only.

    Attributes:
        leases: part of the engine that serves all leases.
        id: number of the lease in its engine; 0 once released.
        number: the same number, also after the release.
        owner: name of the request for error and log messages.
        salt: namespace of the prompt, whose quota counts the blocks.
        layers: view of the transfers that the lease waits for; done when there are none.
        end: code that released the lease, and the offset of the instruction in it; or the cause of
            its end; for error messages. None before the end, and for a lease that ended with its
            engine.
    """

    leases: Leases
    id: int
    number: int
    owner: str
    salt: str
    layers: LayerView
    end: tuple[CodeType, int] | str | None = None
    _waits: Waits | None = None  # None until the lease has waited

    def live_id(self) -> int:
        """Return the id of a lease that is not released.

        Raises:
            LeaseError: the lease is released.
        """
        if not self.id:
            hint = "raise ttl_seconds, or call keep() in time" if isinstance(self.end, str) else ""
            raise LeaseError(f"{self!r} cannot be used any more", hint=hint)
        return self.id

    def held_id(self) -> int:
        """Return the id, for methods that need the blocks.

        Raises:
            LeaseError: the lease is released, or its blocks were lost with a rank.
        """
        lost = self.leases.read.lost
        if lost and self.id in lost:
            raise LeaseError(
                f"{self!r} has lost its blocks: {lost[self.id]}",
                hint="await engine.restart_ranks(), then lease.resume(num_tokens)",
            )
        return self.id or self.live_id()

    def leave_layers(self) -> None:
        """Stop waiting for layers; called when the grant ends."""
        if (seconds := self.layers.elapsed_seconds) is not None:
            self.waits.add_onload(seconds)
        self.layers = self.leases.done

    @property
    def waits(self) -> Waits:
        """Waiting times so far; callers add to them."""
        if self._waits is None:
            self._waits = Waits()
        return self._waits

    def __repr__(self) -> str:
        if self.id:
            state = f"id {self.id:#x}"
        elif isinstance(self.end, str):
            state = self.end
        elif self.end is not None:
            code, offset = self.end
            lines = (line for start, stop, line in code.co_lines() if start <= offset < stop)
            state = f"released at {code.co_filename}:{next(lines, None)}"
        else:
            state = "ended with its engine"
        return f"<Lease of {lease_name(self.owner, self.number)}, {state}>"
