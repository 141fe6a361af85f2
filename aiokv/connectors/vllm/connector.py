"""AiokvConnector: the class that vLLM loads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from aiokv.base.logs import Log, join_log
from aiokv.connectors.vllm import compat, opening
from aiokv.connectors.vllm.arrivals import Arrivals, StepPace
from aiokv.connectors.vllm.blocks import VllmBlocks
from aiokv.connectors.vllm.groups import KVGroups
from aiokv.connectors.vllm.link import LoadQueue
from aiokv.connectors.vllm.messages import StepMetadata, StepOutcome
from aiokv.connectors.vllm.options import Options
from aiokv.connectors.vllm.prefixes import why_prefixes_are_forbidden
from aiokv.connectors.vllm.scheduler import SchedulerHalf
from aiokv.connectors.vllm.statistics import ConnectorStatistics, EngineCounts, PromMetrics
from aiokv.connectors.vllm.waiting import WaitingOrder
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from aiokv.connectors.vllm.worker import WorkerHalf
    from aiokv.sync import SyncEngine

log = Log(__name__)

# Shortest time between two reports of a worker. The first loads after a pause are reported at once,
# and so are those before a pause.
REPORT_SECONDS: Final = 1.0


class AiokvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Host memory and stores of aiokv as further tiers below vLLM's KV cache.

    vLLM makes one object per role; the scheduler half decides, the worker halves copy. Settings:
    :class:`aiokv.connectors.vllm.options.Options`.

    Args:
        vllm_config: configuration of vLLM, with ``kv_transfer_config``.
        role: the half.
        kv_cache_config: blocks and groups of vLLM's KV cache.

    Raises:
        ConfigError: a setting is wrong, or vLLM is configured in a way that the connector does not
            serve.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_log("vllm")
        self._options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        check_config(vllm_config, kv_cache_config, self._options)
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            compat.check_version()
            self._cache = opening.open_cache(vllm_config, kv_cache_config, self._options)
            self._pool = VllmBlocks()
            groups = KVGroups.of(kv_cache_config)
            step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            reason = why_prefixes_are_forbidden(vllm_config, kv_cache_config)
            if reason is not None:
                log.warning("vllm.prefixes_forbidden", reason=reason)
            link = LoadQueue(
                opening.block_bytes_of(vllm_config, kv_cache_config),
                self._cache.load_rate,
                self._options.step_wait_seconds,
            )
            pace = StepPace()
            self._half_of_scheduler = SchedulerHalf(
                self._cache,
                self._options,
                is_active=reason is None,
                groups=groups,
                step_tokens=step_tokens,
                pool=self._pool,
                link=link,
                pace=pace,
                arrivals=Arrivals(
                    link,
                    pace,
                    steps_wait=opening.steps_wait(vllm_config, groups, self._options),
                ),
                order=WaitingOrder(
                    self._cache,
                    self._options.max_overtake_seconds
                    if self._options.admission == "cached_first"
                    else 0.0,
                    has_priorities=vllm_config.scheduler_config.policy == "priority",
                    room=lambda: min(
                        step_tokens,
                        self._pool.num_free // len(groups.layers) * groups.block_tokens,
                    ),
                ),
            )
            self._counts = EngineCounts()
        self._reported = self._reported_loads = -REPORT_SECONDS
        self._has_new_report = True  # of a worker, or this half was not asked for a report since
        self._was_asked = False  # for a report since the last step
        self._is_pausing = False  # the worker's step computes nothing

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that was not saved is computed again, so vLLM keeps all outputs."""
        return False

    # --- worker half ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the tensors of this worker."""
        self._worker = opening.worker_half(
            self._vllm_config, self._kv_cache_config, self._options, kv_caches
        )
        self._drafts_with_layers = opening.drafts_with_layers(self._vllm_config)

    def unregister_kv_caches(self) -> None:
        """Check that no load is in flight before vLLM unmaps its KV cache.

        vLLM resets the connector first, which waits for all transfers and forgets all blocks. When
        it wakes up, the tensors have the same addresses, so nothing has to be registered again.

        Raises:
            UsageError: a load is in flight.
        """
        self._half_of_worker.check_idle()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Note the loads of this step."""
        message = self._message
        self._is_pausing = message.is_empty
        self._half_of_worker.begin(
            message,
            # vLLM calls wait_for_layer_load only between the pieces of a graph, and a batch in two
            # halves has one stream per half. A runner may call this method before it chooses a
            # graph; there is no attention metadata then. The layers of a draft model are computed
            # after get_finished(), or not at all.
            layers_are_hooked=not self._drafts_with_layers
            and forward_context.attn_metadata is not None
            and forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL
            and forward_context.ubatch_slices is None,
        )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the stream wait for a layer of the loads of this step."""
        self._half_of_worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the scheduler half saves blocks after the step."""

    def wait_for_save(self) -> None:
        """Do nothing: the scheduler half saves blocks after the step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended; no request waits for a save."""
        return None, self._half_of_worker.take_loaded(finished_req_ids) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, and those that vLLM computes anew."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._half_of_worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks whose loads have failed; none with several groups."""
        return self._half_of_worker.take_failed()

    def clear_connector_metadata(self) -> None:
        """Close the step. vLLM has submitted all work of it, including that of a draft model."""
        self._half_of_worker.close_step()
        super().clear_connector_metadata()

    def build_connector_worker_meta(self) -> StepOutcome:
        """Return the number of the step, to tell the scheduler half that the step was computed."""
        return StepOutcome(self._message.step)

    @property
    def _half_of_worker(self) -> WorkerHalf:
        assert self._worker is not None, "register_kv_caches was not called"
        return self._worker

    @property
    def _message(self) -> StepMetadata:
        message = self._get_connector_metadata()
        assert isinstance(message, StepMetadata)
        return message

    # --- scheduler half ---------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Note vLLM's pool of blocks."""
        self._pool.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Note a request that waits in vLLM's line."""
        self._half_of_scheduler.added(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and if the request waits for them."""
        return self._half_of_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Begin the load of a request into its new blocks."""
        self._half_of_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return the loaded tokens of a request by source, for vLLM's metrics."""
        fetched = 0
        if self._options.stores:
            fetched = self._half_of_scheduler.fetched_tokens(request)
        return compat.hit_sources(
            num_external_tokens,
            min(fetched, num_external_tokens),
            from_disk=all(url.startswith(("disk:", "directory:")) for url in self._options.stores),
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return the message to the workers."""
        return self._half_of_scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Save the blocks that a step has computed, and name the loads that have ended since."""
        # vLLM 0.22 asks for a report only after one of a worker, and newer versions in each step.
        self._has_new_report = not self._was_asked or bool(connector_output.kv_connector_stats)
        self._was_asked = False
        outcome = connector_output.kv_connector_worker_meta
        if isinstance(outcome, StepOutcome):
            self._half_of_scheduler.step_ended(outcome.step, connector_output.invalid_block_ids)
            connector_output.finished_recving = self._half_of_scheduler.ended_loads(
                connector_output.finished_recving
            )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request; vLLM may free its blocks at once."""
        self._half_of_scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request; vLLM may free its blocks of all groups at once."""
        return self.request_finished(request, [])

    def take_events(self) -> list[KVCacheEvent]:
        """Return the changes of the blocks in host memory since the last call."""
        return self._cache.take_events()

    def reset_cache(self) -> bool:
        """Forget all blocks of host memory and stores, and save none that was computed before."""
        return self._half_of_scheduler.forget()

    @property
    def engine(self) -> SyncEngine:
        """The engine of the scheduler half."""
        return self._cache.engine

    # --- statistics -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStatistics | None:
        """Return the counts since the last report of this half; None if there are none.

        The scheduler half, which has to ask its engine, reports after each report of a worker.
        """
        if self.role == KVConnectorRole.SCHEDULER:
            is_due = self._has_new_report or self._was_asked
            self._was_asked = True
            if not is_due:
                return None
            counts = self._counts.report(
                self._cache.cache_statistics(), errors=self._cache.num_errors
            )
            counts["requests"] = self._half_of_scheduler.num_requests
            counts["usable"] = int(self._cache.is_usable)
            if self._options.stores:
                counts |= self._counts.report_stores(self._cache.statistics())
            return ConnectorStatistics(counts)
        now = time.monotonic()
        has_loads = self._half_of_worker.has_counts
        is_early = now - (self._reported_loads if has_loads else self._reported) < REPORT_SECONDS
        if is_early and not (has_loads and self._is_pausing):
            return None
        self._reported = now
        if has_loads:
            self._reported_loads = now
        return ConnectorStatistics(self._half_of_worker.take_counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStatistics:
        """Return a report from its data."""
        return ConnectorStatistics(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Return the metrics ``vllm:aiokv_*``."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- both -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the threads of this half. Idempotent."""
        if self._worker is not None:
            self._worker.close()
        if self.role == KVConnectorRole.SCHEDULER:
            self._half_of_scheduler.reset()
            self._cache.close()


def check_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> None:
    """Refuse what the connector does not serve.

    Raises:
        ConfigError: with what to change.
    """
    parallel = vllm_config.parallel_config
    for name, hint in (
        ("decode_context_parallel_size", "use tensor, pipeline or data parallelism"),
        ("prefill_context_parallel_size", "use tensor, pipeline or data parallelism"),
        ("nnodes", "use ranks of one node; the connector's socket is local"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"{name} is {getattr(parallel, name)}; AiokvConnector serves 1 only", hint=hint
            )
    if parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend is 'external_launcher'; AiokvConnector needs one "
            "scheduler for all ranks",
            hint="drop --distributed-executor-backend",
        )
    if parallel.distributed_executor_backend == "ray" and not compat.fits_one_node(parallel):
        raise ConfigError(
            f"Ray has placed the {parallel.world_size} ranks on several nodes; AiokvConnector "
            "serves ranks of one node only",
            hint="let tensor_parallel_size times pipeline_parallel_size be at most the number of "
            "GPUs of a node; use data parallelism over nodes",
        )
    stages = compat.layers_of_stages(vllm_config.model_config, parallel)
    if len(set(stages)) > 1:
        raise ConfigError(
            f"pipeline_parallel_size {parallel.pipeline_parallel_size} divides the model into "
            f"stages of {stages} layers; AiokvConnector serves stages of equal size",
            hint="choose a pipeline_parallel_size that divides the number of layers, do not set "
            "VLLM_PP_LAYER_PARTITION, or use tensor parallelism",
        )
    if vllm_config.model_config.enable_sleep_mode and not compat.announces_sleep():
        raise ConfigError(
            "enable_sleep_mode is set; this version of vLLM unmaps the KV cache without notice to "
            "its connector, which may be copying blocks",
            hint="install vLLM 0.33, or drop --enable-sleep-mode or kv_transfer_config",
        )
    if options.stores and compat.calculates_kv_scales(vllm_config.cache_config):
        raise ConfigError(
            "calculate_kv_scales is set, and stores has stores: each start of vLLM computes other "
            "scales, which stored blocks do not have",
            hint="drop --calculate-kv-scales, or stores",
        )
    groups = KVGroups.of(kv_cache_config)
    if groups.sides and parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "the model has several KV cache groups, or no full attention, and "
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; AiokvConnector does not "
            "serve both together",
            hint="use tensor parallelism only",
        )
    if options.load == "layerwise" and groups.main is None:
        raise ConfigError(
            'load is "layerwise", and the model has no layer of full attention: a request that '
            "shares the blocks of a load would not notice its failure",
            hint='set "load": "async"',
        )
    if options.load == "layerwise" and parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f'load is "layerwise" and pipeline_parallel_size is {parallel.pipeline_parallel_size}: '
            "a load could overwrite blocks that a step in the pipeline still uses",
            hint='set "load": "async"',
        )
    if options.load == "layerwise" and vllm_config.scheduler_config.async_scheduling:
        if not opening.is_in_process(vllm_config, options):
            raise ConfigError(
                'load is "layerwise" with asynchronous scheduling and workers in other processes: '
                "a load could overwrite blocks that a step still uses",
                hint='pass --no-async-scheduling, or set "load": "async"',
            )
        if options.verify != "off":
            raise ConfigError(
                f'load is "layerwise" with asynchronous scheduling, and verify is '
                f"{options.verify!r}: a wrong block would be detected one step too late",
                hint='pass --no-async-scheduling, or set "load": "async"',
            )
