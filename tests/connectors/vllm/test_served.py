"""The connector in vLLM's own server: its processes, its log, its signals, and the disk store."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.connectors.vllm.served import (
    BLOCK_TOKENS,
    Completion,
    ServedModel,
    can_serve,
    has_nixl,
    prompt,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not can_serve(), reason="a vLLM that runs on the CPU is not installed: make test-vllm"
    ),
]

SEEDS = range(4)
TOKENS = 400
FULL_BLOCKS = (TOKENS - 1) // BLOCK_TOKENS  # vLLM computes at least the last position


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Return the answers of a server without the connector."""
    with ServedModel(model, None) as server:
        server.wait_ready()
        answers = tokens_of(answers_of(server))
        for seed, answer in zip(SEEDS, answers, strict=True):
            other = [*prompt(99, BLOCK_TOKENS), *prompt(seed, TOKENS)[BLOCK_TOKENS:]]
            assert server.complete(other).tokens != answer, (
                "the output does not depend on the first block"
            )
    return answers


def answers_of(server: ServedModel) -> list[Completion]:
    return [server.complete(prompt(seed, TOKENS)) for seed in SEEDS]


def tokens_of(answers: list[Completion]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def send_until_it_ends(server: ServedModel, seed: int) -> None:
    try:
        while True:
            server.complete(prompt(seed, 900), 4)
            server.forget_device_blocks()
    except httpx.HTTPError:
        pass


def test_answers_are_exact_after_restarts_kills_and_damage(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    extra = {
        "host_gib": 0.125,
        "stores": [f"disk:{folder}?bytes=256MiB"],
        "follow_resets": False,
    }
    with ServedModel(model, extra) as server:
        server.wait_ready()
        assert server.found(r"store\.opened"), "the log of the server lacks aiokv's lines"
        assert server.found(r"engine\.opened")
        first = answers_of(server)
        assert tokens_of(first) == expected
        assert [answer.cached for answer in first] == [0] * len(SEEDS)
        saved = len(SEEDS) * FULL_BLOCKS
        server.wait_until(lambda: server.blocks_moved("save") >= saved, "the saves")
        server.forget_device_blocks()
        again = answers_of(server)
        assert tokens_of(again) == expected
        assert [answer.cached for answer in again] == [FULL_BLOCKS * BLOCK_TOKENS] * len(SEEDS)

        loading = [
            threading.Thread(target=send_until_it_ends, args=(server, 100 + i)) for i in range(4)
        ]
        for thread in loading:
            thread.start()
        loads = server.blocks_moved("onload")
        server.wait_until(lambda: server.blocks_moved("onload") > loads + 100, "loads")
        server.kill()  # as the kernel does when memory is exhausted
        for thread in loading:
            thread.join()

    with ServedModel(model, extra) as server:
        server.wait_ready()
        restarted = answers_of(server)
        assert tokens_of(restarted) == expected
        assert [answer.cached for answer in restarted] == [FULL_BLOCKS * BLOCK_TOKENS] * len(SEEDS)
        server.stop()

    segment = folder / "segment-00000"
    damaged = bytearray(segment.read_bytes())
    for start in range(0, len(damaged), 16 * 1024):  # in each block
        damaged[start : start + 2048] = b"\xc0" * 2048
    segment.write_bytes(damaged)
    with ServedModel(model, extra) as server:
        server.wait_ready()
        assert tokens_of(answers_of(server)) == expected
        assert server.found(r"WARNING .*store\.wrong_block")
        assert server.stop() == 0


def test_answers_are_exact_with_layerwise_loads(model: Path, expected: list[list[int]]) -> None:
    with ServedModel(
        model, {"host_gib": 0.125, "load": "layerwise", "follow_resets": False}
    ) as server:
        server.wait_ready()
        assert tokens_of(answers_of(server)) == expected
        saved = len(SEEDS) * FULL_BLOCKS
        server.wait_until(lambda: server.blocks_moved("offload") >= saved, "the copies")
        server.forget_device_blocks()
        again = answers_of(server)
        assert tokens_of(again) == expected
        assert [answer.cached for answer in again] == [FULL_BLOCKS * BLOCK_TOKENS] * len(SEEDS)
        assert not server.found("layers_not_hooked")


@pytest.mark.parametrize("parallel", ["data", "pipeline"])
def test_answers_are_exact_with_parallel_engines_or_stages(
    model: Path, expected: list[list[int]], tmp_path: Path, parallel: str
) -> None:
    """Two engines of data parallelism share no path; two stages have half of the layers each."""
    extra = {
        "host_gib": "128MiB",
        "stores": [f"disk:{tmp_path}/{{dp}}-{{rank}}?bytes=64MiB"],
        "follow_resets": False,
    }
    size = (f"--{parallel}-parallel-size", "2")
    with ServedModel(model, extra, *size) as server:
        server.wait_ready()
        assert tokens_of(answers_of(server)) == expected
        saved = len(SEEDS) * FULL_BLOCKS
        server.wait_until(lambda: server.blocks_moved("save") >= saved, "the saves")
        server.kill()
    folders = {folder.name for folder in tmp_path.iterdir()}
    assert folders == ({"0-0", "1-0"} if parallel == "data" else {"0-0", "0-1"})
    with ServedModel(model, extra, *size) as server:
        server.wait_ready()
        again = answers_of(server)
        assert tokens_of(again) == expected
        assert sum(answer.cached for answer in again) > 0


@pytest.mark.skipif(not has_nixl(), reason="nixl is not installed")
def test_answers_are_exact_beside_the_connector_of_nixl(
    model: Path, expected: list[list[int]]
) -> None:
    nixl = {"kv_connector": "NixlConnector"}
    with ServedModel(model, {"host_gib": 0.125, "follow_resets": False}, beside=[nixl]) as server:
        server.wait_ready()
        assert tokens_of(answers_of(server)) == expected
        saved = len(SEEDS) * FULL_BLOCKS
        server.wait_until(lambda: server.blocks_moved("offload") >= saved, "the copies")
        server.forget_device_blocks()
        again = answers_of(server)
        assert tokens_of(again) == expected
        assert [answer.cached for answer in again] == [FULL_BLOCKS * BLOCK_TOKENS] * len(SEEDS)
        assert server.metric("vllm:aiokv_loaded_blocks_total") == saved


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"host_gb": 1}, "unknown key 'host_gb' .*did you mean 'host_gib'"),
        ({"host_gib": 0.1, "stores": ["disk:/nvme/kv"]}, "has no bytes, the limit of the store"),
    ],
)
def test_error_of_a_failed_start_names_the_wrong_setting(
    model: Path, extra: dict[str, object], message: str
) -> None:
    with ServedModel(model, extra) as server:
        assert server.wait_end() != 0
        assert server.found(message)
