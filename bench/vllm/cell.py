"""One server in this process: start it, run its loads, write the results as JSON.

``python -m bench.vllm.cell SPEC RESULT``: ``SPEC`` is a file that ``python -m bench.vllm`` writes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from bench.vllm.load import LoadResult, run_agents, run_arrivals, run_load
from bench.vllm.model import SHAPES, write_model
from bench.vllm.servers import BLOCK_TOKENS, Settings, engine_options, environment
from bench.vllm.workload import HASH_BLOCK_TOKENS, Prompt, load_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.vllm.load import Answer
    from bench.vllm.workload import Workload

WEIGHTS_SEED = 1
# One block of 32 gets wrong KV, to show that the comparison of outputs notices it.
_DAMAGE_EVERY = 32
_RESET_TIMEOUT_SECONDS = 30.0
_SAVE_SECONDS = 0.3  # for the saves of one prompt to end

LOADS = ("multi_turn", "one_client", "no_hits", "host_hits", "long_answers", "documents", "agents")
# Prompts of "host hits": a head that host memory has, and a tail that nothing has.
_HEAD_HASH_BLOCKS = 28
_NUM_HEADS = 8
_TAIL_TOKENS = (256, 1_536)
_HOST_HITS_OUTPUT_TOKENS = 3
_HOST_HITS = {1: 24, 4: 64}  # prompts of each load by its number of clients
HOST_HITS_TOKENS = _HEAD_HASH_BLOCKS * HASH_BLOCK_TOKENS + max(_TAIL_TOKENS)
# Documents of "long answers": lengths at equal ratios. Their KV needs 43 GiB of host memory.
_NUM_DOCUMENTS = 48
_DOCUMENT_TOKENS = (1_000, 24_000)
LONG_ANSWER_TOKENS = 64
VARIED_ANSWER_TOKENS = 32, 96  # with ``vary_answers``
_LONG_ANSWERS = {1: 1, 4: 2, 16: 4}  # questions per document by the number of clients
# "documents" asks about the same ones with Zipf popularity, behind tokens that nothing has.
_QUESTION_TOKENS = (32, 511)
DOCUMENT_REQUESTS = {1: 48, 4: 128, 16: 320, 32: 480}  # by the number of clients
_ARRIVAL_SECONDS = 25.0  # of each rate
_AGENTS_SECONDS = 20.0, 40.0  # warm-up and measurement of "agents"
DOCUMENTS_TOKENS = _DOCUMENT_TOKENS[1] + _QUESTION_TOKENS[1]  # of the longest prompt


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One server and its loads.

    Attributes:
        server: name in ``bench.vllm.servers.SERVERS``.
        kind: ``load`` measures; ``small_host`` too, with a host tier that the working set
            exceeds; ``equality`` compares outputs.
        loads: loads to measure, of ``LOADS``.
        shape: name in ``bench.vllm.model.SHAPES``.
        workload: file of the workload.
        settings: of the server.
        clients: prompts in flight.
        max_output_tokens: length of each answer.
        document_clients: numbers of clients of "documents", of ``DOCUMENT_REQUESTS``.
        document_rates: requests per second of "documents" that arrive at random times.
        answer_tokens: lengths of the answers at each of these rates.
        vary_answers: answers of "documents" have different lengths, so that clients do not fall
            into step.
        agents: sessions at a time of "agents".
        limit: prompts of each load to take; None: all.
    """

    server: str
    kind: Literal["load", "small_host", "equality"]
    loads: tuple[str, ...]
    shape: str
    workload: str
    settings: Settings
    clients: int
    max_output_tokens: int
    document_clients: tuple[int, ...] = tuple(DOCUMENT_REQUESTS)
    document_rates: tuple[float, ...] = ()
    answer_tokens: tuple[int, ...] = (LONG_ANSWER_TOKENS,)
    vary_answers: bool = False
    agents: int = 24
    limit: int | None = None


def main(argv: Sequence[str]) -> int:
    spec, result = argv
    cell = msgspec.json.decode(Path(spec).read_bytes(), type=Cell)
    # vLLM reads the environment when it is imported.
    os.environ.update(environment(cell.settings))
    figures = asyncio.run(_run(cell, Path(result)))
    Path(result).write_bytes(msgspec.json.encode(figures))
    return 0


async def _run(cell: Cell, result: Path) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    write_model(cell.shape, Path(cell.settings.model))
    started = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**engine_options(cell.server, cell.settings))
    )
    try:
        await engine.collective_rpc("seed_weights", args=(WEIGHTS_SEED,))
        bench = _Bench(cell, engine, load_workload(Path(cell.workload)), result)
        bench.note(f"started in {time.perf_counter() - started:.1f} s")
        figures = {"start_seconds": round(time.perf_counter() - started, 1)}
        if cell.kind == "equality":
            return figures | await bench.compare()
        return figures | await bench.measure(cell.loads)
    finally:
        engine.shutdown()


class _Bench:
    """Loads of one cell on its engine; the file ``result`` has those that have ended."""

    def __init__(self, cell: Cell, engine: Any, workload: Workload, result: Path) -> None:
        self._result = result
        self._ended: dict[str, Any] = {}
        self._cell = cell
        self._engine = engine
        self._workload = workload

    def note(self, text: str) -> None:
        print(f"{self._cell.server}: {text}", file=sys.stderr, flush=True)

    async def measure(self, loads: Sequence[str]) -> dict[str, Any]:
        """Run the loads that are timed."""
        workload = self._workload
        longest = max(workload.unique, key=lambda prompt: prompt.num_tokens)
        # Without a working set to fill the caches later, the warm-up leaves room in them.
        warm_ups = self._cell.clients if "multi_turn" in loads else 1
        await self._load("warm-up", [_other(longest, id_) for id_ in range(warm_ups)])
        figures: dict[str, Any] = {}
        if "host_hits" in loads:
            figures |= await self._host_hits()
        if "long_answers" in loads:
            figures |= await self._long_answers()
        if "documents" in loads:
            figures |= await self._documents()
        if "agents" in loads:
            figures["agents"] = await self._agents()
        if "multi_turn" in loads:
            await self._load("opening", workload.opening)
            figures["multi_turn"] = await self._load("multi-turn", workload.turns)
        if "one_client" in loads:
            turns = workload.turns[-20:]
            figures["one_client"] = await self._load("one client", turns, clients=1)
        if "no_hits" in loads:
            figures["no_hits"] = await self._load("no hits", workload.unique)
        return figures

    async def _host_hits(self) -> dict[str, Any]:
        """Send prompts whose heads are in host memory only.

        The heads take turns, and the device cache has room for half of them.
        """
        heads = [
            list(range(first, first + _HEAD_HASH_BLOCKS))
            for first in range(2_000_000_000, 2_000_000_000 + _NUM_HEADS * 1_000, 1_000)
        ]
        whole = _HEAD_HASH_BLOCKS * HASH_BLOCK_TOKENS
        await self._load("heads", [Prompt(whole, head) for head in heads], clients=2)
        figures = {}
        tail_ids = itertools.count(3_000_000_000)
        head_ids = itertools.cycle(heads)
        for tail in _TAIL_TOKENS:
            for clients, count in _HOST_HITS.items():
                prompts = [
                    Prompt(
                        whole + tail,
                        [
                            *next(head_ids),
                            *itertools.islice(tail_ids, -(-tail // HASH_BLOCK_TOKENS)),
                        ],
                    )
                    for _ in range(count)
                ]
                name = f"host_hits_{tail}_new_{clients}_clients"
                if self._cell.settings.profile:
                    await self._engine.start_profile(name)
                figures[name] = await self._load(
                    name, prompts, clients=clients, output_tokens=_HOST_HITS_OUTPUT_TOKENS
                )
                if self._cell.settings.profile:
                    await self._engine.stop_profile()
        return figures

    async def _long_answers(self) -> dict[str, Any]:
        """Ask about documents of different lengths, each of which was asked about before."""
        documents = long_documents()
        await self._load("documents", documents, clients=2)
        figures = {}
        for clients, questions in _LONG_ANSWERS.items():
            name = f"long_answers_{clients}_clients"
            figures[name] = await self._load(
                name, documents * questions, clients=clients, output_tokens=LONG_ANSWER_TOKENS
            )
        return figures

    async def _documents(self) -> dict[str, Any]:
        """Ask new questions about documents, of which few are asked about most often."""
        documents = long_documents()
        if "long_answers" not in self._cell.loads:
            await self._load("documents", documents, clients=2)
        questions = DocumentQuestions(documents)
        figures = {}
        lengths_rng = np.random.default_rng(2)
        for clients, count in DOCUMENT_REQUESTS.items():
            asked = questions.take(count)  # equal ones, whatever numbers of clients are chosen
            lengths = lengths_rng.integers(*VARIED_ANSWER_TOKENS, count, endpoint=True).tolist()
            if clients in self._cell.document_clients:
                name = f"documents_{clients}_clients"
                figures[name] = await self._load(
                    name,
                    asked,
                    clients=clients,
                    output_tokens=lengths if self._cell.vary_answers else LONG_ANSWER_TOKENS,
                )
        for tokens, rate in itertools.product(self._cell.answer_tokens, self._cell.document_rates):
            asked = questions.take(round(rate * _ARRIVAL_SECONDS))
            arrivals = np.cumsum(questions.rng.exponential(1 / rate, len(asked))).tolist()
            name = f"documents_{rate:g}_per_second_{tokens}_tokens"
            figures[name] = await self._load(name, asked, arrivals=arrivals, output_tokens=tokens)
        return figures

    async def _agents(self) -> dict[str, Any]:
        """Serve sessions of agents, each of which waits for its answer and then for its tools."""
        vocab = SHAPES[self._cell.shape]["vocab_size"]
        warm_up, seconds = _AGENTS_SECONDS
        sessions = (
            [
                (
                    turn.prompt.token_ids(vocab),
                    turn.pause_seconds,
                    self._sampling(turn.output_tokens),
                )
                for turn in session
            ]
            for session in self._workload.agents
        )
        before: list[int] = []
        result = await run_agents(
            self._engine,
            sessions,
            agents=self._cell.agents,
            warm_up_seconds=warm_up,
            seconds=seconds,
            begin=lambda: before.append(_external_hit_tokens()),
        )
        return self._figures(f"agents, {self._cell.agents}", result, before[-1])

    async def compare(self) -> dict[str, Any]:
        """Answer each prompt with its KV from different places, one prompt at a time.

        Passes: ``computed``; ``device_hits`` and ``repeated`` find all full blocks in the device
        cache; ``reloaded`` finds as many behind it, in host memory; ``damaged`` finds them in the
        device cache, some with wrong KV. vLLM's numbers depend on the length of the hit, which
        splits the prompt, so only answers after hits of equal lengths must be equal.
        """
        names = ("computed", "device_hits", "repeated", "reloaded", "damaged")
        answers: dict[str, list[Answer]] = {name: [] for name in names}
        external = dict.fromkeys(names, 0)
        prompts = [_unaligned(prompt) for prompt in self._workload.equality]
        await self._load("warm-up", [_other(prompts[0], 0)], clients=1)
        started = time.perf_counter()
        for tokens in self._tokens(prompts):
            for name in names:
                if name == "reloaded":
                    await asyncio.sleep(_SAVE_SECONDS)
                    await self._reset_device_cache()
                elif name == "damaged":
                    await self._engine.collective_rpc("damage_blocks", args=(_DAMAGE_EVERY,))
                before = _external_hit_tokens()
                result = await run_load(self._engine, [tokens], self._sampling(), clients=1)
                answers[name] += result.answers
                external[name] += _external_hit_tokens() - before
            await self._reset_device_cache()  # forgets the damaged blocks
        seconds = time.perf_counter() - started
        self.note(f"compared {len(answers[names[0]])} prompts in {seconds:.1f} s")
        return {
            name: LoadResult(answers=answers[name], seconds=seconds).summary()
            | {"external_hit_tokens": external[name]}
            for name in names
        }

    async def _reset_device_cache(self) -> None:
        """Forget the device cache; vLLM refuses while a save still reads its blocks."""
        deadline = time.perf_counter() + _RESET_TIMEOUT_SECONDS
        while not await self._engine.reset_prefix_cache():
            if time.perf_counter() > deadline:
                raise TimeoutError(
                    f"the device cache is still in use after {_RESET_TIMEOUT_SECONDS} s"
                )
            await asyncio.sleep(0.05)

    def _tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        vocab = SHAPES[self._cell.shape]["vocab_size"]
        return [prompt.token_ids(vocab) for prompt in prompts[: self._cell.limit]]

    def _sampling(self, output_tokens: int | None = None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens or self._cell.max_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )

    async def _load(
        self,
        name: str,
        prompts: Sequence[Prompt],
        *,
        clients: int | None = None,
        arrivals: Sequence[float] | None = None,
        output_tokens: int | list[int] | None = None,
    ) -> dict[str, Any]:
        before = _external_hit_tokens()
        sampling: Any
        if isinstance(output_tokens, list):
            sampling = [self._sampling(length) for length in output_tokens]
        else:
            sampling = self._sampling(output_tokens)
        load = self._engine, self._tokens(prompts), sampling
        if arrivals is None:
            result = await run_load(*load, clients=clients or self._cell.clients)
        else:
            result = await run_arrivals(*load, arrivals)
        return self._figures(name, result, before)

    def _figures(self, name: str, result: LoadResult, before: int) -> dict[str, Any]:
        """Return the figures of a load; ``before``: external hit tokens at its start."""
        figures = result.summary()
        # vLLM counts the hits in its own cache again each time it asks a connector that is not
        # ready, so those are what is left.
        figures["external_hit_tokens"] = _external_hit_tokens() - before
        figures["device_hit_tokens"] = figures["cached_tokens"] - figures["external_hit_tokens"]
        first = figures["first_token_ms"]
        self.note(
            f"{name}: {figures['requests']} requests, {figures['seconds']:.1f} s, "
            f"{figures['requests_per_second']:.2f}/s, first token p50 {first['p50']:.0f} ms, "
            f"p99 {first['p99']:.0f} ms, cached {figures['cached_tokens']} of "
            f"{figures['prompt_tokens']} tokens (external {figures['external_hit_tokens']})"
        )
        figures["counters"] = _connector_counters()
        if figures["counters"]:
            self.note(f"{name}: " + " ".join(f"{k}={v:g}" for k, v in figures["counters"].items()))
        self._ended[name] = figures
        self._result.write_bytes(msgspec.json.encode(self._ended))
        return figures


def long_documents() -> list[Prompt]:
    """Return the prompts of "long answers", in the order of their requests."""
    lengths = np.geomspace(*_DOCUMENT_TOKENS, _NUM_DOCUMENTS, dtype=int).tolist()
    documents = [_other_of(length, 1_000 + n) for n, length in enumerate(lengths)]
    order = np.random.default_rng(0).permutation(_NUM_DOCUMENTS)
    return [documents[place] for place in order]


class DocumentQuestions:
    """Questions of "documents": some documents are asked about more often than others.

    Attributes:
        rng: chooses them.
    """

    def __init__(self, documents: Sequence[Prompt]) -> None:
        self.rng = np.random.default_rng(1)
        self._documents = documents
        self._popularity = 1 / np.arange(1, len(documents) + 1)
        self._popularity /= self._popularity.sum()
        self._ids = itertools.count(4_000_000_000)

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` questions."""
        chosen = self.rng.choice(len(self._documents), count, p=self._popularity)
        lengths = self.rng.integers(*_QUESTION_TOKENS, count, endpoint=True)
        return [
            _question(self._documents[place], int(length), next(self._ids))
            for place, length in zip(chosen, lengths, strict=True)
        ]


def _question(document: Prompt, num_tokens: int, question_id: int) -> Prompt:
    """Return a prompt of the whole blocks of a document, and up to ``num_tokens`` other tokens."""
    whole = document.num_tokens // HASH_BLOCK_TOKENS
    return Prompt(whole * HASH_BLOCK_TOKENS + num_tokens, [*document.hash_ids[:whole], question_id])


def _other(prompt: Prompt, seed: int) -> Prompt:
    """Return a prompt of the same length whose blocks are in no workload."""
    return _other_of(prompt.num_tokens, seed)


def _other_of(num_tokens: int, seed: int) -> Prompt:
    """Return a prompt of ``num_tokens`` whose blocks are in no workload."""
    first = 1_000_000_000 + seed * 100_000
    return Prompt(num_tokens, list(range(first, first - -num_tokens // HASH_BLOCK_TOKENS)))


def _unaligned(prompt: Prompt) -> Prompt:
    """Return the prompt without a last token that fills a block.

    Connectors differ in whether the hit of a prompt of whole blocks has the last one.
    """
    if prompt.num_tokens % BLOCK_TOKENS:
        return prompt
    return Prompt(prompt.num_tokens - 1, prompt.hash_ids)


def _external_hit_tokens() -> int:
    """Return vLLM's counter of the tokens that connectors have loaded."""
    from prometheus_client import REGISTRY

    return sum(
        int(sample.value)
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:external_prefix_cache_hits_total"
    )


def _connector_counters() -> dict[str, float]:
    """Return the present counters and gauges of aiokv; those of stores are up to 1 s old."""
    from prometheus_client import REGISTRY

    prefix = "vllm:aiokv_"
    return {
        sample.name.removeprefix(prefix): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith(prefix) and not sample.name.endswith("_created")
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
