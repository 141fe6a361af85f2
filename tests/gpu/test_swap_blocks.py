"""aiokv.ops.swap_blocks between a GPU and host memory, against numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from aiokv.errors import LayoutError, UsageError
from aiokv.ops import swap_blocks

DEVICE_BLOCKS, HOST_BLOCKS, LAYERS = 40, 64, 3


def pinned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    import cupyx

    array: np.ndarray = cupyx.zeros_pinned(shape, dtype)
    return array


def pair(layer: int, *, is_pinned: bool, strided: bool) -> tuple[Any, np.ndarray]:
    import cupy

    shape, dtype = [((16, 2, 64), np.float16), ((37,), np.uint8), ((8, 4), np.float32)][layer]
    make = pinned if is_pinned else np.zeros
    host = make((HOST_BLOCKS, *shape), dtype)
    host[:] = np.random.default_rng(layer).integers(0, 99, host.shape)
    if strided:
        device = cupy.zeros((DEVICE_BLOCKS, 2, *shape), dtype)[:, 1]
    else:
        device = cupy.zeros((DEVICE_BLOCKS, *shape), dtype)
    device[:] = cupy.asarray(
        np.random.default_rng(10 + layer).integers(0, 99, device.shape).astype(dtype)
    )
    return device, host


def streams() -> list[Any]:
    import cupy

    return [None, cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("direction", ["onload", "offload"])
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("which", range(3), ids=["none", "stream", "null"])
def test_the_named_blocks_move_and_no_others(
    direction: str, is_pinned: bool, strided: bool, which: int
) -> None:
    import cupy

    stream = streams()[which]
    dice = random.Random(which)
    for count in (1, 7, 40):
        pairs = [pair(layer, is_pinned=is_pinned, strided=strided) for layer in range(LAYERS)]
        device_ids = dice.sample(range(DEVICE_BLOCKS), count)
        host_ids = dice.sample(range(HOST_BLOCKS), count)
        if count == 40:
            device_ids, host_ids = list(range(40)), list(range(3, 43))  # one run
        expected = [(device.get(), host.copy()) for device, host in pairs]
        for device, host in expected:
            if direction == "onload":
                device[device_ids] = host[host_ids]
            else:
                host[host_ids] = device[device_ids]
        cupy.cuda.Device().synchronize()
        swap_blocks(
            [device for device, _ in pairs],
            [host for _, host in pairs],
            device_ids,
            host_ids,
            direction=direction,  # type: ignore[arg-type]
            stream=stream,
        )
        if stream is not None:
            stream.synchronize()
        for (device, host), (wanted_device, wanted_host) in zip(pairs, expected, strict=True):
            assert np.array_equal(device.get(), wanted_device)
            assert np.array_equal(host, wanted_host)


@pytest.mark.timeout(120)
def test_a_swap_is_ordered_behind_the_work_of_its_stream() -> None:
    import cupy

    device, host = pair(0, is_pinned=True, strided=False)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for value in range(50):
            device[:] = value
    swap_blocks([device], [host], [1, 2, 5], [0, 1, 2], direction="offload", stream=stream)
    stream.synchronize()
    assert (host[:3] == 49).all()


def test_wrong_tensors_and_streams_are_refused() -> None:
    device, host = pair(0, is_pinned=True, strided=False)
    with pytest.raises(LayoutError, match="not in host memory"):
        swap_blocks([device], [device], [0], [0], direction="onload")
    with pytest.raises(UsageError, match="CUDA stream"):
        swap_blocks([device], [host], [0], [0], direction="onload", stream=object())
    with pytest.raises(UsageError, match="40"):
        swap_blocks([device], [host], [40], [0], direction="onload")
