"""SyncLayers: waits of runner threads for the layers of a transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.base import checks
from aiokv.base.checks import Unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.sync.port import Port
    from aiokv.worker.views import LayerView


class SyncLayers(Unique):
    """Layers that a lease or a batch waits for: an :class:`aiokv.LayerView` for threads.

    Waits for layers that have arrived return without a crossing. A lease whose cached blocks are
    all on the device waits for no transfer.
    """

    __slots__ = ("_port", "_view")

    def __init__(self, port: Port, view: LayerView) -> None:
        self._port = port
        self._view = view

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self._view.num_layers

    @property
    def is_done(self) -> bool:
        """True if no byte of the transfers moves any more. Does not cross."""
        return self._view.is_done

    @property
    def has_arrived(self) -> bool:
        """True if all transfers have succeeded and all their layers have arrived.

        Does not cross.
        """
        return self._view.has_arrived()

    @property
    def transfer_ids(self) -> tuple[int, ...]:
        """Ids that a rank's runner passes to ``Rank.layers``. Does not cross."""
        return self._view.transfer_ids

    @property
    def after_step(self) -> int:
        """Last step whose end the transfers await, as of the grant; 0 for none.

        No byte moves while this step is open. Does not cross.
        """
        return self._view.after_step

    def wait_seconds(self, layer: int) -> float:
        """Return how long callers have waited for a layer, as ``LayerView``. Does not cross."""
        return self._view.wait_seconds(layer)

    def wait(self, layer: int, timeout: float | None = None) -> None:
        """Block the calling thread, without the GIL, until a layer has arrived.

        Args:
            layer: from 0.
            timeout: seconds; None for no limit.

        Raises:
            TransferError: the transfer failed; ``first_bad_token`` is the first position to compute
                again.
            TransferTimeout: the layer has not arrived in time. The transfer goes on.
            UsageError: there is no such layer, or ``timeout`` is no number.
            ClosedError, BrokenEngineError: the engine was closed, or its thread has failed.
            KeyboardInterrupt: the transfer goes on.
        """
        limit = checks.timeout(timeout)
        if self.num_layers:
            checks.integer("layer", layer, minimum=0, maximum=self.num_layers - 1)
        if not self._view.has_arrived(layer):
            self._port.begin(self._view.wait, layer, limit).wait()

    def wait_all(self, timeout: float | None = None) -> None:
        """Block the calling thread until all layers have arrived; see ``wait``."""
        limit = checks.timeout(timeout)
        if not self._view.has_arrived():
            self._port.begin(self._view.wait_all, limit).wait()

    def __iter__(self) -> Iterator[int]:
        """Layers in ascending order, each when it has arrived."""
        for layer in range(self.num_layers):
            self.wait(layer)
            yield layer

    def gpu_wait(self, layer: int, stream: Any, timeout: float | None = None) -> None:
        """Let ``stream`` wait for the layer, as ``LayerView.gpu_wait``. Does not cross.

        Raises:
            ClosedError: this process is a fork of the process of the engine.
        """
        self._port.thread.check_process()
        self._view.gpu_wait(layer, stream, timeout)

    def gpu_wait_all(self, stream: Any, timeout: float | None = None) -> None:
        """Let ``stream`` wait for every layer, as ``LayerView.gpu_wait_all``. Does not cross.

        Raises:
            ClosedError: this process is a fork of the process of the engine.
        """
        self._port.thread.check_process()
        self._view.gpu_wait_all(stream, timeout)

    def raise_for_error(self) -> None:
        """Raise the failure of the transfers, if there is one.

        Raises:
            TransferError: as for ``wait``.
        """
        if self._view.transfer_ids:
            self._port.call(lambda calls: calls.add(self._view.raise_for_error))
