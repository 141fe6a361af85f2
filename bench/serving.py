"""Savings of the cache in a serving loop: the demo's workload without cache, with device, and both.

Fails when a run's tokens or logits differ from those of the run without reuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import uvloop

from aiokv.demo.runs import DemoConfig, Scenario, run_demo
from aiokv.demo.transformer import NumpyTransformer
from aiokv.demo.weights import GroupedConfig, random_weights
from aiokv.demo.workload import ChatSizes, chat_workload
from aiokv.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.demo.report import RunResult


def run(quick: bool) -> dict[str, Any]:
    config = GroupedConfig()
    sizes = ChatSizes(conversations=8, turns=3) if quick else ChatSizes()
    workload = chat_workload(sizes, vocab=config.vocab, seed=0)
    weights = random_weights(config)
    model = NumpyTransformer(config, weights, max_context_tokens=workload.max_context_tokens)
    scenario = Scenario(model, workload, weights.version)
    result = uvloop.run(run_demo(lambda: scenario, DemoConfig(), _no_progress))
    if not result.equal:
        raise InternalError("the serving runs differ: the cache served wrong bytes")
    return {run.name: _metrics(run) for run in result.runs}


def _no_progress(stage: str, total: int) -> Callable[[int], None]:
    return lambda count: None


def _metrics(run: RunResult) -> dict[str, Any]:
    metrics = {
        "requests_per_second": run.requests / run.seconds,
        "generated_tokens_per_second": run.generated_tokens / run.seconds,
        "reused_tokens": run.reused_tokens.total,
        "ttft_ms": {"p50": run.ttft_ms.p50, "p99": run.ttft_ms.p99},
    }
    if run.wakeup_us.p50 is not None:
        metrics["wakeup_us"] = {"p50": run.wakeup_us.p50, "p99": run.wakeup_us.p99}
    return metrics
