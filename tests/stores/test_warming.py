"""``aiokv store hot`` and ``warm``: blocks of one server are copied to another one."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import cli
from aiokv._native import seal_blocks
from aiokv.stores import HostStore
from aiokv.stores.base import split_keys
from aiokv.stores.redis import RedisStore
from tests.stores.conformance import DONE, MISSING, PRESENT, Blocks, ids, keys_of
from tests.stores.host_server import HostServer
from tests.stores.servers_redis import RedisServer, needs_server, running_server
from tests.stores.test_host import PITCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from aiokv.stores.base import Store

pytestmark = needs_server


@contextmanager
def host(folder: Path, slots: int = 64) -> Iterator[HostServer]:
    folder.mkdir(0o700)
    server = HostServer(folder, f"{slots * PITCH}")
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Site:
    """A shared server, and the host services of two servers."""

    def __init__(self, redis: RedisServer, first: HostServer, second: HostServer) -> None:
        self.redis, self.first, self.second = redis, first, second

    def save(self, numbers: Iterable[int], url: str, payload_bytes: int = 9_984) -> None:
        """Save blocks to a store, as an engine does."""
        numbers = list(numbers)

        async def save(store: Store, blocks: Blocks) -> None:
            keys, memory = keys_of(numbers), blocks.memory
            blocks.array[: len(numbers)] = np.array(numbers, np.uint8)[:, None]
            at = ids(*range(len(numbers)))
            seal_blocks(
                memory.address, memory.pitch_bytes, memory.payload_bytes, at, keys,
                num_blocks=memory.num_blocks,
            )  # fmt: skip
            assert set((await store.save(keys, at)).tolist()) <= {DONE, PRESENT}

        self._with(url, save, payload_bytes)

    def load(self, numbers: Iterable[int], url: str, payload_bytes: int = 9_984) -> list[int]:
        """Load blocks from a host service; return those that it has, after their verification."""
        numbers, found = list(numbers), []

        async def load(store: Store, blocks: Blocks) -> None:
            results = await store.load(keys_of(numbers), ids(*range(len(numbers))))
            assert set(results.tolist()) <= {DONE, MISSING}
            for block in np.flatnonzero(results == DONE):
                assert (blocks.array[block, :payload_bytes] == numbers[block]).all()
                found.append(numbers[block])

        self._with(url, load, payload_bytes)
        return found

    @staticmethod
    def _with(url, operation, payload_bytes) -> None:
        async def run() -> None:
            kind = RedisStore if url.startswith("redis") else HostStore
            blocks = Blocks(payload_bytes=payload_bytes)
            store = kind.from_url(url)
            await store.open(blocks.memory)
            try:
                await operation(store, blocks)
            finally:
                await store.aclose()

        asyncio.run(run())


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("warm")
    with ExitStack() as stack:
        yield Site(
            stack.enter_context(running_server(folder / "redis")),
            stack.enter_context(host(folder / "1")),
            stack.enter_context(host(folder / "2", 4)),
        )


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run the command; return its standard output."""
    capsys.readouterr()
    assert cli.main([str(part) for part in argv]) == 0
    return capsys.readouterr().out


def test_hot_blocks_of_a_server_are_copied_to_another_one(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.save([1, 2, 3, 4], site.first.url)
    site.save([5], site.first.url, payload_bytes=5_000)
    assert site.load([1], site.first.url) == [1]  # now the hottest
    listed = run(capsys, "store", "hot", site.first.url)
    keys = [key.hex() for key in split_keys(keys_of([1, 4, 3, 2, 5]))]
    assert [line.split() for line in listed.splitlines()] == [
        *([key, "9984"] for key in keys[:4]),
        [keys[4], "5000"],
    ]
    assert run(capsys, "store", "hot", site.first.url, "--blocks", 2).count("9984") == 2

    site.save([1, 2, 3], site.redis.url)
    site.save([5], site.redis.url, payload_bytes=5_000)
    name = f"aiokv:{keys[2]}"
    site.redis.command("SETRANGE", name, 77, b"wrong")  # block 3
    path, result = tmp_path / "hot", tmp_path / "result.json"
    path.write_text(listed)
    warm = ["store", "warm", site.second.url, "--source", site.redis.url, "--list", path]
    run(capsys, *warm, "--json", result)
    counts = {"copied_blocks": 3, "present_blocks": 0, "missing_blocks": 2, "refused_blocks": 0}
    assert json.loads(result.read_text()) == counts
    assert site.load([1, 2, 3, 4], site.second.url) == [1, 2]
    assert site.load([5], site.second.url, payload_bytes=5_000) == [5]
    out = run(capsys, *warm)
    assert "copied blocks: 0\npresent blocks: 3\nmissing blocks: 2" in out


def test_the_hottest_blocks_stay_when_not_all_fit(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.save(range(6), site.first.url)
    site.save(range(6), site.redis.url)
    listed = run(capsys, "store", "hot", site.first.url)
    monkeypatch.setattr("sys.stdin", io.StringIO(listed))
    monkeypatch.setattr("aiokv.stores.warming._STAGING_BYTES", 2 * PITCH)  # parts of two blocks
    out = run(capsys, "store", "warm", site.second.url, "--source", site.redis.url)
    assert "copied blocks: 6" in out
    assert site.load(range(6), site.second.url) == [2, 3, 4, 5]


@pytest.mark.parametrize("line", ["", "00 9984", f"{'0' * 64} x", f"{'0' * 64} -1", "x y"])
def test_a_line_that_names_no_block_is_refused(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hot"
    path.write_text(f"{'0' * 64} 9984\n{line}\n")
    target = f"host://{tmp_path}/host.sock"
    warm = ["store", "warm", target, "--source", "redis://127.0.0.1:1", "--list", str(path)]
    assert cli.main(warm) == 2
    assert f"the line {line!r} is not the key" in capsys.readouterr().err


def test_a_source_with_bundles_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hot"
    path.write_text(f"{'0' * 64} 9984\n")
    target = f"host://{tmp_path}/host.sock"
    warm = ["store", "warm", target, "--source", "s3://bucket/kv", "--list", str(path)]
    assert cli.main(warm) == 2
    assert "are in bundles" in capsys.readouterr().err
