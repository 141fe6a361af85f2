"""``aiokv store`` on the files of an engine: right, damaged, and after the engine went on."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest
import uvloop

from aiokv import cli
from aiokv.layout.host_block import STORE_ALIGNMENT_BYTES, aligned
from aiokv.stores import DirectoryStore, StoreUse
from aiokv.stores.disk import DiskStore
from aiokv.stores.disk.layout import segment_name
from aiokv.testing import ScriptedDevice, run_until_idle
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt
from tests.harness.recurrence import Hybrid
from tests.stores.test_inspection import flip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

    from aiokv.stores import Store

BLOCKS: Final = 4
A, B = prompt(1, BLOCKS), prompt(2, BLOCKS)


def disk_store(path: Path) -> Store:
    return DiskStore(path, bytes="1MiB", min_free_bytes=0)


def wrong_bytes_are_gone(cache: Cache, path: Path, flipped: Path) -> bool:
    if flipped.parent == path:  # a segment
        return cache.engine.statistics().stores[0].store.quarantined_blocks == 1
    return not flipped.exists()


def serve(
    path: Path, make: Callable[[Path], Store], *others: np.ndarray, flipped: Path | None = None
) -> int:
    """Serve A, then others, with a new engine; compare all cached bytes with the prefixes.

    Args:
        path: folder of the store.
        make: returns the store of a folder.
        others: further prompts.
        flipped: a file with one wrong block, which the engine must remove.

    Returns:
        Blocks of A that were cached.
    """

    async def run() -> int:
        store = StoreUse(make(path), deadline_seconds=60.0, lookup_deadline_seconds=60.0)
        sizes = {"device_blocks": 16, "host_blocks": 16}
        async with Cache(device=ScriptedDevice(), stores=[store], **sizes) as cache:
            lease = cache.engine.match(A)
            await lease.allocate(len(A), wait_store=math.inf)
            await lease.layers.wait_all()
            cache.check(lease, A)
            cached = lease.cached_tokens // BLOCK_TOKENS
            if flipped is not None:
                await run_until_idle(lambda: wrong_bytes_are_gone(cache, path, flipped))
                # A second load may find the block before it is removed.
                assert cache.engine.statistics().stores[0].wrong_blocks in (1, 2)
            cache.compute(lease, A)
            lease.release()
            for tokens in others:
                (await cache.serve(tokens, wait_store=math.inf)).release()
            return cached

    return uvloop.run(run())


def aiokv_store(action: str, path: Path, status: int) -> dict[str, Any]:
    """Run ``aiokv store ACTION`` and return its result."""
    result = path.with_name("result.json")
    assert cli.main(["store", action, str(path), "--json", str(result)]) == status
    return json.loads(result.read_text())


@pytest.mark.parametrize("make", [disk_store, DirectoryStore])
def test_blocks_of_an_engine_are_listed_and_verified_and_damaged_ones_computed_again(
    tmp_path: Path, make: Callable[[Path], Store], capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    assert serve(saved, make) == 0
    listing = aiokv_store("ls", saved, 0)
    assert listing["blocks"] == BLOCKS
    object_bytes = listing["block_bytes"] // listing["blocks"]
    slot_bytes = aligned(object_bytes, STORE_ALIGNMENT_BYTES)
    verified = aiokv_store("verify", saved, 0)
    assert (verified["blocks"], verified["bad"]) == (BLOCKS, [])

    hits = []
    for number in range(BLOCKS):
        path = tmp_path / f"kv{number}"
        shutil.copytree(saved, path)
        segment = path / segment_name(0)
        if segment.exists():
            flipped, offset = segment, number * slot_bytes
        else:
            flipped, offset = sorted(path.glob("??/*"))[number], 0
        flip(flipped, offset + number * (object_bytes - 1) // (BLOCKS - 1))
        (bad,) = aiokv_store("verify", path, 1)["bad"]
        assert bad["file"] == str(flipped.relative_to(path))
        assert bad.get("slot") == number if flipped == segment else bad["key"] == flipped.name
        assert f"key {bad['key']}: " in capsys.readouterr().out
        hits.append(serve(path, make, B, A, flipped=flipped))
        verified = aiokv_store("verify", path, 0)
        assert (verified["blocks"], verified["bad"]) == (2 * BLOCKS, [])
        assert aiokv_store("ls", path, 0)["quarantined_blocks"] == (flipped == segment)
        assert serve(path, make) == BLOCKS
    assert sorted(hits) == list(range(BLOCKS))


def test_snapshots_of_recurrent_state_are_listed_verified_and_cleaned_up(tmp_path: Path) -> None:
    path, tokens = tmp_path / "kv", [5, 6, 7, 8, 9, 10, 11]

    async def serve_hybrid() -> int:
        sizes = {"state_slots": 4, "host_state_slots": 4, "host_blocks": 32}
        async with Hybrid(stores=[disk_store(path)], **sizes) as model:
            return await model.serve(tokens, wait_store=math.inf)

    assert uvloop.run(serve_hybrid()) == 0
    listing = aiokv_store("ls", path, 0)
    assert [group["name"] for group in listing["groups"]] == [
        "segment-00000",
        "host_state/segment-00000",
    ]
    assert (listing["blocks"], listing["path"]) == (3 + 1, str(path))
    assert listing["disk_bytes"] > sum(group["disk_bytes"] for group in listing["groups"])
    verified = aiokv_store("verify", path, 0)
    assert (verified["blocks"], verified["bad"]) == (4, [])

    flip(path / "host_state" / segment_name(0), 3)
    (bad,) = aiokv_store("verify", path, 1)["bad"]
    assert (bad["file"], bad["slot"]) == ("host_state/segment-00000", 0)
    result = tmp_path / "result.json"
    assert cli.main(["store", "gc", str(path), "--verify", "--json", str(result)]) == 0
    cleaned = json.loads(result.read_text())
    assert (cleaned["bad_blocks"], cleaned["kept_blocks"]) == (1, 3)
    assert uvloop.run(serve_hybrid()) == 0, "blocks without a snapshot"
    assert uvloop.run(serve_hybrid()) == 6
