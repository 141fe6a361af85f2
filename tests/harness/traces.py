"""Traces and their hits, shared by tests and benches."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from aiokv import CacheConfig
from aiokv.scheduler.plans import new_core
from aiokv.trace.format import HASH_BLOCK_TOKENS, TraceRequest, expand_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.config.cache_config import EvictionPolicy

ROOT = Path(__file__).resolve().parents[2]
TRACE_NAMES = ("conversation_trace.jsonl", "agent-a.jsonl.gz")


def find_traces() -> list[Path]:
    """Return traces that exist: those of ``$AIOKV_TRACE``, else public ones beside the repository.

    ``AIOKV_TRACE`` has one or more paths, separated like those of ``PATH``.
    """
    return [path for path in _trace_paths() if path.is_file()]


def find_trace() -> Path | None:
    """Return the first path of ``$AIOKV_TRACE``, else the conversation trace, if it exists."""
    path = _trace_paths()[0]
    return path if path.is_file() else None


def _trace_paths() -> list[Path]:
    if named := os.environ.get("AIOKV_TRACE"):
        return [Path(path) for path in named.split(os.pathsep)]
    folder = ROOT.parent / "shared" / "traces"
    return [folder / name for name in TRACE_NAMES]


def trace_prompts(requests: Sequence[TraceRequest]) -> list[NDArray[np.int32]]:
    return [expand_tokens(request) for request in requests]


def hit_tokens(
    prompts: Iterable[NDArray[np.int32]],
    capacity_blocks: int,
    policy: EvictionPolicy,
    block_tokens: int = 16,
    labels: Iterable[str] | None = None,
) -> int:
    """Return the hit tokens of one prompt after the other; leave out those longer than the cache.

    Args:
        prompts: token ids of each.
        capacity_blocks: of the cache, in blocks of 512 tokens.
        policy: of eviction.
        block_tokens: of the cache.
        labels: label of each prompt's release, ``""`` for none; None for no labels.
    """
    core = new_core(
        CacheConfig(
            block_tokens=block_tokens,
            device_blocks=capacity_blocks * (HASH_BLOCK_TOKENS // block_tokens),
            eviction_policy=policy,
        )
    )
    with_labels = zip(prompts, itertools.repeat("") if labels is None else labels, strict=False)
    for tokens, label in with_labels:
        if len(tokens) > capacity_blocks * HASH_BLOCK_TOKENS:
            continue
        lease = core.match(tokens, "")[0]
        core.allocate(lease, len(tokens))
        core.commit(lease, len(tokens), 0)
        core.release(lease, 0, 0, label)
    return core.statistics().hit_device_tokens
