"""A server: vLLM's scheduler, KV cache manager and requests, over runners with real bytes."""

from __future__ import annotations

import copy
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from aiokv.connectors.vllm import AiokvConnector
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.vllm.runner import DIM, HEADS, LAYER_NAMES, Launched, Runner

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

BLOCK_TOKENS = 4


def kv_cache_config(layout: str, num_blocks: int, spec: Any = None) -> KVCacheConfig:
    """Return the configuration of vLLM for the tensors of a runner."""
    if spec is None and layout == "latent":
        spec = MLAAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=2 * HEADS * DIM, dtype=torch.int32
        )
    elif spec is None:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.int32
        )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=spec.page_size_bytes * num_blocks, shared_by=[name])
            for name in LAYER_NAMES
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYER_NAMES), spec)],
    )


def vllm_config(
    *,
    extra: dict[str, Any] | None,
    num_ranks: int = 1,
    num_blocks: int = 40,
    max_seqs: int = 8,
    max_tokens_per_step: int = 24,
    prefix_caching: bool = True,
    async_scheduling: bool = False,
    failure_policy: str = "recompute",
    num_drafts: int = 0,
    draft_method: str = "ngram",
    kv_events: bool = False,
) -> Any:
    """Return what the scheduler and the connector read of a VllmConfig; None: no connector."""
    parallel = ParallelConfig()
    parallel.world_size = num_ranks
    parallel.tensor_parallel_size = num_ranks
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=prefix_caching)
    cache.num_gpu_blocks = num_blocks
    scheduler = SchedulerConfig(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens_per_step,
        max_model_len=512,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=async_scheduling,
    )
    transfer = None
    if extra is not None:
        transfer = KVTransferConfig(
            kv_connector="AiokvConnector",
            kv_connector_module_path="aiokv.connectors.vllm",
            kv_role="kv_both",
            engine_id=uuid.uuid4().hex,
            kv_load_failure_policy=failure_policy,
            kv_connector_extra_config=extra,
        )
    scheduler.disable_hybrid_kv_cache_manager = True
    drafts = SimpleNamespace(
        method=draft_method,
        num_speculative_tokens=num_drafts,
        use_eagle=lambda: False,
        uses_draft_model=lambda: False,
    )
    return SimpleNamespace(
        scheduler_config=scheduler,
        cache_config=cache,
        parallel_config=parallel,
        lora_config=None,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if kv_events
        else None,
        kv_transfer_config=transfer,
        ec_transfer_config=None,
        speculative_config=drafts if num_drafts or draft_method == "eagle" else None,
        use_v2_model_runner=False,
        observability_config=SimpleNamespace(kv_cache_metrics=False, enable_mfu_metrics=False),
        model_config=SimpleNamespace(
            model="test",
            revision=None,
            dtype="int32",
            quantization=None,
            hf_config=SimpleNamespace(to_dict=lambda: {"model_type": "test"}),
            max_model_len=512,
            is_encoder_decoder=False,
            enable_return_routed_experts=False,
            enable_sleep_mode=False,
            is_prefix_caching_supported=True,
            runner_type="generate",
            use_mla=False,
            architecture="TestForCausalLM",
        ),
    )


class Server:
    """vLLM's engine loop over runners.

    Args:
        config: as ``vllm_config`` returns it.
        layout: name of LAYOUTS.
        rng: chooses drafts.
        num_drafts: drafts per step.
    """

    def __init__(
        self, config: Any, rng: random.Random, layout: str = "flash", num_drafts: int = 0
    ) -> None:
        init_none_hash(sha256)
        num_blocks = config.cache_config.num_gpu_blocks
        self.config = config
        cache_config = kv_cache_config(layout, num_blocks)
        ranks = range(config.parallel_config.world_size)
        self.runners = [
            Runner(rank, layout, num_blocks, BLOCK_TOKENS, rng, num_drafts) for rank in ranks
        ]
        drafts = config.speculative_config
        if drafts is not None and drafts.method == "eagle":
            for runner in self.runners:
                runner.draft_layers = 1
        self.is_async = config.scheduler_config.async_scheduling
        if config.kv_transfer_config is not None:
            for runner in self.runners:
                ranked = copy.copy(config)
                ranked.parallel_config = copy.copy(config.parallel_config)
                ranked.parallel_config.rank = runner.rank
                runner.connector = AiokvConnector(ranked, KVConnectorRole.WORKER, cache_config)
                runner.connector.register_kv_caches(runner.kv_caches)
        kind = AsyncScheduler if self.is_async else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=SimpleNamespace(should_advance=lambda request: False),
            block_size=BLOCK_TOKENS,
            mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda model_config: False),
            log_stats=True,
        )
        self.aggregator = KVOutputAggregator(len(self.runners))
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.outputs: dict[str, list[int]] = {}
        self._loaded: dict[str, int] = {}
        self.num_loaded = 0  # tokens
        self.statistics = AiokvConnector.build_kv_connector_stats()
        self.errors: set[str] = set()
        self._in_flight: list[tuple[Any, list[Launched]]] = []
        self.num_steps = 0

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        salt: str | None = None,
        adapter: int = 0,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> Request:
        """Add a request that generates ``num_tokens`` tokens."""
        lora = LoRARequest(f"lora{adapter}", adapter, f"/lora{adapter}") if adapter else None
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling_params
            or SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            pooling_params=None,
            cache_salt=salt,
            lora_request=lora,
            block_hasher=self._hasher,
            **options,
        )
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def loaded(self, request: Request) -> int:
        """Return the tokens of a request that the connector has loaded at its first prefill."""
        return self._loaded[request.request_id]

    def abort(self, name: str) -> None:
        """Abort a request, between two steps."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Run one iteration of vLLM's engine loop.

        With asynchronous scheduling, a step is computed only after the next one was scheduled.
        """
        self.num_steps += 1
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            launched = [runner.launch(copy.deepcopy(output)) for runner in self.runners]
            self._in_flight.append((output, launched))
        if self._in_flight and (len(self._in_flight) > self.is_async or not self._has_work()):
            self._finish_step()

    def _has_work(self) -> bool:
        return self.scheduler.has_requests()

    def compute_in_flight(self) -> None:
        """Compute the launched steps, as when the host waits for the GPU."""
        for _, launched in self._in_flight:
            for runner, step in zip(self.runners, launched, strict=True):
                runner.compute(step)

    def _finish_step(self) -> None:
        output, launched = self._in_flight.pop(0)
        results = [
            runner.compute(step) for runner, step in zip(self.runners, launched, strict=True)
        ]
        assert all(r.sampled_token_ids == results[0].sampled_token_ids for r in results)
        result = self.aggregator.aggregate(results) if self.connector is not None else results[0]
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.prefill_stats is not None:
                    self._loaded[one.request_id] = one.prefill_stats.num_external_cached_tokens
                    self.num_loaded += one.prefill_stats.num_external_cached_tokens
                if one.finish_reason is not None and str(one.finish_reason) == "error":
                    self.errors.add(one.request_id)
            payload = outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats
            if payload:
                self.statistics.aggregate(AiokvConnector.build_kv_connector_stats(payload))
        if self.runners[0].drafts:
            ids = list(self.runners[0].drafts)
            drafts = [self.runners[0].drafts[request_id] for request_id in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    @property
    def is_busy(self) -> bool:
        """False when all requests have finished."""
        return bool(self.scheduler.has_requests() or self._in_flight)

    def run(self, max_steps: int = 10_000) -> None:
        """Run until all requests have finished."""
        for _ in range(max_steps):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"requests have not finished in {max_steps} steps")

    def drain(self) -> None:
        """Wait until all saves have ended."""
        engine = self.connector.engine
        engine.call(engine.cache.drain, timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        """End the engine and the ranks. Idempotent."""
        if self.connector is not None:
            self.connector.shutdown()
            for runner in self.runners:
                assert runner.connector is not None
                runner.connector.shutdown()
