"""Paddle tensors that aiokv creates for a layout."""

from __future__ import annotations

import pytest

from aiokv.model.shape import LayerShape
from aiokv.model.tensors import create_tensors

LAYER = LayerShape(kv_heads=2, key_elements=64, value_elements=64)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "block_wise_fp8"])
def test_paddle_tensors_have_the_real_dtypes_and_are_registered_in_place(paddle, kv_dtype):
    created = create_tensors(
        [LAYER] * 2, 4, library="paddle", block_tokens=8, kv_dtype=kv_dtype,
        convention="fastdeploy",
    )  # fmt: skip
    keys = created.layers[1]["k"]
    assert keys.shape == [4, 2, 8, 64]
    assert keys.dtype == (paddle.bfloat16 if kv_dtype == "bfloat16" else paddle.uint8)
    pieces = {(piece.layer, piece.region): piece for piece in created.regions.pieces()}
    assert pieces[1, "k"].pointer == keys.data_ptr()
    assert pieces[1, "k"].dtype == ("bfloat16" if kv_dtype == "bfloat16" else "float8_e4m3fn")
    if kv_dtype != "bfloat16":
        scales = created.layers[1]["k_scale"]
        assert (scales.shape, scales.dtype) == ([4, 2, 8], paddle.bfloat16)
