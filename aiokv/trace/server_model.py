"""ServerModel: the times of a server's link and model, for replays in simulated time."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv import Lease
    from aiokv.trace.format import TraceRequest


class ServerModel:
    """Serves granted leases one at a time, first on the link and then on the model.

    Args:
        prefill_tokens_per_second: prompt tokens that the model computes per second.
        decode_tokens_per_second: output tokens per second.
        link_tokens_per_second: tokens copied from host memory to the device per second.

    Attributes:
        requests: requests that were served.
        prompt_tokens: prompt tokens of the granted requests.
        hit_tokens: tokens of them that were cached.
        waits: seconds from arrival to grant, of each granted request.
        longest_overtaken: the longest time that a request had waited when a later one was granted.
        busy_seconds: time in which the model computed.
    """

    def __init__(
        self,
        *,
        prefill_tokens_per_second: float,
        decode_tokens_per_second: float,
        link_tokens_per_second: float,
    ) -> None:
        self._prefill = prefill_tokens_per_second
        self._decode = decode_tokens_per_second
        self._link = link_tokens_per_second
        self._link_line = asyncio.Lock()
        self._model_line = asyncio.Lock()
        self._waiting: dict[int, float] = {}  # arrivals, by lease id in order of arrival
        self.requests = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.waits = array("f")
        self.longest_overtaken = 0.0
        self.busy_seconds = 0.0

    def arrived(self, lease: Lease) -> None:
        """Note that a lease begins to wait for its grant."""
        self._waiting[lease.id] = asyncio.get_running_loop().time()

    def granted(self, lease: Lease, tokens: int) -> None:
        """Note the grant of a lease for a prompt of ``tokens`` tokens."""
        now = asyncio.get_running_loop().time()
        arrival = self._waiting.pop(lease.id)
        self.waits.append(now - arrival)
        first = next(iter(self._waiting.values()), arrival)
        if first < arrival:
            self.longest_overtaken = max(self.longest_overtaken, now - first)
        self.prompt_tokens += tokens
        self.hit_tokens += lease.cached_tokens

    async def serve(self, lease: Lease, request: TraceRequest) -> None:
        """Take the time to copy the host hit, to compute the uncached tokens, and to decode."""
        if host_tokens := lease.hit.host_tokens:
            async with self._link_line:
                await asyncio.sleep(host_tokens / self._link)
        async with self._model_line:
            uncached = request.input_tokens - lease.cached_tokens
            seconds = uncached / self._prefill + request.output_tokens / self._decode
            await asyncio.sleep(seconds)
            self.busy_seconds += seconds
        self.requests += 1
