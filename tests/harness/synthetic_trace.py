"""Small generated traces of chat traffic, with shared system prompts and several turns.

``python -m tests.harness.synthetic_trace`` writes the trace of ``aiokv replay example`` again: 60
interleaved conversations of up to eight turns behind four shared system prompts.
"""

from __future__ import annotations

import gzip
import random

import msgspec

from aiokv.trace.format import EXAMPLE, HASH_BLOCK_TOKENS, TraceRequest


class _Conversation:
    """Prompt of a conversation, which grows with each turn; full blocks keep their ids."""

    def __init__(self, system_prompt: list[int]) -> None:
        self.hash_ids = list(system_prompt)
        self.num_tokens = len(system_prompt) * HASH_BLOCK_TOKENS

    def grow(self, num_tokens: int, next_id: int) -> int:
        """Append tokens; return the first unused id. A partial last block gets a new id."""
        full = self.num_tokens // HASH_BLOCK_TOKENS
        self.num_tokens += num_tokens
        new = -(-self.num_tokens // HASH_BLOCK_TOKENS) - full
        self.hash_ids[full:] = range(next_id, next_id + new)
        return next_id + new


def generate_trace(
    num_requests: int = 400,
    *,
    seed: int = 0,
    system_prompts: int = 3,
    max_turns: int = 6,
    live_conversations: int = 12,
    turn_tokens: int = 900,
    mean_interval_ms: float = 250.0,
) -> list[TraceRequest]:
    """Return a trace of interleaved conversations; equal arguments give equal traces.

    Args:
        num_requests: number of requests in the trace.
        seed: seed of the random generator.
        system_prompts: number of shared system prompts, of 1, 2, ... blocks of 512 tokens.
        max_turns: a conversation ends after 1 to ``max_turns`` requests.
        live_conversations: number of conversations that are open at a time.
        turn_tokens: mean number of tokens that a turn adds (prompt and answer).
        mean_interval_ms: mean time between arrivals in milliseconds.
    """
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    next_id = 0
    for blocks in range(1, system_prompts + 1):
        prompts.append(list(range(next_id, next_id + blocks)))
        next_id += blocks
    live: list[tuple[_Conversation, int]] = []
    requests: list[TraceRequest] = []
    clock_ms = 0.0
    while len(requests) < num_requests:
        if len(live) < live_conversations:
            live.append((_Conversation(rng.choice(prompts)), rng.randint(1, max_turns)))
        index = rng.randrange(len(live))
        conversation, turns = live.pop(index)
        next_id = conversation.grow(1 + int(rng.expovariate(1 / turn_tokens)), next_id)
        if turns > 1:
            live.append((conversation, turns - 1))
        requests.append(
            TraceRequest(
                timestamp_ms=int(clock_ms),
                input_tokens=conversation.num_tokens,
                output_tokens=rng.randint(1, 400),
                hash_ids=list(conversation.hash_ids),
            )
        )
        clock_ms += rng.expovariate(1 / mean_interval_ms)
    return requests


def example_lines() -> bytes:
    """Return the lines of the trace that comes with the package."""
    requests = generate_trace(
        1_500, live_conversations=60, turn_tokens=1_500, max_turns=8, system_prompts=4
    )
    encode = msgspec.json.Encoder().encode
    return b"".join(encode(request) + b"\n" for request in requests)


if __name__ == "__main__":
    EXAMPLE.write_bytes(gzip.compress(example_lines(), mtime=0))
