"""FastDeploy's own ``ResourceManagerV1`` over the connector, with random requests.

Runs where ``FASTDEPLOY_TREE`` names a tree of FastDeploy's source, and Paddle is installed.
"""

from __future__ import annotations

import os
import random
from itertools import count
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests.connectors.fastdeploy_server import BLOCK

TREE = os.environ.get("FASTDEPLOY_TREE")
if TREE is None:
    pytest.skip("FASTDEPLOY_TREE names no tree of FastDeploy", allow_module_level=True)
pytest.importorskip("paddle")

from tests.connectors.fastdeploy_tree import Drive, fd_config, import_tree  # noqa: E402

PORTS = count(20_000 + os.getpid() % 10_000)


@pytest.fixture(scope="module", autouse=True)
def tree(tmp_path_factory):
    resource_tracker.ensure_running()  # of FastDeploy's shared memory, for the whole process
    import_tree(Path(TREE), tmp_path_factory.mktemp("tree"))


def random_requests(drive: Drive, chance: random.Random, num: int, *, images: bool) -> list[str]:
    shared = [[chance.randrange(900) for _ in range(40)] for _ in range(3)]
    names = []
    for number in range(num):
        prefix = chance.choice(shared)[: chance.choice((4, 12, 40))]
        prompt = prefix + [chance.randrange(900) for _ in range(chance.randrange(1, 9))]
        found = []
        if images and chance.random() < 0.6 and len(prompt) > 12:
            offset = chance.choice((2, 5, 8))
            found = [(offset, chance.choice((3, 4)), chance.randrange(3))]
        names.append(f"r{number}")
        drive.add(names[-1], prompt, chance.randrange(1, 48), found)
    return names


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize(
    ("ranks", "drafts", "images"),
    [(1, 0, False), (2, 0, False), (1, 1, False), (1, 0, True)],
    ids=["text", "two_ranks", "mtp", "images"],
)
def test_random_requests_read_no_wrong_kv(monkeypatch, tmp_path, policy, ranks, drafts, images):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    seed = int(os.environ.get("FASTDEPLOY_SEED", "1"))
    chance = random.Random(f"{seed} {policy} {ranks} {drafts} {images}")
    seats = 12
    config = fd_config(
        34, 80, seats=seats, policy=policy, drafts=drafts, images=images, port=next(PORTS),
        ranks=ranks,
    )  # fmt: skip
    drive = Drive(config, seats, ranks, chance)
    try:
        for turn in range(int(os.environ.get("FASTDEPLOY_TURNS", "3"))):
            drive.requests.clear()
            names = random_requests(drive, chance, 16, images=images)
            for name in names:
                if chance.random() < 0.1:
                    drive.abort(name)
            drive.run()
            drive.check_outputs()
            drive.ended.clear()
            drive.aborted.clear()
            assert turn == 0 or drive.cached_tokens
        assert drive.preemptions
        print(f"{drive.read_positions} positions read, {drive.preemptions} preemptions")
    finally:
        drive.close()


def test_requests_hit_what_an_earlier_server_has_stored(monkeypatch, tmp_path):
    """``--kvcache-storage-backend file``, as FastDeploy calls the connector."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", str(tmp_path / "store"))
    cached = []
    for _ in range(2):
        config = fd_config(
            40, 80, seats=4, policy="write_through", drafts=0, images=False, port=next(PORTS),
            storage="file",
        )  # fmt: skip
        drive = Drive(config, 4, 1, random.Random(7))
        try:
            drive.add("a", list(range(10 * BLOCK + 1)), 3)
            drive.run()
            drive.check_outputs()
            cached.append(drive.cached_tokens)
        finally:
            drive.close()
    assert cached == [0, 10 * BLOCK]
