"""ScriptedDevice: copies end by themselves, except those that the script names.

device = ScriptedDevice()
device.fail("onload", copy=0, layer=1, block=3)   # from its block 3 on, that layer is garbage
device.delay("offload", copy=2, seconds=5.0)      # by the loop's clock; see aiokv.testing.clock
late = device.hold("onload", copy=1)              # until late.open()
device.reorder("onload", copy=4, layers=[3, 0, 1, 2])
device.behind("onload", copy=5, other=("offload", 2))
device.reject("offload", copy=6)
async with CacheEngine(config, regions, device) as engine:
    ...                                           # the server under test
assert device.ends[0] == End("onload", 0, 0, failed=False)

Copies are numbered from 0 per direction, in the order in which the device gets them; ``copy=None``
is every copy, ``layer=None`` every layer. Rules may be added at any time, and apply to all layers
that have not ended yet. Bytes really move. A block that a failed layer did not write is filled with
garbage, so that tests detect its use.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from aiokv.base.groups import ATTENTION
from aiokv.base.plan import direction as direction_of
from aiokv.errors import DeviceError
from aiokv.testing.manual import ManualCopy, ManualDevice
from aiokv.testing.rules import Delay, Gate, Hold, Rule, Script

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import Route
    from aiokv.worker.device.base import Event


class End(NamedTuple):
    """The end of one layer of one copy."""

    direction: str
    copy: int
    layer: int
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure(Rule):
    block: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rejection(Rule):
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order(Rule):
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind(Rule):
    other: tuple[str, int]


@dataclass(slots=True)
class _Running:
    direction: str
    number: int
    copy: ManualCopy
    started_at: float  # time of the loop's clock
    alarms: set[float] = field(default_factory=set)


class ScriptedDevice(ManualDevice):
    """A cpu device that executes a script of failures, delays and reordering.

    Attributes:
        ends: the layers that have ended, in order.
    """

    name = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[End] = []
        self._script = Script()
        self._started: Counter[str] = Counter()
        self._running: list[_Running] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._move_soon = False

    # --- the script -------------------------------------------------------------------------

    def fail(
        self,
        direction: str,
        copy: int | None = None,
        layer: int | None = None,
        *,
        block: int = 0,
        reason: str = "failed by the script",
    ) -> None:
        """Let the blocks of the copy from index ``block`` on not arrive."""
        self._script.add(
            _Failure(operation=direction, call=copy, layer=layer, block=block, reason=reason)
        )

    def reject(
        self, direction: str, copy: int | None = None, reason: str = "rejected by the script"
    ) -> None:
        """Refuse the copy with a ``DeviceError``; the next copy has the next number."""
        self._script.add(_Rejection(operation=direction, call=copy, reason=reason))

    def delay(
        self,
        direction: str,
        copy: int | None = None,
        layer: int | None = None,
        *,
        seconds: float,
    ) -> None:
        """Delay the copy by ``seconds`` of the loop's clock, from its submission on."""
        self._script.add(Delay(operation=direction, call=copy, layer=layer, seconds=seconds))

    def hold(self, direction: str, copy: int | None = None, layer: int | None = None) -> Gate:
        """Hold the copy until the gate is opened."""
        gate = Gate(self._wake)
        self._script.add(Hold(operation=direction, call=copy, layer=layer, gate=gate))
        return gate

    def reorder(self, direction: str, copy: int | None, layers: Sequence[int]) -> None:
        """End the layers in this order; layers that are not named end at any time."""
        self._script.add(_Order(operation=direction, call=copy, layers=tuple(layers)))

    def behind(self, direction: str, copy: int, other: tuple[str, int]) -> None:
        """Delay the copy until another one, ``(direction, number)``, has ended."""
        self._script.add(_Behind(operation=direction, call=copy, other=other))

    def end_script(self) -> None:
        """Remove all rules: all copies end by themselves from now on, held ones too."""
        self._script.end()
        self._wake()

    def running(self, direction: str) -> list[int]:
        """Return the numbers of the copies that have not ended."""
        return [r.number for r in self._running if r.direction == direction]

    # --- the play ---------------------------------------------------------------------------

    def copy(
        self,
        route: Route,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
    ) -> ManualCopy:
        """Take a copy, which ends as the script says."""
        direction = direction_of(route, group)
        self._reject_by_script(direction)
        return self._play(direction, super().copy(route, source_ids, target_ids, after, group))

    def ended(self, copy: ManualCopy) -> None:
        super().ended(copy)
        if not copy.pending_layers:
            self._running = [r for r in self._running if r.copy is not copy]
        self._wake()

    def _reject_by_script(self, direction: str) -> None:
        rejections = self._script.matching(_Rejection, direction, self._started[direction])
        if rejections:
            self._started[direction] += 1
            raise DeviceError(rejections[0].reason)

    def _play(self, direction: str, copy: ManualCopy) -> ManualCopy:
        self._loop = asyncio.get_running_loop()
        number = self._started[direction]
        self._started[direction] += 1
        if copy.pending_layers:
            self._running.append(_Running(direction, number, copy, self._loop.time()))
            self._wake()
        return copy

    def _wake(self) -> None:
        """Check in the next pass of the loop which copies may move."""
        if self._loop is not None and not self._move_soon:
            self._move_soon = True
            self._loop.call_soon(self._move_what_may)

    def _move_what_may(self) -> None:
        self._move_soon = False
        for running in list(self._running):
            for layer in running.copy.pending_layers:
                if self._may_end(running, layer):
                    self._end_layer(running, layer)

    def _end_layer(self, running: _Running, layer: int) -> None:
        copy, direction, number = running.copy, running.direction, running.number
        failures = self._script.matching(_Failure, direction, number, layer)
        self.ends.append(End(direction, number, layer, bool(failures)))
        if not failures:
            copy.complete(layer)
            return
        first = min(failures, key=lambda rule: rule.block)
        copy.fail(layer, block=first.block, reason=first.reason)

    def _may_end(self, running: _Running, layer: int) -> bool:
        direction, number = running.direction, running.number
        if running.copy.after is not None and not running.copy.after.done:
            self._wake()  # the event has no callback to report its end
            return False
        matching = self._script.matching
        if any(not r.gate.opened for r in matching(Hold, direction, number, layer)):
            return False
        if any(not self._has_ended(r.other) for r in matching(_Behind, direction, number)):
            return False
        pending = set(running.copy.pending_layers)
        for order in matching(_Order, direction, number):
            before = order.layers[: order.layers.index(layer)] if layer in order.layers else ()
            if pending & set(before):
                return False
        return self._is_due(running, layer)

    def _is_due(self, running: _Running, layer: int) -> bool:
        delays = self._script.matching(Delay, running.direction, running.number, layer)
        due = running.started_at + max((rule.seconds for rule in delays), default=0.0)
        loop = asyncio.get_running_loop()
        if due <= loop.time():
            return True
        if due not in running.alarms:
            running.alarms.add(due)
            loop.call_at(due, self._on_alarm, running, due)
        return False

    def _on_alarm(self, running: _Running, due: float) -> None:
        running.alarms.discard(due)
        self._wake()

    def _has_ended(self, other: tuple[str, int]) -> bool:
        direction, number = other
        return number < self._started[direction] and number not in self.running(direction)
