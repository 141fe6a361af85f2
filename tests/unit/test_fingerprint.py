"""Fingerprints: each ingredient changes every key, and nothing else does."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aiokv import WindowGroup, _native
from aiokv.base.groups import ATTENTION
from aiokv.errors import ConfigError, LayoutError, UsageError
from aiokv.layout.regions import Regions
from aiokv.stores.identity import StoreIdentity
from aiokv.stores.labels import label

TOKENS = np.arange(160, dtype=np.int32)


def regions_of(
    *,
    num_layers=2,
    names=("k", "v"),
    dtype="f2",
    width=8,
    shape=None,
    blocks=4,
    state=None,
    dtypes=None,
) -> Regions:
    regions = Regions(num_layers=num_layers)
    for name in names:
        layers = [np.zeros((blocks, *(shape or (width,))), dtype) for _ in range(num_layers)]
        regions.add(name, layers=layers, dtypes=dtypes and [dtypes] * num_layers)
    if state is not None:
        regions.add_state("ssm", layers=[np.zeros((3, 4), state)] * num_layers)
    return regions


def options(**changes):
    return {
        "model": "model",
        "weights_version": "1",
        "block_tokens": 16,
        "rank": 0,
        "num_ranks": 2,
    } | changes


def describe(regions, *, group=ATTENTION, **options) -> str:
    return StoreIdentity(**options).describe(regions, group)


def fingerprint(regions, *, group=ATTENTION, **options) -> bytes:
    return StoreIdentity(**options).fingerprint(regions, group)


def keys_of(regions=None, context="", **changes) -> set[bytes]:
    regions = regions_of() if regions is None else regions
    chosen = options(**changes)
    root = _native.root_digest(chosen["block_tokens"], context)
    digests = _native.block_digests(root, TOKENS, chosen["block_tokens"])
    keys = _native.derive_keys(fingerprint(regions, **chosen), digests)
    return {keys[i : i + 32] for i in range(0, len(keys), 32)}


@pytest.mark.parametrize(
    "change",
    [
        {"context": "3:abc"},
        {"context": "0:adapter"},
        {"model": "model2"},
        {"model": "Model"},
        {"weights_version": "2"},
        {"weights_version": ""},
        {"model": "model1", "weights_version": ""},
        {"block_tokens": 8},
        {"rank": 1},
        {"num_ranks": 3},
        {"windows": {"local": WindowGroup(window_tokens=8, device_blocks=4)}},
        {"regions": regions_of(num_layers=3)},
        {"regions": regions_of(num_layers=1, width=16)},
        {"regions": regions_of(names=("k", "w"))},
        {"regions": regions_of(names=("v", "k"))},
        {"regions": regions_of(names=("k",))},
        {"regions": regions_of(names=("k", "v", "scale"))},
        {"regions": regions_of(dtype="i2")},
        {"regions": regions_of(dtype=">f2")},
        {"regions": regions_of(dtype="f4", width=4)},
        {"regions": regions_of(dtypes="bfloat16")},
        {"regions": regions_of(width=9)},
        {"regions": regions_of(shape=(2, 4))},
        {"regions": regions_of(shape=(4, 2))},
        {"regions": regions_of(state="f4")},
    ],
    ids=lambda change: " ".join(change),
)
def test_each_ingredient_changes_every_key(change):
    assert len(keys_of()) == 10
    assert not keys_of() & keys_of(**change)


def test_windows_and_state_change_every_key():
    def window(window_tokens=8, sink_tokens=0, name="local"):
        group = WindowGroup(window_tokens=window_tokens, sink_tokens=sink_tokens, device_blocks=4)
        return {name: group}

    variants = [
        window(),
        window(9),
        window(8, 1),
        window(name="other"),
        window() | window(name="b"),
    ]
    keys = [keys_of(windows=windows) for windows in variants]
    keys += [keys_of(regions_of(state=dtype)) for dtype in ("f4", "f8", "i4")]
    assert len(set().union(*keys)) == 10 * len(keys)


def test_addresses_and_numbers_of_blocks_do_not_count():
    wide = Regions(num_layers=2)
    for name in ("k", "v"):
        wide.add(name, layers=[np.zeros((9, 2, 8), "f2")[:, 0] for _ in range(2)])
    assert keys_of(wide) == keys_of(regions_of(blocks=7)) == keys_of()
    assert keys_of(regions_of().without_tensors()) == keys_of()
    few = {"local": WindowGroup(window_tokens=8, device_blocks=4)}
    many = {"local": WindowGroup(window_tokens=8, device_blocks=40, step_tokens=3)}
    assert keys_of(windows=few) == keys_of(windows=many)


def test_order_of_the_axes_of_a_block_changes_every_key():
    tokens_first, heads_first = regions_of(shape=(16, 2, 4)), regions_of(shape=(2, 16, 4))
    assert not keys_of(tokens_first) & keys_of(heads_first)
    rows = Regions(num_layers=2)
    for name in ("k", "v"):
        layers = [np.zeros((4 * 16, 2, 4), "f2") for _ in range(2)]
        rows.add(name, layers=layers, rows_per_block=16)
    assert keys_of(rows) == keys_of(tokens_first)


def test_fingerprint_is_the_hash_of_the_documented_text():
    text = describe(regions_of(names=("k",), state="f4"), **options(weights_version="é"))
    assert text == (
        "aiokv blocks 2\n"
        'model 5 "model"\n'
        'weights 2 "é"\n'
        "block_tokens 16\n"
        "rank 0 of 2\n"
        "layers 2\n"
        'layer 0 region 1 "k" dtype 7 "float16" shape 8 bytes 16 at 0\n'
        'layer 1 region 1 "k" dtype 7 "float16" shape 8 bytes 16 at 64\n'
        'layer 0 state 3 "ssm" dtype 7 "float32" shape 4 bytes 16\n'
        'layer 1 state 3 "ssm" dtype 7 "float32" shape 4 bytes 16\n'
    )
    labels = label("model", "model") + label("version", "é")
    expected = hashlib.sha256(text.encode()).digest()[:26] + labels
    actual = fingerprint(regions_of(names=("k",), state="f4"), **options(weights_version="é"))
    assert actual == expected


def regions_with(**options) -> Regions:
    regions = Regions(num_layers=1)
    regions.add("k", layers=[np.zeros((4, 16, 16), "f2")], **options)
    return regions


def test_axes_and_heads_change_every_key_where_they_are_given():
    """Tokens and heads may have one length: the shape alone does not tell their order."""
    choices = [
        {},
        {"axes": ("tokens", "heads")},
        {"axes": ("heads", "tokens")},
        {"axes": ("heads", "tokens"), "heads": (0, 16)},
        {"axes": ("heads", "tokens"), "heads": (0, 32)},
    ]
    keys = [keys_of(regions_with(**options)) for options in choices]
    assert len(set.union(*keys)) == sum(map(len, keys))
    line = describe(regions_with(**choices[4]), **options()).splitlines()[-1]
    assert line.endswith('shape 16x16 bytes 512 axes 5 "heads" 6 "tokens" heads 0 of 32 at 0')


def test_pool_and_layout_of_its_slots_change_every_key():
    def state(*shapes):
        regions = regions_of()
        for number, shape in enumerate(shapes):
            regions.add_state(f"s{number}", layers=[np.zeros((3, *shape), "f4")] * 2)
        return regions

    blocks = keys_of(state((4,)))
    snapshots = [
        keys_of(state(*shapes), group="state") for shapes in ([(4,)], [(5,)], [(4,), (4,)])
    ]
    assert len(blocks.union(*snapshots)) == 10 * (1 + len(snapshots))
    text = describe(state((4,), (20,)), **options(group="state"))
    assert text.endswith(
        'pool 10 "host_state"\n'
        'layer 0 slot 2 "s0" dtype 7 "float32" shape 4 bytes 16 at 0\n'
        'layer 0 slot 2 "s1" dtype 7 "float32" shape 20 bytes 80 at 64\n'
        'layer 1 slot 2 "s0" dtype 7 "float32" shape 4 bytes 16 at 192\n'
        'layer 1 slot 2 "s1" dtype 7 "float32" shape 20 bytes 80 at 256\n'
    )


def test_names_cannot_imitate_other_lines():
    joined = keys_of(model='a"\nweights 1 "b', weights_version="c")
    assert not joined & keys_of(model="a", weights_version='b"\nweights 1 "c')


def test_keys_are_equal_in_a_process_with_another_hash_seed():
    script = (
        "from tests.unit.test_fingerprint import *;"
        "print(*sorted(key.hex() for key in keys_of(windows={"
        "name: WindowGroup(window_tokens=8, device_blocks=4) for name in {'a', 'b', 'c'}})))"
    )
    groups = {name: WindowGroup(window_tokens=8, device_blocks=4) for name in "cab"}
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert output.stdout.split() == sorted(key.hex() for key in keys_of(windows=groups))


def test_element_types_of_other_libraries_have_their_plain_name():
    class Tensor:
        def __init__(self, name):
            self.array = np.zeros((4, 8), "u2")
            self.__array_interface__ = self.array.__array_interface__
            self.dtype = type("dtype", (), {"__str__": lambda _: name})()

    for name in ("torch.bfloat16", "paddle.bfloat16", "bfloat16"):
        regions = Regions(num_layers=1)
        regions.add("k", layers=[Tensor(name)])
        assert regions.layer_pieces(0)[0].dtype == "bfloat16"


def test_tensors_without_dtype_have_the_name_of_their_interface():
    interface = SimpleNamespace(__array_interface__=np.zeros((4, 8), "V2").__array_interface__)
    regions = Regions(num_layers=1)
    regions.add("k", layers=[interface])
    assert regions.layer_pieces(0)[0].dtype == "|V2"


@pytest.mark.parametrize("dtypes", ["u", ["bfloat16"], ["a", "b", "c"]])
def test_wrong_number_of_dtypes_is_refused(dtypes):
    regions = Regions(num_layers=2)
    with pytest.raises(LayoutError, match=r"region 'k': dtypes is .* for 2 tensors"):
        regions.add("k", layers=[np.zeros((4, 8), "u1")] * 2, dtypes=dtypes)
    assert regions.names == ()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": ""}, ConfigError, "model is empty; with stores it must name the model"),
        ({"model": None}, UsageError, "model is None; it must be a str"),
        ({"model": "\ud800"}, UsageError, "not valid Unicode"),
        ({"weights_version": 3}, UsageError, "weights_version is 3; it must be a str"),
        ({"block_tokens": 0}, ConfigError, "block_tokens is 0; it must be at least 1"),
        ({"rank": 2}, ConfigError, "rank is 2; it must be between 0 and 1"),
        ({"rank": -1}, ConfigError, "rank is -1; it must be between 0 and 1"),
        ({"num_ranks": 0}, ConfigError, "num_ranks is 0; it must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        fingerprint(regions_of(), **options(**change))
