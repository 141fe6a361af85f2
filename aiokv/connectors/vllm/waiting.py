"""The order of vLLM's waiting requests: those with the largest cached share begin first.

vLLM asks for its waiting requests in its own order. It skips a request for which the connector
answers "not ready", asks for the next one in the same step, and asks for all of them again in the
next step. So a request that should not be first is skipped.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiokv.base.cached_rank import cached_rank
from aiokv.base.types import as_tokens
from aiokv.connectors.vllm.requests import Parameters, is_cacheable, names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from aiokv.connectors.vllm.cache import HostCache
    from aiokv.sync import Answer, Calls

MOST_COMPARED: Final = 32  # at the beginning of the line; those behind keep their order
LOOKUP_TOKENS: Final = 16_384  # per step; the last prompt that is looked up may exceed it
LOOKUP_SECONDS: Final = 1.0  # age at which a cached part is looked up again
RETAINED_SECONDS: Final = 2.0  # time for which the cached part of a waiting prompt is retained
_END_OF_LINE: Final = (sys.maxsize, 0)  # behind the place of each request


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    since: float
    place: tuple[int, int]  # in vLLM's line: priority and arrival
    rank: int
    local: int = 0  # tokens that vLLM's own cache had when vLLM last asked
    host: int = 0  # tokens that host memory had at the last look
    looked_up: float | None = None  # time of the last look; None before the first one
    tokens: NDArray[np.int32] | None = None  # from the first look on; None if nothing is read
    asked_in: int = 0  # last step in which vLLM has asked
    is_overdue: bool = False
    is_skipped: bool = False  # it could not begin when vLLM last asked, or was passed over


class _Lookups(NamedTuple):
    calls: Calls
    answers: list[tuple[_Waiting, Answer[int]]]


class WaitingOrder:
    """Decides which waiting requests are skipped until others have begun.

    The order is that of ``CacheConfig(admission="cached_first")``: see ``cached_rank``. Requests
    that have waited for ``overtake_seconds`` are overdue. Blocks that host memory has of the
    prompts are evicted after others. This is done for the first ``MOST_COMPARED`` requests in order
    of arrival, behind which the others wait; not while only one waits, or if all requests are new
    and the next step has room for them.

    The cached part of a new prompt is looked up at once. It is looked up again in the engine's
    thread while the model computes, so vLLM's scheduler does not wait.

    Args:
        cache: the engine.
        overtake_seconds: time for which a request can be overtaken; 0.0 for the order of vLLM.
        has_priorities: True if vLLM admits requests by their priorities: only requests of equal
            priority overtake each other.
        room: returns how many prompt tokens vLLM has room for in the next step.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        cache: HostCache,
        overtake_seconds: float,
        *,
        has_priorities: bool,
        room: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._overtake_seconds = overtake_seconds
        self._has_priorities = has_priorities
        self._room = room
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}  # in order of arrival
        self._first: _Waiting | None = None  # of the order, until something changes
        self._last_compared = 0  # number of the last request that was compared with it
        self._answered: _Waiting | None = None  # the last one in this step that may begin
        self._compares: bool | None = None  # in this step; None before vLLM has asked
        self._has_left = False  # the last step has left requests in line
        self._lookup_tokens = LOOKUP_TOKENS  # that are left in this step
        self._posted: _Lookups | None = None  # in the engine's thread
        self._step = 0
        self._asked_step = 0  # last step in which vLLM has asked
        self._asked_end = _END_OF_LINE  # place in line where vLLM has stopped to ask in that step
        self._number = 0  # of the last request that was added
        self._idle_steps = 0  # the last steps that compute nothing

    def add(self, request: Request) -> None:
        """Note a request that is new in vLLM's line."""
        if self._overtake_seconds:
            priority = request.priority if self._has_priorities else 0
            self._number += 1
            self._waiting[request.request_id] = _Waiting(
                request,
                self._clock(),
                (priority, self._number),
                cached_rank(priority, 0, request.num_tokens),
                asked_in=self._step,
            )
            self._first = self._compares = None

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
        self._lookup_tokens = LOOKUP_TOKENS
        self._first = self._answered = self._compares = None
        self._has_left = bool(self._waiting)
        if self._has_left:
            now = self._clock()
            self._note_overdue(now)
            if self._posted is None and len(self._waiting) > 1:
                self._look_up_again(now)

    def is_overtaken(self, request: Request, local: int) -> bool:
        """Return True if another request has to begin before this one.

        Args:
            request: vLLM asks for it.
            local: positions that vLLM's own cache has.
        """
        asked = self._waiting.get(request.request_id)
        if asked is None:
            return False
        if self._asked_step != self._step:
            self._note_passed_over()
        asked.asked_in = self._step
        self._asked_end = asked.place
        if asked.is_skipped:
            asked.is_skipped = False
            self._first = None
        if self._compares is None:
            self._compares = self._should_compare()
        if not self._compares or len(self._waiting) == 1:
            return False
        self._note_skipped(asked)
        if local != asked.local:
            asked.local = local
            self._rank(asked)
        if self._posted is not None and self._posted.calls.done:
            found, self._posted = self._posted, None
            self._note_found(found)
        if self._is_behind(asked):
            self._asked_end = _END_OF_LINE  # vLLM asks for the next one
            return True
        self._answered = asked
        return False

    def _is_behind(self, asked: _Waiting) -> bool:
        """Return True if another request that may begin has a lower rank."""
        if self._first is None:
            self._look_up_new()
            compared = list(self._compared())
            self._last_compared = compared[-1].place[1]
            ready = [each for each in compared if each is asked or self._is_ready(each)]
            if not ready:
                return False
            self._first = min(ready, key=_rank_of)
        if asked.place[1] > self._last_compared:
            return self._first.place[0] <= asked.place[0]
        return self._first.rank < asked.rank

    def _compared(self) -> Iterable[_Waiting]:
        return islice(self._waiting.values(), MOST_COMPARED)

    def skip(self, request_id: str) -> None:
        """Note that a request cannot begin in this step: the others do not wait for it."""
        if (waiting := self._waiting.get(request_id)) is not None:
            waiting.is_skipped = True
            self._first = self._answered = None

    def _note_passed_over(self) -> None:
        """Skip the requests that vLLM did not ask for before it asked for others behind them."""
        for waiting in self._compared():
            if waiting.asked_in < self._asked_step and waiting.place < self._asked_end:
                waiting.is_skipped = True
        self._asked_step = self._step

    def _should_compare(self) -> bool:
        waiting = self._waiting
        if self._idle_steps > 1 or len(waiting) < 2:
            return False
        if self._has_left:
            return True
        num_tokens: int = sum(each.request.num_tokens for each in waiting.values())
        return num_tokens > self._room()

    def _note_skipped(self, asked: _Waiting) -> None:
        """Skip the request that could have begun before, because vLLM asks for another one.

        So another connector is not ready. If vLLM had no room for the request, it would ask for no
        other one in this step.
        """
        before, self._answered = self._answered, None
        if before is not None and before is not asked:
            before.is_skipped = True
            self._first = None

    def _note_overdue(self, now: float) -> None:
        """Rank the requests anew that have waited for long: the first ones."""
        for waiting in self._compared():
            if now - waiting.since < self._overtake_seconds:
                break
            if not waiting.is_overdue:
                waiting.is_overdue = True
                self._rank(waiting)

    def _rank(self, waiting: _Waiting) -> None:
        waiting.rank = cached_rank(
            waiting.place[0],
            max(waiting.local, waiting.host),
            waiting.request.num_tokens,
            is_overdue=waiting.is_overdue,
        )
        self._first = None

    def _is_ready(self, waiting: _Waiting) -> bool:
        """Return False for a request that vLLM may not begin: the others do not wait for it.

        It may wait for a grammar, for more input or for another connector, and vLLM does not ask
        for it; or it may need an adapter for which there is no room.
        """
        request = waiting.request
        return (
            not waiting.is_skipped
            and request.status.name == "WAITING"
            and request.lora_request is None
        )

    def _look_up_new(self) -> None:
        """Look up prompts that were not looked up yet, and wait for the answers."""
        new = self._take(lambda each: each.looked_up is None, self._clock())
        for waiting in new:
            request = waiting.request
            if (
                Parameters.of(request).read
                and not request.skip_reading_prefix_cache
                and is_cacheable(request)
            ):
                waiting.tokens = as_tokens(request.all_token_ids[:])
        if new:
            self._note_found(self._recorded(new))

    def _look_up_again(self, now: float) -> None:
        """Let the engine look up prompts that it has looked up before."""
        old = self._take(
            lambda each: (
                each.tokens is not None
                and each.looked_up is not None
                and now - each.looked_up >= LOOKUP_SECONDS
            ),
            now,
        )
        if old:
            self._posted = self._recorded(old)
            self._cache.post(self._posted.calls)

    def _take(self, is_due: Callable[[_Waiting], bool], now: float) -> list[_Waiting]:
        """Return the prompts to look up now, and note the time."""
        taken: list[_Waiting] = []
        if not self._cache.is_usable:
            return taken
        for waiting in self._compared():
            if self._lookup_tokens <= 0:
                break
            if is_due(waiting):
                waiting.looked_up = now
                self._lookup_tokens -= waiting.request.num_tokens
                taken.append(waiting)
        return taken

    def _recorded(self, prompts: list[_Waiting]) -> _Lookups:
        """Record calls that retain the cached parts of prompts, and return their lengths."""
        calls = self._cache.calls()
        answers: list[tuple[_Waiting, Answer[Any]]] = [
            (
                waiting,
                calls.retain(waiting.tokens, seconds=RETAINED_SECONDS, **names_of(waiting.request)),
            )
            for waiting in prompts
            if waiting.tokens is not None
        ]
        return _Lookups(calls, answers)

    def _note_found(self, lookups: _Lookups) -> None:
        """Rank the requests anew after their prompts were looked up, in one crossing."""
        self._cache.run(lookups.calls)
        for waiting, answer in lookups.answers:
            if self._cache.succeeded([answer], f"request {waiting.request.request_id}, waiting"):
                waiting.host = answer.value
                self._rank(waiting)


def _rank_of(waiting: _Waiting) -> int:
    return waiting.rank
