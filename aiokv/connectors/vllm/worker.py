"""Worker half: registers vLLM's tensors, waits for loads, and reports their ends.

A step of vLLM's model runner, and the calls that it makes here:

    start_load_kv        begin()       loads of the message; a captured graph waits for all layers
    (each layer)         wait_layer()  loads of this step, and ends of loads that began before
    get_finished         take_loaded() loads that requests wait for
    get_block_ids_...    take_failed() blocks that vLLM computes again
    (draft model)
    clear_connector_...  close_step()  the event that saves of the step wait for
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from aiokv.base.logs import Log
from aiokv.connectors.vllm import compat
from aiokv.errors import ClosedError, TransferError, UsageError
from aiokv.worker.device.base import as_event

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from aiokv.connectors.vllm.messages import Load, StepMetadata
    from aiokv.connectors.vllm.tensors import LayerTensors
    from aiokv.worker.device.base import Event

log = Log(__name__)

_CUDA: Final = "cuda"


class LoadTransfers(Protocol):
    """The transfers of one load on this worker."""

    @property
    def is_done(self) -> bool:
        """True if no byte moves any more, whether the load succeeded or failed."""
        ...

    def failed_blocks(self, block_ids: Sequence[int]) -> set[int]:
        """Return those of the load's blocks that have failed; final when ``is_done``."""
        ...

    def wait_layer(self, layer: int, timeout: float) -> None:
        """Let the current stream, or the calling thread on the cpu, wait for a layer."""
        ...

    def wait_all(self, timeout: float) -> None:
        """Block the calling thread until all bytes have arrived."""
        ...


class Source(Protocol):
    """Object that has the transfers of loads: the engine, or a rank of it."""

    def transfers(self, load: Load) -> LoadTransfers:
        """Return the transfers of a load that has begun."""
        ...

    def close_step(self, step: int, event: Event | None) -> None:
        """Note that the work of a step was submitted, before an event that was recorded."""
        ...

    def close(self) -> None:
        """End the threads of this worker."""
        ...


class WorkerHalf:
    """Waits for loads on one worker; its methods follow vLLM's model runner.

    Args:
        tensors: the tensors of this worker.
        source: the transfers.
        timeout: seconds that a step waits for a layer.
        is_async: True with asynchronous scheduling, where vLLM learns of a failure only after it
            has scheduled the next step, which would use the failed blocks.
        has_sides: True if the KV cache has several groups: vLLM then computes a request whose load
            has failed from its first position on.
    """

    def __init__(
        self,
        tensors: LayerTensors,
        source: Source,
        timeout: float,
        *,
        is_async: bool = False,
        has_sides: bool = False,
    ) -> None:
        self._tensors = tensors
        self._source = source
        self._timeout = timeout
        self._is_async = is_async
        self._has_sides = has_sides
        self._layers = frozenset(range(tensors.regions.num_layers))
        self._called: set[int] = set()  # layers for which this step has called wait_layer()
        # Whether the last step with calls of wait_layer() called it for all layers.
        self._calls_all = False
        self._loading: dict[str, tuple[Load, LoadTransfers | None]] = {}  # by request
        self._in_step: list[tuple[Load, LoadTransfers]] = []
        self._waits: list[tuple[Load, LoadTransfers]] = []  # of `_loading`, awaited by this step
        self._layers_left: set[int] = set()  # layers of this step's loads that have not ended
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._lost: dict[str, int] = {}  # step of a failure that vLLM cannot be told, by request
        self._ended: set[str] = set()  # requests that have ended during their load
        self._step = 0
        self._counts = {"loaded_blocks": 0, "failed_blocks": 0}

    def begin(self, message: StepMetadata, *, layers_are_hooked: bool) -> None:
        """Note the loads of a step.

        Args:
            message: message of the scheduler half.
            layers_are_hooked: False if vLLM replays a graph of the whole model, in which it does
                not call ``wait_layer``. Then this method waits for all layers. It also does so
                until a step has called ``wait_layer`` for each layer, because some models do not.

        Raises:
            TransferError: as ``end_step``.
        """
        self._step = message.step
        for load in message.loads:
            transfers = self._source.transfers(load) if load.transfer_ids else None
            if load.failed:
                self._fail(load, set(load.block_ids))
            if not load.in_step:
                self._loading[load.request_id] = (load, transfers)
            elif transfers is not None:
                self._in_step.append((load, transfers))
            elif load.failed:
                self._raise_if_late(len(load.block_ids))
        for request_id in message.waits:
            waiting = self._loading.get(request_id)
            if waiting is not None and waiting[1] is not None:
                self._waits.append((waiting[0], waiting[1]))
        if self._in_step or self._waits:
            self._layers_left = set(self._layers)
            if not (layers_are_hooked and self._calls_all):
                for layer in sorted(self._layers):
                    self._wait(layer)

    def wait_layer(self, layer_name: str) -> None:
        """Wait for one layer of the loads of this step."""
        layer = self._tensors.layer_of[layer_name]
        self._called.add(layer)
        if self._layers_left:
            self._wait(layer)

    def _wait(self, layer: int) -> None:
        # A timeout ends the server: bytes may still move, so the blocks cannot be computed again.
        if layer not in self._layers_left:
            return
        self._layers_left.discard(layer)
        for load, transfers in (*self._in_step, *self._waits):
            try:
                transfers.wait_layer(layer, self._timeout)
            except (TransferError, ClosedError) as error:
                log.warning("vllm.load_failed", request=load.request_id, error=str(error))

    def end_step(self) -> None:
        """Wait until the loads of this step have ended, and record their failures.

        Raises:
            TransferError: a load has failed, with asynchronous scheduling; the error ends the
                server.
        """
        failed: set[int] = set()
        for load, transfers in self._in_step:
            with contextlib.suppress(TransferError, ClosedError):  # the failure is recorded below
                transfers.wait_all(self._timeout)
            failed |= self._note_end(load, transfers)
            if self._layers_left:
                # The step has computed a layer without waiting for it, so the blocks must be
                # computed again.
                failed.update(load.block_ids)
        if self._layers_left:
            failed.update(block for load, _ in self._waits for block in load.block_ids)
        if self._layers_left and (self._in_step or self._waits):
            log.error("vllm.layers_not_hooked", layers=sorted(self._layers_left))
        self._in_step.clear()
        self._waits.clear()
        self._layers_left.clear()
        if self._called:
            self._calls_all = self._called == self._layers
            self._called.clear()
        self._failed |= failed
        if failed:
            self._raise_if_late(len(failed))

    def _raise_if_late(self, num_blocks: int) -> None:
        if self._is_async or self._has_sides:
            cause = "several KV cache groups" if self._has_sides else "asynchronous scheduling"
            raise TransferError(
                f"the loads of {num_blocks} blocks have failed in step {self._step}; with {cause}, "
                "vLLM would go on to compute with these blocks",
                hint='set "load" to "async"'
                + ("" if self._has_sides else ", or pass --no-async-scheduling"),
            )

    def _fail(self, load: Load, blocks: set[int]) -> None:
        """Note blocks of a load that have failed."""
        if not self._has_sides:
            self._failed |= blocks
        elif blocks and not load.in_step:
            if compat.CAN_FAIL_REQUESTS:
                self._failed_requests.add(load.request_id)
            else:
                self._lost[load.request_id] = self._step

    def take_loaded(self, ended: Collection[str] = ()) -> set[str]:
        """Return the requests whose loads have ended since the last call.

        Args:
            ended: requests that have ended since the last call. Their loads may fail, because the
                engine cancels the copies of a lease that was released.

        Raises:
            TransferError: a load has failed, and this version of vLLM cannot compute the request
                again; the error ends the server.
        """
        self.end_step()
        loaded = set()
        self._ended.update(request_id for request_id in ended if request_id in self._loading)
        for request_id, (load, transfers) in list(self._loading.items()):
            if transfers is None or transfers.is_done:
                if transfers is not None:
                    self._fail(load, self._note_end(load, transfers))
                loaded.add(request_id)
                del self._loading[request_id]
        for request_id, step in list(self._lost.items()):
            if request_id in ended or request_id in self._ended:
                del self._lost[request_id]
                loaded.add(request_id)
            elif self._step > step + 1:  # vLLM would have named a request that has ended
                raise TransferError(
                    f"the load of request {request_id} has failed; this version of vLLM cannot "
                    "compute it again with several KV cache groups",
                    hint="install vLLM 0.30 or newer",
                )
            else:
                loaded.discard(request_id)
        self._ended -= loaded
        return loaded

    def close_step(self) -> None:
        """Close the step, whose work was submitted."""
        self._source.close_step(self._step, _record_event(self._tensors.device))

    def _note_end(self, load: Load, transfers: LoadTransfers) -> set[int]:
        """Count the blocks of a load that has ended; return the blocks that have failed."""
        failed = transfers.failed_blocks(load.block_ids)
        self._counts["loaded_blocks"] += len(load.block_ids) - len(failed)
        self._counts["failed_blocks"] += len(failed)
        return failed

    def check_idle(self) -> None:
        """Raise if bytes of a load may still move.

        Raises:
            UsageError: with the requests of the loads.
        """
        loads = [*self._loading.values(), *self._in_step]
        moving = [load.request_id for load, moves in loads if moves and not moves.is_done]
        if moving:
            raise UsageError(
                f"loads of the requests {moving} are in flight; the KV cache cannot be unmapped",
                hint="reset the connector first: /reset_prefix_cache?reset_external=true",
            )

    def take_failed(self) -> set[int]:
        """Return the blocks whose loads have failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return the requests that ``take_loaded`` has returned, and whose loads have failed."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    @property
    def has_counts(self) -> bool:
        """True if a load has ended since the last call of ``take_counts``."""
        return any(self._counts.values())

    def take_counts(self) -> dict[str, int]:
        """Return the blocks that were loaded and have failed since the last call."""
        counts = self._counts
        self._counts = dict.fromkeys(counts, 0)
        return counts

    def close(self) -> None:
        """End the threads of this worker."""
        self._source.close()


def stream_of(device: str) -> Any:
    """Return the stream on which vLLM computes in this thread; None on the cpu."""
    return torch.cuda.current_stream() if device.startswith(_CUDA) else None


def _record_event(device: str) -> Event | None:
    """Return an event after the work that was submitted so far; None on the cpu."""
    if not device.startswith(_CUDA):
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    return as_event("event", event)
