"""A cpu device with slots for peers in its own memory, and the copies of ``cuda_ipc`` to them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv import _native
from aiokv.base.groups import ATTENTION
from aiokv.base.plan import PEER_ROUTES, SEND, Pool
from aiokv.stores.base import Result
from aiokv.worker.arena import HostArena
from aiokv.worker.device.base import CopyError
from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from aiokv.layout.regions import Regions
    from aiokv.worker.device.base import Event


class Ended:
    """Work that has ended; also its event."""

    done = True

    def __init__(self, results: bytes = b"", num_layers: int = 1) -> None:
        self.results = results
        self._num_layers = num_layers

    @property
    def layer_events(self) -> Sequence[Event]:
        return [self] * self._num_layers

    def synchronize(self) -> None:
        """Return."""

    def failure(self) -> None:
        return None

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        return True

    def stream_wait(self, layer: int, stream: Any) -> None:
        """Return."""

    def error(self) -> CopyError | None:
        wrong = self.results.find(bytes([Result.WRONG]))
        return (
            CopyError(wrong, "the bytes of a slot do not match its proof") if wrong >= 0 else None
        )


class Slots:
    """See ``DeviceSlots``."""

    ordinal = 3

    def __init__(self, arena: HostArena, regions: Regions) -> None:
        self.arena = arena
        self._payload_bytes = regions.payload_bytes
        self._num_layers = regions.num_layers
        self.address = arena.pointer
        self.num_slots = arena.num_blocks
        self.slot_bytes = arena.pitch_bytes
        self.memory = SimpleNamespace(handle=lambda: b"handle")

    def _call(self, function: Callable[..., Any], slots: NDArray[np.int32], keys: bytes) -> Any:
        return function(
            self.arena.pointer,
            self.arena.pitch_bytes,
            self._payload_bytes,
            np.ascontiguousarray(slots),
            keys,
            num_blocks=self.arena.num_blocks,
        )

    def seal(self, slots: NDArray[np.int32], keys: bytes) -> Ended:
        self._call(_native.seal_blocks, slots, keys)
        return Ended(num_layers=self._num_layers)

    def verify(self, slots: NDArray[np.int32], keys: bytes) -> Ended:
        return Ended(bytes(self._call(_native.verify_blocks, slots, keys)), self._num_layers)


class SlotDevice(CpuDevice):
    """As CudaDevice with ``open_peer_slots``.

    Attributes:
        before_receive: called with the slots before they are copied to device blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._attached: tuple[Any, ...] = ()
        self.slots: Slots | None = None
        self.before_receive: Callable[[NDArray[np.uint8]], object] = lambda slots: None

    def attach(
        self,
        regions: Regions,
        arena: HostArena,
        side_arenas: Mapping[Pool, HostArena] | None = None,
    ) -> None:
        self._attached = (regions, arena, dict(side_arenas or {}))
        super().attach(regions, arena, side_arenas)

    def open_peer_slots(self, num_slots: int, slot_bytes: int) -> Slots:
        regions, arena, side_arenas = self._attached
        own = HostArena(num_blocks=num_slots, pitch_bytes=slot_bytes)
        super().detach(keep_host=True)
        super().attach(regions, arena, {**side_arenas, Pool(ATTENTION, "peer"): own})
        self.slots = Slots(own, regions)
        return self.slots

    def copy(  # type: ignore[override]
        self,
        route: Any,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
        keys: bytes = b"",
    ) -> Any:
        if route not in PEER_ROUTES or self.slots is None:
            return super().copy(route, source_ids, target_ids, after, group)
        assert len(keys) == 32 * len(source_ids)  # the device proves all that moves
        if route == SEND:
            self._move(route, source_ids, target_ids, after, group)
            return self.slots.seal(target_ids, keys)
        self.before_receive(self.slots.arena.blocks[source_ids[:1]][0])
        proof = self.slots.verify(source_ids, keys)
        self._move(route, source_ids, target_ids, after, group)
        return proof

    def _move(self, *arguments: Any) -> None:
        super().copy(*arguments).layer_events[-1].synchronize()


class FakeCuda:
    """Takes the place of ``_native.cuda`` in ``cuda_ipc``: memory of this process is mapped.

    Attributes:
        after_copy: called with the target address and the length of each copy.
    """

    def __init__(self) -> None:
        self.after_copy: Callable[[int, int], object] = lambda target, num_bytes: None
        self.open_copies = 0

    def PeerCopies(self, device: int) -> FakeCuda:
        assert device == Slots.ordinal
        self.open_copies += 1
        return self

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> Ended:
        for target, source, num_bytes in copies:
            ctypes.memmove(target, source, num_bytes)
            self.after_copy(target, num_bytes)
        return Ended()

    def close(self) -> None:
        self.open_copies -= 1
