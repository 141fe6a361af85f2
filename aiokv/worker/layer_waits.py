"""LayerWaits: how long callers have waited for each layer."""

from __future__ import annotations

import threading

from aiokv._native import Histogram
from aiokv.base.statistics import DurationHistogram, LayerWaitStatistics


class LayerWaits:
    """Durations of waits. Any thread."""

    __slots__ = ("_histogram", "_layer_seconds", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histogram = Histogram()
        self._layer_seconds: list[float] = []

    def note(self, layer: int, num_layers: int, seconds: float) -> None:
        """Note the end of a wait.

        Args:
            layer: index of the layer, from 0.
            num_layers: number of layers of the model.
            seconds: time that the caller has waited.
        """
        with self._lock:
            self._histogram.add(seconds)
            self._layer_seconds += [0.0] * (num_layers - len(self._layer_seconds))
            self._layer_seconds[layer] += seconds

    def seconds(self, layer: int) -> float:
        """Return the time of all waits for a layer."""
        with self._lock:
            return self._layer_seconds[layer] if self._layer_seconds else 0.0

    def statistics(self) -> LayerWaitStatistics:
        """Return the waits so far."""
        with self._lock:
            return LayerWaitStatistics(
                waits=DurationHistogram.of(self._histogram),
                layer_seconds=list(self._layer_seconds),
            )
