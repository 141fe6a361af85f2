"""A server: vLLM's scheduler, KV cache manager and requests, over runners with real bytes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from aiokv.connectors.vllm import AiokvConnector
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.vllm.configs import BLOCK_TOKENS, kv_cache_config
from tests.connectors.vllm.runner import LAYER_NAMES, Launched, Runner

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


def make_stages(runners: list[Runner]) -> None:
    """Give each runner one layer. All compute the same values in the tensors of the first."""
    caches = runners[0].caches
    for stage, runner in enumerate(runners):
        runner.rank = 0  # in the values
        runner.caches = caches
        runner.main_layers = [LAYER_NAMES[stage]]
        runner.kv_caches = caches[stage].tensors(LAYER_NAMES[stage])


class Server:
    """vLLM's engine loop over runners.

    Args:
        config: as ``vllm_config`` returns it.
        layout: name of LAYOUTS.
        rng: chooses drafts.
        num_drafts: drafts per step.
        kinds: kinds of the groups, as in ``config``.
    """

    def __init__(
        self,
        config: Any,
        rng: random.Random,
        layout: str = "flash",
        num_drafts: int = 0,
        kinds: Sequence[str] = ("full",),
    ) -> None:
        init_none_hash(sha256)
        num_blocks = config.cache_config.num_gpu_blocks
        self.config = config
        ranks = range(config.parallel_config.world_size)
        self.runners = [
            Runner(rank, layout, num_blocks, BLOCK_TOKENS, rng, num_drafts, kinds) for rank in ranks
        ]
        if config.parallel_config.pipeline_parallel_size > 1:
            make_stages(self.runners)
        cache_configs = [
            kv_cache_config(layout, num_blocks, names=runner.main_layers, kinds=kinds)
            for runner in self.runners
        ]
        cache_config = generate_scheduler_kv_cache_config(cache_configs)
        drafts = config.speculative_config
        if drafts is not None and drafts.method == "eagle":
            for runner in self.runners:
                runner.draft_layers = 1
        self.is_async = config.scheduler_config.async_scheduling
        if config.kv_transfer_config is not None:
            for rank, runner in enumerate(self.runners):
                ranked = copy.copy(config)
                ranked.parallel_config = copy.copy(config.parallel_config)
                ranked.parallel_config.rank = rank
                runner.connector = AiokvConnector(
                    ranked, KVConnectorRole.WORKER, cache_configs[rank]
                )
                runner.connector.register_kv_caches(runner.kv_caches)
        kind = AsyncScheduler if self.is_async else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
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
