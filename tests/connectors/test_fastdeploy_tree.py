"""FastDeploy's own ``ResourceManagerV1`` over the connector, with random requests.

Runs where ``FASTDEPLOY_TREE`` names a tree of FastDeploy's source, and Paddle is installed.
"""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest

from aiokv.connectors.fastdeploy import blocks, handovers
from aiokv.connectors.fastdeploy.metrics import PUBLISH_CALLS
from aiokv.testing import ScriptedDevice
from tests.connectors.fastdeploy_server import BLOCK, next_token
from tests.connectors.fastdeploy_source import PORTS, tree  # noqa: F401
from tests.connectors.fastdeploy_tree import Drive, Roles, fd_config

pytestmark = pytest.mark.usefixtures("tree")


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
@pytest.mark.parametrize("shares_in_batch", [False, True], ids=["", "in_batch"])
@pytest.mark.parametrize(
    ("ranks", "drafts", "images"),
    [(1, 0, False), (2, 0, False), (1, 1, False), (1, 0, True)],
    ids=["text", "two_ranks", "mtp", "images"],
)
def test_random_requests_read_no_wrong_kv(
    monkeypatch, tmp_path, policy, ranks, drafts, images, shares_in_batch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    seed = int(os.environ.get("FASTDEPLOY_SEED", "1"))
    chance = random.Random(f"{seed} {policy} {ranks} {drafts} {images}")
    seats = 12
    config = fd_config(
        34, 80, seats=seats, policy=policy, drafts=drafts, images=images, port=next(PORTS),
        ranks=ranks,
    )  # fmt: skip
    drive = Drive(config, seats, ranks, chance, shares_in_batch=shares_in_batch)
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


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("shares_in_batch", [False, True], ids=["", "in_batch"])
def test_requests_that_wait_for_room_read_no_wrong_kv(
    monkeypatch, tmp_path, policy, shares_in_batch
):
    """FastDeploy reserves blocks for the tokens that running requests will generate."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FD_USE_NEW_TOKEN_RATIO_RESERVE", "1")
    monkeypatch.setenv("FD_INIT_NEW_TOKEN_RATIO", "0.2")
    found = []

    def match_again(self, request, match_again=blocks.RequestBlocks._match_again):
        holding = match_again(self, request)
        found.append(holding is not None)
        return holding

    monkeypatch.setattr(blocks.RequestBlocks, "_match_again", match_again)
    seed = int(os.environ.get("FASTDEPLOY_SEED", "1"))
    chance = random.Random(f"{seed} {policy} {shares_in_batch}")
    config = fd_config(
        60, 80, seats=12, policy=policy, drafts=0, images=False, port=next(PORTS)
    )  # fmt: skip
    drive = Drive(config, 12, 1, chance, shares_in_batch=shares_in_batch)
    try:
        for _ in range(3):
            drive.requests.clear()
            for name in random_requests(drive, chance, 24, images=False):
                if chance.random() < 0.1:
                    drive.abort(name)
            drive.run()
            drive.check_outputs()
            drive.ended.clear()
            drive.aborted.clear()
        assert drive.cached_tokens
        assert sum(found) > 10
    finally:
        drive.close()


def test_requests_whose_onloads_fail_are_computed_again(monkeypatch, tmp_path):
    """Half of the onloads fail, in another layer of each worker; no worker gets an exception."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    devices = []

    def device() -> ScriptedDevice:
        devices.append(ScriptedDevice())
        for copy in range(0, 400, 2):
            devices[-1].fail("onload", copy=copy, layer=len(devices) - 1, block=copy // 2 % 2)
        return devices[-1]

    chance = random.Random(os.environ.get("FASTDEPLOY_SEED", "1"))
    config = fd_config(
        34, 80, seats=12, policy="write_through", drafts=0, images=False, port=next(PORTS), ranks=2,
    )  # fmt: skip
    drive = Drive(config, 12, 2, chance, device)
    try:
        for _ in range(3):
            drive.requests.clear()
            random_requests(drive, chance, 16, images=False)
            drive.run()
            drive.check_outputs()
            drive.ended.clear()
        counts = drive.manager.cache_manager.engine.cache_statistics()
        assert counts.failed_blocks > 10
        assert counts.attention.onloaded_blocks > 10
        for _ in range(PUBLISH_CALLS):
            drive.schedule()
        gauges = drive.metrics()
        assert gauges["cpu_hit_token_rate"] > 0
        assert gauges.items() <= drive.manager.cache_manager.metrics.as_gauges().items()
        print(f"{drive.read_positions} positions read, {counts.failed_blocks} blocks failed")
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


def test_requests_of_one_batch_share_the_prefix_that_the_first_computes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    computed = {}
    for kind in ("aiokv", "own", "off"):
        config = fd_config(
            900, 0, seats=48, policy="write_through", drafts=0, images=False, port=next(PORTS),
            batch_tokens=2_048, max_tokens=1_024,
        )  # fmt: skip
        drive = Drive(
            config, 48, 1, random.Random(1), shares_in_batch=kind == "aiokv", is_own=kind == "own"
        )
        try:
            for number in range(48):
                drive.add(f"r{number}", [*range(800), *(number * 100 + i for i in range(33))], 2)
            drive.run_in_lockstep()
            drive.check_outputs()
            computed[kind] = drive.computed_tokens
        finally:
            drive.close()
    assert computed["aiokv"] <= computed["own"] == 800 + 48 * 33
    assert computed["off"] > computed["own"]


@pytest.mark.parametrize("blocks", [200, 60, 34])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_compute_no_more_than_with_fastdeploys_own_manager(
    monkeypatch, tmp_path, seed, blocks
):
    """With 60 and 34 blocks, requests are preempted, and cached blocks are evicted."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    computed = []
    for is_own in (False, True):
        config = fd_config(
            blocks, 0, seats=12, policy="write_through", drafts=0, images=False,
            port=next(PORTS),
        )  # fmt: skip
        chance = random.Random(seed)
        drive = Drive(config, 12, 1, chance, shares_in_batch=True, is_own=is_own)
        try:
            for _ in range(3):
                drive.requests.clear()
                random_requests(drive, chance, 16, images=False)
                drive.run_in_lockstep()
                drive.ended.clear()
            computed.append(drive.computed_tokens)
        finally:
            drive.close()
    assert computed[0] <= computed[1]


@pytest.mark.parametrize("lost", [0.0, 0.2])
@pytest.mark.parametrize("host_blocks", [0, 80])
def test_prefill_and_decode_servers_read_no_wrong_kv(monkeypatch, tmp_path, host_blocks, lost):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FD_DECODE_PREALLOC_BLOCK_TIMEOUT", "500")
    clock = SimpleNamespace(now=1.0)
    for module in (blocks, handovers):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    chance = random.Random(f"{os.environ.get('FASTDEPLOY_SEED', '1')} {host_blocks} {lost}")
    drives = []
    for role in ("prefill", "decode"):
        config = fd_config(
            60, host_blocks, seats=12, policy="write_through", drafts=0, images=False,
            port=next(PORTS), role=role,
        )  # fmt: skip
        drives.append(Drive(config, 12, 1, chance))
    prefill, decode = drives
    roles = Roles(prefill, decode, chance, lost)

    def expire() -> None:
        if roles.lost_requests & set(decode.manager.requests):
            ours = {name for name in decode.manager.requests if name not in roles.lost_requests}
            if not any(not decode.requests[name].output_token_ids for name in ours):
                clock.now += 501.0

    try:
        for number in range(60):
            shared = list(range(chance.choice((4, 12, 40))))
            own = [chance.randrange(900) for _ in range(chance.randrange(1, 9))]
            roles.add(f"r{number}", shared + own, chance.randrange(1, 40))
        aborted = {f"r{chance.randrange(60)}" for _ in range(5)}
        for name in aborted:
            decode.abort(name)
        roles.run(expire)
        for name in list(roles.lost_requests):
            output = SimpleNamespace(request_id=name)
            clock.now += 501.0
            decode.schedule()
            decode.manager.add_prefilled_request(output)  # too late
        assert not decode.manager.requests
        assert bool(decode.errors) == (lost > 0.0)
        assert bool(roles.lost_requests) == (lost > 0.0)
        for name, request in decode.requests.items():
            tokens = list(roles.prompts[name])
            for output_token in request.output_token_ids:
                assert output_token == next_token(tokens), name
                tokens.append(output_token)
        assert prefill.cached_tokens
        for drive in drives:
            engine = drive.manager.cache_manager.engine
            assert engine.call(engine.cache.check_invariants) == []
    finally:
        for drive in drives:
            drive.close()
