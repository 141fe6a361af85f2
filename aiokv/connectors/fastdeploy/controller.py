"""CacheController: the cache of FastDeploy's worker processes, on aiokv."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

from aiokv.base.logs import join_log
from aiokv.connectors.fastdeploy.caches import cache_name, create_caches, regions_of
from aiokv.connectors.fastdeploy.layers import ComputedLayers, LayerDoneCounter
from aiokv.connectors.fastdeploy.metadata import layer_marks_of, step_of, transfer_ids_of
from aiokv.connectors.fastdeploy.peers import peers_of
from aiokv.connectors.fastdeploy.settings import computes_in_order, layers_of, socket_of
from aiokv.connectors.fastdeploy.stores import stores_of
from aiokv.errors import ConfigError, UsageError
from aiokv.frameworks.paddle import import_paddle, recorded_event
from aiokv.sync import RankThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from aiokv import Peers
    from aiokv.connectors.fastdeploy.layers import Layers
    from aiokv.devices import Device


class LayerSource(Protocol):
    """Finds the layers of transfers: the ``CacheManager`` of this process."""

    def layers(self, transfer_ids: Sequence[int]) -> Sequence[Layers]:
        """Return the layers of transfers that have not arrived yet."""


class CacheController:
    """Replaces ``fastdeploy.cache_manager.v1.cache_controller.CacheController``.

    A worker process creates its cache tensors with ``initialize_kv_cache``; then the controller
    connects to the ``CacheManager`` of the scheduler's process, in a thread of its own, and moves
    the bytes of this rank.

    Args:
        config: the ``FDConfig`` of the worker, or any object with its fields.
        local_rank: number of this worker on its machine.
        device_id: number of its GPU, for the names of tensors.
        path: socket of the manager's ``RankGroup``; None with ``source``.
        source: the ``CacheManager`` of this process, which owns the tensors; None with ``path``.
        device: device of the tensors, as for ``CacheEngine``.
        stores: stores of this rank's shard of the blocks; None for those of
            ``--kvcache-storage-backend``.
        peers: sends this rank's shard of prompts to decode servers, or receives it from prefill
            servers; None for no peers. The ``RankGroup`` of the manager needs ``has_peers=True``.
        step_event: on a GPU: returns an event that was recorded just now on the stream of the
            model. None where all submitted work has finished when a batch begins.

    Raises:
        ConfigError: a field of ``config`` is missing, not exactly one of ``path`` and ``source``
            is given, or the ``kvcache_storage_backend`` cannot be used.
    """

    def __init__(
        self,
        config: Any,
        local_rank: int = 0,
        device_id: int = 0,
        *,
        path: Path | str | None = None,
        source: LayerSource | None = None,
        device: Device | str | None = None,
        stores: Sequence[Any] | None = None,
        peers: Peers | None = None,
        step_event: Callable[[], Any] | None = None,
    ) -> None:
        if (path is None) == (source is None):
            raise ConfigError(
                "path and source: exactly one of them must be given",
                hint="path=ranks.path in worker processes, source=manager in the same process",
            )
        join_log("fastdeploy")
        self.config = config
        self._num_layers, self._draft_layers = layers_of(config)
        ranks = int(getattr(getattr(config, "parallel_config", None), "tensor_parallel_size", 1))
        self._rank_number = local_rank % ranks
        self._device_id = device_id
        self._path, self._source, self._device = path, source, device
        self._stores = stores_of(config) if stores is None else stores
        self._peers = peers
        self._step_event = step_event
        self._rank: RankThread | None = None
        self._closed_step = 0
        self._caches: dict[int, Mapping[str, Any]] = {}
        self._counter: LayerDoneCounter | None = None

    @classmethod
    def for_worker(cls, config: Any, local_rank: int, device_id: int, **options: Any) -> Self:
        """Return the controller of a worker process: see ``CacheManager.for_workers``.

        With a Paddle for CUDA, the tensors are on the GPU, and the model computes in the current
        stream. The peers are those of ``AIOKV_PEERS_SECRET``. With peers, call this method before
        the attention backend is created: it changes ``pd_disaggregation_mode`` to "None".

        Args:
            config: the ``FDConfig`` of the worker.
            local_rank: as for the class, and so is ``device_id``.
            options: further arguments of the class.
        """
        if import_paddle().is_compiled_with_cuda():
            options = {"device": "cuda", "step_event": recorded_event, **options}
        if (peers := peers_of(config)) is not None:
            options = {"peers": peers, **options}
            # Else the attention kernels report layers to a queue, which blocks without a reader.
            config.parallel_config.pd_disaggregation_mode = "None"
        return cls(config, local_rank, device_id, path=socket_of(config), **options)

    # --- tensors ----------------------------------------------------------------------------------

    def initialize_kv_cache(self, attn_backend: Any, num_gpu_blocks: int) -> list[Any]:
        """Create the cache tensors of the model's layers, and register them.

        A later call replaces the tensors, such as those of a profile run, until the manager has
        opened the engine, while its device tier sleeps, and after ``free_gpu_cache``.

        Args:
            attn_backend: creates the tensors of a layer by role; see ``create_caches``.
            num_gpu_blocks: number of device blocks.

        Returns:
            The tensors, layer by layer, for the model.

        Raises:
            UsageError: the engine uses the tensors already. Nothing changed.
            LayoutError: the tensors do not fit.
        """
        return self._create(attn_backend, num_gpu_blocks, range(self._num_layers))

    def initialize_mtp_kv_cache(
        self, attn_backend: Any, num_gpu_blocks: int, num_mtp_layers: int, layer_offset: int
    ) -> list[Any]:
        """Create the cache tensors of draft layers; see ``initialize_kv_cache``.

        Args:
            attn_backend: attention backend of the draft model.
            num_gpu_blocks: number of device blocks, that of the model.
            num_mtp_layers: number of draft layers.
            layer_offset: number of the first one, behind the layers of the model.
        """
        layers = range(layer_offset, layer_offset + num_mtp_layers)
        return self._create(attn_backend, num_gpu_blocks, layers)

    def register_kv_cache(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Register tensors that exist, per layer and role, in place of ``initialize_kv_cache``.

        Raises:
            UsageError, LayoutError: as for ``initialize_kv_cache``.
        """
        self._register(dict(enumerate(layers)))

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block the calling thread until the manager has opened the engine.

        Raises:
            ControlTimeout: it has not done so in time.
            ClosedError: the engine was closed, or has refused this worker.
            UsageError: no cache tensors are registered.
        """
        self._connected().wait_ready(timeout)

    def _connected(self) -> RankThread:
        if self._rank is None:
            raise UsageError(
                "no cache tensors are registered", hint="call initialize_kv_cache first"
            )
        return self._rank

    def get_kv_caches(self) -> dict[str, Any]:
        """Return the tensors by FastDeploy's names."""
        return {
            cache_name(role, layer, self._rank_number, self._device_id): tensor
            for layer, caches in self._caches.items()
            for role, tensor in caches.items()
        }

    def _create(self, attn_backend: Any, num_gpu_blocks: int, layers: range) -> list[Any]:
        quantization = getattr(
            getattr(self.config, "quant_config", None), "kv_cache_quant_type", None
        )
        caches = {
            layer: create_caches(
                attn_backend, num_gpu_blocks, self.config.model_config.dtype, quantization
            )
            for layer in layers
        }
        self._register(caches)
        return [tensor for layer in layers for tensor in caches[layer].values()]

    def _register(self, caches: Mapping[int, Mapping[str, Any]]) -> None:
        rank = self._rank
        if rank is not None and not rank.is_asleep:
            if rank.is_ready:
                raise UsageError(
                    "the engine uses the cache tensors already",
                    hint="call sleep() of the manager, or free_gpu_cache(), first",
                )
            self.stop()
        known = {**self._caches, **caches}
        num_layers = self._num_layers + self._draft_layers
        if self._path is not None and known.keys() >= set(range(num_layers)):
            regions = regions_of([known[layer] for layer in range(num_layers)])
            if self._rank is not None:
                self._rank.regions = regions  # for wakeup() of the manager
            else:
                self._rank = RankThread(
                    self._path,
                    self._rank_number,
                    regions,
                    self._device,
                    stores=self._stores,
                    peers=self._peers,
                )
                self._rank.start()
        self._caches = known

    # --- batches ----------------------------------------------------------------------------------

    @property
    def swap_layer_done_counter(self) -> LayerDoneCounter | None:
        """Counter of the layers of the present batch; see ``submit_swap_tasks``."""
        return self._counter

    def submit_swap_tasks(
        self, evict_metadata: Any, swap_in_metadata: Any
    ) -> LayerDoneCounter | None:
        """Begin a batch: close the step named by the batch, and find the onloads that it waits for.

        aiokv has submitted the onloads itself. Call this for each batch, before the model computes
        it, and after all work of earlier batches was submitted. The transfers of blocks that
        earlier batches compute or use begin when that work has finished.

        Args:
            evict_metadata: ``BatchRequest.cache_evict_metadata``.
            swap_in_metadata: ``BatchRequest.cache_swap_metadata``.

        Returns:
            Counter of the onloads, which also tells this rank which layers are computed, so that
            they are sent. None when the batch waits for no onload, and no layer is sent early.
        """
        step = step_of(evict_metadata)
        if self._rank is not None and step > self._closed_step:
            self._rank.step(step, None if self._step_event is None else self._step_event())
            self._closed_step = step
        self._counter = None
        transfer_ids = transfer_ids_of(swap_in_metadata)
        marks = layer_marks_of(evict_metadata) if computes_in_order() else []
        if transfer_ids or marks:
            self._counter = LayerDoneCounter(
                self._num_layers + self._draft_layers,
                self._find(transfer_ids),
                self._computed_layers(marks) if marks else None,
            )
        return self._counter

    def _computed_layers(self, marks: list[tuple[int, bytes]]) -> ComputedLayers:
        return ComputedLayers(marks, self._connected().layers_done, self._step_event)

    def _find(self, transfer_ids: list[int]) -> Sequence[Layers]:
        if self._source is not None:
            return self._source.layers(transfer_ids)
        return [self._connected().layers(transfer_ids)] if transfer_ids else []

    # --- the end ----------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Forget the onloads of the last batch; return True. The scheduler resets the cache."""
        self._counter = None
        return True

    def free_gpu_cache(self) -> None:
        """Finish moving transfers, and drop the references to the tensors. Idempotent.

        Disconnects from the manager, unless its device tier sleeps: see ``CacheManager.sleep``.
        Nothing is cached any more then. The manager connects again when a request needs blocks,
        and waits for ``initialize_kv_cache`` of all workers.
        """
        if self._rank is None or not self._rank.is_asleep:
            self.stop()
        self._caches = {}

    def stop(self) -> None:
        """Finish moving transfers, and disconnect from the manager. Idempotent."""
        rank, self._rank = self._rank, None
        self._counter = None
        if rank is not None:
            rank.close()

    def get_stats(self) -> dict[str, Any]:
        """Return the number of layers, and the counts of this rank's transfers by direction.

        With peers, ``sent`` and ``received`` count what was exchanged with other servers.
        """
        stats: dict[str, Any] = {
            "initialized": bool(self._caches) or self._source is not None,
            "num_layers": self._num_layers + self._draft_layers,
        }
        if self._rank is not None and self._rank.is_ready:
            counts = self._rank.statistics()
            stats |= {"swap_in": counts.attention.onload, "swap_out": counts.attention.offload}
            for peers in self._rank.peer_statistics():
                stats |= {"sent": peers.sent, "received": peers.received}
        return stats
