"""A request on its way through the serving loop, and the sums over all of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.demo.ledger import digest

if TYPE_CHECKING:
    import aiokv


@dataclass(slots=True)
class Request:
    """One turn. ``tokens`` grows while it is served; it survives preemptions.

    Attributes:
        reused_device_tokens: prompt tokens found on the device when it was first admitted.
        reused_host_tokens: those that were onloaded from the host tier.
        disconnect_in_step: the step of an attempt in which its client leaves; None for never.
        disconnected: its client left; it is sent again.
        prefix_keys: digests of the first block, the first two, and so on; see :meth:`prefix_key`.
    """

    name: str
    tokens: list[int]
    prompt_length: int
    stop_length: int
    items: tuple[aiokv.Item, ...] = ()
    arrived_seconds: float = field(default_factory=time.perf_counter)
    attempts: int = 0
    reused_device_tokens: int = 0
    reused_host_tokens: int = 0
    capacity_wait_seconds: float = 0.0
    ttft_seconds: float | None = None
    disconnect_in_step: int | None = None
    disconnected: bool = False
    prefix_keys: list[bytes] = field(default_factory=list)

    def prefix_key(self, block: int, block_tokens: int) -> bytes:
        """Name what block ``block`` depends on: all tokens and images up to its last position."""
        for number in range(len(self.prefix_keys), block + 1):
            first, stop = number * block_tokens, (number + 1) * block_tokens
            parts = [
                self.prefix_keys[-1] if number else b"",
                repr(self.tokens[first:stop]).encode(),
            ]
            parts += [
                repr(item).encode()
                for item in self.items
                if item.offset < stop and first < item.offset + item.length
            ]
            self.prefix_keys.append(digest(b"".join(parts)))
        return self.prefix_keys[block]

    def send_again(self) -> None:
        """Start again from the prompt, as a client does that sends the request again."""
        self.disconnected = False
        del self.tokens[self.prompt_length :]
        self.prefix_keys.clear()

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def note_usage(self, usage: aiokv.Usage) -> None:
        """Count what the first attempt reused; a later one finds the request's own blocks."""
        if self.attempts == 0:
            self.reused_device_tokens = usage.cached_device_tokens
            self.reused_host_tokens = usage.cached_host_tokens
        self.capacity_wait_seconds += usage.capacity_wait_seconds or 0.0
        self.attempts += 1


class Sequence:
    """A request that holds a lease.

    ::

        0 ........... computed ........... length
        | KV in cache | pending: to compute |

    One with a single pending position decodes, one with more is in its prompt. While it is
    ``arriving``, layers of its cached part may still be on their way from the host.

    Attributes:
        checked: the bytes of the cached part were compared with what was computed for it.
        abandoned: the client left or was cancelled; the lease is released.
        steps: number of steps that were submitted with it.
    """

    def __init__(self, request: Request, lease: aiokv.Lease) -> None:
        self.request = request
        self.lease = lease
        self.computed = lease.cached_tokens
        self.arriving = True
        self.checked = False
        self.abandoned = False
        self.steps = 0
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._attempt = asyncio.current_task()

    @property
    def pending(self) -> int:
        return len(self.request.tokens) - self.computed

    def blocks_to_check(self, count: int, block_tokens: int) -> range:
        """Blocks whose bytes to read back after the step that computes ``count`` positions.

        These are the blocks that the step completes; at the first step, also the cached ones, and
        at the last step all blocks of the request, in case something else wrote them meanwhile.
        """
        stop = self.computed + count
        last = stop == len(self.request.tokens) and stop + 1 == self.request.stop_length
        first = self.computed // block_tokens if self.checked and not last else 0
        return range(first, stop // block_tokens)

    @property
    def needs_position(self) -> bool:
        """The last token has no position in the lease yet."""
        return len(self.request.tokens) > self.lease.num_tokens

    def disconnect(self) -> None:
        """Cancel the attempt, as a server does when its client leaves; not after its end."""
        if not self.ended.done() and self._attempt is not None:
            self.request.disconnected = True
            self._attempt.cancel()

    def end(self, *, finished: bool) -> None:
        """Wake the conversation: finished (True) or preempted (False)."""
        self.request.note_usage(self.lease.usage)
        if not self.ended.done():
            self.ended.set_result(finished)


@dataclass(slots=True)
class ServingStatistics:
    """Sums over a run. Every prompt token is reused on one tier or computed, once.

    Attributes:
        layer_wait_seconds: the runner stood still for a layer on its way from the host.
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused_device_tokens: int = 0
    reused_host_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    disconnections: int = 0
    failed_onloads: int = 0
    steps: int = 0
    compute_seconds: float = 0.0
    layer_wait_seconds: float = 0.0
    ttft_seconds: list[float] = field(default_factory=list)
    capacity_wait_seconds: list[float] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model because no tier had them."""
        return self.prompt_tokens - self.reused_device_tokens - self.reused_host_tokens

    def add(self, request: Request) -> None:
        self.requests += 1
        self.prompt_tokens += request.prompt_length
        self.reused_device_tokens += request.reused_device_tokens
        self.reused_host_tokens += request.reused_host_tokens
        self.generated_tokens += len(request.generated)
        self.capacity_wait_seconds.append(request.capacity_wait_seconds)
        if request.ttft_seconds is not None:
            self.ttft_seconds.append(request.ttft_seconds)
