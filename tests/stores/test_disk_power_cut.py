"""DiskStore and power cuts: writes behind the last flush are lost, in part and out of order.

Each image must be free of wrong blocks without the help of the trailer: a record never outlives its
data, and a reused slot is never found under its old key.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.stores.disk import committer
from tests.stores.disk_medium import (
    keys_of,
    load,
    opened,
    save,
    small_blocks,
    small_store,
)
from tests.stores.disk_volumes import Event, RecordingVolume, write_image

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = 400 if os.environ.get("AIOKV_DEEP") else 20
NUMBERS = 120


async def use(path: Path, rng: random.Random, *, slots: int, fsync_seconds: float) -> list[Event]:
    """Save, load and remove at random; return the operations."""
    volume = RecordingVolume(path)
    blocks = small_blocks()
    store = small_store(path, slots=slots, volume=volume, fsync_seconds=fsync_seconds)
    async with opened(store, blocks):
        number = 0
        while number < NUMBERS:
            batch = list(range(number, number + rng.randint(1, 6)))
            number = batch[-1] + 1
            results = await save(store, blocks, batch)
            saved = [n for n, result in zip(batch, results, strict=True) if result == 0]
            volume.note(("saved", saved))
            earlier = [rng.randrange(number) for _ in range(3)]
            await store.load(
                keys_of(sorted(set(earlier))), np.arange(len(set(earlier)), dtype=np.int32)
            )
            if rng.random() < (0.3 if slots < NUMBERS else 0.9):
                volume.note(("remove", earlier))
                await store.remove(keys_of(sorted(set(earlier))))
    return volume.events


async def check_image(path: Path, slots: int, must_have: set[int]) -> set[int]:
    """Recover an image, twice; return the numbers that it has."""
    blocks = small_blocks()
    present: set[int] = set()
    for attempt in range(2):
        async with opened(small_store(path, slots=slots), blocks) as store:
            again = set(await load(store, blocks, range(NUMBERS + 8)))
            # The save between the two may have evicted a block.
            assert attempt == 0 or again <= present, "the second recovery found other blocks"
            present = again
            assert must_have <= present, f"lost {sorted(must_have - present)}"
            await save(store, blocks, [10**6 + attempt])
    return present


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("slots", "fsync_seconds"), [(24, 0.0), (24, 1e9), (400, 0.0), (24, 0.001)]
)
async def test_power_cut_leaves_no_wrong_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, fsync_seconds: float
) -> None:
    monkeypatch.setattr(committer, "MIN_RECORDS", 60)
    rng = random.Random(slots + int(fsync_seconds > 0))
    events = await use(tmp_path / "kv", rng, slots=slots, fsync_seconds=fsync_seconds)
    assert sum(event.kind == "rename" for event in events) > 1, "no journal was replaced"
    found = 0
    for image in range(IMAGES):
        count = rng.randint(0, len(events))
        path = tmp_path / f"image{image}"
        write_image(events, count, rng, path)
        saved: set[int] = set()
        for event in events[:count]:
            if event.kind == "note":
                what, numbers = event.note
                saved = saved | set(numbers) if what == "saved" else saved - set(numbers)
        durable = saved if fsync_seconds == 0 and slots > NUMBERS + 8 else set()
        found += len(await check_image(path, slots, durable))
    assert found > 0
