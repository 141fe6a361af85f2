"""Trailers of objects in stores: sealed blocks are proven, and changed ones are found."""

from __future__ import annotations

import json
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv import _native
from aiokv.errors import UsageError
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.stores import Result
from tests.models import digests as model

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "digests.json").read_text())


class Arena:
    """Blocks of random payloads, and one key per entry of ``ids``."""

    def __init__(self, payload_bytes=3000, pitch_bytes=4096, num_blocks=6, ids=(4, 0, 3)):
        random = np.random.default_rng(0)
        self.memory = random.integers(0, 256, (num_blocks, pitch_bytes), np.uint8)
        self.payload_bytes = payload_bytes
        self.object_bytes = payload_bytes + TRAILER_BYTES
        self.ids = np.array(ids, np.int32)
        self.keys = random.bytes(32 * len(ids))

    def seal(self, **changes):
        return self._call(_native.seal_blocks, changes)

    def verify(self, **changes):
        return self._call(_native.verify_blocks, changes).tolist()

    def _call(self, function, changes):
        arguments = {
            "address": self.memory.ctypes.data,
            "pitch_bytes": self.memory.shape[1],
            "payload_bytes": self.payload_bytes,
            "blocks": self.ids,
            "keys": self.keys,
            "num_blocks": len(self.memory),
        }
        return function(**arguments | changes)

    def object(self, index):
        return self.memory[self.ids[index], : self.object_bytes]

    def key(self, index):
        return self.keys[32 * index : 32 * index + 32]


@pytest.mark.parametrize("vector", VECTORS["objects"], ids=lambda v: str(v["payload_bytes"]))
def test_trailers_are_those_of_the_vectors(vector):
    payload, key = model.pattern(vector["payload_bytes"]), bytes.fromhex(vector["key"])
    arena = Arena(payload_bytes=len(payload), pitch_bytes=len(payload) + 64, ids=[2])
    arena.memory[2, : len(payload)] = np.frombuffer(payload, np.uint8)
    arena.seal(keys=key)
    assert arena.memory[2, len(payload) :].tobytes().hex() == vector["trailer"]
    assert _native.verify_object(payload + bytes.fromhex(vector["trailer"]), key)


@settings(max_examples=50)
@given(
    payload=st.binary(max_size=3000),
    repeats=st.integers(1, 3),
    key=st.binary(min_size=32, max_size=32),
)
def test_trailers_are_those_of_the_model(payload, repeats, key):
    sealed = payload * repeats + model.trailer(payload * repeats, key)
    assert _native.verify_object(sealed, key)


def test_sealed_blocks_are_verified_and_others_are_wrong():
    arena = Arena()
    assert arena.verify() == [Result.WRONG] * 3
    before = arena.memory.copy()
    arena.seal()
    assert arena.verify() == [Result.DONE] * 3
    changed = np.argwhere(arena.memory != before)
    assert set(changed[:, 0]) <= set(arena.ids.tolist())
    assert changed[:, 1].min() >= arena.payload_bytes
    assert changed[:, 1].max() < arena.object_bytes


def test_swapped_keys_are_wrong():
    arena = Arena()
    arena.seal()
    assert arena.verify(keys=arena.key(1) + arena.key(0) + arena.key(2)) == [
        Result.WRONG,
        Result.WRONG,
        Result.DONE,
    ]


def test_object_of_another_length_is_wrong():
    arena = Arena()
    arena.seal()
    assert arena.verify(payload_bytes=arena.payload_bytes - 64) == [Result.WRONG] * 3


@pytest.mark.parametrize("size", [512, 4096])
def test_lost_and_stale_sectors_are_found(size):
    """A torn write leaves sectors of zeros, or of the object that was there before."""
    arena = Arena(payload_bytes=16_384, pitch_bytes=20_480)
    stale = np.roll(arena.memory, 1)
    arena.seal()
    right = arena.memory.copy()
    for begin in range(0, arena.payload_bytes, size):
        for replacement in (0, stale[4, begin : begin + size]):
            arena.memory[4, begin : begin + size] = replacement
            assert arena.verify() == [Result.WRONG, Result.DONE, Result.DONE]
            arena.memory[:] = right


def test_swapped_sectors_are_found():
    arena = Arena(payload_bytes=16_384, pitch_bytes=20_480)
    arena.seal()
    first, second = arena.memory[4, :512].copy(), arena.memory[4, 8192:8704].copy()
    arena.memory[4, :512], arena.memory[4, 8192:8704] = second, first
    assert arena.verify() == [Result.WRONG, Result.DONE, Result.DONE]


def test_batches_are_verified_in_several_threads():
    arena = Arena(ids=range(6))
    arena.seal()
    arena.memory[5, 0] ^= 1
    with ThreadPoolExecutor(2) as threads:
        halves = [(arena.ids[:3], arena.keys[:96]), (arena.ids[3:], arena.keys[96:])]
        results = threads.map(lambda half: arena.verify(blocks=half[0], keys=half[1]), halves)
        assert list(results) == [[Result.DONE] * 3, [Result.DONE, Result.DONE, Result.WRONG]]


def test_empty_batch_has_no_results():
    arena = Arena(ids=[])
    assert arena.seal() is None
    assert arena.verify() == []


@pytest.mark.parametrize(
    "as_buffer", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)]
)
def test_any_buffer_is_verified(as_buffer):
    arena = Arena()
    arena.seal()
    data = arena.object(1).tobytes()
    assert _native.verify_object(as_buffer(data), arena.key(1))
    assert not _native.verify_object(as_buffer(data), arena.key(0))
    assert not _native.verify_object(as_buffer(data[:-1]), arena.key(1))
    assert not _native.verify_object(as_buffer(b""), arena.key(1))


def test_mapped_file_is_verified(tmp_path):
    arena = Arena()
    arena.seal()
    path = tmp_path / "object"
    path.write_bytes(arena.object(2).tobytes())
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert _native.verify_object(mapped, arena.key(2))
        mapped[10] ^= 1
        assert not _native.verify_object(mapped, arena.key(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"blocks": np.array([4, -1, 3], np.int32)},
            r"host block -1 at index 1 is not in \[0, 6\)",
        ),
        ({"blocks": np.array([4, 0, 6], np.int32)}, r"host block 6 at index 2 is not in \[0, 6\)"),
        ({"num_blocks": 4}, r"host block 4 at index 0 is not in \[0, 4\)"),
        ({"blocks": np.array([4, 0, 4], np.int32)}, "host block 4 is listed more than once"),
        ({"keys": bytes(95)}, "keys has 95 bytes; 3 blocks have 96 bytes of keys"),
        ({"keys": bytes(128)}, "keys has 128 bytes; 3 blocks have 96"),
        ({"payload_bytes": 4096 - 63}, "pitch_bytes is 4096; it must be at least 64 more than"),
        ({"payload_bytes": 2**64 - 1}, r"payload_bytes \(18446744073709551615\)"),
        ({"pitch_bytes": 2**63}, "pitch_bytes is 9223372036854775808; it must be"),
        ({"address": 0}, "address is 0 for 6 blocks of 4096 bytes"),
        ({"num_blocks": 2**63}, "for 9223372036854775808 blocks of 4096 bytes"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_refused_before_the_first_access(changes, message):
    arena = Arena()
    before = arena.memory.copy()
    with pytest.raises(UsageError, match=message):
        arena.seal(**changes)
    with pytest.raises(UsageError, match=message):
        arena.verify(**changes)
    assert (arena.memory == before).all()


def test_ids_of_another_type_are_refused():
    with pytest.raises(TypeError):
        Arena().seal(blocks=np.array([4, 0, 2**32], np.int64))


def test_wrong_arguments_of_an_object_are_refused():
    with pytest.raises(UsageError, match="key has 31 bytes; it must have 32"):
        _native.verify_object(bytes(100), bytes(31))
    with pytest.raises(TypeError):
        _native.verify_object("text", bytes(32))
    with pytest.raises(ValueError, match="not C-contiguous"):
        _native.verify_object(np.zeros((8, 8), np.uint8)[:, ::2], bytes(32))


def test_native_constants_are_those_of_the_protocol():
    assert (Result.DONE, Result.WRONG) == (0, 2)
    assert len(model.trailer(b"", bytes(32))) == TRAILER_BYTES
