"""A decode step of the cache managers of vLLM and SGLang, for ``bench steps``.

Each function needs the package in the running interpreter, and makes the calls of that server's
scheduler. Times are CPU time of the calling thread, in microseconds.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from array import array
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Times = dict[str, float]

_cpu_ns = time.thread_time_ns


def measure(
    leases: Iterable[int], prompt_tokens: int, block_tokens: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Return the figures and the version of each of the packages that is installed.

    ``all`` is the median of the steps, ``mean`` includes the few steps that complete blocks.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, decode in _BASELINES.items():
        if find_spec(name) is None:
            print(f"bench steps: {name} is not installed: not compared", file=sys.stderr)
            continue
        found[name] = {"version": import_module(name).__version__}
        for number in leases:
            times = decode(number, prompt_tokens, block_tokens, steps)
            found[name][f"{number}_leases"] = times
    return found


def _vllm(num_requests: int, prompt_tokens: int, block_tokens: int, steps: int) -> Times:
    """Steps of ``KVCacheManager``: slots for each request, its new block ids, its next token."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_tokens, sha256)
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    most_tokens = prompt_tokens + steps + 1
    sizes = {"hash_block_size": block_tokens, "scheduler_block_size": block_tokens}
    known = inspect.signature(KVCacheManager).parameters  # 0.22 has no scheduler_block_size
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=num_requests * (most_tokens // block_tokens + 2),
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        max_model_len=most_tokens,
        **{name: size for name, size in sizes.items() if name in known},
    )
    sampling = SamplingParams(max_tokens=steps + 1)
    requests = []
    for prompt in _prompts(num_requests, prompt_tokens):
        name = str(len(requests))
        request = Request(name, list(prompt), sampling, None, block_hasher=hasher)
        manager.allocate_slots(request, prompt_tokens, 0, manager.get_computed_blocks(request)[0])
        request.num_computed_tokens = prompt_tokens
        request.append_output_token_ids(0)
        requests.append(request)

    def step(token: int) -> None:
        manager.new_step_starts()
        for request in requests:
            manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
            request.num_computed_tokens += 1
        for request in requests:
            request.append_output_token_ids(token)

    return _times(step, steps - 1)


def _sglang(num_requests: int, prompt_tokens: int, block_tokens: int, steps: int) -> Times:
    """Steps with ``RadixCache``: slots of the batch, and their entries in the request table.

    The prefix index gets the tokens of an answer at its end: ``inserts`` is that time per step, for
    answers of ``steps`` tokens. Pages have one token, as is SGLang's default. The tensors are in
    host memory, so the step includes work that a GPU does in kernels.
    """
    import torch
    from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_token_slots
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    torch.set_num_threads(1)  # all work in the thread that is measured
    most_tokens = prompt_tokens + steps
    slots = TokenToKVPoolAllocator(num_requests * most_tokens, torch.float32, "cpu", None, False)
    table = ReqToTokenPool(num_requests, most_tokens, "cpu", False)
    tree = RadixCache(CacheInitParams(False, table, slots, page_size=1))
    texts = [array("q", prompt) for prompt in _prompts(num_requests, prompt_tokens)]
    rows = torch.tensor(table.alloc_rows(num_requests))
    for row, text in zip(rows, texts, strict=True):
        found = alloc_token_slots(tree, prompt_tokens)
        table.write((row, slice(0, prompt_tokens)), found.to(torch.int32))
        tree.insert(InsertParams(key=RadixKey(text), value=found))
    lengths = torch.full((num_requests,), prompt_tokens)
    batch: Any = SimpleNamespace(
        device="cpu",
        model_config=SimpleNamespace(is_encoder_decoder=False),
        tree_cache=tree,
        req_to_token_pool=table,
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        maybe_evict_swa=lambda: None,
        reqs=[
            SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=0, kv_committed_len=0))
            for _ in texts
        ],
    )

    def step(token: int) -> None:
        alloc_for_decode(batch, 1)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        for text in texts:
            text.append(token)

    slots_us = _times(step, steps)
    began = _cpu_ns()
    for row, text in zip(rows, texts, strict=True):
        found = table.req_to_token[row, : len(text)].to(torch.int64, copy=True)
        tree.insert(InsertParams(key=RadixKey(text), value=found, inserted_len=prompt_tokens))
    inserts = (_cpu_ns() - began) / 1e3 / steps
    return {name: value + inserts for name, value in slots_us.items()} | {"inserts": inserts}


def _prompts(number: int, length: int) -> list[range]:
    return [range(first * length, (first + 1) * length) for first in range(number)]


def _times(step: Callable[[int], None], steps: int) -> Times:
    samples = []
    for token in range(steps):
        began = _cpu_ns()
        step(token)
        samples.append((_cpu_ns() - began) / 1e3)
    return {"all": statistics.median(samples), "mean": statistics.fmean(samples)}


_BASELINES: Final = {"vllm": _vllm, "sglang": _sglang}
