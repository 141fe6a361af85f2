"""Time that FastDeploy's scheduler spends in the cache, per ``schedule()``.

A server decodes 64 requests of 1,024 tokens in 64-token blocks. Verbs are called as FastDeploy's
scheduler calls them, one by one; the connector crosses to the engine's thread as rarely as it can.

* ``decode_step_us``: one ``schedule()`` in which each request has one more token: blocks for those
  that need one, and the end of ``schedule()``.
* ``new_request_us``: match, room and blocks of one request, of which 960 tokens are cached.
* ``finish_us``: the end of one request.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.base.percentiles import percentile
from aiokv.connectors.fastdeploy import CacheManager
from aiokv.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_TOKENS = 64
PROMPT_TOKENS = 1_024
RUNNING = 64


def run(quick: bool) -> dict[str, Any]:
    steps = 200 if quick else 3_000
    manager = CacheManager(_config(device_blocks=RUNNING * 200))
    try:
        requests = [_Request(f"r{i}", _prompt(i)) for i in range(RUNNING)]
        for request in requests:
            _start(manager, request)
        manager.issue_pending_backup_to_batch_request()

        def step() -> None:
            for request in requests:
                if len(request.block_tables) * BLOCK_TOKENS <= request.num_total_tokens:
                    if not manager.can_allocate_gpu_blocks(1):
                        raise InternalError("the device is full")
                    request.block_tables += manager.allocate_gpu_blocks(request, 1)
            manager.issue_pending_backup_to_batch_request()
            manager.check_and_add_pending_backup()

        decode = _measure(step, steps, before=lambda: _decode(requests))
        begin, end = _measure_requests(manager, steps)
        for request in requests:
            manager.request_finish(request)
    finally:
        manager.close()
    return {"decode_step_us": decode, "new_request_us": begin, "finish_us": end}


class _Request:
    """Fields of FastDeploy's request that the connector reads."""

    def __init__(self, name: str, tokens: np.ndarray) -> None:
        self.request_id = name
        self.prompt_token_ids = tokens
        self.output_token_ids: list[int] = []
        self.block_tables: list[int] = []
        self.cache_swap_metadata: list[Any] = []
        self.num_computed_tokens = 0
        self._match_result: Any = None

    @property
    def match_result(self) -> Any:
        return self._match_result

    @property
    def num_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


def _start(manager: CacheManager, request: _Request) -> None:
    manager.match_prefix(request)
    request.block_tables = request.match_result.device_block_ids
    missing = -(-len(request.prompt_token_ids) // BLOCK_TOKENS) - len(request.block_tables)
    if not manager.can_allocate_gpu_blocks(missing):
        raise InternalError("the device is full")
    request.block_tables += manager.allocate_gpu_blocks(request, missing)
    request.num_computed_tokens = len(request.prompt_token_ids)


def _decode(requests: list[_Request]) -> None:
    for request in requests:
        request.output_token_ids.append(len(request.output_token_ids))
        request.num_computed_tokens = request.num_total_tokens - 1


def _measure_requests(
    manager: CacheManager, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return percentiles for the begin and the end of a request; two begin per ``schedule()``."""
    new = [_Request(f"n{i}", _prompt(i % RUNNING, more=100)) for i in range(repeats)]
    begins, ends = [], []
    for pair in zip(new[::2], new[1::2], strict=True):
        begins += [_microseconds(_start, manager, request) for request in pair]
        manager.issue_pending_backup_to_batch_request()
        ends += [_microseconds(manager.request_finish, request) for request in pair]
    return _percentiles(begins), _percentiles(ends)


def _measure(
    function: Callable[[], object], repeats: int, before: Callable[[], object]
) -> dict[str, float]:
    """Return percentiles of the microseconds of ``function``."""
    samples = []
    for _ in range(repeats):
        before()
        samples.append(_microseconds(function))
    return _percentiles(samples)


def _microseconds(function: Callable[..., object], *args: Any) -> float:
    begin = time.perf_counter_ns()
    function(*args)
    return (time.perf_counter_ns() - begin) / 1e3


def _percentiles(samples: list[float]) -> dict[str, float]:
    samples = sorted(samples)
    return {"p50": percentile(samples, 50), "p99": percentile(samples, 99)}


def _prompt(seed: int, more: int = 0) -> np.ndarray:
    return np.arange(PROMPT_TOKENS + more, dtype=np.int32) + np.int32(seed * 10_000)


def _config(device_blocks: int) -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=BLOCK_TOKENS,
            total_block_num=device_blocks,
            num_cpu_blocks=0,
            enable_prefix_caching=True,
            enc_dec_block_num=1,
            prealloc_dec_block_slot_num_threshold=0,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8_192),
    )
