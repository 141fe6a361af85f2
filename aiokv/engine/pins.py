"""Cached prefixes that somebody asked to keep on the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aiokv.checks import Unique

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiokv.lease import Lease


class Pin(Unique):
    """Keeps a prefix on the device until ``release()``, or until its time is over.

    Attributes:
        tokens: how much of the prompt is pinned: what was cached, in full blocks.
    """

    def __init__(
        self, lease: Lease, tokens: int, on_release: Callable[[Pin], object] = lambda pin: None
    ) -> None:
        self._lease = lease
        self._on_release = on_release
        self._timer: asyncio.TimerHandle | None = None
        self.tokens = tokens

    @property
    def released(self) -> bool:
        return not self._lease._id

    def expire_after(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        if seconds < math.inf:
            self._timer = loop.call_later(seconds, self.release)

    def release(self) -> None:
        """Let it be evicted again; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.released:
            self._lease.release()
            self._on_release(self)

    def is_used(self) -> bool:
        """A lease beside the pin holds the whole prefix."""
        return not self.released and self._lease._core.is_shared(self._lease._id)

    def __repr__(self) -> str:
        return f"<Pin {self.tokens} tokens{', released' if self.released else ''}>"


class Pins:
    """The pins of one engine; ``until_used`` ones are released when a lease takes them over."""

    def __init__(self) -> None:
        self._pins: dict[Pin, bool] = {}  # -> until_used

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, lease: Lease, tokens: int, *, until_used: bool) -> Pin:
        pin = Pin(lease, tokens, lambda gone: self._pins.pop(gone, None))
        self._pins[pin] = until_used
        return pin

    def release_used(self) -> None:
        for pin in [pin for pin, until_used in self._pins.items() if until_used]:
            if pin.is_used():
                pin.release()

    def release_all(self) -> None:
        for pin in list(self._pins):
            pin.release()
