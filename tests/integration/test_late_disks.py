"""Disks that fail while an engine starts: it uses them when they work, and finds their blocks."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.stores import DirectoryStore, DiskStore, StoreUse, opening
from aiokv.stores.disk.volume import Volume
from aiokv.testing import ScriptedDevice
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import Cache, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from aiokv.stores import Store

pytestmark = pytest.mark.asyncio

A = prompt(1, 4)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the attempts to open a store follow one another at once."""
    monkeypatch.setattr(opening, "FIRST_PAUSE_SECONDS", 0.0)


def disk(path: Path, volume: Volume | None = None) -> DiskStore:
    return DiskStore(path, bytes="1MiB", min_free_bytes=0, volume=volume)


def cache(store: Store) -> Cache:
    patient = StoreUse(
        store, deadline_seconds=PATIENCE_SECONDS, lookup_deadline_seconds=PATIENCE_SECONDS
    )
    return Cache(device=ScriptedDevice(), stores=[patient])


def failure_of(c: Cache) -> str:
    """Return the reason why the store is not open; the health of the engine has its URL."""
    (store,) = c.engine.statistics().stores
    assert c.engine.health().unavailable_stores == [store.url]
    return store.failure


async def until_open(c: Cache) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while c.engine.health().unavailable_stores:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def check_hit(store: Store) -> None:
    """Check that another engine finds the prompt in a store, with the same bytes."""
    async with cache(store) as c:
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 16
        lease.release()


@pytest.mark.parametrize("kind", [disk, DirectoryStore])
async def test_path_that_appears_later_is_used(tmp_path, kind: Callable[[Path], Any]):
    (tmp_path / "mount").write_text("a file where the folder should be")
    async with cache(kind(tmp_path / "mount")) as c:
        assert "mount" in failure_of(c)
        (tmp_path / "mount").unlink()
        await until_open(c)
        await c.fill(A)
    await check_hit(kind(tmp_path / "mount"))


class SickVolume(Volume):
    """A volume whose directory cannot be read while ``is_sick``."""

    is_sick = True

    def names(self) -> list[str]:
        if self.is_sick:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().names()


async def test_disk_with_input_output_errors_is_used_when_it_works(tmp_path):
    async with cache(disk(tmp_path / "kv")) as c:
        await c.fill(A)
    volume = SickVolume(tmp_path / "kv")
    async with cache(disk(tmp_path / "kv", volume)) as c:
        assert "Input/output error" in failure_of(c)
        volume.is_sick = False
        await until_open(c)
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 16
        lease.release()


@contextmanager
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 16 MiB; skip the test where that is not allowed."""
    image, mount = tmp_path / "image", tmp_path / "mounted"
    mount.mkdir()
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a file system needs root and mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(16 << 20)
    commands = (
        ["mkfs.ext4", "-q", "-F", str(image)],
        ["mount", "-o", "loop", str(image), str(mount)],
    )
    for command in commands:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            pytest.skip(f"a file system cannot be mounted here: {ended.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


async def test_full_file_system_is_used_when_it_has_space(tmp_path):
    with small_file_system(tmp_path) as mount:
        with (mount / "others").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4_096)):
                pass
        async with cache(disk(mount / "kv")) as c:
            assert "No space left" in failure_of(c)
            (mount / "others").unlink()
            await until_open(c)
            await c.fill(A)
        await check_hit(disk(mount / "kv"))


async def test_disk_of_another_block_size_starts_empty_and_finds_the_first_again(tmp_path):
    async def serve(block_tokens: int) -> int:
        """Return the hit of an engine with empty memory."""
        regions = Regions(num_layers=1)
        regions.add("kv", layers=[np.zeros((16, block_tokens, 32), np.float32)])
        config = CacheConfig(
            block_tokens=block_tokens, device_blocks=16, host_blocks=16, model="tests"
        )
        store = StoreUse(disk(tmp_path / "kv"), lookup_deadline_seconds=PATIENCE_SECONDS)
        engine = CacheEngine(config, regions, stores=[store])
        async with engine, engine.match(A) as lease:
            await lease.allocate(len(A), wait_store=math.inf)
            lease.commit(len(A))
            engine.step()
            return lease.cached_tokens

    assert [await serve(n) for n in (4, 8, 4, 8)] == [0, 0, 16, 16]
