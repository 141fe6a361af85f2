"""Tensors of a worker that runs in the scheduler's process, as with vLLM's executor for one GPU.

The worker half registers its tensors before vLLM makes the scheduler half, which finds them here.
The engine then copies the tensors itself, without a socket or a second event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from aiokv.connectors.vllm.tensors import LayerTensors
    from aiokv.sync import SyncLayers
    from aiokv.worker.device.base import Event

_tensors: dict[str, Tensors] = {}  # by engine_id of vLLM


class Tensors:
    """The tensors of one worker, and the loads into them.

    Attributes:
        layers: the tensors.
    """

    def __init__(self, layers: LayerTensors) -> None:
        self.layers = layers
        self._loads: dict[tuple[int, ...], SyncLayers] = {}  # by transfer ids
        self._events: dict[int, Event | None] = {}  # by step

    def note_load(self, layers: SyncLayers) -> None:
        """Note a load that has begun."""
        self._loads[layers.transfer_ids] = layers

    def take_load(self, transfer_ids: tuple[int, ...]) -> SyncLayers:
        """Return a load, and forget it."""
        return self._loads.pop(transfer_ids)

    def note_event(self, step: int, event: Event | None) -> None:
        """Note the event after the work of a step; None when the work has finished."""
        self._events[step] = event

    def wait_computed(self, step: int) -> None:
        """Block the calling thread until the work of a step has ended.

        Without an event of the step, it waits for all work of the device.
        """
        if step not in self._events and self.layers.device.startswith("cuda"):
            torch.cuda.synchronize()
            return
        event = self._events.get(step)
        if event is not None:
            event.synchronize()

    def take_event(self, step: int) -> Event | None:
        """Return the event of a step, and forget it and those of earlier steps."""
        events = self._events
        event = events.pop(step, None)
        while events and (number := next(iter(events))) < step:
            del events[number]
        return event


def offer(engine_id: str, layers: LayerTensors) -> Tensors:
    """Offer the tensors of a worker to the scheduler half of this process."""
    tensors = _tensors[engine_id] = Tensors(layers)
    return tensors


def take(engine_id: str) -> Tensors | None:
    """Return the tensors of a worker of this process, if there is one."""
    return _tensors.pop(engine_id, None)


def clear() -> None:
    """Forget all offers."""
    _tensors.clear()
