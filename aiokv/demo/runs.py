"""The demo's runs: one workload, served with nothing cached, one tier and two, and compared."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import aiokv
from aiokv.demo.report import DemoResult, Percentiles, ReusedTokens, RunResult, Traffic
from aiokv.demo.runner import ModelRunner
from aiokv.demo.serving import Server, ServingConfig
from aiokv.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from aiokv.config import WritePolicy
    from aiokv.demo.ledger import Ledger
    from aiokv.demo.model import CacheT, Model, PagedCache
    from aiokv.demo.workload import Workload
    from aiokv.worker.lanes import LaneStatistics
    from aiokv.worker.poller import PollerStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Sizes of the cache and of the batch.

    Attributes:
        device_blocks: of the runs without pressure.
        pressure_blocks: device blocks of the run with a host tier.
        write_policy: of the run with a host tier.
        corrupt: corrupt one cached block of the last run.
        disconnect: share of the requests of the later runs that are cancelled while they are
            computed, and sent again.
        seed: for the random choice of these instants.
    """

    block_tokens: int = 16
    device_blocks: int = 1024
    pressure_blocks: int = 128
    host_blocks: int = 1024
    max_running: int = 8
    chunk_tokens: int = 32
    write_policy: WritePolicy = "write_through"
    corrupt: bool = False
    disconnect: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.disconnect <= 1:
            raise ConfigError(f"disconnect is {self.disconnect}; it must be between 0 and 1")
        for name in (
            "block_tokens",
            "device_blocks",
            "pressure_blocks",
            "host_blocks",
            "max_running",
            "chunk_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def check_fits(self, workload: Workload) -> None:
        """One request, alone, must fit into the smallest device pool.

        Raises:
            ConfigError: it does not.
        """
        needed = -(-workload.max_context_tokens // self.block_tokens)
        for name in ("device_blocks", "pressure_blocks"):
            if getattr(self, name) < needed:
                raise ConfigError(
                    f"the longest conversation has {workload.max_context_tokens} tokens and needs "
                    f"{needed} blocks, but {name} is {getattr(self, name)}",
                    hint=f"raise --{name.replace('_', '-')} or make the conversations shorter",
                )


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    label: str
    device_blocks: int
    host_blocks: int
    reuse: bool
    corrupt: bool = False


def _plan_runs(config: DemoConfig) -> list[_Run]:
    """The three runs, the reference first."""
    return [
        _Run("no_cache", "no cache", config.device_blocks, 0, reuse=False),
        _Run("device", "device only", config.device_blocks, 0, reuse=True),
        _Run(
            "device_host",
            f"device + host, {config.write_policy}",
            config.pressure_blocks,
            config.host_blocks,
            reuse=True,
            corrupt=config.corrupt,
        ),
    ]


class _Corruptor:
    """Corrupts, once, the last block on the device of the first lease that reads one."""

    def __init__(self, cache: PagedCache, block_tokens: int) -> None:
        self._cache = cache
        self._block_tokens = block_tokens
        self.done = ""

    def __call__(self, lease: aiokv.Lease) -> None:
        # Layers that are still arriving would overwrite the corrupted bytes.
        if self.done or not lease.hit.device_tokens or not lease.layers.is_done:
            return
        place = lease.hit.device_tokens // self._block_tokens - 1
        block = int(lease.block_table[place])
        self._cache.corrupt(block)
        self.done = f"device block {block} (block {place} of {lease.owner})"


class Progress(Protocol):
    """What is told while the demo runs."""

    def begin(self, label: str, requests: int) -> None: ...

    def advance(self) -> None: ...

    def end(self, result: RunResult) -> None: ...


async def run_demo(
    model: Model[CacheT], workload: Workload, config: DemoConfig, progress: Progress
) -> DemoResult:
    """Run the workload three times and compare the later runs with the first.

    Args:
        model: knows positions up to ``workload.max_context_tokens``.

    Raises:
        ConfigError: a conversation does not fit into the device blocks.
    """
    config.check_fits(workload)
    reference: Ledger | None = None
    results = []
    for run in _plan_runs(config):
        progress.begin(run.label, workload.requests)
        result, ledger = await _run_once(model, workload, config, run, reference, progress)
        progress.end(result)
        results.append(result)
        reference = reference or ledger
    return DemoResult.of(results, workload=workload.title, model=model.description)


async def _run_once(
    model: Model[CacheT],
    workload: Workload,
    config: DemoConfig,
    run: _Run,
    reference: Ledger | None,
    progress: Progress,
) -> tuple[RunResult, Ledger]:
    cache = model.new_cache(run.device_blocks, config.block_tokens)
    cache_config = aiokv.CacheConfig(
        block_tokens=config.block_tokens,
        device_blocks=run.device_blocks,
        host_blocks=run.host_blocks,
        write_policy=config.write_policy,
    )
    serving = ServingConfig(
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        reuse=run.reuse,
        disconnect=config.disconnect if run.reuse else 0.0,
        seed=config.seed,
    )
    corruptor = _Corruptor(cache, config.block_tokens) if run.corrupt else None
    async with aiokv.CacheEngine(cache_config, cache.regions(), model.new_device()) as engine:
        with ModelRunner(model, cache) as runner:
            server = Server(engine, runner, serving, on_hit=corruptor, on_done=progress.advance)
            start = time.perf_counter()
            await server.serve(workload)
            seconds = time.perf_counter() - start
        await engine.drain()
        if violations := engine.check_invariants():
            raise InternalError(f"after {run.label}: {'; '.join(violations)}")
        result = _result(run, server, engine, seconds, corruptor, reference)
    return result, server.ledger


def _result(
    run: _Run,
    server: Server,
    engine: aiokv.CacheEngine,
    seconds: float,
    corruptor: _Corruptor | None,
    reference: Ledger | None,
) -> RunResult:
    serving = server.statistics
    worker, poller = engine.worker_statistics(), engine.poller_statistics()
    device, host = serving.reused_device_tokens, serving.reused_host_tokens
    return RunResult(
        name=run.name,
        label=run.label,
        device_blocks=run.device_blocks,
        host_blocks=run.host_blocks,
        seconds=seconds,
        requests=serving.requests,
        prompt_tokens=serving.prompt_tokens,
        computed_tokens=serving.computed_tokens,
        reused_tokens=ReusedTokens(device, host, device + host),
        repeated_tokens=server.ledger.repeated_rows,
        generated_tokens=serving.generated_tokens,
        preemptions=serving.preemptions,
        disconnections=serving.disconnections,
        failed_onloads=serving.failed_onloads,
        steps=serving.steps,
        compute_seconds=serving.compute_seconds,
        ttft_ms=Percentiles.of([1e3 * value for value in serving.ttft_seconds]),
        capacity_wait_ms=Percentiles.of([1e3 * s for s in serving.capacity_wait_seconds]),
        onload=_traffic(worker.onload),
        offload=_traffic(worker.offload),
        layer_wait_ms=1e3 * serving.layer_wait_seconds,
        wakeup_us=_wakeup_us(poller),
        rows_not_finite=server.ledger.rows_not_finite,
        corrupted=corruptor.done if corruptor is not None else "",
        compared=server.ledger.compare(reference) if reference is not None else None,
    )


def _traffic(lane: LaneStatistics) -> Traffic:
    busy = lane.busy_seconds
    speed = round(lane.moved_bytes / busy / 1e9, 3) if busy else None
    return Traffic(lane.done, lane.moved_bytes, round(busy, 6), speed)


def _wakeup_us(poller: PollerStatistics) -> Percentiles:
    if not poller.events:
        return Percentiles(None, None)
    p50, p99 = poller.latency_p50_seconds, poller.latency_p99_seconds
    return Percentiles(round(1e6 * p50, 3), round(1e6 * p99, 3))
