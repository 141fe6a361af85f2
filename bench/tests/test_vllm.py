"""The bench of vLLM: its workload, its clients, and its comparison of outputs; vLLM is scripted."""

from __future__ import annotations

import asyncio
import time
from itertools import count, pairwise
from types import SimpleNamespace

import pytest

from aiokv.testing import clocked_loop, running_clock
from aiokv.trace.format import TraceRequest
from bench.vllm.__main__ import main
from bench.vllm.cell import DOCUMENTS_TOKENS, long_documents
from bench.vllm.from_trace import Sizes, agent_sessions, build_workload
from bench.vllm.load import run_agents, run_arrivals, run_load
from bench.vllm.model import block_bytes
from bench.vllm.report import compare_outputs, print_tables
from bench.vllm.servers import SERVERS, Settings, engine_options, environment
from bench.vllm.workload import Prompt, load_workload, save_workload

SIZES = Sizes(
    sessions=2,
    min_turns=2,
    max_turns=3,
    min_prompt_tokens=512,
    max_prompt_tokens=8_192,
    unique_prompts=2,
    equality_sessions=1,
    equality_max_tokens=4_096,
)


def _session(first_id: int, turns: int) -> list[TraceRequest]:
    """Return turns of 1,800, 2,312, ... tokens; each repeats the whole blocks of the one before."""
    ids = [0, *range(first_id, first_id + turns + 3)]
    return [
        TraceRequest(
            timestamp_ms=turn,
            input_tokens=1_800 + 512 * turn,
            output_tokens=1,
            # The last block covers fewer tokens than the same block of the next turn.
            hash_ids=[*ids[: 3 + turn], 10_000 + first_id + turn],
        )
        for turn in range(turns)
    ]


def _interleaved() -> list[TraceRequest]:
    first, second, short = _session(100, 4), _session(200, 3), _session(300, 1)
    return [first[0], second[0], short[0], first[1], second[1], first[2], second[2], first[3]]


def _settings(**changes: object) -> Settings:
    known = {
        "model": "model",
        "block_bytes": block_bytes("8b", 16),
        "device_blocks": 64,
        "host_gib": 2.0,
        "small_host_gib": 1.0,
        "disk": "/disk",
        "disk_gib": 3,
        "max_model_tokens": 4_096,
    }
    return Settings(**(known | changes))


class ScriptedEngine:
    """Answer each prompt with its sum and its length; note how many are answered at once."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0
        self.order: list[list[int]] = []
        self.sampling: list[object] = []
        self._ids = count()

    async def generate(self, prompt, sampling_params, request_id):
        tokens = prompt["prompt_token_ids"]
        self.order.append(tokens)
        self.sampling.append(sampling_params)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        answer = [sum(tokens), len(tokens)]
        for end in range(len(answer) + 1):
            output = SimpleNamespace(token_ids=answer[:end])
            yield SimpleNamespace(outputs=[output], num_cached_tokens=len(tokens) // 2)
        self.running -= 1


def test_workload_takes_sessions_turn_by_turn():
    workload = build_workload(_interleaved(), SIZES)
    assert [turn.num_tokens for turn in workload.opening] == [1_800, 1_800]
    assert [turn.hash_ids[1] for turn in workload.opening] == [100, 200]
    assert [(turn.hash_ids[1], turn.num_tokens) for turn in workload.turns] == [
        (100, 2_312),
        (200, 2_312),
        (100, 2_824),
        (200, 2_824),
    ]
    assert [turn.hash_ids[1] for turn in workload.equality] == [100, 100, 100]
    assert workload.max_prompt_tokens == 2_824


def test_workload_counts_each_token_of_the_working_set_once():
    workload = build_workload(_interleaved(), SIZES)
    ids = {block for turn in workload.opening + workload.turns for block in turn.hash_ids}
    assert workload.working_set_tokens == 512 * len(ids)
    assert len(ids) < sum(len(turn.hash_ids) for turn in workload.opening + workload.turns)


def test_unique_prompts_share_no_block():
    workload = build_workload(_interleaved(), SIZES)
    known = {block for request in _interleaved() for block in request.hash_ids}
    blocks = [block for prompt in workload.unique for block in prompt.hash_ids]
    assert len(workload.unique) == 2
    assert len(set(blocks)) == len(blocks)
    assert not known & set(blocks)


def test_turns_of_agents_share_as_large_a_part_of_their_prompts_as_in_the_trace():
    requests = [
        TraceRequest(
            timestamp_ms=16_000 * turn,
            input_tokens=512 * (80 + 8 * turn),
            output_tokens=80 + 8_000 * (turn == 3),
            hash_ids=list(range(80 + 8 * turn)),
        )
        for turn in range(9)
    ]
    [session] = agent_sessions([*requests, *_session(1_000, 3)])
    assert [turn.prompt.num_tokens for turn in session] == [64 * (80 + 8 * n) for n in range(9)]
    for turn, following in pairwise(session):
        assert following.prompt.hash_ids[:-1] == turn.prompt.hash_ids
        assert following.pause_seconds == pytest.approx(2, abs=0.1) or turn is session[3]
    assert [turn.output_tokens for turn in session] == [10, 10, 10, 256, *[10] * 5]
    saved = build_workload(_interleaved(), SIZES)
    assert saved.agents == []


def test_agents_send_a_turn_after_its_answer_and_count_after_the_warm_up():
    engine = ScriptedEngine()

    async def load(sessions, **options):
        running = asyncio.create_task(run_agents(engine, sessions, **options))
        await running_clock().advance(40)
        return await running

    with asyncio.Runner(loop_factory=clocked_loop()) as runner:
        session = [([turn], 1.5, None) for turn in range(100)]
        begun: list[int] = []
        load_of_two = load(
            [session] * 3,
            agents=2,
            warm_up_seconds=10,
            seconds=20,
            begin=lambda: begun.append(len(engine.order)),
        )
        result = runner.run(load_of_two)
        assert begun == [0, 12]
        assert [answer.token_ids[0] for answer in result.answers[::2]] == list(range(6, 19))
        assert engine.order[:4] == [[0], [0], [1], [1]]
        assert len(engine.order) == 2 * 19  # nothing is sent after the end
        assert result.seconds == 20
        with pytest.raises(RuntimeError, match="no session is left"):
            runner.run(load([session[:1]], agents=1, warm_up_seconds=10, seconds=20))


def test_documents_of_long_answers_share_no_block_and_fit_the_server():
    documents = long_documents()
    lengths = [document.num_tokens for document in documents]
    assert (len(lengths), min(lengths), max(lengths)) == (48, 1_000, 24_000)
    assert lengths != sorted(lengths)
    blocks = [block for document in documents for block in document.hash_ids]
    assert len(set(blocks)) == len(blocks)
    assert all(len(d.token_ids(1_000)) == d.num_tokens for d in documents[:3])
    assert max(lengths) < DOCUMENTS_TOKENS


def test_saved_workload_is_read_back(tmp_path):
    workload = build_workload(_interleaved(), SIZES)
    save_workload(workload, tmp_path / "workload.json")
    assert load_workload(tmp_path / "workload.json") == workload


def test_equal_ids_are_equal_tokens():
    first, second = Prompt(700, [5, 6]), Prompt(1_000, [5, 7])
    tokens = first.token_ids(1_000)
    assert len(tokens) == 700
    assert all(0 <= token < 1_000 for token in tokens)
    assert tokens[:512] == second.token_ids(1_000)[:512]
    assert tokens[512:] != second.token_ids(1_000)[512:700]


@pytest.mark.asyncio
async def test_load_keeps_the_order_and_the_number_of_clients():
    engine = ScriptedEngine()
    prompts = [[number, number + 1] for number in range(7)]
    result = await run_load(engine, prompts, None, clients=3)
    assert engine.order == prompts
    assert engine.most_running == 3
    assert [answer.token_ids for answer in result.answers] == [[sum(p), 2] for p in prompts]
    figures = result.summary()
    assert figures["requests"] == 7
    assert figures["prompt_tokens"] == 14
    assert figures["cached_tokens"] == 7
    assert len(set(figures["digests"])) == 7
    each = [f"sampling{number}" for number in range(7)]
    await run_load(engine, prompts, each, clients=3)
    assert engine.sampling == [None] * 7 + each


@pytest.mark.asyncio
async def test_arrivals_do_not_wait_for_answers():
    engine = ScriptedEngine()
    prompts = [[number, number + 1] for number in range(7)]
    result = await run_arrivals(engine, prompts, None, [0.0] * len(prompts))
    assert engine.most_running == len(prompts)
    assert [answer.token_ids for answer in result.answers] == [[sum(p), 2] for p in prompts]
    before = time.perf_counter()
    late = await run_arrivals(engine, prompts[:2], None, [0.0, 0.02])
    assert late.answers[1].submitted - before >= 0.019  # a timer may be early by its resolution


@pytest.mark.asyncio
async def test_an_answer_without_a_token_fails_the_load():
    async def generate(prompt, sampling_params, request_id):
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[])], num_cached_tokens=0)

    with pytest.raises(ExceptionGroup) as failed:
        await run_load(SimpleNamespace(generate=generate), [[1]], None, clients=1)
    assert failed.group_contains(RuntimeError, match="without a token")


def _pass(digests: list[str], hits: list[int]) -> dict[str, object]:
    return {
        "requests": len(digests),
        "digests": digests,
        "cached_of_each": hits,
        "external_hit_tokens": 16,
    }


def test_outputs_are_compared_with_those_after_equal_hits_in_the_device_cache():
    comparison = compare_outputs(
        {
            "aiokv": {
                "equality": {
                    "computed": _pass(["x", "x", "x"], [0, 0, 0]),
                    "device_hits": _pass(["a", "b", "c"], [16, 32, 48]),
                    "reloaded": _pass(["a", "z", "z"], [16, 32, 32]),
                    "damaged": _pass(["x", "y", "z"], [16, 32, 48]),
                }
            },
            "lmcache": {"equality": {"error": "exit code 1"}},
        }
    )
    assert comparison["aiokv"]["reloaded"] == {
        "requests": 3,
        "compared": 2,
        "different": 1,
        "external_hit_tokens": 16,
    }
    assert comparison["aiokv"]["damaged"]["different"] == 3
    assert set(comparison) == {"aiokv"}


def test_tables_name_a_server_that_failed(capsys):
    results = {"none": {}, "lmcache": {"load": {"error": "exit code 1"}}}
    results["comparison"] = compare_outputs(results)
    print_tables(results)
    assert "lmcache load: exit code 1" in capsys.readouterr().out


@pytest.mark.parametrize("server", SERVERS)
def test_all_servers_have_the_same_device_cache(server):
    options = engine_options(server, _settings())
    assert options["kv_cache_memory_bytes"] == 64 * 2 * 1024 * 1024
    assert ("kv_transfer_config" in options) == (server != "none")
    assert not options["enforce_eager"]


def test_equality_runs_are_eager_and_batch_invariant():
    settings = _settings(batch_invariant=True, graph_sizes=())
    assert engine_options("vllm", settings)["enforce_eager"]
    assert environment(settings)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in environment(_settings())


def test_unknown_server_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["vlm"])
    assert "unknown server 'vlm'; one of none, vllm" in capsys.readouterr().err
