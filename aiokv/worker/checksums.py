"""``verify="checksum"``: every block is compared with what it was when it was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.observe.logs import Log
from aiokv.worker.blocks import checksum_blocks
from aiokv.worker.device.base import CopyError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv.plan import TransferPlan
    from aiokv.worker.regions import Regions

log = Log(__name__)


class Checksums:
    """Follows blocks from device to host and back. For finding bugs: it reads every byte."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._device: dict[int, int] = {}  # device id -> CRC-32 when it was recorded
        self._host: dict[int, int] = {}

    def bind(self, regions: Regions) -> None:
        """The device tier has new tensors, or none; nothing in it is known."""
        self._regions = regions
        self._device.clear()

    def record(self, device_ids: NDArray[np.int32]) -> None:
        """The blocks hold what they are meant to hold."""
        sums = checksum_blocks(self._regions, device_ids)
        self._device.update(zip(device_ids.tolist(), sums, strict=True))

    def begin(self, plan: TransferPlan) -> None:
        """An offload takes the sums along; an onload makes those of its targets unknown."""
        if plan.direction == "onload":
            for device_id in plan.device_ids.tolist():
                self._device.pop(device_id, None)
            return
        for device_id, host_id in zip(
            plan.device_ids.tolist(), plan.host_ids.tolist(), strict=True
        ):
            recorded = self._device.get(device_id)
            if recorded is None:
                self._host.pop(host_id, None)
            else:
                self._host[host_id] = recorded

    def prove(self, plan: TransferPlan, failure: CopyError | None) -> CopyError | None:
        """What an onload brought is what was committed; the first block that is not, else.

        Args:
            plan: of the onload.
            failure: of the copy itself; blocks before it have to be proven all the same.
        """
        good = plan.num_blocks if failure is None else failure.first_bad_block
        device_ids, host_ids = plan.device_ids[:good], plan.host_ids[:good]
        sums = checksum_blocks(self._regions, device_ids)
        pairs = zip(device_ids.tolist(), host_ids.tolist(), sums, strict=True)
        for index, (device_id, host_id, actual) in enumerate(pairs):
            expected = self._host.get(host_id, actual)
            if actual != expected:
                reason = (
                    f"checksum of host block {host_id}, onloaded to device block {device_id}, is "
                    f"{actual:#010x}, not {expected:#010x} as committed"
                )
                log.error("block.corrupt", transfer_id=plan.transfer_id, reason=reason)
                return CopyError(index, reason)
            self._device[device_id] = actual
        return failure
