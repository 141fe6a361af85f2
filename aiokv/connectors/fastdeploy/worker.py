"""CacheController and LayerDoneCounter: what FastDeploy's model runner calls, on aiokv."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from aiokv import UsageError
from aiokv.connectors.fastdeploy.metadata import step_of, transfer_ids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LayerSwapTimeoutError(TimeoutError):
    """A layer has not arrived in time; the name is FastDeploy's."""


class Layers(Protocol):
    """Layers of transfers, such as :class:`aiokv.sync.SyncLayers`."""

    @property
    def is_done(self) -> bool:
        """True when no byte moves any more."""

    def wait(self, layer: int, timeout: float | None = None) -> None:
        """Block the calling thread until a layer has arrived."""

    def wait_all(self, timeout: float | None = None) -> None:
        """Block the calling thread until all layers have arrived."""

    def gpu_wait(self, layer: int, stream: Any) -> None:
        """Let a stream wait for a layer."""

    def raise_for_error(self) -> None:
        """Raise the failure of a transfer."""


class LayerSource(Protocol):
    """Finds the layers of transfers: the ``CacheManager`` of this process, for example."""

    def layers(self, transfer_ids: Sequence[int]) -> Sequence[Layers]:
        """Return the layers of transfers that have not arrived yet."""


class LayerDoneCounter:
    """Layers of the onloads that a batch waits for; any thread of the runner.

    Args:
        num_layers: layers of the model, those of draft models included.
        parts: layers of the onloads.
    """

    def __init__(self, num_layers: int, parts: Sequence[Layers]) -> None:
        self._num_layers = num_layers
        self._parts = tuple(parts)
        self._created = time.monotonic()
        self._wait_seconds: dict[int, float] = {}

    def get_num_layers(self) -> int:
        """Return the number of layers."""
        return self._num_layers

    def is_all_done(self) -> bool:
        """Return True when all layers have arrived. Does not cross."""
        return all(part.is_done for part in self._parts)

    def wait_for_layer(self, layer_idx: int, timeout: float | None = 1.0) -> bool:
        """Block the calling thread, without the GIL, until a layer has arrived.

        Args:
            layer_idx: from 0.
            timeout: seconds; None for no limit.

        Returns:
            True.

        Raises:
            LayerSwapTimeoutError: the layer has not arrived in time. The onload goes on.
            TransferError: an onload failed: do not use what the batch computes.
            UsageError: there is no such layer.
        """
        if not 0 <= layer_idx < self._num_layers:
            raise UsageError(
                f"layer_idx is {layer_idx}; it must be between 0 and {self._num_layers - 1}"
            )
        began = time.monotonic()
        try:
            self._wait(f"layer {layer_idx}", timeout, lambda part, left: part.wait(layer_idx, left))
        finally:
            waited = time.monotonic() - began
            self._wait_seconds[layer_idx] = self._wait_seconds.get(layer_idx, 0.0) + waited
        return True

    def wait_all(self, timeout: float | None = 300.0) -> bool:
        """Block the calling thread until all layers have arrived; see ``wait_for_layer``."""
        self._wait("all layers", timeout, lambda part, left: part.wait_all(left))
        return True

    def gpu_wait(self, layer_idx: int, stream: Any) -> None:
        """Let a compute stream wait for a layer, without blocking the host for its bytes.

        Call ``raise_for_error`` before what the batch has computed is used.
        """
        for part in self._parts:
            part.gpu_wait(layer_idx, stream)

    def raise_for_error(self) -> None:
        """Raise the failure of an onload, if there is one.

        Raises:
            TransferError: as for ``wait_for_layer``.
        """
        for part in self._parts:
            part.raise_for_error()

    def get_layer_wait_time(self, layer_idx: int) -> float:
        """Return the seconds that ``wait_for_layer`` has blocked for a layer."""
        return self._wait_seconds.get(layer_idx, 0.0)

    def get_all_layer_times(self) -> dict[int, float]:
        """Return the seconds that ``wait_for_layer`` has blocked, per layer."""
        return dict(self._wait_seconds)

    def get_elapsed_time(self) -> float:
        """Return the seconds since the counter was made."""
        return time.monotonic() - self._created

    def _wait(
        self, what: str, timeout: float | None, wait: Callable[[Layers, float | None], None]
    ) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                wait(part, left)
            except TimeoutError as error:
                raise LayerSwapTimeoutError(f"{what} did not arrive within {timeout} s") from error


class CacheController:
    """Replaces ``fastdeploy.cache_manager.v1.cache_controller.CacheController``. Runner thread.

    Args:
        num_layers: layers of the model, those of draft models included.
        source: where the layers of onloads are found: the ``CacheManager`` of this process, or the
            rank of this worker process.
        close_step: closes a step of the rank; None without ranks, where the manager closes steps.
    """

    def __init__(
        self,
        num_layers: int,
        source: LayerSource,
        close_step: Callable[[int], None] | None = None,
    ) -> None:
        self._num_layers = num_layers
        self._source = source
        self._close_step = close_step
        self._counter: LayerDoneCounter | None = None

    @property
    def swap_layer_done_counter(self) -> LayerDoneCounter | None:
        """Counter of the last batch that waits for onloads; None before the first one."""
        return self._counter

    def submit_swap_tasks(
        self, evict_metadata: Any, swap_in_metadata: Any
    ) -> LayerDoneCounter | None:
        """Begin a batch: close the step that it names, and find the onloads that it waits for.

        aiokv has submitted the onloads itself. Call this for each batch, before the model computes
        it, and after all work of earlier batches was submitted.

        Args:
            evict_metadata: ``BatchRequest.cache_evict_metadata``.
            swap_in_metadata: ``BatchRequest.cache_swap_metadata``.

        Returns:
            Counter of the onloads; None when the batch waits for none.
        """
        step = step_of(evict_metadata)
        if step and self._close_step is not None:
            self._close_step(step)
        transfer_ids = transfer_ids_of(swap_in_metadata)
        self._counter = None
        if transfer_ids:
            self._counter = LayerDoneCounter(self._num_layers, self._source.layers(transfer_ids))
        return self._counter
