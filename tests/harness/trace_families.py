"""Families of generated traces, one for each shape of traffic that a prefix cache meets.

Each family is a seeded generator: the same name, seed and length give the same trace. The constants
that decide between LRU and the scores (native/src/index/set_dueling.cpp) were chosen on these
families with seeds below 200 and on the public conversation trace. Seeds from 200 on served no
choice, except ``mixture`` 208, a test of which led to the lower limit of the way back to LRU: tests
and the bench report on them. The constants of the scores themselves
(reuse_model.cpp, return_rates.cpp) were chosen on the public conversation trace.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, Final

from aiokv.trace.format import HASH_BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # Prompts of one session, each with the seconds until the next one.
    Session = Iterator[tuple["_Prompt", float]]
    Family = Callable[["_Ids", int], Iterator[tuple[float, "_Prompt"]]]


class _Ids:
    """Random numbers and block ids of one trace."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._next_id = 0

    def take(self, blocks: int) -> list[int]:
        """Return ids that no other prompt has."""
        first = self._next_id
        self._next_id += blocks
        return list(range(first, self._next_id))

    def pool(self, prompts: int, smallest: int, largest: int) -> list[list[int]]:
        """Return shared prefixes of ``smallest`` to ``largest`` blocks."""
        return [self.take(self.rng.randint(smallest, largest)) for _ in range(prompts)]

    def exponential(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean)


class _Prompt:
    """A prompt that grows by turns; full blocks keep their ids, a partial last block does not."""

    def __init__(self, ids: _Ids, prefix: list[int]) -> None:
        self._ids = ids
        self.hash_ids = list(prefix)
        self.tokens = len(prefix) * HASH_BLOCK_TOKENS

    def grow(self, tokens: float) -> _Prompt:
        full = self.tokens // HASH_BLOCK_TOKENS
        self.tokens += 1 + int(tokens)
        self.hash_ids[full:] = self._ids.take(-(-self.tokens // HASH_BLOCK_TOKENS) - full)
        return self


def _interleave(
    ids: _Ids, sessions_per_second: float, open_session: Callable[[], Session]
) -> Iterator[tuple[float, _Prompt]]:
    """Merge sessions that arrive at random, by time."""
    waiting: list[tuple[float, int, Session]] = []
    arrival, count = 0.0, 0
    while True:
        while not waiting or arrival <= waiting[0][0]:
            heapq.heappush(waiting, (arrival, count, open_session()))
            arrival += ids.exponential(1 / sessions_per_second)
            count += 1
        now, order, session = heapq.heappop(waiting)
        prompt, pause = next(session, (None, 0.0))
        if prompt is not None:
            yield now, prompt
            heapq.heappush(waiting, (now + pause, order, session))


def _conversation(
    ids: _Ids, prefixes: list[list[int]], turns: float, tokens: float, pause: Callable[[], float]
) -> Session:
    prompt = _Prompt(ids, ids.rng.choice(prefixes))
    for _ in range(1 + int(ids.exponential(turns))):
        yield prompt.grow(ids.exponential(tokens)), pause()


def _chat(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """Conversations whose next turn comes within about 30 seconds."""
    prefixes = ids.pool(8, 1, 8)
    return _interleave(
        ids, 2, lambda: _conversation(ids, prefixes, 6, 1_500, lambda: ids.exponential(30))
    )


def _heavy_tailed_chat(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """Conversations whose think times have a Pareto tail: some come back after an hour."""
    prefixes = ids.pool(8, 1, 8)
    return _interleave(
        ids,
        2,
        lambda: _conversation(
            ids, prefixes, 6, 2_500, lambda: min(7_200, 8 * ids.rng.paretovariate(0.8))
        ),
    )


def _agents(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """Agent loops: contexts that grow to a hundred blocks, short pauses, some slow tools."""
    prefixes = ids.pool(5, 6, 16)

    def pause() -> float:
        return ids.exponential(120) if ids.rng.random() < 0.05 else ids.exponential(4)

    return _interleave(ids, 0.4, lambda: _conversation(ids, prefixes, 25, 1_800, pause))


def _rag(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """One instruction, one to three documents by Zipf's law, then a question."""
    rng = ids.rng
    instruction = ids.take(2)
    documents = ids.pool(2_000, 2, 12)
    weights = [1 / rank for rank in range(1, len(documents) + 1)]
    chains: dict[tuple[int, ...], list[int]] = {}

    def open_session() -> Session:
        prefix: list[int] = list(instruction)
        chosen: tuple[int, ...] = ()
        for document in rng.choices(range(len(documents)), weights, k=rng.choice((1, 1, 2, 3))):
            chosen += (document,)
            prefix += chains.setdefault(chosen, ids.take(len(documents[document])))
        yield _Prompt(ids, prefix).grow(ids.exponential(200)), 0.0

    return _interleave(ids, 3, open_session)


def _few_shot(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """Batch jobs: hundreds of short questions behind the same examples, then another job."""

    def job() -> Session:
        examples = ids.take(ids.rng.randint(4, 24))
        for _ in range(ids.rng.randint(20, 400)):
            yield _Prompt(ids, examples).grow(ids.exponential(600)), ids.exponential(2)

    return _interleave(ids, 0.01, job)


def _flood(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """Conversations beside four times as many prompts that never come back."""
    prefixes = ids.pool(8, 1, 8)

    def open_session() -> Session:
        if ids.rng.random() < 0.8:
            return iter([(_Prompt(ids, []).grow(ids.exponential(6_000)), 0.0)])
        return _conversation(ids, prefixes, 6, 1_500, lambda: ids.exponential(60))

    return _interleave(ids, 4, open_session)


def _scan(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """The same documents in the same order, over and over, a question behind each."""
    documents = ids.pool(250, 2, 14)

    def passes() -> Session:
        while True:
            for document in documents:
                yield _Prompt(ids, document).grow(ids.exponential(200)), 1.0

    session = passes()
    return ((0.0, prompt) for prompt, _ in session)


def _phases(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """Each of the other shapes for 300 to 1,500 requests, in random order; they continue later."""
    parts = [
        shape(ids) for shape in (_chat, _heavy_tailed_chat, _agents, _rag, _few_shot, _flood, _scan)
    ]
    while True:
        part = ids.rng.choice(parts)
        for _ in range(ids.rng.randint(300, 1_500)):
            yield next(part)


def _bursts(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """Documents that are asked about often for some minutes and then never again."""
    instruction = ids.take(1)

    def burst() -> Session:
        document = instruction + ids.take(ids.rng.randint(2, 20))
        pause = 10 ** ids.rng.uniform(0, 2.5)
        for _ in range(1 + int(ids.exponential(10))):
            yield _Prompt(ids, document).grow(ids.exponential(500)), ids.exponential(pause)

    return _interleave(ids, 0.5, burst)


def _mixture(ids: _Ids) -> Iterator[tuple[float, _Prompt]]:
    """One to four streams of sessions with parameters drawn at random, changing now and then."""
    rng = ids.rng

    def stream() -> Iterator[tuple[float, _Prompt]]:
        prefixes = ids.pool(rng.choice((1, 4, 40, 400)), 0, rng.choice((1, 8, 30)))
        turns = rng.choice((0.01, 1, 4, 16))
        tokens = rng.choice((300, 1_500, 6_000))
        mean = 10 ** rng.uniform(0, 3)
        tail = rng.choice((0, 0.7, 1.2))

        def pause() -> float:
            return mean * (rng.paretovariate(tail) if tail else ids.exponential(1))

        return _interleave(
            ids,
            10 ** rng.uniform(-1, 0.5),
            lambda: _conversation(ids, prefixes, turns, tokens, pause),
        )

    while True:
        streams = [stream() for _ in range(rng.randint(1, 4))]
        shares = [rng.random() for _ in streams]
        for _ in range(rng.choice((500, 2_000, 8_000))):
            yield next(rng.choices(streams, shares)[0])


FAMILIES: Final = {
    "chat": _chat,
    "rag": _rag,
    "flood": _flood,
    "scan": _scan,
    "mixture": _mixture,
    "heavy_tailed_chat": _heavy_tailed_chat,
    "agents": _agents,
    "few_shot": _few_shot,
    "phases": _phases,
    "bursts": _bursts,
}


def generate_family(name: str, num_requests: int, *, seed: int) -> list[TraceRequest]:
    """Return a trace of the family ``name``; equal arguments give equal traces.

    Args:
        name: a key of ``FAMILIES``.
        num_requests: requests in the trace.
        seed: of the generator.
    """
    prompts = FAMILIES[name](_Ids(seed))
    requests = []
    for i in range(num_requests):
        _, prompt = next(prompts)
        requests.append(
            TraceRequest(
                timestamp_ms=i,
                input_tokens=prompt.tokens,
                output_tokens=1,
                hash_ids=list(prompt.hash_ids),
            )
        )
    return requests
