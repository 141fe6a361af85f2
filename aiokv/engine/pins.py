"""Cached prefixes that are kept on the device on request."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aiokv.checks import Unique

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from aiokv._native import Core
    from aiokv.lease import Lease


class Pin(Unique):
    """Keeps a prefix on the device until ``release()``, or until ``ttl_seconds`` have passed.

    A reset, new weights, the loss of a rank and closing the engine release it, too.

    Attributes:
        tokens: number of pinned tokens: what was cached of the prompt, in full blocks.
        release_reason: why the pin was released; empty while it holds the prefix.
    """

    def __init__(
        self,
        lease: Lease,
        tokens: int,
        on_release: Callable[[Pin], object] = lambda pin: None,
        *,
        release_reason: str = "",
    ) -> None:
        self._lease = lease
        self._on_release = on_release
        self._timer: asyncio.TimerHandle | None = None
        self.tokens = tokens
        self.release_reason = release_reason

    @property
    def released(self) -> bool:
        """True when the pin does not keep the prefix any more."""
        return not self._lease._id

    def expire_after(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        if seconds < math.inf:
            self._timer = loop.call_later(seconds, self.end, "ttl_seconds passed")

    def release(self) -> None:
        """Let it be evicted again; idempotent."""
        self.end("release() was called")

    def end(self, reason: str) -> None:
        """Release the pin, and keep the reason."""
        if not self.released:
            self._lease.release()
            self.release_reason = reason
            self._on_release(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __repr__(self) -> str:
        state = f", released: {self.release_reason}" if self.released else ""
        return f"<Pin {self.tokens} tokens{state}>"


class Pins:
    """The pins of one engine.

    Attributes:
        until_used: by lease id, the pins that end when another lease hits all that they hold.
    """

    def __init__(self) -> None:
        self._pins: dict[Pin, int] = {}  # -> lease id
        self.until_used: dict[int, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, lease: Lease, tokens: int, *, until_used: bool) -> Pin:
        """Make the pin of a granted lease."""
        pin = Pin(lease, tokens, self._forget)
        self._pins[pin] = lease._id
        if until_used:
            self.until_used[lease._id] = pin
        return pin

    def _forget(self, pin: Pin) -> None:
        self.until_used.pop(self._pins.pop(pin), None)

    def release_used(self, lease_ids: Iterable[int]) -> None:
        """Release those pins of these leases that end with their use."""
        for lease_id in lease_ids:
            if (pin := self.until_used.get(lease_id)) is not None:
                pin.end("a lease used it")

    def release_all(self, reason: str) -> None:
        for pin in list(self._pins):
            pin.end(reason)

    def violations(self, core: Core) -> list[str]:
        """Return a description of each pin whose blocks cannot be hit."""
        return [
            f"{pin!r} holds blocks that no match can find"
            for pin, lease_id in self._pins.items()
            if pin.released or not core.is_current(lease_id)
        ]
