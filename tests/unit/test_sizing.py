"""Capacities for memory of a given size, and the ``size`` command."""

from __future__ import annotations

import json
import tomllib

import pytest

from aiokv import CacheConfig, WindowGroup, cli
from aiokv.errors import ConfigError
from aiokv.model.shape import ModelShape
from aiokv.model.sizing import Memory, cache_sizes, weight_bytes
from aiokv.scheduler.plans import new_core
from tests.unit import model_configs as configs

GIB = 2**30


def sizes(config, **memory):
    return cache_sizes(ModelShape.from_config(config), Memory(**memory))


def test_blocks_fill_the_memory_that_weights_leave():
    result = sizes(
        configs.LLAMA_3_8B,
        gpu_bytes=80 * GIB,
        gpu_share=0.75,
        weight_bytes=16 * GIB,
        host_bytes=100 * GIB,
        conversation_tokens=8000,
    )
    assert result.block_bytes == 2 << 20
    assert result.kv_bytes == 44 * GIB
    assert result.device_blocks == 44 * 512
    assert result.host_blocks == 100 * 512
    assert result.device_conversations == 44 * 512 // 500
    assert result.host_conversations == 100 * 512 // 500
    assert CacheConfig(**result.settings()).device_blocks == 44 * 512


def test_ranks_divide_weights_heads_and_host_memory():
    one = sizes(configs.LLAMA_3_8B, gpu_bytes=GIB * 80, gpu_share=1.0)
    four = sizes(
        configs.LLAMA_3_8B,
        gpu_bytes=20 * GIB,
        gpu_share=1.0,
        weight_bytes=16 * GIB,
        host_bytes=64 * GIB,
        tensor_parallel=4,
    )
    assert four.block_bytes == one.block_bytes // 4
    assert four.device_blocks == 16 * 2048
    assert four.host_blocks == 16 * 2048


@pytest.mark.parametrize("tokens", [100, 300, 2_000, 32_000])
@pytest.mark.parametrize(
    ("config", "gib"),
    [(configs.GEMMA_3_27B, 40), (configs.GPT_OSS_20B, 40), (configs.GEMMA_3_4B, 0.4)],
)
def test_pools_of_a_model_with_windows_fit_together_and_hold_the_conversations(config, gib, tokens):
    shape = ModelShape.from_config(config)
    memory = Memory(gpu_bytes=int(gib * GIB), host_bytes=30 * GIB, conversation_tokens=tokens)
    result = cache_sizes(shape, memory)
    (group,) = result.windows
    used = result.device_blocks * result.block_bytes + group.device_blocks * group.block_bytes
    assert 0 <= result.kv_bytes - used < result.block_bytes
    host = result.host_blocks * result.host_block_bytes
    host += group.host_blocks * shape.host_bytes_per_block(16, group=group.name)
    assert 0 <= memory.host_bytes - host < result.host_block_bytes
    blocks = -(-tokens // 16)
    assert result.device_blocks >= result.device_conversations * blocks
    assert group.device_blocks >= result.device_conversations * group.conversation_blocks
    assert result.host_blocks >= result.host_conversations * blocks


@pytest.mark.parametrize("gpu_bytes", [420_000_000, GIB])
def test_a_cache_with_the_printed_windows_is_accepted(gpu_bytes):
    """The engine refuses a group that cannot hold a window and a step."""
    settings = sizes(configs.GEMMA_3_4B, gpu_bytes=gpu_bytes, conversation_tokens=100).settings()
    assert new_core(CacheConfig(**settings))
    group = settings["windows"]["window_1024"]
    smaller = WindowGroup(window_tokens=1024, device_blocks=192, step_tokens=2048)
    assert group.device_blocks >= 193
    with pytest.raises(ConfigError, match="need 193 blocks"):
        new_core(CacheConfig(**settings | {"windows": {"window_1024": smaller}}))


def test_a_model_with_state_gets_slots():
    result = sizes(
        configs.QWEN_3_NEXT_80B, gpu_bytes=80 * GIB, host_bytes=80 * GIB, tensor_parallel=2
    )
    assert result.state_slots == 2 * result.device_conversations
    assert result.host_state_slots == result.host_conversations
    used = result.device_blocks * result.block_bytes
    used += result.state_slots * result.state_slot_bytes
    assert 0 <= result.kv_bytes - used < result.block_bytes
    assert CacheConfig(**result.settings()).host_state_slots == result.host_state_slots


def test_host_memory_holds_its_blocks_and_states_with_their_trailers():
    memory = Memory(gpu_bytes=80 * GIB, host_bytes=8 * GIB, conversation_tokens=1, with_stores=True)
    shape = ModelShape.from_config(configs.QWEN_3_NEXT_80B)
    result = cache_sizes(shape, memory)
    state_bytes = shape.host_state_slot_bytes(with_stores=True)
    assert state_bytes > result.state_slot_bytes
    used = result.host_blocks * result.host_block_bytes
    assert 0 <= 8 * GIB - used - result.host_state_slots * state_bytes < result.host_block_bytes


def test_memory_for_less_than_one_conversation_still_has_blocks():
    result = sizes(configs.LLAMA_3_8B, gpu_bytes=GIB, conversation_tokens=100_000)
    assert (result.device_conversations, result.device_blocks) == (0, 460)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_bytes": 90 * GIB}, r"weights take 90\.0 GiB of each GPU.*72\.0 GiB"),
        ({"gpu_bytes": 10**6}, r"of GPU memory are left for KV; one block.*takes 2\.00 MiB"),
        ({"gpu_share": 0}, "gpu_share is 0"),
        ({"gpu_share": 1.5}, r"gpu_share is 1\.5"),
        ({"conversation_tokens": 0}, "conversation_tokens is 0"),
        ({"host_bytes": -1}, "host_bytes is -1"),
        ({"tensor_parallel": 3}, "tensor_parallel is 3"),
        ({"kv_dtype": "fp9"}, "kv_dtype is 'fp9'"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        sizes(configs.LLAMA_3_8B, **{"gpu_bytes": 80 * GIB} | changes)


def test_weights_are_those_of_the_folder(tmp_path):
    assert weight_bytes(tmp_path) is None
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}}')
    assert weight_bytes(tmp_path) is None
    index.write_text('{"metadata": {"total_size": 5000}}')
    assert weight_bytes(tmp_path) == 5000
    (tmp_path / "model-1.safetensors").write_bytes(bytes(300))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(40))
    assert weight_bytes(tmp_path) == 340


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.GEMMA_3_27B))
    return str(tmp_path)


def test_the_printed_toml_is_a_configuration(model, capsys):
    arguments = ["--model", model, "--gpu-memory", "80GiB", "--weights", "55 GiB"]
    assert cli.main(["size", *arguments, "--host-memory", "200GiB", "--tokens", "8000"]) == 0
    printed = capsys.readouterr().out
    assert "bytes per token: 81,920 (80.0 KiB)" in printed
    assert "GPU memory for KV: 17.0 GiB (90% of 80.0 GiB, less 55.0 GiB of weights)" in printed
    settings = tomllib.loads(printed[printed.index("# aiokv.toml") :])
    windows = {name: WindowGroup(**group) for name, group in settings.pop("windows").items()}
    assert CacheConfig(**settings, windows=windows).windows["window_1024"].window_tokens == 1024


def test_json_has_all_figures(model, capsys, tmp_path):
    arguments = ["size", "--model", model, "--gpu-memory", "80GiB", "--kv-dtype", "fp8"]
    assert cli.main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["token_bytes"] == 40_960
    assert printed["windows"][0]["window_tokens"] == 1024
    assert cli.main([*arguments, "--json", str(tmp_path / "sizes.json")]) == 0
    assert json.loads((tmp_path / "sizes.json").read_text()) == printed
    assert capsys.readouterr().out == ""


def test_without_gpu_memory_the_bytes_of_each_group_are_printed(model, capsys):
    assert cli.main(["size", "--model", model]) == 0
    printed = capsys.readouterr().out
    assert "bytes per token: 81,920 (80.0 KiB)" in printed
    assert "bytes per block, layers of window_1024: 6,815,744 (6.50 MiB)" in printed
    assert "blocks:" not in printed
    assert cli.main(["size", "--model", model, "--tensor-parallel", "2", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert groups["full"] == {"token_bytes": 40_960, "block_bytes": 655_360}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host-memory", "8GiB"], "--host-memory needs --gpu-memory"),
        (["--weights", "8GiB"], "--weights needs --gpu-memory"),
        (["--gpu-memory", "80"], "72 bytes of GPU memory"),
        (["--gpu-memory", "80"], "with a unit, such as 80GiB"),
        (["--gpu-memory", "1"], "gpu_bytes is 1: the weights take 0 bytes of each GPU, but"),
        (["--gpu-memory", "1"], "with a unit, such as 1GiB"),
        (["--gpu-memory", "0"], "'0' is not a size above 0, such as 80GiB"),
        (["--gpu-memory", "1MB"], "use more GPU memory, more ranks"),
        (["--gpu-memory", "80XB"], "'80XB' is not a size, such as 80GiB"),
        (["--gpu-memory", "80GiB", "--gpu-memory-utilization", "0"], "not a number above 0"),
        (["--gpu-memory", "80GiB", "--json", "/no/such/folder/x"], "is not a folder"),
        (["--gpu-memory", "900000000TB"], "gpu_bytes is 900000000000000000000; it must be between"),
        (["--gpu-memory", "900000TB"], "device_blocks is 78695120434"),
    ],
)
def test_bad_arguments_are_refused(model, arguments, message, capsys):
    try:
        status = cli.main(["size", "--model", model, *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
