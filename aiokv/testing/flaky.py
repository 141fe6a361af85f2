"""Devices that fail and delay copies at random, from a seed.

A block that a failed copy did not write is filled with ``GARBAGE``, so that code which trusts it
anyway is found by its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from aiokv.errors import DeviceError
from aiokv.testing.manual import ManualDevice
from aiokv.worker.device.base import CopyError
from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.worker.arena import HostArena
    from aiokv.worker.device.base import Event
    from aiokv.worker.device.cpu import CpuCopy
    from aiokv.worker.regions import Regions

GARBAGE: Final = 0xEE


class FlakyCopy:
    """A copy of which the blocks from ``error`` on did not arrive."""

    def __init__(self, copy: CpuCopy, error: CopyError) -> None:
        self._copy = copy
        self._error = error

    @property
    def layer_events(self) -> Sequence[Event]:
        return self._copy.layer_events

    def wait_submitted(self, layer: int) -> None:
        self._copy.wait_submitted(layer)

    def stream_wait(self, layer: int, stream: Any) -> None:
        self._copy.stream_wait(layer, stream)

    def error(self) -> CopyError | None:
        return self._error


class Faults:
    """Draws and counts them.

    Args:
        rng: decides; the caller's, so that a seed repeats a run.
        refuse_share: of the copies that are not even accepted.
        fail_share: of what may fail (copies, or their layers): it loses its blocks from a random
            one on.
    """

    def __init__(self, rng: random.Random, *, refuse_share: float, fail_share: float) -> None:
        self._rng = rng
        self._refuse_share = refuse_share
        self._fail_share = fail_share
        self.count = 0

    def refusal(self) -> DeviceError | None:
        """Of the next copy."""
        if self._rng.random() >= self._refuse_share:
            return None
        self.count += 1
        return DeviceError("refused at random")

    def first_bad(self, num_blocks: int, *, at_least: int = 0) -> int | None:
        """The first block that does not arrive; None when all do."""
        if num_blocks <= at_least or self._rng.random() >= self._fail_share:
            return None
        self.count += 1
        return self._rng.randrange(at_least, num_blocks)


class _WithFaults:
    """A device that draws its faults.

    Args:
        rng: as of :class:`Faults`.
        refuse_share: as of :class:`Faults`.
        fail_share: as of :class:`Faults`; None for the device's own.
    """

    FAIL_SHARE: ClassVar[float]

    def __init__(
        self, rng: random.Random, *, refuse_share: float = 0.02, fail_share: float | None = None
    ) -> None:
        super().__init__()
        self.rng = rng
        fail_share = self.FAIL_SHARE if fail_share is None else fail_share
        self.faults = Faults(rng, refuse_share=refuse_share, fail_share=fail_share)


class FlakyDevice(_WithFaults, CpuDevice):
    """The cpu device with its native threads, some of whose copies fail."""

    name = "flaky"
    FAIL_SHARE = 0.05

    def attach(self, regions: Regions, arena: HostArena) -> None:
        super().attach(regions, arena)
        self._memory_of = (regions, arena)

    def detach(self, *, keep_host: bool) -> None:
        super().detach(keep_host=keep_host)
        del self._memory_of

    def _copy(  # type: ignore[override]
        self,
        stream: Any,
        host_ids: NDArray[np.int32],
        device_ids: NDArray[np.int32],
        after: Event | None,
        *,
        onload: bool,
    ) -> CpuCopy | FlakyCopy:
        if (refusal := self.faults.refusal()) is not None:
            raise refusal
        good = self.faults.first_bad(len(host_ids), at_least=1)
        if good is None:
            return super()._copy(stream, host_ids, device_ids, after, onload=onload)
        spoil(*self._memory_of, host_ids[good:], device_ids[good:], onload=onload)
        copy = super()._copy(stream, host_ids[:good], device_ids[:good], after, onload=onload)
        return FlakyCopy(copy, CopyError(good, "failed at random"))


class ChaosDevice(_WithFaults, ManualDevice):
    """The manual device, driven at random: layers end in any order, and some of them fail."""

    name = "chaos"
    FAIL_SHARE = 0.02

    def move(self, layers: int) -> None:
        """End up to ``layers`` layers of copies in flight, whichever."""
        for _ in range(layers):
            copies = self.copies
            if not copies:
                return
            copy = self.rng.choice(copies)
            layer = self.rng.choice(copy.pending_layers)
            good = self.faults.first_bad(len(copy.host_ids))
            if good is None:
                copy.complete(layer)
                continue
            if copy.direction == "state":
                copy.fail(layer, reason="failed at random")  # a failed slot is never used
                continue
            spoil(
                self.regions,
                self.arena,
                copy.host_ids[good:],
                copy.device_ids[good:],
                onload=copy.direction == "onload",
                layer=layer,
            )
            copy.fail(layer, block=good, reason="failed at random")

    def onload(self, *args: Any) -> Any:
        self.refuse = self.faults.refusal()
        return super().onload(*args)

    def offload(self, *args: Any) -> Any:
        self.refuse = self.faults.refusal()
        return super().offload(*args)


def spoil(
    regions: Regions,
    arena: HostArena,
    host_ids: NDArray[np.int32],
    device_ids: NDArray[np.int32],
    *,
    onload: bool,
    layer: int | None = None,
) -> None:
    """Fill the destination blocks with garbage, of one layer or of all."""
    for piece in regions.pieces():
        if layer is not None and piece.layer != layer:
            continue
        if onload:
            piece.view()[device_ids] = GARBAGE
        else:
            begin = piece.host_offset_bytes
            arena.blocks[host_ids, begin : begin + piece.block_bytes] = GARBAGE
