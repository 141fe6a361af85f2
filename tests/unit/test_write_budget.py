"""WriteBudget: which blocks a store with limited writes gets."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import ConfigError
from aiokv.stores import StoreUse, stores_from
from aiokv.stores.base import Result
from aiokv.stores.proof import Proof, derive_keys
from aiokv.stores.write_budget import WriteBudget
from aiokv.testing import ScriptedStore, running_clock, spin
from tests.stores.conformance import eventually
from tests.unit.store_memory import Arena, digests
from tests.unit.test_store_set import FINGERPRINT, Stores

if TYPE_CHECKING:
    from pathlib import Path

HOUR = 3_600.0
DAY = 24 * HOUR
PITCH_BYTES = Arena().memory.pitch_bytes
DONE, REFUSED, FAILED = int(Result.DONE), int(Result.REFUSED), int(Result.FAILED)


def keys_of(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(b"%d" % number).digest() for number in numbers)


def test_no_day_has_more_bytes_than_the_budget_and_one_block():
    rng = np.random.default_rng(7)
    budget = WriteBudget([(10_000, DAY)])
    now, writes = 0.0, []
    for _ in range(4_000):
        now += float(rng.choice((1.0, 60.0, 600.0, 20_000.0), p=(0.5, 0.3, 0.19, 0.01)))
        offered = rng.choice(5_000, 8, replace=False).tolist()
        writes += [now] * int(budget.admit(keys_of(*offered), 16, now).sum())
    times = np.array(writes)
    per_day = np.searchsorted(times, times + DAY) - np.arange(len(times))
    assert 16 * per_day.max() <= 10_000 + 16
    assert 16 * len(times) > 0.6 * 10_000 * (now / DAY)  # and hardly less, because there is demand


def test_the_mean_of_a_minute_is_limited_too():
    budget = WriteBudget([(60_000, 60.0), (1_000_000, DAY)])
    written = sum(int(budget.admit(keys_of(i), 100, i * 0.01).sum()) for i in range(6_000))
    assert 30_000 < 100 * written <= 60_000


def test_an_eighth_of_the_budget_is_left_to_blocks_that_are_offered_again():
    budget = WriteBudget([(800, DAY)])
    assert budget.admit(keys_of(*range(10)), 10, 0.0).all()
    admitted = budget.admit(keys_of(*range(10, 80)), 10, 0.0)
    assert admitted.tolist() == [True] * 60 + [False] * 10
    assert budget.left == 1 / 8
    assert budget.admit(keys_of(75, 100, 76), 10, 0.0).tolist() == [True, False, True]
    assert budget.admit(keys_of(*range(70, 75), *range(77, 80), 100), 10, 0.0).sum() == 8
    assert budget.left == 0
    assert not budget.admit(keys_of(100), 10, 0.0).any()


def test_what_one_part_of_a_day_leaves_is_there_for_another():
    budget = WriteBudget([(1_000, DAY)])
    hour, day = 3_600.0, []
    for now in np.arange(0.0, 3 * DAY, hour):
        offered = 200 if now % DAY < 8 * hour else 0  # blocks, in working hours only
        keys = keys_of(*(int(now) * 1_000 + i for i in range(offered)))
        day.append(int(budget.admit(keys, 1, now).sum()) if offered else 0)
    assert sum(day[24:48]) >= 0.87 * 1_000  # the rest is left to blocks that are offered again
    assert sum(day[48:]) == sum(day[24:48])


def test_bytes_that_were_not_written_are_given_back_to_the_part_of_their_admission():
    budget, half_hour = WriteBudget([(100, DAY)]), DAY / 48
    assert budget.admit(keys_of(*range(50)), 1, 0.0).all()
    assert budget.admit(keys_of(*range(50, 60)), 1, 1.5 * half_hour).all()
    budget.refund(50, 0.0)
    assert budget.left == 0.9
    budget.admit(b"", 1, DAY + 1.2 * half_hour)
    assert budget.left == 0.9, "the ten bytes were written within 24 hours"
    budget.admit(b"", 1, DAY + 2.2 * half_hour)
    assert budget.left == 1.0
    budget.refund(10, 0.0)
    assert budget.left == 1.0


@pytest.mark.asyncio
async def test_offers_and_the_rest_of_the_day_survive_a_restart(tmp_path: Path):
    path, now = tmp_path / "kv" / "admission", 1e9
    budget = WriteBudget([(1 << 30, DAY)], path, lambda: now)
    await budget.open()
    assert budget.admit(keys_of(*range(94)), 10_000_000, 0.0).all()
    left = budget.left
    assert 0 < left < 1 / 8
    assert not budget.admit(keys_of(200), 10_000_000, 0.0)[0]
    await budget.aclose()
    now += DAY / 2
    restarted = WriteBudget([(1 << 30, DAY)], path, lambda: now)
    await restarted.open()
    assert restarted.left == pytest.approx(left, abs=0.001)
    assert restarted.admit(keys_of(200, 201), 10_000_000, 0.0).tolist() == [True, False]
    await restarted.aclose()
    now += DAY / 2 + 1_800
    later = WriteBudget([(1 << 30, DAY)], path, lambda: now)
    await later.open()
    assert later.left == pytest.approx(1 - 10_000_000 / (1 << 30), abs=0.001)
    now -= 2 * DAY  # the clock of the system was set back
    later.admit(keys_of(1), 10_000_000, 0.0)
    await later.aclose()
    now += DAY
    await (back := WriteBudget([(1 << 30, DAY)], path, lambda: now)).open()
    assert back.left <= 1.0


@pytest.mark.asyncio
async def test_a_crash_costs_a_part_of_the_budget_and_never_adds_to_it(tmp_path: Path):
    path, now = tmp_path / "admission", 1e9
    killed = WriteBudget([(1 << 30, DAY)], path, lambda: now)
    await killed.open()
    for number in range(20):
        killed.admit(keys_of(number), 1_000_000, 0.0)
        await asyncio.sleep(0)

    async def is_written() -> bool:
        return path.exists()

    await eventually(is_written)  # what follows finds no aclose
    restarted = WriteBudget([(1 << 30, DAY)], path, lambda: now)
    await restarted.open()
    assert 0 < restarted.left < killed.left
    await killed.aclose()  # the write of the file may not have ended


@pytest.mark.asyncio
async def test_the_new_file_and_its_name_are_written_to_the_medium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, synced = tmp_path / "admission", []

    def fsync(fd: int) -> None:
        synced.append(("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file", path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    budget = WriteBudget([(8_000_000, DAY)], path)
    budget.admit(keys_of(1), 100, 0.0)
    await budget.aclose()
    assert synced == [("file", False), ("folder", True)]


@pytest.mark.asyncio
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "folder"])
async def test_a_damaged_file_counts_as_a_budget_that_is_spent(tmp_path: Path, damage: str):
    path = tmp_path / "admission"
    budget = WriteBudget([(8_000_000, DAY)], path, lambda: 1e9)
    await budget.open()
    budget.admit(keys_of(1), 100, 0.0)
    await budget.aclose()
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes({"flipped": bytes(data), "cut": bytes(data[:30]), "empty": b""}[damage])
    again = WriteBudget([(8_000_000, DAY)], path, lambda: 1e9)
    await again.open()
    assert again.left == 0
    assert not again.admit(keys_of(2), 100, 0.0)[0]
    await again.aclose()  # writes a good file, if it can


@pytest.mark.asyncio
@pytest.mark.clock
async def test_a_refused_block_is_offered_again_and_other_stores_are_not_asked_again():
    disk, other = ScriptedStore("disk"), ScriptedStore("other")
    async with Stores(StoreUse(disk, write_bytes_per_day=4 * PITCH_BYTES), other) as s:
        assert await s.save(0, 1, 2, 3) == [DONE] * 4  # the whole budget
        assert await s.save(4, 5) == [REFUSED] * 2
        assert len(other.objects) == 6
        assert await s.save(4, 5) == [REFUSED] * 2
        assert (disk.calls["save"], other.calls["save"]) == (1, 2)
        (guard, _) = s.set.statistics()
        assert (guard.refused_blocks, guard.write_budget_left) == (4, 0.0)
        s.set.costs[0].writes.refund(4 * PITCH_BYTES, asyncio.get_running_loop().time())
        assert await s.save(4, 5) == [DONE] * 2
        assert len(disk.objects) == 6
        assert await s.lookup(4, 5) == 2


@pytest.mark.asyncio
@pytest.mark.clock
async def test_failed_and_present_blocks_cost_no_budget():
    disk = ScriptedStore("disk", keeps_objects=True)
    async with Stores(StoreUse(disk, write_bytes_per_day=4 * PITCH_BYTES)) as s:
        disk.objects[derive_keys(FINGERPRINT, digests([1]))] = b""
        assert await s.save(1) == [DONE]
        disk.fail("save")
        await s.save(2)
        (guard,) = s.set.statistics()
        assert guard.write_budget_left == 1.0


@pytest.mark.asyncio
@pytest.mark.clock
async def test_save_that_ends_before_its_write_costs_no_budget(monkeypatch: pytest.MonkeyPatch):
    disk = ScriptedStore("disk")
    sealing = asyncio.Event()

    async def seal(*arguments: object) -> None:
        sealing.set()
        await asyncio.Future()

    monkeypatch.setattr("aiokv.stores.proof.Proof.seal", seal)
    async with Stores(StoreUse(disk, write_bytes_per_day=4 * PITCH_BYTES)) as s:
        save = asyncio.create_task(s.save(1, 2))
        await sealing.wait()
        assert s.set.statistics()[0].write_budget_left == 0.5
        save.cancel()
        await asyncio.wait({save})
        assert save.cancelled()
        assert s.set.statistics()[0].write_budget_left == 1.0


@pytest.mark.asyncio
@pytest.mark.clock
async def test_failed_save_is_refunded_to_the_time_of_its_admission(
    monkeypatch: pytest.MonkeyPatch,
):
    disk, clock, seal = ScriptedStore("disk"), running_clock(), Proof.seal
    may_seal = asyncio.Event()

    async def seal_late(*arguments: Any) -> None:
        await may_seal.wait()
        await seal(*arguments)

    async with Stores(StoreUse(disk, write_bytes_per_day=4 * PITCH_BYTES)) as s:
        with monkeypatch.context() as patch:
            patch.setattr(Proof, "seal", seal_late)
            late = asyncio.create_task(s.save(1, 2))
            await spin(2)
        await clock.advance(0.75 * HOUR)  # the next part of the day has begun
        assert await s.save(3) == [DONE]
        disk.fail("save", call=1)
        may_seal.set()
        assert await late == [FAILED] * 2
        await clock.advance(23.8 * HOUR)  # what the first part has written counts no more
        assert await s.save(4, 5, 6, 7) == [DONE] * 3 + [REFUSED]


@pytest.mark.parametrize("now", [0.1 + i * 0.1 for i in range(20)])
def test_a_refund_at_the_time_of_the_first_admission_is_whole(now: float):
    budget = WriteBudget([(100, DAY)])
    assert budget.admit(keys_of(1), 10, 65_000.0 + now).all()
    budget.refund(10, 65_000.0 + now)
    assert budget.left == 1.0


def test_limits_come_from_a_url():
    (use,) = stores_from(
        ["disk:/nvme/kv?bytes=1GiB&write_bytes_per_day=1TB&write_bytes_per_second=200MB"]
    )
    assert use.write_limits() == [(10**12, DAY), (60 * 200 * 10**6, 60.0)]


def test_a_limit_must_be_a_positive_size():
    with pytest.raises(ConfigError, match="size is 0; it must be a positive number of bytes"):
        StoreUse(ScriptedStore(), write_bytes_per_day=0)
