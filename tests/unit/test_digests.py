"""Digests and keys of blocks: their definition, and what they depend on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv import _native
from aiokv.errors import UsageError
from tests.models import digests as model

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "digests.json").read_text())
IMPLEMENTATIONS = pytest.mark.parametrize("portable", [False, True], ids=["fastest", "portable"])


def split(digests: bytes) -> list[str]:
    return [digests[i : i + 32].hex() for i in range(0, len(digests), 32)]


def as_items(rows):
    return [(bytes.fromhex(content), offset, length) for content, offset, length in rows]


@IMPLEMENTATIONS
@pytest.mark.parametrize("vector", VECTORS["prompts"], ids=lambda v: v["context"] or "no context")
def test_digests_are_those_of_the_vectors(vector, portable):
    root = _native.root_digest(vector["block_tokens"], vector["context"])
    assert root.hex() == vector["root"]
    found = _native.block_digests(
        root,
        np.array(vector["tokens"], np.int32),
        vector["block_tokens"],
        as_items(vector["items"]),
        portable=portable,
    )
    assert split(found) == vector["digests"]


@IMPLEMENTATIONS
def test_keys_are_those_of_the_vectors(portable):
    for vector in VECTORS["keys"]:
        fingerprint, digest = bytes.fromhex(vector["fingerprint"]), bytes.fromhex(vector["digest"])
        keys = _native.derive_keys(fingerprint, digest * 2, portable=portable)
        assert keys.hex() == vector["key"] * 2


def test_vectors_are_those_of_the_model():
    assert model.vectors() == VECTORS


@IMPLEMENTATIONS
@given(data=st.data())
def test_digests_are_those_of_hashlib(data, portable):
    block_tokens = data.draw(st.integers(1, 70))
    tokens = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200))
    context = data.draw(st.text(max_size=80))
    root = model.root_digest(block_tokens, context)
    assert _native.root_digest(block_tokens, context) == root
    digests = model.block_digests(root, tokens, block_tokens)
    found = _native.block_digests(root, np.array(tokens, np.int32), block_tokens, portable=portable)
    assert found == b"".join(digests)
    assert _native.derive_keys(root, found, portable=portable) == b"".join(
        model.derive_key(root, digest) for digest in digests
    )


def test_implementation_has_a_name():
    assert _native.sha256_implementation() in ("sha instructions", "portable")


# -- what a digest depends on ----------------------------------------------------------------

PROMPT = np.arange(64, dtype=np.int32)


def prompt_digests(
    tokens=PROMPT, block_tokens=16, context="3:usradapter", items=((b"image", 20, 8),)
) -> list[str]:
    root = _native.root_digest(block_tokens, context)
    return split(_native.block_digests(root, tokens, block_tokens, list(items)))


@pytest.mark.parametrize(
    "change",
    [
        {"context": "3:usxadapter"},
        {"context": "3:usradaptex"},
        {"context": "4:usradapter"},
        {"context": ""},
        {"block_tokens": 8},
        {"tokens": np.concatenate([[-1], PROMPT[1:]]).astype(np.int32)},
    ],
    ids=str,
)
def test_each_ingredient_changes_every_digest(change):
    assert not set(prompt_digests()) & set(prompt_digests(**change))


@pytest.mark.parametrize(
    "items",
    [
        [],
        [(b"imagf", 20, 8)],
        [(b"image", 21, 8)],
        [(b"image", 20, 9)],
        [(b"image", 20, 8), (b"image", 28, 1)],
    ],
    ids=str,
)
def test_items_change_the_digests_from_their_block_on(items):
    before, after = prompt_digests(), prompt_digests(items=items)
    assert before[0] == after[0]
    assert not set(before[1:]) & set(after[1:])


def test_changed_token_keeps_the_digests_of_earlier_blocks():
    tokens = PROMPT.copy()
    tokens[47] += 1
    before, after = prompt_digests(), prompt_digests(tokens=tokens)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, False]


def test_tokens_behind_the_last_whole_block_do_not_count():
    assert prompt_digests(tokens=PROMPT[:63]) == prompt_digests()[:3]


def test_digests_are_equal_in_a_process_with_another_hash_seed():
    script = (
        "import numpy as np; from tests.unit.test_digests import prompt_digests;"
        "print(*prompt_digests())"
    )
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert output.stdout.split() == prompt_digests()


# -- refused arguments -----------------------------------------------------------------------

ROOT = bytes(32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _native.root_digest(0, ""), "block_tokens is 0; it must be between 1 and"),
        (lambda: _native.root_digest(2**30, ""), "block_tokens is 1073741824; it must be"),
        (
            lambda: _native.block_digests(b"short", PROMPT, 16),
            "root has 5 bytes; it must have 32",
        ),
        (lambda: _native.block_digests(ROOT, PROMPT, -1), "block_tokens is -1"),
        (
            lambda: _native.block_digests(ROOT, PROMPT, 16, [(b"image", 60, 5)]),
            "ends behind the prompt of 64 positions",
        ),
        (lambda: _native.derive_keys(bytes(31), ROOT), "fingerprint has 31 bytes"),
        (
            lambda: _native.derive_keys(ROOT, bytes(65)),
            "digests has 65 bytes; it must be a multiple of 32",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_tokens_of_another_type_are_refused():
    with pytest.raises(TypeError):
        _native.block_digests(ROOT, PROMPT.astype(np.int64), 16)
