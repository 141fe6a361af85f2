"""``verify="checksum"``: each onloaded block is compared with the block that was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.groups import retention_of
from aiokv.base.logs import Log
from aiokv.base.plan import FETCH, OFFLOAD, ONLOAD, RECEIVE
from aiokv.worker.blocks import checksum_blocks
from aiokv.worker.device.base import CopyError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import TransferPlan
    from aiokv.layout.regions import Regions

log = Log(__name__)


class Checksums:
    """Checksums of blocks on the device and on the host. For finding bugs: reads every byte."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._device: dict[int, int] = {}  # by device id: CRC-32 at the time of recording
        self._host: dict[int, int] = {}

    def bind(self, regions: Regions) -> None:
        """Forget the device blocks: the tier has new tensors, or none."""
        self._regions = regions
        self._device.clear()

    def record(self, device_ids: NDArray[np.int32]) -> None:
        """Record the present bytes of device blocks as the right ones."""
        sums = checksum_blocks(self._regions, device_ids)
        self._device.update(zip(device_ids.tolist(), sums, strict=True))

    def begin(self, plan: TransferPlan) -> None:
        """Note that a plan starts: an offload copies the checksums, an onload overwrites blocks.

        A fetch and a receive overwrite blocks, too; the stores and the peers verify their bytes.
        """
        if retention_of(plan.group) != "all":
            return
        if plan.route in (ONLOAD, FETCH, RECEIVE):
            overwritten = self._host if plan.route == FETCH else self._device
            for block_id in plan.target_ids.tolist():
                overwritten.pop(block_id, None)
        if plan.route != OFFLOAD:
            return
        for device_id, host_id in zip(
            plan.source_ids.tolist(), plan.target_ids.tolist(), strict=True
        ):
            checksum = self._device.get(device_id)
            if checksum is None:
                self._host.pop(host_id, None)
            else:
                self._host[host_id] = checksum

    def verify(self, plan: TransferPlan, failure: CopyError | None) -> CopyError | None:
        """Compare the blocks that an onload has copied with the committed ones.

        Args:
            plan: plan of the onload.
            failure: failure of the copy itself; blocks before it are compared all the same.

        Returns:
            The first block that differs, or else ``failure``.
        """
        good = plan.num_blocks if failure is None else failure.first_bad_block
        device_ids, host_ids = plan.target_ids[:good], plan.source_ids[:good]
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
