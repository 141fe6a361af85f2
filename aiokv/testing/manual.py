"""ManualDevice: real bytes, but every copy ends only when the test ends it, in any order.

copy = device.onloads[0]
copy.complete(2)          # layer 2 moves its bytes; the others are still in flight
copy.fail(1, block=3)     # blocks from index 3 on of layer 1 are not written
copy.complete_all()
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv.base.groups import ATTENTION, retention_of
from aiokv.base.plan import CLONE, OFFLOAD, ONLOAD, RECEIVE, SEND, STATE_CLONE, Pool, direction
from aiokv.errors import DeviceError, UsageError
from aiokv.worker.device.base import (
    CopyError,
    blocks_of,
    check_event_type,
    host_pool,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from aiokv.base.groups import Retention
    from aiokv.base.plan import GroupRoute, Route
    from aiokv.layout.arrays import Piece
    from aiokv.layout.regions import Regions
    from aiokv.worker.arena import HostArena
    from aiokv.worker.device.base import Event

_ROUTES: Final[tuple[GroupRoute, ...]] = (
    ("all", ONLOAD),
    ("all", OFFLOAD),
    STATE_CLONE,
    *((retention, route) for retention in ("last", "window") for route in (ONLOAD, OFFLOAD)),
    *((retention, route) for retention in ("all", "last", "window") for route in (RECEIVE, SEND)),
)
GARBAGE: Final = 0xEE  # bytes of blocks that a failed copy did not reach


class ManualEvent:
    """An event that ``complete()`` makes done. Thread-safe.

    Attributes:
        query_error: raised by ``done`` while set, as a broken device would.
        queries: times that ``done`` was read.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self.finished_seconds: float | None = None
        self.query_error: Exception | None = None
        self.queries = 0

    @property
    def done(self) -> bool:
        self.queries += 1
        if self.query_error is not None:
            raise self.query_error
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()

    def complete(self) -> None:
        self.finished_seconds = time.monotonic()
        self._done.set()


class ManualStream:
    """A stream that records its waits.

    Attributes:
        waits: copies and layers that it waits for.
    """

    def __init__(self) -> None:
        self.waits: list[tuple[ManualCopy, int]] = []


class ManualCopy:
    """A copy that the test moves and ends.

    Attributes:
        route: the plan's.
        source_ids: copied from the plan.
        target_ids: copied from the plan.
        after: the event that the first byte waits for; completing a layer earlier is a mistake of
            the test and raises.
        group: the plan's.
    """

    def __init__(
        self,
        device: ManualDevice,
        route: Route,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
    ) -> None:
        self.route = route
        self.group = group
        self.source_ids = source_ids.copy()
        self.target_ids = target_ids.copy()
        self.after = after
        self._device = device
        self._events = [ManualEvent() for _ in range(device.regions.num_layers)]
        self._submitted = [threading.Event() for _ in self._events]
        self._error: CopyError | None = None
        for layer, submitted in enumerate(self._submitted):
            if layer not in device.delayed_layers:
                submitted.set()

    @property
    def direction(self) -> str:
        """Name of the route."""
        return direction(self.route, self.group)

    @property
    def group_route(self) -> GroupRoute:
        """Retention of the group, and the route."""
        return retention_of(self.group), self.route

    @property
    def host_ids(self) -> NDArray[np.int32]:
        """Host blocks of an onload or offload."""
        return self.source_ids if self.route.is_onload else self.target_ids

    @property
    def device_ids(self) -> NDArray[np.int32]:
        """Device blocks of an onload or offload."""
        return self.target_ids if self.route.is_onload else self.source_ids

    # --- the test's side --------------------------------------------------------------------

    def complete(self, layer: int) -> None:
        """Move the bytes of one layer and end it.

        Raises:
            UsageError: ``after`` is not done yet, or the layer has ended.
        """
        self._check_turn(layer)
        self._move(layer, len(self.target_ids))
        self._end(layer)

    def complete_all(self) -> None:
        """Call ``complete`` for all layers that have not ended, in ascending order."""
        for layer in self.pending_layers:
            self.complete(layer)

    def fail(self, layer: int, *, block: int = 0, reason: str = "failed by the test") -> None:
        """End one layer without copying its blocks from index ``block`` on.

        They are filled with ``GARBAGE``, so that tests detect their use; slots of recurrent state
        that are copied within the device are left as they are. The other layers are still to be
        completed or failed.
        """
        self._check_turn(layer)
        self._move(layer, block)
        if self.route != CLONE:
            tiers = self._device.tiers(self.route, self.group)
            fill_with_garbage(*tiers, self.route, self.target_ids[block:], layer)
        if self._error is None or block < self._error.first_bad_block:
            self._error = CopyError(block, reason)
        self._end(layer)

    def fail_all(self, *, block: int = 0, reason: str = "failed by the test") -> None:
        """fail() all layers that have not ended."""
        for layer in self.pending_layers:
            self.fail(layer, block=block, reason=reason)

    def submit(self, layer: int) -> None:
        """Let a layer of ``device.delayed_layers`` reach its stream."""
        self._submitted[layer].set()

    @property
    def pending_layers(self) -> list[int]:
        return [i for i, event in enumerate(self._events) if event.finished_seconds is None]

    def _move(self, layer: int, num_blocks: int) -> None:
        sources, targets = self.source_ids[:num_blocks], self.target_ids[:num_blocks]
        if self.route == CLONE:
            for piece in self._device.regions.state_pieces:
                if piece.layer == layer:
                    view = piece.view()
                    view[targets] = np.where((sources >= 0)[:, None], view[sources], 0)
            return
        regions, arena = self._device.tiers(self.route, self.group)
        for piece in regions.layer_pieces(layer):
            host, device = _host_view(piece, arena), piece.view()
            if self.route.is_onload:
                device[targets] = host[sources]
            else:
                host[targets] = device[sources]

    def _check_turn(self, layer: int) -> None:
        if self.after is not None and not self.after.done:
            raise UsageError("complete: the step that this copy comes after is not done")
        if layer not in self.pending_layers:
            raise UsageError(f"complete: layer {layer} has ended already")

    def _end(self, layer: int) -> None:
        self._submitted[layer].set()
        self._events[layer].complete()
        self._device.ended(self)

    # --- the controller's side --------------------------------------------------------------

    @property
    def layer_events(self) -> Sequence[ManualEvent]:
        return self._events

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        return self._submitted[layer].wait(timeout)

    def stream_wait(self, layer: int, stream: Any) -> None:
        if not self._submitted[layer].is_set():
            raise UsageError(
                f"stream_wait: layer {layer} is not submitted; the stream would not wait"
            )
        stream.waits.append((self, layer))

    def error(self) -> CopyError | None:
        return self._error


class ManualDevice:
    """A cpu device whose copies wait for the test.

    Attributes:
        delayed_layers: layers that new copies submit only on ``copy.submit(layer)``.
        refuse: raised by the next submission, then forgotten.
        closed: ``close`` was called.
    """

    name = "manual"
    routes = frozenset(_ROUTES)
    in_order = False
    computes_in_stream = False

    def __init__(self) -> None:
        self._copies: dict[GroupRoute, list[ManualCopy]] = {route: [] for route in _ROUTES}
        self.delayed_layers: frozenset[int] = frozenset()
        self.refuse: DeviceError | None = None
        self.closed = False
        self._tiers: dict[Pool, tuple[Regions, HostArena]] = {}

    @property
    def regions(self) -> Regions:
        """The attached tensors."""
        return self.tiers(ONLOAD)[0]

    @property
    def arena(self) -> HostArena:
        """The attached host memory."""
        return self.tiers(ONLOAD)[1]

    @property
    def onloads(self) -> list[ManualCopy]:
        """Onloads that have not ended, in the order of submission."""
        return self.copies_of(ONLOAD)

    @property
    def offloads(self) -> list[ManualCopy]:
        """Offloads that have not ended, in the order of submission."""
        return self.copies_of(OFFLOAD)

    @property
    def copies(self) -> list[ManualCopy]:
        """All copies that have not ended, onloads first."""
        return [copy for copies in self._copies.values() for copy in copies]

    def copies_of(self, route: Route, retention: Retention = "all") -> list[ManualCopy]:
        """Copies of a route that have not ended, in the order of submission.

        Args:
            route: the route.
            retention: retention of the group: ``"last"`` for recurrent state, ``"window"`` for the
                blocks of all window groups.
        """
        return self._copies[retention, route]

    def tiers(self, route: Route, group: str = ATTENTION) -> tuple[Regions, HostArena]:
        """Return the device tensors and the host memory of a route between the two tiers."""
        pool = host_pool(route, group)
        if pool not in self._tiers:
            raise UsageError(f"the manual device has no memory for {route}: attach() it first")
        return self._tiers[pool]

    def attach(
        self,
        regions: Regions,
        arena: HostArena,
        side_arenas: Mapping[Pool, HostArena] | None = None,
    ) -> None:
        """Bind the memory."""
        arenas: dict[Pool, HostArena] = {Pool(ATTENTION, "host"): arena, **(side_arenas or {})}
        self._tiers = {pool: (blocks_of(regions, pool), own) for pool, own in arenas.items()}

    def detach(self, *, keep_host: bool) -> None:
        """Detach from the memory.

        Raises:
            UsageError: a copy is in flight.
        """
        self._check_idle()
        self._tiers = {}

    def copy(
        self,
        route: Route,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
    ) -> ManualCopy:
        """Take a copy, which the test completes or fails.

        Raises:
            DeviceError: ``refuse``.
        """
        copy = ManualCopy(self, route, source_ids, target_ids, after, group)
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        if copy.layer_events:
            self._copies[copy.group_route].append(copy)
        return copy

    def check_event(self, event: Event) -> None:
        """Raise unless the event has ``done`` and ``synchronize()``."""
        check_event_type(event)

    def complete_all(self) -> None:
        """Complete everything that is in the device now, in the order of submission."""
        for copy in self.copies:
            copy.complete_all()

    def close(self) -> None:
        """Close the device.

        Raises:
            UsageError: a copy is in flight, and its memory would be freed.
        """
        self._check_idle()
        self.closed = True

    def ended(self, copy: ManualCopy) -> None:
        """Take note that a layer of the copy has ended; forget the copy after its last one."""
        if not copy.pending_layers:
            self._copies[copy.group_route].remove(copy)

    def _check_idle(self) -> None:
        if self.copies:
            raise UsageError(
                f"{len(self.copies)} copies are in flight", hint="complete or fail them first"
            )


def fill_with_garbage(
    regions: Regions,
    arena: HostArena,
    route: Route,
    target_ids: NDArray[np.int32],
    layer: int | None = None,
) -> None:
    """Fill the target blocks of an onload or offload with ``GARBAGE``.

    Args:
        regions: the device tensors of the route.
        arena: the host memory of the route.
        route: between the two tiers.
        target_ids: [N] int32.
        layer: the layer to fill; None for all layers.
    """
    for piece in regions.pieces():
        if layer is None or piece.layer == layer:
            blocks = piece.view() if route.is_onload else _host_view(piece, arena)
            blocks[target_ids] = GARBAGE


def _host_view(piece: Piece, arena: HostArena) -> NDArray[np.uint8]:
    """Return the bytes of a piece in all host blocks, ``[host_blocks, bytes]``."""
    begin = piece.host_offset_bytes
    return arena.blocks[:, begin : begin + piece.block_bytes]
