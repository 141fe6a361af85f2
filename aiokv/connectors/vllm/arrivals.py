"""Arrivals: tells vLLM that loads have ended, before the output of a step does.

A worker reports the end of a load when it submits a step, and vLLM reads the report with the output
of this step, while it computes the next one. So a request begins two steps after its load has
ended. The scheduler half sees the end of a load at once, and adds it to the report that vLLM reads
next. It also adds a load that is about to end: the step that vLLM schedules next then waits for the
blocks layer by layer.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.connectors.vllm.link import LoadQueue
    from aiokv.connectors.vllm.requests import CachedRequest

_NUM_STEPS: Final = 64  # recent steps of which the shortest one is taken


class StepPace:
    """Expected durations of steps, from those that have ended.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[int, tuple[float, int]] = {}  # by step: time, prompt tokens
        self._ended = 0.0  # time of the last end
        self._recent: deque[float] = deque(maxlen=_NUM_STEPS)
        self._seconds_per_token = 0.0

    def begin(self, step: int, prompt_tokens: int) -> None:
        """Note a step that computes, with its number of prompt tokens."""
        self._begun[step] = self._clock(), prompt_tokens

    def end(self, step: int, prefill: tuple[int, float] | None) -> None:
        """Note the end of a step and of all earlier ones.

        Args:
            step: number of the step.
            prefill: prompt tokens and seconds of the step if it computed many; see
                ``PrefillClock``.
        """
        last, self._ended = self._ended, self._clock()
        begun = self._begun
        ended = [number for number in begun if number <= step]
        if len(ended) == 1:
            self._recent.append(self._ended - max(begun[ended[0]][0], last))
        for number in ended:
            del begun[number]
        if prefill is not None:
            self._seconds_per_token = prefill[1] / prefill[0]

    @property
    def step_seconds(self) -> float:
        """The shortest recent step: no step takes less; 0.0 before the first one has ended."""
        return min(self._recent, default=0.0)

    @property
    def seconds_left(self) -> float:
        """Expected time until the steps in flight have ended."""
        if not self._begun:
            return 0.0
        began = max(min(began for began, _ in self._begun.values()), self._ended)
        expected = sum(
            max(self.step_seconds, prompt_tokens * self._seconds_per_token)
            for _, prompt_tokens in self._begun.values()
        )
        return max(began + expected - self._clock(), 0.0)


class Arrivals:
    """Loads of which vLLM was told, and of whose end the workers have yet to report.

    Args:
        link: the loads in flight.
        pace: the steps.
        steps_wait: False to tell vLLM of a load only when all its bytes have arrived.
        clock: returns the time in seconds.

    Attributes:
        steps_wait: as the argument.
        unreported: requests of which vLLM was told that their loads have ended, before their
            workers have reported it.
        waits: requests that the step that is built computes, and for whose loads it has to wait.
    """

    def __init__(
        self,
        link: LoadQueue,
        pace: StepPace,
        *,
        steps_wait: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._pace = pace
        self.steps_wait = steps_wait
        self._clock = clock
        self.unreported: set[str] = set()
        self.waits: list[CachedRequest] = []
        self._ready_at = 0.0  # expected end of the loads that steps in flight wait for

    def suits_step(self, num_blocks: int, num_computing: int) -> bool:
        """Return True if the step that is being scheduled should wait for a load that begins now.

        Call only if ``steps_wait``.

        Args:
            num_blocks: number of blocks of the load, and of those that begin before it.
            num_computing: number of other requests that the step computes.
        """
        return self._is_short(self._link.seconds_of(num_blocks), num_computing)

    def join(self, cached: CachedRequest) -> None:
        """Let the step that is being built wait for the load of a request that it computes."""
        if cached.onload is not None:
            cached.onload.is_told = True
            self.unreported.add(cached.request_id)
            self.waits.append(cached)

    def add_to(
        self, reported: set[str] | None, loading: dict[str, CachedRequest], num_computing: int
    ) -> set[str] | None:
        """Return the requests whose loads vLLM shall take as ended.

        Args:
            reported: those that the workers have reported.
            loading: requests that wait for a load, or hold loaded blocks, in order of their loads.
            num_computing: number of requests that the next step computes without more reports.
        """
        ended = set(reported or ())
        for request_id in ended:
            onload = loading[request_id].onload if request_id in loading else None
            if onload is not None and not onload.is_told:
                onload.is_told = True
                num_computing += 1
        known = ended & self.unreported
        self.unreported -= known
        ended -= known
        for request_id, cached in loading.items():
            onload = cached.onload
            if onload is None or onload.is_told or onload.layers is None:
                continue
            has_arrived = onload.layers.has_arrived
            if has_arrived or (
                not onload.layers.is_done and self._ends_in_time(cached, num_computing)
            ):
                onload.is_told = True
                self.unreported.add(request_id)
                ended.add(request_id)
                num_computing += 1
                if not has_arrived:
                    self.waits.append(cached)
        return ended or None

    def _ends_in_time(self, cached: CachedRequest, num_computing: int) -> bool:
        """Return True if the next step should wait for the rest of a load."""
        if not self.steps_wait or cached.onload is None or cached.onload.layers is None:
            return False
        return self._is_short(self._link.seconds_left(cached.onload.layers), num_computing)

    def _is_short(self, left: float, num_computing: int) -> bool:
        """Return True if a step should wait for a load that ends after ``left`` seconds.

        If this step does not, the request begins a step later. If it does, all requests of the
        step wait for the part of the load that is not copied while the steps in flight, and the
        first layers of this step, are computed. The smaller sum of delays is chosen. A step without
        other requests waits for at most ``step_wait_seconds``, because new requests wait for it.
        """
        if num_computing == 0:  # vLLM asks again after an empty step, and may have a new request
            return left <= self._link.step_wait_seconds
        step = self._pace.step_seconds
        before = max(self._pace.seconds_left, self._ready_at - self._clock())
        return (left - before - step) * num_computing <= step

    def take_waits(self) -> list[CachedRequest]:
        """Return the requests for whose loads the step that is built has to wait."""
        waits, self.waits = self.waits, []
        for cached in waits:
            if cached.onload is not None and cached.onload.layers is not None:
                left = self._link.seconds_left(cached.onload.layers)
                self._ready_at = max(self._ready_at, self._clock() + left)
        return [cached for cached in waits if not cached.ended]
