"""aiokv.ops.swap_blocks on the cpu device, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.devices import CpuEvent, CpuStream
from aiokv.errors import ConfigError, LayoutError, UsageError
from aiokv.ops import swap_blocks


def tensors(num_blocks: int, *, layers: int = 3, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = [(4, 2, 8), (7,), (1, 3)][:layers]
    dtypes = [np.float16, np.uint8, np.float32]
    return [
        random.integers(0, 99, (num_blocks, *shape)).astype(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]


pairs_of_ids = st.integers(0, 12).flatmap(
    lambda count: st.tuples(
        st.permutations(range(12)).map(lambda ids: ids[:count]),
        st.permutations(range(20)).map(lambda ids: ids[:count]),
    )
)


@given(ids=pairs_of_ids, onload=st.booleans(), with_stream=st.booleans())
def test_the_named_blocks_move_and_no_others(ids, onload, with_stream):
    device_ids, host_ids = ids
    device, host = tensors(12, seed=1), tensors(20, seed=2)
    expected_device, expected_host = [t.copy() for t in device], [t.copy() for t in host]
    for d, h in zip(expected_device, expected_host, strict=True):
        if onload:
            d[device_ids] = h[host_ids]
        else:
            h[host_ids] = d[device_ids]
    stream = CpuStream("swap") if with_stream else None
    direction = "onload" if onload else "offload"
    swap_blocks(device, host, device_ids, np.array(host_ids), direction=direction, stream=stream)
    if stream is not None:
        stream.close()
    for actual, expected in zip(device + host, expected_device + expected_host, strict=True):
        assert np.array_equal(actual, expected)


def test_sources_may_repeat_and_blocks_may_be_strided():
    both = np.arange(2 * 6 * 4, dtype=np.int32).reshape(6, 2, 4)
    keys, values = both[:, 0], both[:, 1]  # [6, 4] with a gap between blocks
    host = [np.zeros((3, 4), np.int32), np.zeros((3, 16), np.uint8)]
    swap_blocks([keys, values], host, [5, 5, 0], [0, 2, 1], direction="offload")
    assert np.array_equal(host[0], keys[[5, 0, 5]])
    assert np.array_equal(host[1].view(np.int32), values[[5, 0, 5]])
    swap_blocks([keys], host[:1], [1, 2], [0, 0], direction="onload")
    assert np.array_equal(keys[[1, 2]], host[0][[0, 0]])


def test_a_swap_waits_for_the_work_of_its_stream():
    device, host = [np.zeros((2, 4), np.int8)], [np.ones((2, 4), np.int8)]
    stream, gate = CpuStream("swap"), CpuEvent()
    gate.begin()
    stream.wait_event(gate)
    swap_blocks(device, host, [1], [0], direction="onload", stream=stream)
    assert not device[0].any()
    gate.finish()
    stream.close()
    assert device[0].tolist() == [[0] * 4, [1] * 4]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"device_ids": [0, 4]}, UsageError, "4"),
        ({"device_ids": [-1, 0]}, UsageError, "-1"),
        ({"host_ids": [0, 6]}, UsageError, "6"),
        ({"host_ids": [0, 2**40]}, UsageError, "host_ids"),
        ({"device_ids": [1, 1]}, UsageError, "duplicate destination"),
        ({"device_ids": [1]}, UsageError, "device_ids has 1 ids and host_ids has 2"),
        ({"device_ids": [[1, 2]]}, UsageError, "device_ids"),
        ({"device_ids": [0.5, 1]}, UsageError, "device_ids"),
        ({"direction": "sideways"}, UsageError, "direction"),
        ({"stream": 7}, UsageError, "CpuStream"),
        ({"host_tensors": []}, UsageError, "1 device_tensors and 0 host_tensors"),
        ({"host_tensors": [np.zeros((6, 4), np.int8)]}, LayoutError, "8 bytes"),
        ({"host_tensors": [np.zeros((6, 2, 2), np.float16)]}, LayoutError, r"float16.*uint8"),
        ({"host_tensors": [np.zeros((6, 2, 4), np.int16)[:, :, ::2]]}, LayoutError, "C-contiguous"),
        ({"host_tensors": [object()]}, LayoutError, r"host_tensors\[0\]"),
        ({"host_tensors": 5}, UsageError, "host_tensors"),
        ({"host_tensors": [np.zeros((6, 4), object)]}, LayoutError, "are not numbers"),
        ({"host_tensors": [np.zeros((6, 4), "M8[s]")]}, LayoutError, "are not numbers"),
        ({"host_tensors": [np.zeros(6, "U2")]}, LayoutError, "are not numbers"),
        ({"host_tensors": [np.broadcast_to(np.int16(1), (6, 4))]}, LayoutError, "read-only"),
        ({"host_tensors": [np.ones((6, 4), np.int16)[::-1]]}, LayoutError, "overlap"),
        ({"host_tensors": [np.ones((0, 4), np.int16)]}, LayoutError, "no blocks"),
        ({"device_ids": [True, False]}, UsageError, "list of integers"),
        ({"device_ids": [[0], [1, 2]]}, UsageError, "not an array of integers"),
        ({"device_ids": None}, UsageError, "list of integers"),
        (
            {"device_ids": np.array([0, 2**63], np.uint64)},
            UsageError,
            "block ids are from 0 to 2147483647",
        ),
    ],
)
def test_wrong_arguments_copy_nothing(change, error, message):
    device, host = np.zeros((4, 4), np.int16), np.ones((6, 4), np.int16)
    arguments = {
        "device_tensors": [device],
        "host_tensors": [host],
        "device_ids": [0, 1],
        "host_ids": [2, 3],
        "direction": "onload",
        **change,
    }
    with pytest.raises(error, match=message):
        swap_blocks(**arguments)
    assert not device.any()


def test_a_closed_stream_copies_nothing():
    device, host = np.zeros((4, 4), np.int16), np.ones((6, 4), np.int16)
    stream = CpuStream("ended")
    stream.close()
    with pytest.raises(UsageError, match="is closed"):
        swap_blocks([device], [host], [0], [1], direction="onload", stream=stream)
    assert not device.any()


def test_wrong_pair_after_valid_pairs_copies_nothing():
    device, host = np.zeros((4, 4), np.int16), np.ones((6, 4), np.int16)
    for wrong in (np.ones((6, 3), np.int16), np.ones((6, 4), object), np.ones((5, 4), np.int16)):
        with pytest.raises(LayoutError, match=r"host_tensors\[2\]"):
            swap_blocks(
                [device] * 3, [host, host, wrong], [0, 1], [2, 3], direction="onload"
            )  # fmt: skip
    assert not device.any()


def test_a_tensor_that_two_copies_write_is_refused():
    device, host = ([*tensors(n, layers=1), *tensors(n, layers=1, seed=1)] for n in (4, 6))
    before = [array.copy() for array in (*device, *host)]
    with pytest.raises(LayoutError, match=r"host_tensors\[1\] has the memory of host_tensors\[0\]"):
        swap_blocks(device, [host[0]] * 2, [0], [1], direction="offload")
    with pytest.raises(LayoutError, match=r"device_tensors\[1\] has the memory of device_tenso"):
        swap_blocks([device[0]] * 2, host, [0], [1], direction="onload")
    for array, copy in zip((*device, *host), before, strict=True):
        assert (array == copy).all()
    swap_blocks([device[0]] * 2, host, [0], [1], direction="offload")  # sources may repeat
    assert (host[0][1] == host[1][1]).all()


@pytest.mark.parametrize("direction", ["onload", "offload"])
def test_a_block_that_is_source_and_destination_is_refused(direction):
    (blocks,) = tensors(6, layers=1)
    before = blocks.copy()
    with pytest.raises(UsageError, match="block 2 is a source and a destination"):
        swap_blocks([blocks], [blocks], [0, 2], [2, 4], direction=direction)
    assert (blocks == before).all()
    swap_blocks([blocks], [blocks], [0, 2], [1, 3], direction="offload")
    assert (blocks[[1, 3]] == before[[0, 2]]).all()


def test_tensors_of_different_sizes_are_refused():
    with pytest.raises(LayoutError, match=r"device_tensors\[1\] has 3 blocks.*has 4"):
        swap_blocks(
            [np.zeros((4, 2)), np.zeros((3, 2))], [np.zeros((4, 2))] * 2, [0], [0],
            direction="onload",
        )  # fmt: skip


def test_a_gpu_needs_cuda(monkeypatch):
    class OnGpu:
        dtype = np.dtype(float)
        __cuda_array_interface__ = np.zeros((4, 2)).__array_interface__ | {"version": 3}

    monkeypatch.setattr("aiokv.ops._cuda", None)
    with pytest.raises(ConfigError, match="without CUDA"):
        swap_blocks([OnGpu()], [np.zeros((4, 2))], [0], [0], direction="onload")
    with pytest.raises(LayoutError, match="not in host memory"):
        swap_blocks([np.zeros((4, 2))], [OnGpu()], [0], [0], direction="onload")
