"""RankLayers: waits of a worker's threads for transfers on its rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from aiokv.base.checks import Unique
from aiokv.worker.thread_waits import Deadline
from aiokv.worker.views import LayerView, done_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.base.plan import TransferPlan
    from aiokv.worker.layer_waits import LayerWaits
    from aiokv.worker.layers import LayerDoneCounter


class TransferFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer that has failed on one rank, or was cancelled.

    Attributes:
        transfer_id: the plan's.
        first_bad_block: index into the plan's blocks; the blocks before it have arrived.
        block_ids: ids, in the target pool, of the blocks from ``first_bad_block`` on, which have
            not arrived: device blocks for an onload.
        reason: text of the failure.
    """

    transfer_id: int
    first_bad_block: int
    block_ids: tuple[int, ...]
    reason: str


Arrived: TypeAlias = "tuple[TransferPlan, LayerDoneCounter]"


class RankTransfers(Protocol):
    """The transfers of a rank in a thread."""

    def check_process(self) -> None:
        """Check that this process is that of the rank.

        Raises:
            ClosedError: this process is a fork of the process of the rank.
        """

    def find(self, transfer_id: int) -> Arrived | None:
        """Return a transfer; None before its plan has arrived. Does not cross.

        Raises:
            UsageError: the transfer was forgotten.
        """

    def arrived(self, transfer_ids: Sequence[int], deadline: Deadline) -> list[Arrived]:
        """Wait until plans have arrived, and return their transfers."""


class RankLayers(Unique):
    """Transfers on one rank, for the threads of its process; made by ``RankThread.layers``.

    Each method that waits also waits for the plans, which may reach this rank later than the ids
    reach its model runner. Any thread may call any method.

    Attributes:
        transfer_ids: as given.
    """

    __slots__ = ("_arrived", "_num_layers", "_transfers", "_view", "_waits", "transfer_ids")

    def __init__(
        self,
        transfers: RankTransfers,
        transfer_ids: tuple[int, ...],
        num_layers: int,
        waits: LayerWaits,
    ) -> None:
        self._transfers = transfers
        self._num_layers = num_layers
        self._waits = waits
        self._arrived: list[Arrived] = []  # empty, or the layers of all transfers
        self._view: LayerView | None = None  # set when all plans have arrived
        self.transfer_ids = transfer_ids

    def gpu_wait(self, layer: int, stream: Any, timeout: float | None = None) -> None:
        """Let ``stream`` wait for a layer of every transfer; the host waits for no byte.

        Blocks the calling thread, without the GIL, until the layer has been submitted on this rank.
        It orders work but does not verify the transfers: call ``raise_for_error`` or ``failures``
        before outputs of the step are used.

        Args:
            layer: from 0.
            stream: a stream of the rank's device: of CuPy, PyTorch or Paddle, or a raw handle.
            timeout: seconds for the plans to arrive and the layer to be submitted; None for no
                limit.

        Raises:
            TransferError: a transfer failed or was cancelled.
            TransferTimeout: a plan has not arrived in time, or the layer was not submitted; the
                stream may wait for some of the transfers.
            UsageError: a transfer ended so long ago that the rank has forgotten it; there is no
                such layer; or the thread was not started.
            ClosedError: the rank or the group has ended.
            KeyboardInterrupt: the transfers go on.
        """
        deadline = Deadline(timeout)
        self._resolve(deadline).gpu_wait(layer, stream, deadline.left())

    def gpu_wait_all(self, stream: Any, timeout: float | None = None) -> None:
        """Let ``stream`` wait for every layer of every transfer; see ``gpu_wait``."""
        deadline = Deadline(timeout)
        self._resolve(deadline).gpu_wait_all(stream, deadline.left())

    def wait(self, layer: int, timeout: float | None = None) -> None:
        """Block the calling thread, without the GIL, until a layer of every transfer has arrived.

        Args:
            layer: from 0.
            timeout: seconds, also for the plans; None for no limit.

        Raises:
            TransferError: a transfer failed or was cancelled. No byte of it moves any more.
            TransferTimeout: the layer has not arrived in time. The transfers go on.
            UsageError, ClosedError, KeyboardInterrupt: as for ``gpu_wait``.
        """
        deadline = Deadline(timeout)
        self._resolve(deadline).host_wait(layer, deadline.left())

    def wait_all(self, timeout: float | None = None) -> None:
        """Block the calling thread until all layers have arrived; see ``wait``."""
        deadline = Deadline(timeout)
        self._resolve(deadline).host_wait_all(deadline.left())

    def wait_seconds(self, layer: int) -> float:
        """Return how long callers of this object have waited for a layer; see ``LayerView``.

        Raises:
            UsageError: there is no such layer.
        """
        return 0.0 if self._view is None else self._view.wait_seconds(layer)

    @property
    def is_done(self) -> bool:
        """True if all plans have arrived, and no byte of them moves any more.

        True after a failure, too: see ``failures``.

        Raises:
            UsageError: a transfer was forgotten.
        """
        arrived = self._arrived_so_far()
        return len(arrived) == len(self.transfer_ids) and all(
            counter.at_rest for _, counter in arrived
        )

    def raise_for_error(self) -> None:
        """Raise the first failure of the transfers whose plans have arrived.

        Raises:
            TransferError: with ``first_bad_token`` 0: a rank does not know the positions of leases;
                see ``failures``.
            UsageError: a transfer was forgotten.
        """
        for _, counter in self._arrived_so_far():
            counter.raise_for_error()

    def failures(self) -> list[TransferFailure]:
        """Return the failures known so far, one per failed transfer, in the order of the ids.

        Final when ``is_done`` is true.

        Raises:
            UsageError: a transfer was forgotten.
        """
        return [
            TransferFailure(
                transfer_id=plan.transfer_id,
                first_bad_block=failure.first_bad_block,
                block_ids=tuple(plan.target_ids[failure.first_bad_block :].tolist()),
                reason=failure.reason,
            )
            for plan, counter in self._arrived_so_far()
            if (failure := counter.failure) is not None
        ]

    def _arrived_so_far(self) -> list[Arrived]:
        if self._arrived:
            self._transfers.check_process()
            return self._arrived
        found = [self._transfers.find(transfer_id) for transfer_id in self.transfer_ids]
        arrived = [transfer for transfer in found if transfer is not None]
        if len(arrived) == len(found):
            self._arrived = arrived
        return arrived

    def _resolve(self, deadline: Deadline) -> LayerView:
        if len(self._arrived_so_far()) < len(self.transfer_ids):
            self._arrived = self._transfers.arrived(self.transfer_ids, deadline)
        if self._view is None:
            counters = [counter for _, counter in self._arrived]
            self._view = (
                LayerView(counters, waits=self._waits) if counters else done_view(self._num_layers)
            )
        return self._view

    def __repr__(self) -> str:
        return f"<RankLayers of transfers {list(self.transfer_ids)}>"
