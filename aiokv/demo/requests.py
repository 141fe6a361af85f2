"""A request on its way through the serving loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.demo.ledger import digest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiokv
    from aiokv.demo.workload import Conversation


@dataclass(slots=True)
class Request:
    """One turn. ``tokens`` grows while it is served; it outlives its leases.

    Attributes:
        reused_tokens: prompt tokens that its first attempt found on the device, on the host, and in
            a store.
        received_tokens: prompt tokens that another server computed for its first attempt.
        disconnect_in_step: the step of an attempt in which its client leaves; None for never.
        disconnected: its client left; the request is sent again.
        prefix_keys: digests of the first block, the first two, and so on; see :meth:`prefix_key`.
    """

    name: str
    tokens: list[int]
    prompt_length: int
    stop_length: int
    items: tuple[aiokv.Item, ...] = ()
    arrived_seconds: float = field(default_factory=time.perf_counter)
    attempts: int = 0
    reused_tokens: tuple[int, int, int] = (0, 0, 0)
    received_tokens: int = 0
    capacity_wait_seconds: float = 0.0
    ttft_seconds: float | None = None
    disconnect_in_step: int | None = None
    disconnected: bool = False
    prefix_keys: list[bytes] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def prefix_key(self, block: int, block_tokens: int) -> bytes:
        """Return a digest of all tokens and images up to the last position of ``block``."""
        for number in range(len(self.prefix_keys), block + 1):
            first, stop = number * block_tokens, (number + 1) * block_tokens
            before = self.prefix_keys[-1] if number else b""
            items = [i for i in self.items if i.offset < stop and first < i.offset + i.length]
            self.prefix_keys.append(
                digest(before + repr((self.tokens[first:stop], items)).encode())
            )
        return self.prefix_keys[block]

    def send_again(self) -> None:
        """Start again from the prompt, as a client does that sends the request again."""
        self.disconnected = False
        del self.tokens[self.prompt_length :]
        self.prefix_keys.clear()

    def note_usage(self, usage: aiokv.Usage) -> None:
        """Count tokens that the first attempt reused; later ones hit the request's own blocks."""
        if self.attempts == 0:
            store = usage.fetched_tokens
            host = max(usage.cached_host_tokens - store, 0)
            self.reused_tokens = usage.cached_tokens - host - store, host, store
            self.received_tokens = usage.received_tokens
        self.capacity_wait_seconds += usage.capacity_wait_seconds or 0.0
        self.attempts += 1


async def converse(conversation: Conversation, serve: Callable[[Request], Awaitable[None]]) -> None:
    """Serve the turns of a conversation, one after the other.

    Args:
        conversation: the turns.
        serve: appends the output tokens to the tokens of a request.
    """
    tokens: list[int] = []
    items: tuple[aiokv.Item, ...] = ()
    for number, turn in enumerate(conversation.turns):
        items += tuple(item._replace(offset=len(tokens) + item.offset) for item in turn.items)
        tokens.extend(turn.added.tolist())
        length = len(tokens)
        name, stop_length = f"{conversation.name}/{number}", length + turn.output_tokens
        await serve(Request(name, tokens, length, stop_length, items))


class Sequence:
    """A request that holds a lease.

    ::

        0 ........... computed ........... length
        | KV in cache | pending: to compute |

    A sequence with one pending position decodes; one with more is in its prompt. While it is
    ``arriving``, layers of its cached part may still be on their way from the host.

    Attributes:
        checked: the bytes of the cached part were compared with what was computed for it.
        abandoned: the client left or was cancelled; the lease is released.
        steps: number of steps that were submitted with it.
        ended: its result is True for finished, False for preempted.
    """

    def __init__(self, request: Request, lease: aiokv.Lease, first_position: int) -> None:
        self.request = request
        self.lease = lease
        self.computed = first_position
        self.arriving = True
        self.checked = False
        self.abandoned = False
        self.steps = 0
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._attempt = asyncio.current_task()

    @property
    def pending(self) -> int:
        return len(self.request.tokens) - self.computed

    @property
    def lacks_one_token(self) -> bool:
        """True if the next token is the last one of the request."""
        return len(self.request.tokens) + 1 == self.request.stop_length

    @property
    def needs_position(self) -> bool:
        """True if the last token has no position in the lease yet."""
        return len(self.request.tokens) > self.lease.num_tokens

    def blocks_to_check(self, count: int, block_tokens: int) -> range:
        """Return the blocks to read back after the step that computes ``count`` positions.

        These are the blocks that the step completes; at the first step, also the cached ones, and
        at the last step all blocks of the request, in case another one overwrote them.
        """
        stop = self.computed + count
        last = stop == len(self.request.tokens) and self.lacks_one_token
        first = self.computed // block_tokens if self.checked and not last else 0
        return range(first, stop // block_tokens)

    def disconnect(self) -> None:
        """Cancel the attempt, as a server does when its client leaves; not after its end."""
        if not self.ended.done() and self._attempt is not None:
            self.request.disconnected = True
            self._attempt.cancel()

    def end(self, *, finished: bool) -> None:
        """Wake the conversation: the request is finished, or preempted."""
        self.request.note_usage(self.lease.usage)
        if not self.ended.done():
            self.ended.set_result(finished)
