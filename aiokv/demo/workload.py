"""Workload of the demo: conversations that are drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aiokv.demo.images import IMAGE_TOKENS, PLACEHOLDER_TOKEN, image
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from aiokv import Item

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what the user adds to the conversation, and how much is answered.

    Attributes:
        images: items in ``added``; offsets count from its beginning.
    """

    added: Tokens
    output_tokens: int
    images: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order; each prompt is all that was said before plus what is added."""

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
    """Sizes of generated conversations; user turns vary by half around ``user_tokens``.

    Attributes:
        images: different ones; each conversation begins with one, behind its system prompt.
    """

    conversations: int = 24
    turns: int = 4
    system_prompts: int = 4
    system_tokens: int = 128
    user_tokens: int = 48
    answer_tokens: int = 16
    images: int = 0

    def __post_init__(self) -> None:
        if self.images < 0:
            raise ConfigError(f"images must not be negative, got {self.images}")
        for name in set(self.__slots__) - {"images"}:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


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
        if sizes.images:
            shown = number // len(systems) % sizes.images
            turns[0] = _with_image(turns[0], shown, sizes.system_tokens)
        conversations.append(Conversation(f"chat-{number}", turns))
    title = (
        f"{sizes.conversations} conversations of {sizes.turns} turns, "
        f"{sizes.system_prompts} system prompts of {sizes.system_tokens} tokens"
    )
    if sizes.images:
        title += f", {sizes.images} images of {IMAGE_TOKENS} positions"
    return Workload(title, conversations)


def _with_image(turn: Turn, number: int, offset: int) -> Turn:
    placeholders = np.full(IMAGE_TOKENS, PLACEHOLDER_TOKEN, dtype=np.int32)
    added = np.insert(turn.added, offset, placeholders)
    return replace(turn, added=added, images=(image(number, offset),))


def random_tokens(rng: np.random.Generator, count: int, vocab: int) -> Tokens:
    return rng.integers(0, vocab, count, dtype=np.int32)
