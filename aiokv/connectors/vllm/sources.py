"""Sources of transfers: an engine in this process, or a rank that is connected to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.connectors.vllm.worker import stream_of
from aiokv.errors import BrokenEngineError, ClosedError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.connectors.vllm.messages import Load
    from aiokv.connectors.vllm.tensors_here import Tensors
    from aiokv.connectors.vllm.worker import LoadTransfers
    from aiokv.sync import SyncLayers
    from aiokv.sync.rank import RankThread
    from aiokv.sync.rank_layers import RankLayers
    from aiokv.worker.device.base import Event


class EngineSource:
    """Transfers of the engine in this process."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def transfers(self, load: Load) -> LoadTransfers:
        """Return the transfers of a load that has begun."""
        return EngineTransfers(
            self._tensors.take_load(load.transfer_ids), self._tensors.layers.device
        )

    def close_step(self, step: int, event: Event | None) -> None:
        """Note the event; the scheduler half closes the step with it."""
        self._tensors.note_event(step, event)

    def close(self) -> None:
        """Do nothing: the scheduler half closes the engine."""


class EngineTransfers:
    """Transfers of a load on the engine's own worker."""

    def __init__(self, layers: SyncLayers, device: str) -> None:
        self._layers = layers
        self._device = device

    @property
    def is_done(self) -> bool:
        return self._layers.is_done

    def failed_blocks(self, block_ids: Sequence[int]) -> set[int]:
        try:
            self._layers.raise_for_error()
        except (TransferError, ClosedError, BrokenEngineError):  # no byte moves now: see `is_done`
            return set(block_ids)
        return set()

    def wait_layer(self, layer: int, timeout: float) -> None:
        _wait_layer(self._layers, self._device, layer, timeout)

    def wait_all(self, timeout: float) -> None:
        self._layers.wait_all(timeout)


class RankSource:
    """Transfers of a rank, whose engine may be in another process."""

    def __init__(self, rank: RankThread, device: str) -> None:
        self._rank = rank
        self._device = device

    def transfers(self, load: Load) -> LoadTransfers:
        """Return the transfers of a load that has begun."""
        return RankTransfers(self._rank, load.transfer_ids, self._device)

    def close_step(self, step: int, event: Event | None) -> None:
        """Close the step on this rank."""
        if self._rank.is_ready:
            self._rank.step(step, event)

    def close(self) -> None:
        """Disconnect, and end the thread of the rank."""
        self._rank.close()


class RankTransfers:
    """Transfers of a load on one rank."""

    def __init__(self, rank: RankThread, transfer_ids: tuple[int, ...], device: str) -> None:
        self._rank = rank
        self._layers: RankLayers = rank.layers(transfer_ids)
        self._device = device

    @property
    def is_done(self) -> bool:
        return self._rank.is_done(self._layers.transfer_ids)

    def failed_blocks(self, block_ids: Sequence[int]) -> set[int]:
        if not self._layers.is_done:  # the rank has ended before the plans arrived
            return set(block_ids)
        return {block for failure in self._layers.failures() for block in failure.block_ids}

    def wait_layer(self, layer: int, timeout: float) -> None:
        _wait_layer(self._layers, self._device, layer, timeout)

    def wait_all(self, timeout: float) -> None:
        self._layers.wait_all(timeout)


def _wait_layer(layers: SyncLayers | RankLayers, device: str, layer: int, timeout: float) -> None:
    """Let the current stream of a device, or this thread if there is none, wait for a layer."""
    stream = stream_of(device)
    if stream is None:
        layers.wait(layer, timeout)
    else:
        layers.gpu_wait(layer, stream, timeout)
