"""Workload of the demo: conversations that are drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from aiokv import Item

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the text that the user adds, and the length of the answer.

    Attributes:
        items: images in ``added``; offsets count from its beginning.
    """

    added: Tokens
    output_tokens: int
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order. Each prompt has all earlier turns and the new text."""

    name: str
    turns: list[Turn]

    @property
    def context_tokens(self) -> int:
        """Positions the last turn ends with."""
        return sum(len(turn.added) + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations that arrive at once, in order."""

    title: str
    conversations: list[Conversation]

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def max_context_tokens(self) -> int:
        return max(conversation.context_tokens for conversation in self.conversations)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSizes:
    """Sizes of generated conversations; user turns vary by half around ``user_tokens``."""

    conversations: int = 24
    turns: int = 4
    system_prompts: int = 4
    system_tokens: int = 128
    user_tokens: int = 48
    answer_tokens: int = 16


def chat_workload(sizes: ChatSizes, *, vocab: int, seed: int) -> Workload:
    """Conversations that share ``system_prompts`` system prompts, drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    systems = [random_tokens(rng, sizes.system_tokens, vocab) for _ in range(sizes.system_prompts)]
    conversations = []
    for number in range(sizes.conversations):
        turns = []
        for turn in range(sizes.turns):
            low, high = (sizes.user_tokens + 1) // 2, sizes.user_tokens * 3 // 2
            added = random_tokens(rng, int(rng.integers(low, high + 1)), vocab)
            if turn == 0:
                added = np.concatenate((systems[number % len(systems)], added))
            turns.append(Turn(added, sizes.answer_tokens))
        conversations.append(Conversation(f"chat-{number}", turns))
    title = (
        f"{sizes.conversations} conversations of {sizes.turns} turns, "
        f"{sizes.system_prompts} system prompts of {sizes.system_tokens} tokens"
    )
    return Workload(title, conversations)


def random_tokens(rng: np.random.Generator, count: int, vocab: int) -> Tokens:
    return rng.integers(0, vocab, count, dtype=np.int32)
