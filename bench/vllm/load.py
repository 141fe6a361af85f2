"""Load on an engine: a fixed number of clients takes prompts in order, and times their answers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

_request_ids = itertools.count()


class Engine(Protocol):
    """Part of vLLM's ``AsyncLLM`` that the bench drives."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]: ...


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to one prompt.

    Attributes:
        submitted: time of the submission, of ``time.perf_counter``.
        first_token_seconds: from the submission to the first token.
        seconds: from the submission to the last token.
        gaps_seconds: between the arrivals of tokens; a step may deliver several tokens at once.
        prompt_tokens: length of the prompt.
        cached_tokens: tokens of the prompt that the engine did not compute.
        token_ids: the answer.
    """

    submitted: float
    first_token_seconds: float
    seconds: float
    gaps_seconds: list[float]
    prompt_tokens: int
    cached_tokens: int
    token_ids: list[int]

    @property
    def digest(self) -> str:
        """Hash of the tokens, for comparison with those of another process."""
        return hashlib.sha256(np.array(self.token_ids, dtype=np.int64).tobytes()).hexdigest()[:16]


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one load in the order of the prompts, and the seconds that all of them took."""

    answers: list[Answer]
    seconds: float

    def summary(self) -> dict[str, Any]:
        """Return the figures of the load."""
        first = [1e3 * answer.first_token_seconds for answer in self.answers]
        gaps = [1e3 * gap for answer in self.answers for gap in answer.gaps_seconds]
        prompt_tokens = sum(answer.prompt_tokens for answer in self.answers)
        return {
            "requests": len(self.answers),
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(self.answers) / self.seconds, 3),
            "first_token_ms": _percentiles(first) | {"mean": round(float(np.mean(first)), 2)},
            "gap_ms": _percentiles(gaps) if gaps else {},
            "prompt_tokens": prompt_tokens,
            "cached_tokens": sum(answer.cached_tokens for answer in self.answers),
            "distinct_output_tokens": len({t for a in self.answers for t in a.token_ids}),
            "submitted_of_each": [round(answer.submitted, 6) for answer in self.answers],
            "first_token_ms_of_each": [round(ms, 2) for ms in first],
            "cached_of_each": [answer.cached_tokens for answer in self.answers],
            "digests": [answer.digest for answer in self.answers],
        }


async def run_arrivals(
    engine: Engine, prompts: Sequence[list[int]], sampling: Any, arrivals: Sequence[float]
) -> LoadResult:
    """Send each prompt at its time, whatever was answered before: as users do who do not wait.

    A fixed number of clients whose answers have equal lengths falls into step: most requests arrive
    together, and how many do depends on the server.

    Args:
        engine: to send them to.
        prompts: token ids of each.
        sampling: as for ``run_load``.
        arrivals: seconds from the start of the load to each prompt, ascending.
    """
    started = time.perf_counter()

    async def at(seconds: float, prompt: list[int]) -> Answer:
        await asyncio.sleep(seconds - (time.perf_counter() - started))
        return await ask(engine, {"prompt_token_ids": prompt}, sampling)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(at(*one)) for one in zip(arrivals, prompts, strict=True)]
    seconds = time.perf_counter() - started
    return LoadResult(answers=[task.result() for task in tasks], seconds=seconds)


async def run_agents(
    engine: Engine,
    sessions: Iterable[Sequence[tuple[list[int], float, Any]]],
    *,
    agents: int,
    warm_up_seconds: float,
    seconds: float,
    begin: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Let ``agents`` agents take the next session each, and send its turns one after the other.

    Args:
        engine: to send them to.
        sessions: of each turn the token ids, the pause before it in seconds, and its sampling.
        agents: sessions at a time.
        warm_up_seconds: time whose answers are not counted.
        seconds: time of the measurement after it. Answers that end within it are counted; what is
            running at its end is cancelled.
        begin: called when the warm-up and when the measurement begins.

    Raises:
        RuntimeError: an agent had no session left before the end.
    """
    waiting = iter(sessions)
    answers: list[Answer] = []

    async def agent() -> None:
        for turns in waiting:
            for prompt, pause, sampling in turns:
                await asyncio.sleep(pause)
                answers.append(await ask(engine, {"prompt_token_ids": prompt}, sampling))

    tasks = [asyncio.create_task(agent()) for _ in range(agents)]
    try:
        for phase_seconds in (warm_up_seconds, seconds):
            answers.clear()
            begin()
            done, _ = await asyncio.wait(
                tasks, timeout=phase_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
                raise RuntimeError(f"no session is left within the phase of {phase_seconds:g} s")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return LoadResult(answers=answers, seconds=seconds)


async def run_load(
    engine: Engine, prompts: Sequence[list[int]], sampling: Any, *, clients: int
) -> LoadResult:
    """Send all prompts, at most ``clients`` at a time, in order.

    Args:
        engine: to send them to.
        prompts: token ids of each.
        sampling: vLLM's sampling parameters, whose output kind is cumulative, for all prompts; or
            a list of those of each.
        clients: number of prompts in flight.
    """
    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    answers: list[Answer | None] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def client() -> None:
        for place, prompt in waiting:
            answers[place] = await ask(engine, {"prompt_token_ids": prompt}, each[place])

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    seconds = time.perf_counter() - started
    return LoadResult(answers=[answer for answer in answers if answer], seconds=seconds)


async def ask(engine: Engine, prompt: dict[str, Any], sampling: Any) -> Answer:
    """Send one of vLLM's prompts, given by its token ids, and return its answer.

    Raises:
        RuntimeError: the request ended without a token.
    """
    started = time.perf_counter()
    arrivals: list[float] = []
    output = None
    request_id = f"bench-{next(_request_ids)}"
    async for output in engine.generate(prompt, sampling, request_id):
        if output.outputs[0].token_ids:
            arrivals.append(time.perf_counter() - started)
    if not arrivals:
        raise RuntimeError(f"{request_id} ended without a token: {output}")
    return Answer(
        submitted=started,
        first_token_seconds=arrivals[0],
        seconds=time.perf_counter() - started,
        gaps_seconds=np.diff(arrivals).tolist(),
        prompt_tokens=len(prompt["prompt_token_ids"]),
        cached_tokens=output.num_cached_tokens or 0,
        token_ids=list(output.outputs[0].token_ids),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 2) for q in (50, 90, 99)}
