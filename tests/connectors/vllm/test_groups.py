"""Models with several KV cache groups generate what they generate without a cache."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

import msgspec
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from aiokv.connectors.vllm import compat, opening
from aiokv.connectors.vllm.groups import BlockTables, KVGroups
from aiokv.connectors.vllm.options import Options
from aiokv.errors import ConfigError, TransferError
from tests.connectors.vllm.configs import (
    BLOCK_TOKENS,
    indexed_config,
    kv_cache_config,
    vllm_config,
)
from tests.connectors.vllm.model import LAYERS, WINDOW, generate
from tests.connectors.vllm.runner import DIM, HEADS, INDEX_DIM
from tests.connectors.vllm.serving import HOST, prompt
from tests.connectors.vllm.test_random_serving import use_device
from tests.harness.flaky import Faults, FlakyDevice

if TYPE_CHECKING:
    from pathlib import Path

    from tests.connectors.vllm.server import Server
    from tests.connectors.vllm.serving import MakeServer

GROUPS = [("full", "window"), ("full", "window", "window"), ("full", "full", "window"), ("window",)]
if compat.CAN_LOAD_STATES:
    GROUPS += [("full", "state"), ("full", "state", "state"), ("state",)]
    GROUPS += [("full", "full", "window", "state")]


needs_states = pytest.mark.skipif(
    not compat.CAN_LOAD_STATES, reason="this version of vLLM lets no connector load states"
)


@pytest.fixture
def make_server(make_server: MakeServer) -> MakeServer:
    def make(kinds: tuple[str, ...], extra: dict[str, Any] | None = None, **options: Any) -> Server:
        return make_server(extra, "infer", num_blocks=200, kinds=kinds, **options)

    return make


def serve(server: Server, tokens: list[int], num_tokens: int = 6) -> int:
    """Serve a prompt exactly; return the number of tokens that were loaded."""
    name = f"r{server.num_steps}"
    request = server.add(name, tokens, num_tokens)
    server.run()
    assert server.outputs[name] == generate(tokens, 0, num_tokens, kinds_of(server))
    return server.loaded(request)


def kinds_of(server: Server) -> tuple[str, ...]:
    kinds = {FullAttentionSpec: "full", SlidingWindowSpec: "window", MambaSpec: "state"}
    groups = server.scheduler.kv_cache_config.kv_cache_groups
    return tuple(kinds[type(group.kv_cache_spec)] for group in groups)


def forget_device_blocks(server: Server) -> None:
    """Empty vLLM's own cache, after all saves have ended."""
    server.drain()
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()


@pytest.mark.parametrize("kinds", GROUPS)
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"num_ranks": 2}], ids=str)
def test_evicted_prompt_is_loaded(
    make_server: MakeServer, kinds: tuple[str, ...], options: dict[str, Any]
) -> None:
    server = make_server(kinds, **options)
    tokens = prompt(1, 61)
    assert serve(server, tokens) == 0
    forget_device_blocks(server)
    if "async_scheduling" in options and not hasattr(server.scheduler, "defer_block_free"):
        # Only the window at the end of a step of 24 tokens is there when the step has ended.
        assert serve(server, tokens) == 48
        return
    assert serve(server, tokens) == 60
    forget_device_blocks(server)
    longer = [*tokens, *server.outputs["r0"], *prompt(2, 9)]
    assert serve(server, longer) == 64  # with the blocks that were generated


@pytest.mark.parametrize("kinds", GROUPS)
def test_hits_are_those_of_full_attention(make_server: MakeServer, kinds: tuple[str, ...]) -> None:
    """Conversations whose turns part at the end of an earlier turn, as states are kept there."""

    def hits(server: Server) -> int:
        rng = random.Random(7)
        turns = [prompt(100 + i, 45) for i in range(6)]
        for i in range(30):
            tokens = rng.choice(turns)
            serve(server, tokens, 3)
            if i % 3 == 0:
                forget_device_blocks(server)
            if len(tokens) < 200:
                turns.append([*tokens, *prompt(i, rng.randrange(4, 40))])
        return server.num_loaded

    extra = {"cpu_bytes_to_use": 16 << 20}
    assert hits(make_server(kinds, extra)) >= 0.95 * hits(make_server(("full",), extra))


def test_hit_that_is_not_loaded_delays_the_saves_of_its_request(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before vLLM 0.27 behind its own hit, and where another connector loads the prompt."""
    monkeypatch.setattr(compat, "CAN_EXTEND_HITS", False)
    server = make_server(("full", "window"))
    tokens = prompt(1, 61)
    serve(server, tokens)
    forget_device_blocks(server)
    serve(server, tokens[:30])  # its blocks are loaded, and stay in vLLM's cache
    longer = [*tokens, *server.outputs["r0"], *prompt(2, 40)]
    assert serve(server, longer) == 0, "vLLM has computed it behind its own hit"
    assert server.statistics.data["errors"] == 0
    forget_device_blocks(server)
    assert serve(server, longer) == 104, "and has saved it"


@pytest.mark.parametrize("kinds", GROUPS)
def test_wrong_block_of_a_group_changes_the_output(
    make_server: MakeServer, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests would notice it."""
    server = make_server(kinds)
    tokens = prompt(1, 61)
    serve(server, tokens)
    forget_device_blocks(server)

    def swapped(tables: BlockTables, groups: KVGroups, end: int) -> dict[str, list[int]]:
        found = sides_of_hit(tables, groups, end)
        for i, table in enumerate(found.values(), 1):  # the last blocks go elsewhere
            table[-1] = server.scheduler.kv_cache_config.num_blocks - i
        return found

    sides_of_hit = BlockTables.sides_of_hit
    monkeypatch.setattr(BlockTables, "sides_of_hit", swapped)
    server.add("b", tokens, 6)
    server.run()
    assert server.outputs["b"] != generate(tokens, 0, 6, kinds)


@pytest.mark.parametrize("kinds", GROUPS)
def test_store_survives_a_restart(
    make_server: MakeServer, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    extra = {"stores": [f"disk:{tmp_path}?bytes=64MiB"]}
    tokens = prompt(1, 61)
    first = make_server(kinds, extra)
    serve(first, tokens)
    first.drain()
    first.close()
    assert serve(make_server(kinds, extra), tokens) == 60


def test_damaged_store_is_computed_again(make_server: MakeServer, tmp_path: Path) -> None:
    kinds = GROUPS[-1]
    extra = {"stores": [f"disk:{tmp_path}?bytes=64MiB"]}
    tokens = prompt(1, 61)
    first = make_server(kinds, extra)
    serve(first, tokens)
    first.drain()
    first.close()
    for segment in tmp_path.rglob("segment-*"):
        damaged = bytearray(segment.read_bytes())
        for start in range(0, len(damaged), 4096):
            damaged[start : start + 64] = b"\xc0" * 64
        segment.write_bytes(damaged)
    assert serve(make_server(kinds, extra), tokens) == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_load_is_computed_again_or_fails_its_request(
    make_server: MakeServer, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FlakyDevice(random.Random(1), refuse_share=0.0, fail_share=0.0)
    use_device(device, monkeypatch)
    server = make_server(GROUPS[-1], failure_policy=policy)
    tokens = prompt(1, 61)
    serve(server, tokens)
    forget_device_blocks(server)
    device.faults = Faults(random.Random(1), refuse_share=0.0, fail_share=1.0)
    server.add("b", tokens, 6)
    if not compat.CAN_FAIL_REQUESTS:
        with pytest.raises(TransferError, match=r"vLLM 0\.30"):
            server.run()
        return
    server.run()
    if policy == "fail":
        assert server.errors == {"b"}
    else:
        assert server.outputs["b"] == generate(tokens, 0, 6, GROUPS[-1])
    assert device.faults.count > 0


def test_older_vllm_is_not_reset_while_a_request_waits_for_its_load(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset would let the load fail, which ends a server without ``failed_recving``."""
    monkeypatch.setattr(compat, "CAN_FAIL_REQUESTS", False)
    server = make_server(("full", "window"))
    tokens = prompt(1, 61)
    serve(server, tokens)
    forget_device_blocks(server)
    server.add("b", tokens, 6)
    server.step()
    assert not server.connector.reset_cache()
    server.run()
    assert server.outputs["b"] == server.outputs["r0"]
    assert server.connector.reset_cache()


@pytest.mark.parametrize(("kinds", "group"), [(("full",), 0), (("window", "full"), 1)])
def test_events_name_the_group_of_full_attention(
    make_server: MakeServer, kinds: tuple[str, ...], group: int
) -> None:
    """As vLLM's own events, decoded from its messages."""
    server = make_server(kinds, {"cpu_bytes_to_use": 16 << 10}, kv_events=True)
    sent: list[Any] = []
    server.scheduler.kv_event_publisher = SimpleNamespace(publish=sent.append, shutdown=lambda: 0)
    for seed in range(40):  # more than the device and host memory have room for
        serve(server, prompt(seed, 61))
        server.drain()
    serve(server, prompt(7, 5))
    payloads = [msgspec.msgpack.encode(batch) for batch in sent]
    batches = [msgspec.msgpack.decode(data, type=KVEventBatch) for data in payloads]
    events = [event for batch in batches for event in batch.events]
    stored = [event for event in events if isinstance(event, BlockStored)]
    on_host = {(e.group_idx, e.kv_cache_spec_kind) for e in stored if e.medium == "CPU"}
    on_device = {(e.group_idx, e.kv_cache_spec_kind) for e in stored if e.medium == "GPU"}
    assert on_host == {(group, "full_attention")} <= on_device
    removed = {e.group_idx for e in events if isinstance(e, BlockRemoved) and e.medium == "CPU"}
    assert removed == {group}


def test_block_that_left_the_window_is_not_saved() -> None:
    groups = KVGroups.of(
        kv_cache_config(
            "infer",
            40,
            kinds=(
                "full",
                "window",
            ),
        )
    )
    tables = BlockTables()
    tables.set(groups, [list(range(1, 11)), list(range(11, 21))])
    (side,) = groups.sides
    kept = (40 - WINDOW + 1) // BLOCK_TOKENS
    saved = tables.sides_to_save(groups, 5, 10, kept_tokens=40)
    assert saved == {side.name: [-1] * (kept - 5) + list(range(11 + kept, 21))}
    assert tables.sides_to_save(groups, 0, 3, kept_tokens=0) == {side.name: [11, 12, 13]}


@needs_states
def test_state_is_saved_only_where_it_is_noted() -> None:
    groups = KVGroups.of(
        kv_cache_config(
            "infer",
            40,
            kinds=(
                "full",
                "state",
            ),
        )
    )
    tables = BlockTables()
    tables.set(groups, [[1, 2, 3, 4], [0, 0, 7, 8]])
    (side,) = groups.sides
    tables.note_states(groups, 12)
    tables.note_states(groups, 14)  # the step ends inside of a block
    tables.note_state(groups, side.index, 8, 9)  # vLLM names a block that is not in the table
    tables.note_state(groups, side.index, 10, 9)
    assert tables.sides_to_save(groups, 0, 4, kept_tokens=4) == {side.name: [-1, 9, 7, -1]}
    assert tables.sides_to_save(groups, 0, 4, kept_tokens=4) == {side.name: [-1] * 4}, "once"
    tables.note_states(groups, 12)
    assert tables.sides_to_save(groups, 0, 4, kept_tokens=13) == {side.name: [-1] * 4}


def test_layers_of_a_group_are_part_of_the_key_in_stores() -> None:
    config = kv_cache_config(
        "infer",
        40,
        kinds=(
            "full",
            "window",
        ),
    )
    before = KVGroups.of(config)
    config.kv_cache_groups[1].layer_names.reverse()
    after = KVGroups.of(config)
    assert before.layout_prefix(0) == after.layout_prefix(0)
    assert before.layout_prefix(1) != after.layout_prefix(1)
    assert KVGroups.of(kv_cache_config("infer", 40)).layout_prefix(0) == ""


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
def test_host_blocks_of_all_layers_fit_the_given_memory(order: str) -> None:
    """Of this group, vLLM describes to its scheduler the index keys, whose pages are smaller."""
    workers = indexed_config(40, order=order)
    scheduler = generate_scheduler_kv_cache_config([workers])
    spec = scheduler.kv_cache_groups[0].kv_cache_spec
    assert type(workers.kv_cache_groups[0].kv_cache_spec) is not type(spec)
    block_bytes = LAYERS * BLOCK_TOKENS * (2 * HEADS * DIM + INDEX_DIM) * 4
    assert KVGroups.of(workers).block_bytes == block_bytes
    assert KVGroups.of(scheduler).block_bytes == block_bytes > 4 * spec.page_size_bytes
    options = Options.parse({"cpu_bytes_to_use": 100 * block_bytes + 1})
    host_blocks = opening.cache_config(vllm_config(extra=HOST), scheduler, options).host_blocks
    assert host_blocks == 100


_PLAIN: dict[str, Any] = {
    "block_size": 4,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.int32,
}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            [FullAttentionSpec(**_PLAIN), FullAttentionSpec(**_PLAIN | {"block_size": 8})],
            r"blocks of \[4, 8\] tokens",
        ),
        (
            [
                FullAttentionSpec(**_PLAIN),
                ChunkedLocalAttentionSpec(**_PLAIN, attention_chunk_size=16),
            ],
            "ChunkedLocalAttentionSpec",
        ),
    ],
)
def test_group_that_is_not_served_is_refused(specs: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        groups_of(specs)


@pytest.mark.parametrize(
    ("mode", "num_speculative_blocks", "message"),
    [("none", 0, "mamba_cache_mode is 'none'"), ("align", 2, "speculative decoding")],
)
def test_state_that_is_not_served_is_refused(
    mode: str, num_speculative_blocks: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = MambaSpec(
        block_size=4,
        shapes=((8,),),
        dtypes=(torch.int32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative_blocks,
    )
    monkeypatch.setattr(compat, "CAN_LOAD_STATES", True)
    with pytest.raises(ConfigError, match=message):
        groups_of([FullAttentionSpec(**_PLAIN), state])
    monkeypatch.setattr(compat, "CAN_LOAD_STATES", False)
    with pytest.raises(ConfigError, match=r"install vLLM 0\.32"):
        groups_of([FullAttentionSpec(**_PLAIN), state])


def groups_of(specs: list[Any]) -> KVGroups:
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{i}"])
        for i, spec in enumerate(specs)
    ]
    config: Any = SimpleNamespace(kv_cache_groups=groups, num_blocks=8, kv_cache_tensors=[])
    return KVGroups.of(config)
