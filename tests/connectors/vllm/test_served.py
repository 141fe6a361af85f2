"""The connector in vLLM's own server: its processes, its log, its signals, and the disk store."""

from __future__ import annotations

import asyncio
import re
import threading
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from aiokv.stores.host.link import inspect
from tests.connectors.vllm.served import (
    BLOCK_TOKENS,
    Completion,
    ServedModel,
    can_serve,
    has_nixl,
    prompt,
    write_model,
    write_state_model,
    write_windowed_model,
    write_windows_only_model,
)
from tests.stores.host_server import HostServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not can_serve(), reason="a vLLM that runs on the CPU is not installed: make test-vllm"
    ),
]

SEEDS = range(4)
TOKENS = 400
FULL_BLOCKS = (TOKENS - 1) // BLOCK_TOKENS  # vLLM computes at least the last position
ALL_BLOCKS = len(SEEDS) * FULL_BLOCKS


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


def answers_of(server: ServedModel, engine: int | None = None) -> list[Completion]:
    return [server.complete(prompt(seed, TOKENS), engine=engine) for seed in SEEDS]


def tokens_of(answers: list[Completion]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def with_store(url: str) -> dict[str, object]:
    """Return settings with a store whose blocks are loaded, however slow a busy machine is."""
    options = "deadline=60&lookup_deadline=60"
    return {
        "stores": [f"{url}{'&' if '?' in url else '?'}{options}"],
        "store_wait_seconds": 60.0,
        "prefill_tokens_per_second": 1.0,  # so that computing never seems faster
        "follow_resets": False,
    }


def damage(segment: Path) -> None:
    """Change bytes of each block in a file of a disk store."""
    damaged = bytearray(segment.read_bytes())
    for start in range(0, len(damaged), 16 * 1024):
        damaged[start : start + 2048] = b"\xc0" * 2048
    segment.write_bytes(damaged)


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
    extra = {"host_gib": 0.125, **with_store(f"disk:{folder}?bytes=256MiB")}
    with ServedModel(model, extra) as server:
        server.wait_ready()
        assert server.found(r"store\.opened"), "the log of the server lacks aiokv's lines"
        assert server.found(r"engine\.opened")
        first = answers_of(server)
        assert tokens_of(first) == expected
        assert [answer.cached for answer in first] == [0] * len(SEEDS)
        server.wait_until(lambda: server.blocks_moved("save") >= ALL_BLOCKS, "the saves")
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
        dashboard = (files("aiokv.observe") / "grafana-vllm.json").read_text()
        for name in set(re.findall(r"vllm:\w+", dashboard)):
            server.metric(name)  # fails for a name that is not on the page
        server.stop()

    damage(folder / "segment-00000")
    with ServedModel(model, extra) as server:
        server.wait_ready()
        assert tokens_of(answers_of(server)) == expected
        # Without a good block, the store counts as unavailable.
        assert server.found(r"WARNING.*(store\.wrong_block|blocks were wrong)")
        assert server.stop() == 0


def test_answers_are_exact_with_layerwise_loads(model: Path, expected: list[list[int]]) -> None:
    with ServedModel(
        model, {"host_gib": 0.125, "load": "layerwise", "follow_resets": False}
    ) as server:
        server.wait_ready()
        assert tokens_of(answers_of(server)) == expected
        server.wait_until(lambda: server.blocks_moved("offload") >= ALL_BLOCKS, "the copies")
        server.forget_device_blocks()
        again = answers_of(server)
        assert tokens_of(again) == expected
        assert [answer.cached for answer in again] == [FULL_BLOCKS * BLOCK_TOKENS] * len(SEEDS)
        assert not server.found("layers_not_hooked")


def test_engines_of_data_parallelism_share_no_path(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    store = with_store(f"disk:{tmp_path}/{{dp}}-{{rank}}?bytes=64MiB")
    extra = {"host_gib": "128MiB", **store}
    for is_filled in (False, True):
        with ServedModel(model, extra, "--data-parallel-size", "2") as server:
            server.wait_ready()
            answers = answers_of(server)
            assert tokens_of(answers) == expected
            assert bool(sum(answer.cached for answer in answers)) == is_filled
            if not is_filled:
                server.wait_until(lambda: server.blocks_moved("save") >= ALL_BLOCKS, "saves")
            server.kill()
    assert {folder.name for folder in tmp_path.iterdir()} == {"0-0", "1-0"}


def test_engines_of_data_parallelism_share_the_memory_of_a_host(
    model: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("host")  # a short path
    folder.chmod(0o700)
    service = HostServer(folder)
    service.start()

    def stored_blocks() -> int:
        return sum(counts.blocks for counts in asyncio.run(inspect(service.path)).sizes)

    extra = {"host_gib": "128MiB", **with_store(service.url)}
    all_cached = [FULL_BLOCKS * BLOCK_TOKENS] * len(SEEDS)
    try:
        with ServedModel(model, extra, "--data-parallel-size", "2") as server:
            server.wait_ready()
            first = answers_of(server, engine=0)
            assert tokens_of(first) == expected
            assert [answer.cached for answer in first] == [0] * len(SEEDS)
            server.wait_until(lambda: server.blocks_moved("save") >= ALL_BLOCKS, "the saves")
            second = answers_of(server, engine=1)
            assert tokens_of(second) == expected
            assert [answer.cached for answer in second] == all_cached
            assert stored_blocks() == ALL_BLOCKS  # each prefix once
            server.kill_engine(1)
            server.wait_end()
        with ServedModel(model, extra, "--data-parallel-size", "2") as server:
            server.wait_ready()
            restarted = [*answers_of(server, engine=1), *answers_of(server, engine=0)]
            assert tokens_of(restarted) == [*expected, *expected]
            assert [answer.cached for answer in restarted] == [*all_cached, *all_cached]
            assert server.blocks_moved("save") == 0
        assert stored_blocks() == ALL_BLOCKS
    finally:
        service.kill()


@pytest.mark.skipif(not has_nixl(), reason="nixl is not installed")
def test_answers_are_exact_beside_the_connector_of_nixl(
    model: Path, expected: list[list[int]]
) -> None:
    nixl = {"kv_connector": "NixlConnector"}
    with ServedModel(model, {"host_gib": 0.125, "follow_resets": False}, beside=[nixl]) as server:
        server.wait_ready()
        assert tokens_of(answers_of(server)) == expected
        server.wait_until(lambda: server.blocks_moved("offload") >= ALL_BLOCKS, "the copies")
        server.forget_device_blocks()
        again = answers_of(server)
        assert tokens_of(again) == expected
        assert [answer.cached for answer in again] == [FULL_BLOCKS * BLOCK_TOKENS] * len(SEEDS)
        server.wait_until(lambda: server.blocks_moved("onload") == ALL_BLOCKS, "the loads")
        # The metrics of the last second follow with the next step.
        assert 0 < server.metric("vllm:aiokv_loaded_blocks_total") <= ALL_BLOCKS


class Family(NamedTuple):
    """A small model with other KV cache groups than one of full attention.

    Attributes:
        write: writes the model.
        num_tokens: of the prompts.
        cached: positions of a prompt that a hit has.
        block_tokens: positions per block.
        groups: groups of the engine that keep a block for each of these positions.
        arguments: of the server.
        changed: first of 16 positions, without which the output is another one.
    """

    write: Callable[[Path], Path]
    num_tokens: int
    cached: int
    block_tokens: int
    groups: tuple[str, ...]
    arguments: tuple[str, ...]
    changed: int


FAMILIES = {
    "Gemma 3": Family(
        write_windowed_model, 400, 384, 32, ("attention", "window0", "window1"), (), 360
    ),
    "Mistral, windows only": Family(
        write_windows_only_model, 400, 384, 32, ("attention", "window0"), (), 360
    ),
    "Qwen3-Next": Family(
        write_state_model,
        2_120,
        2_112,
        1_056,
        ("attention",),
        ("--dtype", "bfloat16", "--max-model-len", "4096", "--mamba-ssm-cache-dtype", "float32"),
        2_090,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_of_other_groups_are_exact_after_a_kill_and_damage(
    name: str, tmp_path: Path
) -> None:
    import vllm

    from aiokv.connectors.vllm import compat

    if name == "Qwen3-Next" and not compat.CAN_LOAD_STATES:
        pytest.skip("this version of vLLM lets no connector load states")
    if name == "Mistral, windows only" and vllm.__version__.startswith("0.27"):
        pytest.skip("its CPU kernel ends the server, also without a connector")
    family = FAMILIES[name]
    model = family.write(tmp_path / "model")
    arguments = ("--num-gpu-blocks-override", "400", "--max-num-seqs", "2", *family.arguments)
    prompts = [prompt(seed, family.num_tokens) for seed in range(3)]
    with ServedModel(model, None, *arguments) as server:
        server.wait_ready()
        expected = [server.complete(tokens).tokens for tokens in prompts]
        first = family.changed
        changed = [*prompts[0][:first], *prompt(98, 16), *prompts[0][first + 16 :]]
        assert server.complete(changed).tokens != expected[0], "the output does not depend on it"
    extra = {"host_gib": 0.125, **with_store(f"disk:{tmp_path / 'kv'}?bytes=256MiB")}
    cached = [
        Completion(*answer) for answer in zip(expected, [family.cached] * len(prompts), strict=True)
    ]
    with ServedModel(model, extra, *arguments) as server:
        server.wait_ready()
        assert [server.complete(tokens).tokens for tokens in prompts] == expected
        blocks = len(prompts) * family.cached // family.block_tokens
        for group in family.groups:
            server.wait_until(
                lambda group=group: server.blocks_moved("save", group) >= blocks,
                f"saves of {group}",
            )
        server.forget_device_blocks()
        assert [server.complete(tokens) for tokens in prompts] == cached
        server.kill()
    with ServedModel(model, extra, *arguments) as server:
        server.wait_ready()
        assert [server.complete(tokens) for tokens in prompts] == cached
        server.stop()
    for segment in (tmp_path / "kv").rglob("segment-*"):
        damage(segment)
    with ServedModel(model, extra, *arguments) as server:
        server.wait_ready()
        assert [server.complete(tokens).tokens for tokens in prompts] == expected
        # Without a good block, the store counts as unavailable.
        assert server.found(r"WARNING.*(store\.wrong_block|blocks were wrong)")


def test_recurrent_state_is_refused_by_versions_that_let_no_connector_load_it(
    tmp_path: Path,
) -> None:
    import vllm

    from aiokv.connectors.vllm import compat

    if compat.CAN_LOAD_STATES:
        pytest.skip("this version serves it")
    if vllm.__version__.startswith("0.22"):
        pytest.skip("it cannot read the configuration of the model")
    model = FAMILIES["Qwen3-Next"].write(tmp_path / "model")
    with ServedModel(model, {"host_gib": 0.125}, *FAMILIES["Qwen3-Next"].arguments) as server:
        assert server.wait_end() != 0
        assert server.found("recurrent state, which this version of vLLM lets no connector load")


@pytest.mark.parametrize("write", [write_model, write_windowed_model])
def test_answers_are_exact_after_failed_loads(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    from aiokv.connectors.vllm import compat

    model = write(tmp_path / "model")
    arguments = ("--num-gpu-blocks-override", "400")
    with ServedModel(model, None, *arguments) as server:
        server.wait_ready()
        expected = tokens_of(answers_of(server))
    faults = tmp_path / "faults"
    extra = {"host_gib": 0.125, "follow_resets": False}
    with ServedModel(model, extra, *arguments, faults=faults) as server:
        server.wait_ready()
        assert tokens_of(answers_of(server)) == expected
        server.wait_until(lambda: server.blocks_moved("offload") >= ALL_BLOCKS, "the copies")
        server.forget_device_blocks()
        faults.touch()
        if write is write_windowed_model and not compat.CAN_FAIL_REQUESTS:
            with pytest.raises(httpx.HTTPError):
                server.complete(prompt(SEEDS[0], TOKENS))
            assert server.found("this version of vLLM cannot compute it again with several")
            return
        assert tokens_of(answers_of(server)) == expected
        server.wait_until(lambda: server.metric("vllm:aiokv_failed_blocks_total") > 0, "failures")
        faults.unlink()
        server.forget_device_blocks()
        again = answers_of(server)
        assert tokens_of(again) == expected
        assert all(answer.cached for answer in again), "blocks that did not fail are still there"


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
