"""Routers: choose the server of each prompt. An example of about 100 lines.

A router needs two numbers per server: how many leading tokens of the prompt the server holds
(``engine.would_hit(tokens)``, asked over the router's own connection), and how much work the server
still has to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

RouterName = Literal["prefix", "round-robin"]
ROUTER_NAMES: Final[tuple[RouterName, ...]] = ("prefix", "round-robin")


class Router(Protocol):
    """Chooses a server for each prompt."""

    def choose(self, held_tokens: Sequence[int], prompt_tokens: int, now: float) -> int:
        """Return the index of the server that gets the prompt.

        Args:
            held_tokens: leading tokens of the prompt that each server holds.
            prompt_tokens: length of the prompt.
            now: time in seconds, of any clock that never goes back.
        """


class RoundRobin:
    """Gives each server the next prompt in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, held_tokens: Sequence[int], prompt_tokens: int, now: float) -> int:
        """Return the server whose turn it is."""
        chosen = self._next % len(held_tokens)
        self._next = chosen + 1
        return chosen


class PrefixRouter:
    """Gives a prompt to the server that would answer first.

    A server answers after it has computed its backlog and the tokens of the prompt that it does not
    hold. So prompts go to the server with their prefix, unless another server is so much less busy
    that it computes the whole prompt sooner. Among equals, the server that has computed least gets
    the prompt, so that the caches of all servers are used.

    Args:
        num_servers: number of servers, at least 1.
        tokens_per_second: prompt tokens that a server computes per second.

    Raises:
        UsageError: ``num_servers`` or ``tokens_per_second`` is too small.
    """

    def __init__(self, num_servers: int, tokens_per_second: float) -> None:
        if num_servers < 1:
            raise UsageError(f"num_servers is {num_servers}; it must be at least 1")
        if not tokens_per_second > 0:
            raise UsageError(f"tokens_per_second is {tokens_per_second}; it must be above 0")
        self._tokens_per_second = tokens_per_second
        self._backlog = [0.0] * num_servers  # tokens to compute, at the time of the last choice
        self._computed = [0] * num_servers  # tokens, since the first choice
        self._chosen_at = 0.0

    def choose(self, held_tokens: Sequence[int], prompt_tokens: int, now: float) -> int:
        """Return the server with the least work before the first token; count the prompt there.

        Raises:
            UsageError: ``held_tokens`` has not one number per server.
        """
        if len(held_tokens) != len(self._backlog):
            raise UsageError(
                f"held_tokens has {len(held_tokens)} numbers; there are {len(self._backlog)} "
                "servers"
            )
        computed = max(0.0, now - self._chosen_at) * self._tokens_per_second
        self._chosen_at = max(now, self._chosen_at)
        self._backlog = [max(0.0, tokens - computed) for tokens in self._backlog]
        work = [
            backlog + prompt_tokens - held
            for backlog, held in zip(self._backlog, held_tokens, strict=True)
        ]
        chosen = min(range(len(work)), key=lambda i: (work[i], self._computed[i]))
        self._backlog[chosen] = work[chosen]
        self._computed[chosen] += prompt_tokens - held_tokens[chosen]
        return chosen


def new_router(name: RouterName, num_servers: int, tokens_per_second: float) -> Router:
    """Return a router by its name; arguments as for :class:`PrefixRouter`."""
    if name == "round-robin":
        return RoundRobin()
    return PrefixRouter(num_servers, tokens_per_second)
