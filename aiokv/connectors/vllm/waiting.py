"""The order of vLLM's waiting requests: those with the largest cached share begin first.

vLLM asks for its waiting requests in its own order. It skips a request for which the connector
answers "not ready", asks for the next one in the same step, and asks for all of them again in the
next step. So a request that should not be first is skipped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aiokv.connectors.vllm.requests import Parameters, is_cacheable, names_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

    from aiokv.connectors.vllm.cache import HostCache

MOST_WAITING: Final = 32  # more are not compared: vLLM would ask for each of them in a step
LOOKUPS_PER_STEP: Final = 4  # prompts whose cached part is looked up
LOOKUP_SECONDS: Final = 1.0  # age at which a cached part is looked up again
RETAINED_SECONDS: Final = 2.0  # time for which the cached part of a waiting prompt is retained
_SHARES: Final = 10  # steps of a cached share

Rank = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    since: float
    is_read: bool
    local: int = 0  # tokens that vLLM's own cache had when vLLM last asked
    host: int = 0  # tokens that host memory had at the last look
    looked_up: float = float("-inf")
    asked_in: int = 0  # last step in which vLLM has asked
    is_skipped: bool = False  # it could not begin when vLLM last asked


class WaitingOrder:
    """Decides which waiting requests are skipped until others have begun.

    The order is that of ``CacheConfig(admission="cached_first")``: requests that have waited for
    ``overtake_seconds`` go first, in order of arrival; then those with the largest cached share of
    the prompt, in tenths; among these, those with the fewest tokens to compute, in powers of two;
    and among these, the first that came. Blocks that host memory has of these prompts are evicted
    after others. Nothing of this is done while one request waits, or more than ``MOST_WAITING``.

    Args:
        cache: the engine.
        overtake_seconds: time for which a request can be overtaken; 0.0 for the order of vLLM.
        has_priorities: True if vLLM admits requests by their priorities: only requests of equal
            priority overtake each other.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        cache: HostCache,
        overtake_seconds: float,
        *,
        has_priorities: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._overtake_seconds = overtake_seconds
        self._has_priorities = has_priorities
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}  # in order of arrival
        self._first: _Waiting | None = None  # of the order, until something changes
        self._answered: _Waiting | None = None  # the last one in this step that may begin
        self._lookups = LOOKUPS_PER_STEP
        self._step = 0
        self._idle_steps = 0  # the last steps that compute nothing

    def add(self, request: Request) -> None:
        """Note a request that is new in vLLM's line."""
        if self._overtake_seconds:
            wishes = Parameters.of(request)
            is_read = (
                wishes.read and not request.skip_reading_prefix_cache and is_cacheable(request)
            )
            waiting = _Waiting(request, self._clock(), is_read, asked_in=self._step)
            self._waiting[request.request_id] = waiting
            self._first = None

    def remove(self, request_id: str) -> None:
        """Note that a request has begun or ended. Idempotent."""
        if self._waiting.pop(request_id, None) is not None:
            self._first = None

    def begin_step(self, *, is_idle: bool) -> None:
        """Compare the requests anew: vLLM schedules another step.

        Args:
            is_idle: True if the step before computes nothing. After two such steps, no request is
                overtaken.
        """
        self._step += 1
        self._idle_steps = self._idle_steps + 1 if is_idle else 0
        self._lookups = LOOKUPS_PER_STEP
        self._first = self._answered = None

    def is_overtaken(self, request: Request, local: int) -> bool:
        """Return True if another request has to begin before this one.

        Args:
            request: vLLM asks for it.
            local: positions that vLLM's own cache has.
        """
        asked = self._waiting.get(request.request_id)
        if asked is None:
            return False
        asked.asked_in = self._step
        if asked.is_skipped:
            asked.is_skipped = False
            self._first = None
        if self._idle_steps > 1 or not 1 < len(self._waiting) <= MOST_WAITING:
            return False
        self._note_skipped(asked)
        now = self._clock()
        if local != asked.local:
            asked.local = local
            self._first = None
        if self._first is None:
            self._look_up(now)
            ready = [
                each for each in self._waiting.values() if each is asked or self._is_ready(each)
            ]
            self._first = min(ready, key=lambda each: self._rank(each, now))
        if self._rank(self._first, now) < self._rank(asked, now):
            return True
        self._answered = asked
        return False

    def skip(self, request_id: str) -> None:
        """Note that a request cannot begin in this step: the others do not wait for it."""
        if (waiting := self._waiting.get(request_id)) is not None:
            waiting.is_skipped = True
            self._first = self._answered = None

    def _note_skipped(self, asked: _Waiting) -> None:
        """Skip the request that could have begun before, because vLLM asks for another one.

        So another connector is not ready. If vLLM had no room for the request, it would ask for no
        other one in this step.
        """
        before, self._answered = self._answered, None
        if before is not None and before is not asked:
            self.skip(before.request.request_id)

    def _rank(self, waiting: _Waiting, now: float) -> Rank:
        request = waiting.request
        priority = request.priority if self._has_priorities else 0
        if now - waiting.since >= self._overtake_seconds:
            return (priority, 0)
        cached = max(waiting.local, waiting.host)
        share = cached * _SHARES // max(request.num_tokens, 1)
        return (priority, 1, -share, max(request.num_tokens - cached, 0).bit_length())

    def _is_ready(self, waiting: _Waiting) -> bool:
        """Return False for a request that vLLM may not begin: the others do not wait for it.

        It may wait for a grammar, for more input or for another connector, and vLLM does not ask
        for it; or it may need an adapter for which there is no room.
        """
        request = waiting.request
        return (
            not waiting.is_skipped
            and waiting.asked_in >= self._step - 1
            and request.status.name == "WAITING"
            and request.lora_request is None
        )

    def _look_up(self, now: float) -> None:
        """Retain the cached parts of prompts, and note their lengths, in one crossing."""
        old = [
            waiting
            for waiting in self._waiting.values()
            if waiting.is_read and now - waiting.looked_up >= LOOKUP_SECONDS
        ][: self._lookups]
        if not old or not self._cache.is_usable:
            return
        self._lookups -= len(old)
        calls = self._cache.calls()
        answers: list[Any] = []
        for waiting in old:
            waiting.looked_up = now
            tokens = waiting.request.all_token_ids[:]
            answers.append(
                calls.retain(tokens, seconds=RETAINED_SECONDS, **names_of(waiting.request))
            )
        self._cache.run(calls)
        for waiting, answer in zip(old, answers, strict=True):
            if self._cache.succeeded([answer], f"request {waiting.request.request_id}, waiting"):
                waiting.host = answer.value
