"""Interface of a device: the protocols that the cpu, cuda and manual devices satisfy.

An event's ``done`` is False until its work has been submitted *and* has finished. To CUDA an event
that was never recorded is done; a device must hide that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from aiokv.base.groups import ATTENTION
from aiokv.base.plan import PEER_ROUTES, Pool
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import GroupRoute, Route
    from aiokv.layout.regions import Regions
    from aiokv.worker.arena import HostArena


def host_pool(route: Route, group: str) -> Pool:
    """Return the blocks on the host's side of a route between the device and host memory."""
    return Pool(group, "peer" if route in PEER_ROUTES else "host")


def blocks_of(regions: Regions, pool: Pool) -> Regions:
    """Return the tensors whose host blocks, or slots of peers, are those of a pool."""
    return regions.group_blocks(pool.group)


class CopyError(NamedTuple):
    """Failure of a copy; the blocks before ``first_bad_block`` have arrived.

    Attributes:
        first_bad_block: index into the plan.
        reason: text of the failure.
        rank: number of the failed rank; None without ranks.
    """

    first_bad_block: int
    reason: str
    rank: int | None = None


@runtime_checkable
class Event(Protocol):
    """A point in a device's order of work; ``cupy.cuda.Event`` satisfies the protocol.

    Optional: ``finished_seconds`` (``time.monotonic()`` at its end, None while not done), for
    latencies and layer times; without it the poller's own observations are used.
    """

    @property
    def done(self) -> bool:
        """True if finished, also with an error. Any thread; does not block."""

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until done."""


class QueriedEvent:
    """An event of a library that has ``query()`` instead of ``done``, such as PyTorch's.

    Attributes:
        event: the library's own, whose handle the cuda device passes to CUDA.
    """

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        """True if finished."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


def as_event(name: str, value: Any) -> Event | None:
    """Return an event, or None; events with ``query()`` are wrapped.

    Raises:
        UsageError: it is neither.
    """
    if value is None:
        return None
    # Checks the class only, because reading ``done`` of the object would query the device.
    kind = type(value)
    if hasattr(kind, "synchronize"):
        if hasattr(kind, "done"):
            event: Event = value
            return event
        if hasattr(kind, "query"):
            return QueriedEvent(value)
    raise UsageError(
        f"{name} is {value!r}; it must be an event or None",
        hint="record an event after the work: cupy.cuda.Event, torch.cuda.Event, CpuEvent",
    )


class Stream(Protocol):
    """An ordered queue of work. Devices define their own; ``gpu_wait`` passes it on unchanged."""


class Copy(Protocol):
    """One transfer that the device accepted. Any thread may call its methods."""

    @property
    def layer_events(self) -> Sequence[Event]:
        """One event per layer, ascending; layers may share one. Empty without layers."""

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        """Block the calling thread, without the GIL, until the layer is on its stream.

        Args:
            layer: from 0.
            timeout: seconds, at least 0.0; None for no limit.

        Returns:
            False when the layer was not submitted in time.

        Raises:
            DeviceError: the layer will never be submitted.
        """

    def stream_wait(self, layer: int, stream: Any) -> None:
        """Make ``stream`` wait for the layer, which has been submitted. The host does not wait."""

    def error(self) -> CopyError | None:
        """Return the failure, or None while none is known; final once all events are done."""


class Verification(Protocol):
    """Slots that are being verified."""

    @property
    def layer_events(self) -> Sequence[Event]:
        """The end of the work; the last one counts."""

    @property
    def results(self) -> bytes:
        """``Result`` of each slot, one byte each; all wrong before the end, and after a failure."""


class DeviceSlots(Protocol):
    """Slots for peers in the memory of a device. Only the loop's thread calls it.

    Attributes:
        ordinal: number of the GPU.
        address: address of slot 0.
        num_slots: number of slots.
        slot_bytes: distance from one slot to the next.
        memory: object that keeps the memory allocated, and exports it.
    """

    ordinal: int
    address: int
    num_slots: int
    slot_bytes: int
    memory: Any

    def verify(self, slots: NDArray[np.int32], keys: bytes) -> Verification:
        """Start to compare the trailers of slots."""


class Device(Protocol):
    """A backend. Only the loop's thread calls it.

    Attributes:
        name: ``"cpu"``, ``"cuda:0"``, ...
        routes: routes that ``copy`` takes, by retention of the group.
        in_order: copies of one route and group end in the order of submission, layers ascending,
            so that only the oldest event of both has to be queried.
        computes_in_stream: the model's work may have been submitted only when `commit` is called,
            so that transfers have to wait for the event of its step.

    Optional: ``failure``, the error after which no transfer can succeed, which breaks the engine;
    ``unpinned_bytes``, the host memory that it has not page-locked yet.
    ``open_peer_slots(num_slots, slot_bytes)`` returns :class:`DeviceSlots`, which exist until
    ``detach``; the routes from and to ``"peer"`` use them then, and ``copy`` takes ``keys``: see
    ``CudaDevice.copy``.
    """

    name: str
    routes: frozenset[GroupRoute]
    in_order: bool
    computes_in_stream: bool

    def attach(
        self,
        regions: Regions,
        arena: HostArena,
        side_arenas: Mapping[Pool, HostArena] | None = None,
    ) -> None:
        """Bind the memory of both tiers, before the first copy and after ``detach``.

        Args:
            regions: the device tensors.
            arena: host memory of the blocks.
            side_arenas: host memory of the other pools that have some, laid out as the host
                blocks of ``blocks_of(regions, pool)``; None for none. Several pools may have
                the same arena, the slots of peers, whose blocks are as large as those of the
                largest.

        Raises:
            LayoutError: the device cannot reach a region's memory.
        """

    def copy(
        self,
        route: Route,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
    ) -> Copy:
        """Start copying blocks, layer by layer, in the background.

        Args:
            route: one of ``routes``. The layers of an onload arrive one by one; those of other
                routes may share one event. Other groups than ``"attention"`` need a side arena. A
                clone of recurrent state fills slots with zeros where the source is ``ZEROS``.
            source_ids: [N] int32, N > 0, borrowed until return. The worker has checked the ids
                (``aiokv.worker.ids``).
            target_ids: [N] int32, distinct; within one pool none of them is a source.
            after: recorded event that the first byte waits for, on the device.
            group: group of the ids, or a range of layers for routes from and to peers.

        Raises:
            UsageError: the device cannot wait for ``after``; nothing moved.
            DeviceError: the device does not take the copy; nothing moved.
        """

    def check_event(self, event: Event) -> None:
        """Raise unless transfers can be ordered behind the event. Cheap; changes nothing.

        Raises:
            UsageError: ``event`` is not an event, is of another device, or was never recorded.
        """

    def detach(self, *, keep_host: bool) -> None:
        """Release the memory; no copy is in flight, and none follows before ``attach``. Idempotent.

        Args:
            keep_host: the next ``attach`` gets the same arena, so the device may keep it pinned.
        """

    def close(self) -> None:
        """Finish submitted copies, join native threads, release the memory. Idempotent."""


def check_event_type(event: object) -> None:
    """Raise unless ``event`` has the members of :class:`Event`; reads none of them.

    A future is refused, too: its ``done`` is a method, which as an attribute is always true.

    Raises:
        UsageError: names the missing attribute.
    """
    kind = type(event)
    done = getattr(kind, "done", None) or getattr(event, "done", None)
    missing = "done" if done is None or callable(done) else ""
    if not missing and not callable(getattr(event, "synchronize", None)):
        missing = "synchronize()"
    if missing:
        raise UsageError(
            f"a {kind.__module__}.{kind.__qualname__} is not an event: it has no "
            f"{'property' if missing == 'done' else 'method'} {missing!r}",
            hint="pass an event that was recorded after the step's work, or None when the work "
            "has finished",
        )
