"""The demo's runs: one workload, served with and without caches, and compared.

Without a store, the runs are: nothing cached, a device tier, a device and a host tier. With a
store, the later two runs are processes of their own, which share nothing but the store.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

import aiokv
from aiokv.demo.processes import start_in_new_process
from aiokv.demo.report import DemoResult, Percentiles, RunResult, Traffic
from aiokv.demo.runner import ModelRunner
from aiokv.demo.serving import Server, ServingConfig
from aiokv.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.base.statistics import RouteStatistics
    from aiokv.demo.ledger import Ledger
    from aiokv.demo.transformer import NumpyCache, NumpyTransformer
    from aiokv.demo.workload import Workload

    # (stage, total) -> what to call with the number of requests done since the last call
    Stages = Callable[[str, int], Callable[[int], None]]
    MakeScenario = Callable[[], "Scenario"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Sizes of the cache, and the serving loop.

    Attributes:
        device_blocks: number of device blocks of the runs without pressure.
        pressure_blocks: device blocks of the run with a host tier.
        write_policy: write policy of the run with a host tier.
        store: URL of a store below the host tier; ``""`` for none.
        corrupt: corrupt one cached block of the last run.
        serving: options of the later runs; in the first, nothing is reused and no client leaves.
    """

    block_tokens: int = 16
    device_blocks: int = 1024
    pressure_blocks: int = 128
    host_blocks: int = 1024
    write_policy: str = "write_through"
    store: str = ""
    corrupt: bool = False
    serving: ServingConfig = field(default_factory=ServingConfig)

    def check_fits(self, workload: Workload) -> None:
        """Check that one request, alone, fits into the smallest device pool.

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


class Scenario(NamedTuple):
    """Model and requests that the runs serve.

    Attributes:
        model: has positions up to ``workload.max_context_tokens``.
        workload: the requests.
        weights_version: digest of the weights, for stores.
    """

    model: NumpyTransformer
    workload: Workload
    weights_version: str


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    label: str
    device_blocks: int
    host_blocks: int = 0
    reuse: bool = True
    store: str = ""
    corrupt: bool = False


def _plan_runs(config: DemoConfig) -> list[_Run]:
    """Return the three runs, the reference first."""
    small, label = config.pressure_blocks, f"device + host, {config.write_policy}"
    no_cache = _Run("no_cache", "no cache", config.device_blocks, reuse=False)
    if config.store:
        sizes = (config.device_blocks, config.host_blocks)
        return [
            no_cache,
            _Run("first_process", "1st process", *sizes, store=config.store),
            _Run(
                "second_process",
                "2nd process",
                *sizes,
                store=config.store,
                corrupt=config.corrupt,
            ),
        ]
    return [
        no_cache,
        _Run("device", "device only", config.device_blocks),
        _Run("device_host", label, small, config.host_blocks, corrupt=config.corrupt),
    ]


class _Corruptor:
    """Corrupts, once, the last block on the device of the first lease that reads one."""

    def __init__(self, cache: NumpyCache, block_tokens: int) -> None:
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


async def run_demo(make_scenario: MakeScenario, config: DemoConfig, stages: Stages) -> DemoResult:
    """Run the workload three times and compare the later runs with the first.

    Args:
        make_scenario: returns what to serve. With a store, the function is pickled, and called in
            each new process, too.
        config: sizes of the cache and of the batch.
        stages: reports progress.

    Raises:
        ConfigError: a conversation does not fit into the device blocks.
    """
    scenario = make_scenario()
    workload = scenario.workload
    config.check_fits(workload)
    reference: Ledger | None = None
    computed: dict[bytes, set[bytes]] = {}
    results = []
    for run in _plan_runs(config):
        advance = stages(run.label, workload.requests)
        if run.store:
            # The store may have blocks of earlier processes. The blocks that the first run has
            # computed are correct for them, too.
            async with start_in_new_process(
                _run_alone, make_scenario, config, run, reference, computed
            ) as child:
                result, ledger = await child.result()
            advance(workload.requests)
        else:
            result, ledger = await _run_once(scenario, config, run, reference, advance, {})
        results.append(result)
        reference = reference or ledger
        computed = ledger.computed_blocks
    return DemoResult.of(results, workload=workload.title, model=scenario.model.description)


async def run_on_one_server(
    scenario: Scenario, config: DemoConfig, advance: Callable[[int], None]
) -> tuple[RunResult, Ledger]:
    """Serve the workload with one engine that has a device tier.

    Args:
        scenario: what to serve.
        config: sizes.
        advance: called with the number of requests done since the last call.
    """
    run = _Run("one_server", "one server", config.device_blocks)
    return await _run_once(scenario, config, run, None, advance, {})


async def _run_alone(
    make_scenario: MakeScenario,
    config: DemoConfig,
    run: _Run,
    reference: Ledger | None,
    computed_blocks: dict[bytes, set[bytes]],
) -> tuple[RunResult, Ledger]:
    """Make a run in a new process, so that only the store keeps cached blocks."""
    return await _run_once(
        make_scenario(), config, run, reference, lambda count: None, computed_blocks
    )


async def _run_once(
    scenario: Scenario,
    config: DemoConfig,
    run: _Run,
    reference: Ledger | None,
    advance: Callable[[int], None],
    computed_blocks: dict[bytes, set[bytes]],
) -> tuple[RunResult, Ledger]:
    cache = scenario.model.new_cache(run.device_blocks, config.block_tokens)
    serving = replace(config.serving, wait_store=math.inf if run.store else 0.0)
    if not run.reuse:
        serving = replace(serving, reuse=False, disconnect=0.0)
    corruptor = _Corruptor(cache, config.block_tokens) if run.corrupt else None
    async with open_engine(
        scenario,
        config,
        cache,
        device_blocks=run.device_blocks,
        host_blocks=run.host_blocks,
        store=run.store,
    ) as engine:
        with ModelRunner(scenario.model, cache) as runner:
            server = Server(engine, runner, serving, on_hit=corruptor, on_done=lambda: advance(1))
            server.ledger.computed_blocks.update(computed_blocks)
            start = time.perf_counter()
            await server.serve(scenario.workload)
            seconds = time.perf_counter() - start
        await check_idle(engine, run.label)
        statistics = engine.statistics()
        worker, poller = statistics.worker, statistics.poller
    ledger = server.ledger
    wakeups = [poller.latency_p50_seconds, poller.latency_p99_seconds] if poller.events else []
    result = RunResult(
        **msgspec.structs.asdict(server.statistics),
        name=run.name,
        label=run.label,
        device_blocks=run.device_blocks,
        host_blocks=run.host_blocks,
        seconds=seconds,
        repeated_tokens=ledger.repeated_rows,
        ttft_ms=Percentiles.of(server.ttft_seconds, 1e3),
        capacity_wait_ms=Percentiles.of(server.capacity_wait_seconds, 1e3),
        onload=_traffic(worker.attention.onload),
        offload=_traffic(worker.attention.offload),
        fetch=_traffic(worker.attention.fetch),
        save=_traffic(worker.attention.save),
        wakeup_us=Percentiles(*(round(1e6 * seconds, 3) for seconds in wakeups)),
        rows_not_finite=ledger.rows_not_finite,
        corrupted=corruptor.done if corruptor is not None else "",
        compared=ledger.compare(reference) if reference is not None else None,
    )
    return result, ledger


def open_engine(
    scenario: Scenario,
    config: DemoConfig,
    cache: NumpyCache,
    *,
    device_blocks: int | None = None,
    host_blocks: int = 0,
    store: str = "",
    peers: aiokv.Peers | None = None,
) -> aiokv.CacheEngine:
    """Return an engine for the model of a scenario.

    Args:
        scenario: the model.
        config: sizes of the cache.
        cache: tensors of the model.
        device_blocks: blocks of the device tier; None for those of ``config``.
        host_blocks: blocks of the host tier.
        store: URL of a store below the host tier; ``""`` for none.
        peers: how blocks travel from and to other engines; None for not at all.
    """
    is_shared = bool(store) or peers is not None
    cache_config = aiokv.CacheConfig(
        block_tokens=config.block_tokens,
        device_blocks=config.device_blocks if device_blocks is None else device_blocks,
        host_blocks=host_blocks,
        write_policy=config.write_policy,
        model=f"aiokv demo, {scenario.model.description}" if is_shared else "",
        weights_version=scenario.weights_version if is_shared else "",
    )
    return aiokv.CacheEngine(
        cache_config,
        cache.regions(),
        scenario.model.new_device(),
        stores=[store] if store else [],
        peers=peers,
    )


async def check_idle(engine: aiokv.CacheEngine, label: str) -> None:
    """Wait until an engine is idle, and check its invariants.

    Raises:
        InternalError: an invariant does not hold.
    """
    await engine.drain()
    if violations := engine.check_invariants():
        raise InternalError(f"after {label}: {'; '.join(violations)}")


def _traffic(lane: RouteStatistics) -> Traffic:
    busy = lane.busy_seconds
    speed = round(lane.moved_bytes / busy / 1e9, 3) if busy else None
    return Traffic(lane.done, lane.moved_bytes, round(busy, 6), speed)
