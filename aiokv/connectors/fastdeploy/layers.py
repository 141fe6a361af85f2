"""LayerDoneCounter: waits of FastDeploy's model runner for the layers of onloads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from aiokv.base import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LayerSwapTimeoutError(TimeoutError):
    """A layer has not arrived in time; the name is FastDeploy's."""


class Layers(Protocol):
    """Layers of transfers: :class:`aiokv.sync.SyncLayers`, or :class:`aiokv.sync.RankLayers`."""

    def wait(self, layer: int, timeout: float | None = None) -> None:
        """Block the calling thread until a layer has arrived."""

    def wait_all(self, timeout: float | None = None) -> None:
        """Block the calling thread until all layers have arrived."""

    def gpu_wait(self, layer: int, stream: Any, timeout: float | None = None) -> None:
        """Let a stream wait for a layer."""

    def raise_for_error(self) -> None:
        """Raise the failure of a transfer."""


class LayersDone(Protocol):
    """See :meth:`aiokv.sync.RankThread.layers_done`."""

    def __call__(self, *marks: bytes, event: Any) -> None: ...


class ComputedLayers:
    """Layers of a batch that can be sent when the model has computed them.

    Args:
        marks: numbers of layers, and the marks for when so many are computed; see
            :meth:`aiokv.ranks.Rank.layers_done`.
        layers_done: gets the marks of layers, and an event behind their work.
        new_event: returns an event that was recorded just now on the stream of the model; None
            where all submitted work has finished.
    """

    def __init__(
        self,
        marks: Sequence[tuple[int, bytes]],
        layers_done: LayersDone,
        new_event: Callable[[], Any] | None,
    ) -> None:
        self._marks = marks
        self._layers_done = layers_done
        self._new_event = new_event

    def note(self, num_layers: int) -> None:
        """Note that the model has submitted the work of the first layers, and goes on."""
        due = [mark for layers, mark in self._marks if layers <= num_layers]
        if not due:
            return
        self._marks = [named for named in self._marks if named[0] > num_layers]
        self._layers_done(*due, event=None if self._new_event is None else self._new_event())


class LayerDoneCounter:
    """Layers of the onloads that a batch waits for; any thread of the runner.

    The runner waits for a layer when it has submitted the work of those before.

    Args:
        num_layers: layers of the model, those of draft models included.
        parts: layers of the onloads.
        computed: learns which layers are computed; None if no layer is sent early.
    """

    def __init__(
        self, num_layers: int, parts: Sequence[Layers], computed: ComputedLayers | None = None
    ) -> None:
        self._num_layers = num_layers
        self._parts = tuple(parts)
        self._computed = computed
        self._wait_seconds: dict[int, float] = {}

    def wait_for_layer(self, layer_idx: int, timeout: float | None = 30.0) -> bool:
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
        self._begin_layer(layer_idx)
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

    def gpu_wait(self, layer_idx: int, stream: Any, timeout: float | None = 30.0) -> None:
        """Let a compute stream wait for a layer, without blocking the host for its bytes.

        Call ``raise_for_error`` before what the batch has computed is used.

        Args:
            layer_idx: from 0.
            stream: the stream of the model.
            timeout: seconds for the layer to be submitted; None for no limit.

        Raises:
            LayerSwapTimeoutError: the layer was not submitted in time.
            TransferError, UsageError: as for ``wait_for_layer``.
        """
        self._begin_layer(layer_idx)
        self._wait(
            f"layer {layer_idx}",
            timeout,
            lambda part, left: part.gpu_wait(layer_idx, stream, left),
        )

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

    def _begin_layer(self, layer_idx: int) -> None:
        checks.integer("layer_idx", layer_idx, minimum=0, maximum=self._num_layers - 1)
        if self._computed is not None:
            self._computed.note(layer_idx)

    def _wait(
        self, what: str, timeout: float | None, wait: Callable[[Layers, float | None], None]
    ) -> None:
        timeout = checks.timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                wait(part, left)
            except TimeoutError as error:
                raise LayerSwapTimeoutError(f"{what} did not arrive within {timeout} s") from error
