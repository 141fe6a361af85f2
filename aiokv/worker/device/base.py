"""Interface of a device: the protocols that the cpu, cuda and manual devices satisfy.

Contract of time: an event's ``done`` is False until the work it stands for was *submitted and*
has finished. CUDA calls an event that was never recorded done; a device must hide that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.worker.arena import HostArena
    from aiokv.worker.regions import Regions


class CopyError(NamedTuple):
    """Why a copy failed; blocks before ``first_bad_block`` (index into the plan) are proven.

    ``rank`` is where, when there are several.
    """

    first_bad_block: int
    reason: str
    rank: int | None = None


@runtime_checkable
class Event(Protocol):
    """A point in a device's order of work; what ``cupy.cuda.Event`` satisfies.

    Optional: ``finished_seconds`` (``time.monotonic()`` at its end, None while not done), from
    which latencies and layer times are taken; without it they are what the poller saw.
    """

    @property
    def done(self) -> bool:
        """True when finished, also with an error. Any thread; does not block."""

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
    kind = type(value)  # reading ``done`` of the object would query the device
    if hasattr(kind, "synchronize"):
        if hasattr(kind, "done"):
            event: Event = value
            return event
        if hasattr(kind, "query"):
            return QueriedEvent(value)
    raise UsageError(
        f"{name} is {value!r}; it must be an event or None",
        hint="record an event behind the work: cupy.cuda.Event, torch.cuda.Event, CpuEvent",
    )


class Stream(Protocol):
    """Work in order. Devices define their own; `gpu_wait` passes it through untouched."""


class Copy(Protocol):
    """One transfer that the device accepted. Any thread may call its methods."""

    @property
    def layer_events(self) -> Sequence[Event]:
        """One a layer, ascending; layers may share one. Empty when there are no layers."""

    def wait_submitted(self, layer: int) -> None:
        """Block the calling thread, without the GIL, until the layer is on its stream.

        Raises:
            DeviceError: it never will be.
        """

    def stream_wait(self, layer: int, stream: Any) -> None:
        """Make ``stream`` wait for the layer, which has been submitted. The host does not wait."""

    def error(self) -> CopyError | None:
        """None while no failure is known; final once all events are done."""


class Device(Protocol):
    """A backend. Only the loop's thread calls it.

    Attributes:
        name: ``"cpu"``, ``"cuda:0"``, ...
        in_order: copies of one direction end in the order of submission, layers ascending, so that
            only the oldest event of a direction has to be asked.
        computes_in_stream: the model's work is only submitted when `commit` is called, so that
            transfers have to wait for the event of its step.

    Optional: ``failure``, the error after which no transfer can succeed, which breaks the engine.
    """

    name: str
    in_order: bool
    computes_in_stream: bool

    def attach(self, regions: Regions, arena: HostArena) -> None:
        """Bind the memory of both tiers, before the first copy and after ``detach``.

        Raises:
            LayoutError: the device cannot reach a region's memory.
        """

    def onload(
        self, host_ids: NDArray[np.int32], device_ids: NDArray[np.int32], after: Event | None
    ) -> Copy:
        """Start copying host blocks to device blocks, layer by layer, in the background.

        Args:
            host_ids: [N] int32, borrowed until return.
            device_ids: [N] int32, distinct.
            after: recorded event that the first byte waits for, on the device.

        Raises:
            UsageError: ids out of range, unequal lengths, duplicate destinations; nothing moved.
            DeviceError: the device does not take the copy; nothing moved.
        """

    def offload(
        self, host_ids: NDArray[np.int32], device_ids: NDArray[np.int32], after: Event | None
    ) -> Copy:
        """As onload(), the other way; all layers may share one event."""

    def move_state(
        self, source_slots: NDArray[np.int32], target_slots: NDArray[np.int32], after: Event | None
    ) -> Copy:
        """Start copying slots of recurrent state within the device, or zeroing them.

        Args:
            source_slots: [N] int32, borrowed until return; -1 for zeros.
            target_slots: [N] int32, distinct, none of them a source.
            after: as of onload(). All layers share one event.

        Raises:
            UsageError, DeviceError: as onload().
        """

    def check_event(self, event: Event) -> None:
        """Raise unless transfers can be ordered behind the event. Cheap; changes nothing.

        Raises:
            UsageError: ``event`` is no event, one of another device, or was never recorded.
        """

    def detach(self, *, keep_host: bool) -> None:
        """Let go of the memory; no copy is in flight, and none comes before ``attach``. Idempotent.

        Args:
            keep_host: the arena stays, and comes again with ``attach``: so does what was done to
                it, such as pinning.
        """

    def close(self) -> None:
        """Finish what is submitted, join native threads, let go of the memory. Idempotent."""


def check_event_type(event: object) -> None:
    """Raise unless ``event`` has what :class:`Event` asks for; reads nothing of it.

    A future is refused, too: its ``done`` is a method, and as an attribute always true.

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
            hint="pass an event that was recorded behind the step's work, or None when the work "
            "has finished",
        )
