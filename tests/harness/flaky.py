"""Devices whose copies fail or are slow at random, from a seed.

A block that a failed copy did not write is filled with ``GARBAGE``, so that tests detect its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.base.groups import ATTENTION
from aiokv.base.plan import CLONE
from aiokv.errors import DeviceError
from aiokv.testing.manual import ManualDevice, fill_with_garbage
from aiokv.worker.device.base import CopyError, blocks_of, host_pool
from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import Route
    from aiokv.testing.manual import ManualCopy
    from aiokv.worker.device.base import Event
    from aiokv.worker.device.cpu import CpuCopy


class FlakyCopy:
    """A copy whose blocks from ``error`` on do not arrive."""

    def __init__(self, copy: CpuCopy, error: CopyError) -> None:
        self._copy = copy
        self._error = error

    @property
    def layer_events(self) -> Sequence[Event]:
        return self._copy.layer_events

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        return self._copy.wait_submitted(layer, timeout)

    def stream_wait(self, layer: int, stream: Any) -> None:
        self._copy.stream_wait(layer, stream)

    def error(self) -> CopyError | None:
        return self._error


class Faults:
    """Random faults of a device, and their number.

    Args:
        rng: the caller's, so that a seed repeats a run.
        refuse_share: share of the copies that the device does not accept.
        fail_share: share of the copies (or of their layers) that lose their blocks from a random
            one on.

    Attributes:
        count: faults so far.
    """

    def __init__(self, rng: random.Random, *, refuse_share: float, fail_share: float) -> None:
        self._rng = rng
        self._refuse_share = refuse_share
        self._fail_share = fail_share
        self.count = 0

    def refusal(self) -> DeviceError | None:
        """Return the error that refuses the next copy, or None."""
        if self._rng.random() >= self._refuse_share:
            return None
        self.count += 1
        return DeviceError("refused at random")

    def first_bad(self, num_blocks: int, *, at_least: int = 0) -> int | None:
        """Return the first block that does not arrive; None when all do."""
        if num_blocks <= at_least or self._rng.random() >= self._fail_share:
            return None
        self.count += 1
        return self._rng.randrange(at_least, num_blocks)


class FlakyDevice(CpuDevice):
    """The cpu device, real threads and all, of which a share of the copies fails."""

    name = "flaky"

    def __init__(
        self, rng: random.Random, *, refuse_share: float = 0.02, fail_share: float = 0.05
    ) -> None:
        super().__init__()
        self.faults = Faults(rng, refuse_share=refuse_share, fail_share=fail_share)

    def copy(  # type: ignore[override]
        self,
        route: Route,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
    ) -> CpuCopy | FlakyCopy:
        """Start a copy, which may be refused, or fail from a random block on."""
        if route == CLONE:
            return super().copy(route, source_ids, target_ids, after, group)
        if (refusal := self.faults.refusal()) is not None:
            raise refusal
        good = self.faults.first_bad(len(target_ids), at_least=1)
        if good is None or self._memory is None:
            return super().copy(route, source_ids, target_ids, after, group)
        regions, arenas = self._memory
        pool = host_pool(route, group)
        fill_with_garbage(blocks_of(regions, pool), arenas[pool], route, target_ids[good:])
        copy = super().copy(route, source_ids[:good], target_ids[:good], after, group)
        return FlakyCopy(copy, CopyError(good, "failed at random"))


class ChaosDevice(ManualDevice):
    """The manual device, driven at random: layers end in any order, and a share of them fails."""

    name = "chaos"

    def __init__(
        self, rng: random.Random, *, refuse_share: float = 0.02, fail_share: float = 0.02
    ) -> None:
        super().__init__()
        self._rng = rng
        self.faults = Faults(rng, refuse_share=refuse_share, fail_share=fail_share)

    def move(self, layers: int) -> None:
        """End up to ``layers`` layers, of random copies in flight."""
        for _ in range(layers):
            copies = self.copies
            if not copies:
                return
            copy = self._rng.choice(copies)
            layer = self._rng.choice(copy.pending_layers)
            good = self.faults.first_bad(len(copy.target_ids))
            if good is None:
                copy.complete(layer)
            else:
                copy.fail(
                    layer, block=0 if copy.route == CLONE else good, reason="failed at random"
                )

    def copy(
        self,
        route: Route,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
    ) -> ManualCopy:
        """Take a copy, or refuse it at random."""
        if route != CLONE:
            self.refuse = self.faults.refusal()
        return super().copy(route, source_ids, target_ids, after, group)
