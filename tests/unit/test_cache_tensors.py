"""Created KV tensors: shapes, dtypes, bytes, and the regions that they become."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import ConfigError
from aiokv.model.shape import LayerShape, ModelShape, StateShape
from aiokv.model.tensors import create_tensors, tensor_layouts
from tests.unit import model_configs as configs

T = 8  # tokens per block
GQA = LayerShape(kv_heads=4, key_elements=64, value_elements=64)
UNEVEN = LayerShape(kv_heads=4, key_elements=64, value_elements=32)
MLA = LayerShape(kv_heads=1, key_elements=512, value_elements=64, is_latent=True)
DSA = LayerShape(
    kv_heads=1, key_elements=512, value_elements=64, is_latent=True, index_elements=128
)


@pytest.mark.parametrize(
    ("layer", "options", "expected"),
    [
        (GQA, {}, {"k": ((T, 4, 64), "bfloat16"), "v": ((T, 4, 64), "bfloat16")}),
        (
            UNEVEN,
            {"convention": "fastdeploy", "tensor_parallel": 2},
            {"k": ((2, T, 64), "bfloat16"), "v": ((2, T, 32), "bfloat16")},
        ),
        (GQA, {"joined": True}, {"kv": ((2, T, 4, 64), "bfloat16")}),
        (
            GQA,
            {"joined": True, "convention": "fastdeploy", "kv_dtype": "fp8"},
            {"kv": ((2, 4, T, 64), "uint8")},
        ),
        (
            GQA,
            {"kv_dtype": "block_wise_fp8", "convention": "fastdeploy", "model_dtype": "float16"},
            {
                "k": ((4, T, 64), "uint8"),
                "k_scale": ((4, T), "float16"),
                "v": ((4, T, 64), "uint8"),
                "v_scale": ((4, T), "float16"),
            },
        ),
        (
            GQA,
            {"kv_dtype": "int4_zp"},
            {
                "k": ((T, 4, 32), "uint8"),
                "k_scale": ((T, 4), "bfloat16"),
                "k_zero_point": ((T, 4), "bfloat16"),
                "v": ((T, 4, 32), "uint8"),
                "v_scale": ((T, 4), "bfloat16"),
                "v_zero_point": ((T, 4), "bfloat16"),
            },
        ),
        (
            GQA,
            {"kv_dtype": "block_wise_int8", "joined": True},
            {"kv": ((2, T, 4, 64), "uint8"), "kv_scale": ((2, T, 4), "bfloat16")},
        ),
        (MLA, {"tensor_parallel": 8}, {"latent": ((T, 576), "bfloat16")}),
        (MLA, {"convention": "fastdeploy"}, {"latent": ((1, T, 576), "bfloat16")}),
        (
            DSA,
            {"kv_dtype": "fp8_ds_mla", "joined": True},
            {"latent": ((T, 656), "uint8"), "index": ((T, 132), "uint8")},
        ),
        (
            DSA,
            {"kv_dtype": "fp8_ds_mla", "convention": "fastdeploy"},
            {"latent": ((1, T, 656), "uint8"), "index": ((T, 132), "uint8")},
        ),
    ],
)
def test_shapes_follow_the_convention(layer, options, expected):
    layouts = tensor_layouts([layer], block_tokens=T, **options)
    assert {layout.name: (layout.shape, layout.dtype) for layout in layouts} == expected
    for layout in layouts:
        assert len(layout.axes) == len(layout.shape)
        assert layout.axes.count("tokens") == 1
        assert ("heads" in layout.axes) == (layout.heads is not None)


@pytest.mark.parametrize("convention", ["vllm", "fastdeploy"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("tensor_parallel", [1, 4])
@pytest.mark.parametrize(
    ("config", "kv_dtypes"),
    [
        (configs.LLAMA_3_8B, ["auto", "fp8", "block_wise_fp8", "block_wise_int8", "int4_zp"]),
        (configs.QWEN_2_5_7B, ["auto", "int8", "float32"]),
        (configs.DEEPSEEK_V3, ["auto", "fp8_ds_mla"]),
        (configs.DEEPSEEK_V3_2, ["auto", "fp8_ds_mla"]),
        (configs.GEMMA_3_4B, ["auto", "int4_zp"]),
    ],
)
def test_the_bytes_are_those_of_the_model_shape(
    config, kv_dtypes, tensor_parallel, joined, convention
):
    shape = ModelShape.from_config(config)
    for kv_dtype in kv_dtypes:
        options = {"kv_dtype": kv_dtype, "tensor_parallel": tensor_parallel}
        created = create_tensors(
            shape,
            2,
            window_blocks=dict.fromkeys(shape.windows, 3),
            block_tokens=T,
            rank=tensor_parallel - 1,
            convention=convention,
            joined=joined,
            **options,
        )
        regions = created.regions
        assert regions.num_blocks == 2
        assert regions.block_bytes == shape.bytes_per_block(T, **options)
        if not joined:
            assert regions.payload_bytes == shape.host_bytes_per_block(T, **options)
        assert regions.num_window_blocks == dict.fromkeys(shape.windows, 3)
        for group in shape.windows:
            window = regions.window_blocks(group)
            assert window.block_bytes == shape.bytes_per_block(T, group=group, **options)


def test_regions_know_axes_heads_and_element_types():
    created = create_tensors([GQA], 3, block_tokens=T, kv_dtype="fp8", tensor_parallel=8, rank=5)
    pieces = {piece.region: piece for piece in created.regions.pieces()}
    assert set(pieces) == {"k", "v"}
    assert pieces["k"].axes == ("tokens", "heads", "dim")
    assert pieces["k"].heads == (2, 4), "two ranks share each of the 4 heads"
    assert pieces["k"].dtype == "float8_e4m3fn"
    assert created.layers[0]["k"].shape == (3, T, 1, 64)


def test_layers_may_have_different_numbers_of_heads():
    other = LayerShape(kv_heads=2, key_elements=64, value_elements=64)
    created = create_tensors([GQA, other, GQA], 3, block_tokens=T)
    assert created.regions.names == ("k", "v", "k.2_heads", "v.2_heads")
    assert [layer["k"].shape for layer in created.layers] == [
        (3, T, 4, 64), (3, T, 2, 64), (3, T, 4, 64),
    ]  # fmt: skip


HYBRID = ModelShape(
    name="hybrid",
    dtype="bfloat16",
    layers=((GQA, 2),),
    states=(
        (
            StateShape(conv_elements=24, recurrent_elements=64, heads=4, recurrent_dtype="float32"),
            2,
        ),
        (StateShape(conv_elements=0, recurrent_elements=32, heads=4), 1),
    ),
)


@pytest.mark.parametrize("tensor_parallel", [1, 4])
@pytest.mark.parametrize("shape", [HYBRID, ModelShape.from_config(configs.QWEN_3_NEXT_80B)])
def test_state_tensors_have_the_bytes_of_the_model_shape(shape, tensor_parallel):
    heads = {"tensor_parallel": tensor_parallel, "rank": tensor_parallel - 1}
    created = create_tensors(shape, 2, state_slots=3, block_tokens=T, **heads)
    regions, kv_layers = created.regions, sum(count for _, count in shape.layers)
    assert regions.num_state_slots == 3
    assert regions.block_bytes == shape.bytes_per_block(T, tensor_parallel=tensor_parallel)
    pieces = regions.state_pieces
    expected = shape.state_slot_bytes(tensor_parallel=tensor_parallel)
    assert sum(piece.block_bytes for piece in pieces) == expected
    on_host = shape.host_state_slot_bytes(tensor_parallel=tensor_parallel)
    assert regions.state_blocks().payload_bytes == on_host
    assert len(created.layers) == regions.num_layers
    assert {piece.layer for piece in pieces} == set(range(kv_layers, regions.num_layers))
    for layer in created.layers[:kv_layers]:
        assert set(layer) == {"k", "v"}


def test_states_are_created_layer_by_layer():
    layers = create_tensors(HYBRID, 2, state_slots=3, tensor_parallel=2).layers
    assert [
        {name: (t.shape, t.dtype.name) for name, t in layer.items()} for layer in layers[2:]
    ] == [
        {"conv": ((3, 12), "uint16"), "recurrent": ((3, 32), "float32")},
        {"conv": ((3, 12), "uint16"), "recurrent": ((3, 32), "float32")},
        {"recurrent": ((3, 16), "uint16")},
    ]


def test_recurrent_state_is_created_or_refused():
    with pytest.raises(ConfigError, match="3 layers of the model have recurrent state") as caught:
        create_tensors(HYBRID, 2)
    assert "state_slots=" in caught.value.hint
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ConfigError, match="state_slots is"):
            create_tensors(HYBRID, 2, state_slots=wrong)
    with pytest.raises(ConfigError, match="no recurrent state"):
        create_tensors([GQA], 2, state_slots=2)
    odd = with_first_state(HYBRID, conv_elements=26)
    with pytest.raises(ConfigError, match=r"tensor_parallel is 4.*26 conv elements"):
        create_tensors(odd, 2, state_slots=2, tensor_parallel=4)
    created = create_tensors(HYBRID, 2, state_slots=0)
    assert (created.regions.num_state_slots, len(created.layers)) == (None, 2)
    assert create_tensors([GQA], 2, state_slots=0).regions.num_layers == 1


def with_first_state(shape: ModelShape, **fields: int) -> ModelShape:
    (state, count), *others = shape.states
    return replace(shape, states=((replace(state, **fields), count), *others))


@pytest.mark.asyncio
async def test_an_engine_restores_created_states():
    created = create_tensors(HYBRID, 8, state_slots=4, block_tokens=4)
    states = [tensor for layer in created.layers[2:] for tensor in layer.values()]
    config = CacheConfig(block_tokens=4, device_blocks=8, state_slots=4)
    async with CacheEngine(config, created.regions) as engine:
        async with engine.match(range(9)) as lease:
            await lease.allocate(9)
            await lease.layers.wait_all()  # the slot was zeroed
            for tensor in states:
                assert not tensor[lease.state_slot].any()
                tensor[lease.state_slot] = 7
            lease.commit(8)
            assert lease.snapshot(8)
            lease.commit(9)
        engine.step()
        async with engine.match(range(9)) as lease:
            await lease.allocate(9)
            await lease.layers.wait_all()
            assert lease.cached_tokens == 8
            for tensor in states:
                assert (tensor[lease.state_slot] == 7).all()


@pytest.mark.asyncio
async def test_an_engine_restores_created_tensors():
    created = create_tensors([GQA, GQA], 8, block_tokens=4, kv_dtype="block_wise_fp8")
    tensors = [tensor for layer in created.layers for tensor in layer.values()]
    config = CacheConfig(block_tokens=4, device_blocks=8, host_blocks=8)
    async with CacheEngine(config, created.regions) as engine:
        for expected in (0, 16):
            async with engine.match(range(17)) as lease:
                await lease.allocate(17)
                await lease.layers.wait_all()
                assert lease.cached_tokens == expected
                for tensor in tensors:
                    for position, block in enumerate(lease.block_table[:4]):
                        if expected:
                            assert (tensor[block].view(np.uint8) == position + 1).all()
                        tensor[block].view(np.uint8)[...] = position + 1
                lease.commit(17)
            engine.step()
            await engine.drain()
            await engine.evict(8)
            for tensor in tensors:
                tensor[...] = 0


def test_other_libraries_make_tensors_of_the_real_dtypes(monkeypatch):
    made = []

    def zeros(shape, dtype, device):
        made.append((dtype, device))
        return np.zeros(shape, {"t.bfloat16": np.uint16, "t.uint8": np.uint8}[dtype])

    torch = SimpleNamespace(zeros=zeros, bfloat16="t.bfloat16", uint8="t.uint8")
    monkeypatch.setitem(sys.modules, "torch", torch)
    created = create_tensors([GQA], 2, library="torch", device="cuda:1", kv_dtype="block_wise_fp8")
    assert made == [("t.uint8", "cuda:1"), ("t.bfloat16", "cuda:1")] * 2
    assert [piece.dtype for piece in created.regions.pieces()] == [
        "float8_e4m3fn", "bfloat16", "float8_e4m3fn", "bfloat16",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (GQA, {"kv_dtype": "fp8_ds_mla"}, r"fp8_ds_mla.*latent"),
        (MLA, {"kv_dtype": "int4_zp"}, r"int4_zp.*latent.*fp8_ds_mla"),
        (MLA, {"kv_dtype": "block_wise_fp8"}, r"block_wise_fp8.*latent"),
        (
            LayerShape(kv_heads=1, key_elements=3, value_elements=3),
            {"kv_dtype": "int4_zp"},
            "has 3 elements",
        ),
        (UNEVEN, {"joined": True}, "64 elements per head and a value 32"),
        (GQA, {"tensor_parallel": 3}, "tensor_parallel is 3"),
        (GQA, {"tensor_parallel": 2, "rank": 2}, "rank is 2"),
        (GQA, {"block_tokens": 0}, "block_tokens is 0"),
        (GQA, {"convention": "other"}, "convention"),
        (GQA, {"kv_dtype": "fp4"}, "kv_dtype"),
        (GQA, {"model_dtype": "int"}, "model_dtype"),
        (GQA, {"num_blocks": 0}, "num_blocks is 0"),
        (GQA, {"library": "jax"}, "library"),
        (GQA, {"device": "cuda:0"}, "CPU only"),
        (
            LayerShape(kv_heads=1, key_elements=8, value_elements=8, window_tokens=64),
            {},
            r"window_64.*window_blocks",
        ),
        (5, {}, r"model\[0\] is 5; it must be a LayerShape"),
        (
            GQA,
            {"window_blocks": {"window_64": 2}},
            "'window_64'; the model has no such window group",
        ),
        (GQA, {"window_blocks": 7}, "window_blocks is 7"),
    ],
)
def test_wrong_arguments_are_refused(layer, options, message):
    with pytest.raises(ConfigError, match=message):
        create_tensors([layer], **{"num_blocks": 2, **options})


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigError, match="no layers"):
        create_tensors([], 2)


def test_a_device_without_tensors_is_named_and_other_errors_are_kept(monkeypatch):
    def zeros(shape, dtype, device):
        if device == "cuda:9":
            raise RuntimeError("invalid device ordinal")
        if len(shape) > 1:
            raise MemoryError("2 GiB")
        return np.zeros(shape, np.uint8)

    torch = SimpleNamespace(zeros=zeros, bfloat16="t.bfloat16", uint8="t.uint8")
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ConfigError, match=r"device is 'cuda:9'; torch .*invalid device ordinal"):
        create_tensors([GQA], 2, library="torch", device="cuda:9")
    with pytest.raises(MemoryError, match="2 GiB"):
        create_tensors([GQA], 2, library="torch", device="cuda:0")


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"library is 'torch', which is not installed"):
        create_tensors([GQA], 2, library="torch")
