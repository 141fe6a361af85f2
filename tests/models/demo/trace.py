"""A Mooncake trace, scaled down, as a workload of the demo."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import numpy as np

from aiokv.demo.workload import Conversation, Turn, Workload, random_tokens
from aiokv.trace.format import HASH_BLOCK_TOKENS, TraceRequest, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.demo.workload import Tokens


def trace_workload(
    path: str | os.PathLike[str],
    *,
    requests: int,
    block_tokens: int,
    max_context_tokens: int,
    vocab: int,
    seed: int,
) -> Workload:
    """The first conversations of a Mooncake trace, each 512-token block shrunk to one cache block.

    Conversations are taken whole, so that what they reuse is what they reuse in the trace; they
    are told apart by their first two blocks. All requests arrive together, in trace order.
    Requests longer than ``max_context_tokens`` after that are cut at their end.

    Raises:
        TraceError: the file cannot be read or has a malformed line.
    """
    scale = max(1, HASH_BLOCK_TOKENS // block_tokens)
    conversations = [
        Conversation(
            f"request-{number}", [_scaled_turn(request, scale, max_context_tokens, vocab, seed)]
        )
        for number, request in _first_conversations(read_trace(path), requests)
    ]
    title = f"{len(conversations)} requests of {os.fspath(path)}, lengths divided by {scale}"
    return Workload(title, conversations)


def _first_conversations(
    trace: list[TraceRequest], requests: int
) -> list[tuple[int, TraceRequest]]:
    """The conversations that begin first, up to ``requests`` requests, numbered as in the trace."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(trace):
        numbers.setdefault(tuple(request.hash_ids[:2]), []).append(number)
    chosen = list(itertools.chain.from_iterable(numbers.values()))[:requests]
    return [(number, trace[number]) for number in sorted(chosen)]


def _scaled_turn(
    request: TraceRequest, scale: int, max_context_tokens: int, vocab: int, seed: int
) -> Turn:
    output_tokens = max(1, min(request.output_tokens // scale, max_context_tokens // 2))
    length = max(1, min(request.input_tokens // scale, max_context_tokens - output_tokens))
    block_tokens = HASH_BLOCK_TOKENS // scale
    hash_ids = request.hash_ids[: -(-length // block_tokens)]
    return Turn(_expand_scaled(hash_ids, block_tokens, vocab, seed)[:length], output_tokens)


def _expand_scaled(hash_ids: Sequence[int], tokens: int, vocab: int, seed: int) -> Tokens:
    """Equal ids give equal tokens, different ids almost surely different ones."""
    blocks = [random_tokens(np.random.default_rng((seed, h)), tokens, vocab) for h in hash_ids]
    return np.concatenate(blocks)
