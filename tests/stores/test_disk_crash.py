"""DiskStore and ``kill -9``: what was acknowledged is there, and nothing is wrong."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import random
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.stores import disk_child
from tests.stores.disk_medium import keys_of, load, opened, small_blocks, small_store

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = int(os.environ.get("AIOKV_CRASH_ROUNDS", 300 if os.environ.get("AIOKV_DEEP") else 15))
ROUND_NUMBERS = 10_000


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    """Start the process that forks the others; it has imported all modules, and stays."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.stores.disk_child"])
    multiprocessing.forkserver.ensure_running()


class Killed:
    """Reports of a killed process, over several rounds.

    Attributes:
        saved: numbers that were acknowledged.
        uncertain: numbers whose removal had begun.
        tried: all numbers that may be stored.
    """

    def __init__(self) -> None:
        self.saved: set[int] = set()
        self.uncertain: set[int] = set()
        self.removed: set[int] = set()
        self.highest = 0

    def note(self, kind: str, numbers: list[int]) -> None:
        self.highest = max(self.highest, *numbers, 0)
        if kind == "save":
            self.saved |= set(numbers)
        elif kind == "remove":
            self.saved -= set(numbers)
            self.uncertain |= set(numbers)
        elif kind == "removed":
            self.removed |= set(numbers)


def run_and_kill(path: Path, slots: int, first: int, rng: random.Random, killed: Killed) -> None:
    """Let a process use the store, and kill it between its first and its n-th message."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=disk_child.run, args=(str(path), slots, first, rng.randrange(10**6), sender)
    )
    process.start()
    sender.close()
    messages = rng.randint(0, 60)
    deadline = None
    try:
        while True:
            if messages == 0 and deadline is None:
                deadline = time.monotonic() + rng.random() * 0.005
            if deadline is not None and time.monotonic() >= deadline:
                break
            if receiver.poll(None if deadline is None else max(0, deadline - time.monotonic())):
                killed.note(*receiver.recv())
                messages = max(0, messages - 1)
        process.kill()
        while True:  # messages before the kill
            killed.note(*receiver.recv())
    except (EOFError, OSError):
        pass
    finally:
        process.kill()
        process.join()
        receiver.close()
        exitcode = process.exitcode
        process.close()
    assert exitcode == -9, f"the process ended by itself: {exitcode}"


@pytest.mark.asyncio
@pytest.mark.timeout(900)
async def test_killed_process_loses_no_acknowledged_block(tmp_path: Path) -> None:
    rng = random.Random(1)
    slots = 60 * disk_child.BATCH * disk_child.SAVERS * ROUNDS
    killed = Killed()
    blocks = small_blocks()
    for number in range(ROUNDS):
        first = number * ROUND_NUMBERS
        run_and_kill(tmp_path / "kv", slots, first, rng, killed)
        async with opened(small_store(tmp_path / "kv", slots=slots), blocks) as store:
            saved, removed = sorted(killed.saved), sorted(killed.removed)
            found = await store.lookup(keys_of(saved))
            assert found.all(), f"round {number} lost {np.array(saved)[~found]}"
            assert not (await store.lookup(keys_of(removed))).any()
            # Also what was written and not acknowledged is whole.
            earlier = rng.sample(saved, min(200, len(saved)))
            await load(store, blocks, [*earlier, *range(first, killed.highest + 100)])
            details = store.statistics().details
            assert details["damaged_records"] == details["unproven_records"] == 0
    assert len(killed.saved) > ROUNDS


@pytest.mark.asyncio
@pytest.mark.timeout(900)
async def test_killed_process_that_evicts_leaves_no_wrong_block(tmp_path: Path) -> None:
    rng = random.Random(2)
    killed = Killed()
    blocks = small_blocks()
    evicted = 0
    for number in range(ROUNDS):
        first = number * ROUND_NUMBERS
        run_and_kill(tmp_path / "kv", 64, first, rng, killed)
        async with opened(small_store(tmp_path / "kv", slots=64), blocks) as store:
            present = await load(store, blocks, range(max(0, first - 400), killed.highest + 100))
            evicted += len(killed.saved) - len(present)
            assert not set(present) & killed.removed
            assert store.statistics().blocks <= 64
    assert evicted > 0
