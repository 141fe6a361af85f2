"""Purges of stores without an engine, labels in keys, and purges that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aiokv import cli
from aiokv._native import SlotTable
from aiokv.stores.base import KEY_BYTES, Result
from aiokv.stores.disk import store as disk_module
from aiokv.stores.labels import KINDS, MAX_LABELS, label, usage
from tests.stores.conformance import Blocks, keys_of
from tests.stores.test_inspection import directory_store, disk_store, opened


def labelled(number: int, model: str, version: str, salt: str) -> bytes:
    hashed = keys_of([number])[: KINDS["model"].start]
    return hashed + label("model", model) + label("version", version) + label("salt", salt)


KEYS = [
    labelled(10 * i + j, model, version, salt)
    for i, (model, version) in enumerate([("m1", "v1"), ("m1", "v2"), ("m2", "v1")])
    for j, salt in enumerate(["a", "a", "b"])
]


@pytest.fixture(params=["disk", "directory"])
def path(request, tmp_path):
    """A store with two blocks of the salt a and one of b, for each of three fingerprints."""
    return request.param, tmp_path / "kv"


async def fill(path):
    kind, folder = path
    store = disk_store(folder) if kind == "disk" else directory_store(folder)
    async with opened(store, Blocks()):
        saved = await store.save(b"".join(KEYS), np.arange(len(KEYS), dtype=np.int32))
        assert saved.tolist() == [Result.DONE] * len(KEYS)
        return store.statistics().labels


async def found(path):
    kind, folder = path
    store = disk_store(folder) if kind == "disk" else directory_store(folder)
    async with opened(store, Blocks()):
        return (await store.lookup(b"".join(KEYS))).tolist()


@pytest.fixture
def run():
    return asyncio.run


def test_purge_by_path_and_by_url_removes_the_salt_of_all_models(path, run, tmp_path, capsys):
    run(fill(path))
    kind, folder = path
    result = tmp_path / "result.json"
    assert cli.main(["store", "purge", str(folder), "--salt", "a", "--json", str(result)]) == 0
    assert "blocks removed: 6\n" in capsys.readouterr().out
    assert json.loads(result.read_bytes())["removed_blocks"] == 6
    assert run(found(path)) == [False, False, True] * 3
    assert cli.main(["store", "purge", f"{kind}:{folder}", "--salt", "b"]) == 0
    assert run(found(path)) == [False] * 9


def test_purge_of_a_disk_store_in_use_is_refused(run, tmp_path, capsys):
    async def purge() -> int:
        async with opened(disk_store(tmp_path / "kv"), Blocks()):
            command = ["store", "purge", str(tmp_path / "kv"), "--salt", "a"]
            return await asyncio.to_thread(cli.main, command)

    assert run(purge()) == 2
    assert "process" in capsys.readouterr().err


def test_ls_counts_the_blocks_of_each_label_and_shows_given_names(path, run, capsys):
    run(fill(path))
    names = ["--salt", "a", "--model", "m1", "--weights-version", "v2"]
    assert cli.main(["store", "ls", str(path[1]), *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = ["salt 'a': 6", "model 'm1': 6", "version 'v2': 3"]
    expected += [f"salt {label('salt', 'b').hex()}: 3", f"model {label('model', 'm2').hex()}: 3"]
    assert set(expected) <= set(lines)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--model", "m1"], [False] * 6 + [True] * 3),
        (["--weights-version", "v1"], [False] * 3 + [True] * 3 + [False] * 3),
        (["--model", "m1", "--weights-version", "v1"], [False] * 3 + [True] * 6),
        (["--model", "m1", "--older-than", "1d"], [True] * 9),
        (["--model", "another"], [True] * 9),
    ],
)
def test_gc_removes_blocks_that_meet_all_conditions(path, run, options, kept):
    run(fill(path))
    assert cli.main(["store", "gc", str(path[1]), *options]) == 0
    assert run(found(path)) == kept


def test_disk_statistics_count_labels_also_after_a_restart_and_a_removal(run, tmp_path):
    path = ("disk", tmp_path / "kv")
    expected = {f"salt:{label('salt', 'a').hex()}": 6, f"salt:{label('salt', 'b').hex()}": 3}
    assert expected.items() <= run(fill(path)).items()

    async def after_restart():
        store = disk_store(path[1])
        async with opened(store, Blocks()):
            before = store.statistics().labels
            assert await store.purge(label("salt", "a")) == 6
            return before, store.statistics().labels

    before, after = run(after_restart())
    assert expected.items() <= before.items()
    assert after[f"salt:{label('salt', 'b').hex()}"] == 3
    assert sum(blocks for name, blocks in after.items() if name.startswith("salt:")) == 3


def test_smaller_labels_are_summed_up():
    counts = {bytes([i]): 100 - i for i in range(MAX_LABELS + 5)}
    blocks = usage({"salt": counts}, sum(counts.values()) + 7)
    assert len(blocks) == MAX_LABELS + 1
    assert blocks["salt:other"] == sum(100 - i for i in range(MAX_LABELS, MAX_LABELS + 5)) + 7


def test_number_of_counted_labels_is_limited_and_large_ones_stay():
    """A count costs time and memory per label, and a store may have more salts than blocks fit."""
    table = SlotTable(30_000)
    table.grow(30_000)
    keys = [KEY_BYTES * b"a"] * 100 + [number.to_bytes(KEY_BYTES) for number in range(20_000)]
    distinct = b"".join(number.to_bytes(4) + key[4:] for number, key in enumerate(keys))
    table.commit(distinct, table.reserve(len(keys)), 0)
    counts = table.label_counts(1 << 20)["salt"]
    assert counts[b"a" * 5] == 100
    assert len(counts) <= 4_096
    assert sum(usage(table.label_counts(MAX_LABELS), table.stored).values()) == 3 * table.stored
    table.remove(distinct)
    assert table.label_counts(1) == {"model": {}, "version": {}, "salt": {}}


def purge_and_die(path: str, removals: int) -> None:
    """Purge a salt in a process that is killed after some removals."""

    async def purge() -> None:
        disk_module._KEYS_PER_PASS = 1
        store = disk_store(Path(path))
        remove, left = store.remove, [removals]

        async def remove_or_die(keys: bytes):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return await remove(keys)

        store.remove = remove_or_die
        await store.open(Blocks().memory)
        await store.purge(label("salt", "a"))

    asyncio.run(purge())


@pytest.mark.parametrize("removals", [0, 1, 3, 5])
def test_purge_that_was_killed_is_completed_by_the_next_one(run, tmp_path, removals):
    path = ("disk", tmp_path / "kv")
    run(fill(path))
    call = f"purge_and_die({str(path[1])!r}, {removals})"
    code = f"from tests.stores.test_purging import purge_and_die; {call}"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    partly = run(found(path))
    assert partly[2::3] == [True] * 3
    assert sum(partly) == 9 - removals, "what was removed stays removed"

    async def purge_again() -> int:
        store = disk_store(path[1])
        async with opened(store, Blocks()):
            return await store.purge(label("salt", "a"))

    assert run(purge_again()) == 6 - removals
    assert run(found(path)) == [False, False, True] * 3


def test_purge_of_an_open_disk_store_removes_blocks_of_other_layouts_and_groups(run, tmp_path):
    """The layout of another model, and a group that the present model does not have."""
    large = Blocks(payload_bytes=150_000)

    async def with_blocks(blocks, keys, group=None):
        store = disk_store(tmp_path / "kv")
        store = store if group is None else store.for_group(group)
        async with opened(store, blocks):
            await store.save(b"".join(keys), np.arange(len(keys), dtype=np.int32))

    async def find(blocks, keys, group=None):
        store = disk_store(tmp_path / "kv")
        store = store if group is None else store.for_group(group)
        async with opened(store, blocks):
            return (await store.lookup(b"".join(keys))).tolist()

    async def purge() -> int:
        store = disk_store(tmp_path / "kv")
        async with opened(store, Blocks()):
            return await store.purge(label("salt", "a"))

    run(with_blocks(Blocks(), KEYS[:3]))
    run(with_blocks(large, KEYS[3:6]))
    run(with_blocks(large, KEYS[6:], "state"))
    assert run(purge()) == 6
    assert run(find(Blocks(), KEYS[:3])) == [False, False, True]
    assert run(find(large, KEYS[3:6])) == [False, False, True]
    assert run(find(large, KEYS[6:], "state")) == [False, False, True]


def test_labels_have_fixed_places_and_values():
    """They name what is on disks: a change makes all stored blocks missing."""
    assert label("salt", "").hex() == "d7f7ecc2fd"
    assert label("salt", "tenant").hex() == "d83d590f46"
    assert label("model", "m").hex() == "4b499d"
    assert label("version", "1").hex() == "f6d1ae"
    assert max(place.stop for place in KINDS.values()) == KEY_BYTES
