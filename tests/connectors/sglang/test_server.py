"""A whole SGLang server gives the same outputs for loaded and for computed prompts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROMPTS, CACHED = 3, 160  # prompts per round, and tokens in the full pages of a prompt

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("sglang", "torch")),
        reason="SGLang is not installed; run `make test-sglang`",
    ),
    pytest.mark.timeout(1200),  # importing SGLang takes a minute on a busy machine
]


def served(
    directory: Path, layout: str, store: str, *rounds: str, model: str = "llama"
) -> dict[str, Any]:
    """Serve rounds of prompts in a separate server process."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.connectors.sglang.server"]
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.run(
            [*program, str(directory), model, layout, store, *rounds],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, timeout=560, check=False,
        )  # fmt: skip
    assert process.returncode == 0, log.read_text()[-4000:]
    answers: dict[str, Any] = json.loads((directory / "answers.json").read_text())
    return answers


def cached(answers: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [answer["cached"] for answer in answers]


def outputs(answers: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    return [(answer["tokens"], answer["logprobs"]) for answer in answers]


def assert_computed_equally(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Compare outputs of prefills of different lengths, which have different rounding errors."""
    for one, other in zip(answers, others, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


def test_flushed_and_restarted_servers_load_equal_pages_from_disk(tmp_path):
    store = f"disk:{tmp_path}/store/{{rank}}?bytes=64MiB"
    rounds = ("computed", "again", "half", "changed", "flushed", "half_again")
    first = served(tmp_path, "page_first", store, *rounds)
    assert cached(first["again"]) == [{"device": CACHED, "host": 0, "storage": 0}] * PROMPTS
    assert cached(first["flushed"]) == [{"device": 0, "host": 0, "storage": CACHED}] * PROMPTS
    assert outputs(first["flushed"]) == outputs(first["again"])  # to the last bit
    # Attention over all pages is the same in any order of them, over the first half it is not.
    assert (
        cached(first["half_again"]) == [{"device": CACHED // 2, "host": 0, "storage": 0}] * PROMPTS
    )
    assert outputs(first["half_again"]) == outputs(first["half"])
    assert_computed_equally(first["flushed"], first["computed"])
    for answer, changed in zip(first["computed"], first["changed"], strict=True):
        assert answer["logprobs"] != pytest.approx(changed["logprobs"], abs=0.01)
    # SGLang ends its scheduler with SIGKILL: the next server recovers the store.
    second = served(tmp_path, "page_first", store, "again")
    assert cached(second["again"]) == [{"device": 0, "host": 0, "storage": CACHED}] * PROMPTS
    assert outputs(second["again"]) == outputs(first["again"])


def test_damaged_pages_are_computed_again(tmp_path):
    rounds = ("computed", "again", "flushed", "damaged")
    answers = served(tmp_path, "layer_first", f"directory:{tmp_path}/store", *rounds)
    assert cached(answers["flushed"]) == [{"device": 0, "host": 0, "storage": CACHED}] * PROMPTS
    assert outputs(answers["flushed"]) == outputs(answers["again"])
    found = [answer["cached"]["storage"] for answer in answers["damaged"]]
    assert 0 <= sum(found) < PROMPTS * CACHED
    assert_computed_equally(answers["damaged"], answers["computed"])


def test_windows_are_loaded_beside_the_pages_of_full_attention(tmp_path):
    store = f"directory:{tmp_path}/store"
    rounds = ("computed", "again", "changed", "flushed", "wrong")
    first = served(tmp_path, "page_first", store, *rounds, model="gemma4")
    assert cached(first["again"]) == [{"device": CACHED, "host": 0, "storage": 0}] * PROMPTS
    assert cached(first["flushed"]) == [{"device": 0, "host": 0, "storage": CACHED}] * PROMPTS
    assert outputs(first["flushed"]) == outputs(first["again"])  # to the last bit
    assert_computed_equally(first["flushed"], first["computed"])
    for answer, changed in zip(first["computed"], first["changed"], strict=True):
        assert answer["logprobs"] != pytest.approx(changed["logprobs"], abs=0.01)
    assert cached(first["wrong"]) == cached(first["flushed"])
    for answer, wrong in zip(first["flushed"], first["wrong"], strict=True):
        assert answer["logprobs"] != pytest.approx(wrong["logprobs"], abs=0.01)
    # SGLang ends its scheduler with SIGKILL.
    second = served(tmp_path, "page_first", store, "again", "damaged", model="gemma4")
    assert cached(second["again"]) == [{"device": 0, "host": 0, "storage": CACHED}] * PROMPTS
    assert outputs(second["again"]) == outputs(first["again"])
    assert sum(each["storage"] for each in cached(second["damaged"])) < PROMPTS * CACHED
    assert_computed_equally(second["damaged"], first["computed"])
