"""Prompts of the bench: what is sent, in which order, and the tokens of each prompt.

A workload names prompts by the ids of the trace's blocks of 512 tokens; equal ids become equal
tokens in each process, so a file of a few kilobytes determines all prompts. This module needs
neither aiokv nor vLLM: a machine without the trace reads a workload that another one has written.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

HASH_BLOCK_TOKENS = 512
AGENT_OUTPUT_TOKENS = 256  # of the longest answer of an agent


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """Prompt of ``num_tokens`` tokens; one id per 512 tokens, the last may cover fewer."""

    num_tokens: int
    hash_ids: list[int]

    def token_ids(self, vocab: int) -> list[int]:
        """Return the token ids, each from 0 to ``vocab - 1``."""
        blocks = [_block(hash_id, vocab) for hash_id in self.hash_ids]
        return np.concatenate(blocks)[: self.num_tokens].tolist()


@lru_cache(maxsize=8192)
def _block(hash_id: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(hash_id).integers(0, vocab, HASH_BLOCK_TOKENS, dtype=np.int32)


class AgentTurn(msgspec.Struct, frozen=True, array_like=True):
    """Turn of an agent's session: it is sent ``pause_seconds`` after the answer before it."""

    prompt: Prompt
    pause_seconds: float
    output_tokens: int


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of all loads.

    Attributes:
        opening: first turn of each session; fills the caches before the measurement.
        turns: later turns, one session after the other within each round.
        unique: prompts that share no block with any other.
        equality: turns of a few short sessions, for the comparison of outputs.
        max_prompt_tokens: length of the longest prompt.
        working_set_tokens: number of distinct tokens in ``opening`` and ``turns``.
        agents: sessions of agents, each with its turns in order.
    """

    opening: list[Prompt]
    turns: list[Prompt]
    unique: list[Prompt]
    equality: list[Prompt]
    max_prompt_tokens: int
    working_set_tokens: int
    agents: list[list[AgentTurn]] = []


def save_workload(workload: Workload, path: Path) -> None:
    """Write a workload as JSON."""
    path.write_bytes(msgspec.json.encode(workload))


def load_workload(path: Path) -> Workload:
    """Read a workload; raises ``OSError`` or ``msgspec.DecodeError``."""
    return msgspec.json.decode(path.read_bytes(), type=Workload)
