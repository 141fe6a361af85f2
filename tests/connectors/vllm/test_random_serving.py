"""Random loads: whatever happens to requests, they generate what the model generates alone."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.request import RequestStatus

from aiokv.connectors.vllm import compat, link, opening
from aiokv.connectors.vllm.arrivals import StepPace
from aiokv.connectors.vllm.cache import HostCache
from aiokv.connectors.vllm.retired import Ending, RetiredLeases
from aiokv.connectors.vllm.sources import EngineTransfers
from aiokv.sync import SyncEngine
from aiokv.worker.plan_table import PlanTable
from tests.connectors.vllm.configs import vllm_config
from tests.connectors.vllm.model import VOCABULARY, generate
from tests.connectors.vllm.runner import LAYOUTS, SHARED_LAYOUTS
from tests.connectors.vllm.server import Server
from tests.harness.flaky import ChaosDevice, FlakyDevice

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from aiokv.connectors.vllm.blocks import Idle

STEPS = 3_000 if os.environ.get("AIOKV_DEEP") else 400

# Host memory that evicts. With 64 device blocks, vLLM's own hit is never shorter than that of these
# host blocks, so nothing would be loaded: of 193 requests, 34 of 45 hits in host memory were equal.
SMALL_HOST: dict[str, Any] = {"host_blocks": 30, "device_blocks": 32}

MODES: dict[str, dict[str, Any]] = {
    "async loads": {},
    "async scheduling": {"async_scheduling": True},
    "layerwise": {"load": "layerwise"},
    "no prefix cache": {"prefix_caching": False},
    "no prefix cache, async scheduling": {"prefix_caching": False, "async_scheduling": True},
    "drafts": {"num_drafts": 3},
    "small host": SMALL_HOST,
    "small host, larger than the device": {"host_blocks": 100, "device_blocks": 32},
    "small host, async scheduling": {**SMALL_HOST, "async_scheduling": True},
    "small host, slow": {**SMALL_HOST, "slow": True},
    "small host, flaky": {**SMALL_HOST, "flaky": True},
    "small host, two ranks": {**SMALL_HOST, "num_ranks": 2},
    "selective": {"write_policy": "nth_use:2"},
    "layerwise, async scheduling": {"load": "layerwise", "async_scheduling": True},
    "flaky": {"flaky": True},
    "flaky, async scheduling": {"flaky": True, "load": "async", "async_scheduling": True},
    "flaky, layerwise": {"flaky": True, "load": "layerwise"},
    "flaky, failed requests": {"flaky": True, "failure_policy": "fail"},
    "slow": {"slow": True},
    "slow, async scheduling": {"slow": True, "load": "async", "async_scheduling": True},
    "slow, auto, async scheduling": {"slow": True, "fail_share": 0.0, "async_scheduling": True},
    "slow, layerwise": {"slow": True, "load": "layerwise"},
    "slow, layerwise, async scheduling": {
        "slow": True,
        "fail_share": 0.0,
        "load": "layerwise",
        "async_scheduling": True,
    },
    "slow, no prefix cache": {
        "slow": True,
        "fail_share": 0.0,
        "prefix_caching": False,
        "async_scheduling": True,
    },
    "sockets": {"in_process": False},
    "two ranks": {"num_ranks": 2},
    "two ranks, async scheduling": {"num_ranks": 2, "async_scheduling": True},
    "two stages": {"num_stages": 2},
    "two stages, async scheduling": {"num_stages": 2, "async_scheduling": True},
    "two ranks, layerwise": {"num_ranks": 2, "load": "layerwise"},
    "windows": {"kinds": ("full", "window", "window")},
    "windows, async scheduling": {
        "kinds": (
            "full",
            "window",
        ),
        "async_scheduling": True,
    },
    "windows, drafts": {
        "kinds": (
            "full",
            "window",
        ),
        "num_drafts": 3,
    },
    "windows, layerwise": {
        "kinds": (
            "full",
            "window",
        ),
        "load": "layerwise",
    },
    "windows, slow": {
        "kinds": (
            "full",
            "window",
        ),
        "slow": True,
        "fail_share": 0.0,
    },
    "windows, slow, async scheduling": {
        "kinds": (
            "full",
            "window",
        ),
        "slow": True,
        "fail_share": 0.0,
        "async_scheduling": True,
    },
    "windows, two ranks": {
        "kinds": (
            "full",
            "window",
        ),
        "num_ranks": 2,
    },
    "windows, no prefix cache": {
        "kinds": (
            "full",
            "window",
        ),
        "prefix_caching": False,
    },
    "windows only": {"kinds": ("window",)},
    "windows only, async scheduling": {"kinds": ("window",), "async_scheduling": True},
    "windows only, slow": {"kinds": ("window",), "slow": True, "fail_share": 0.0},
    "windows only, small host": {"kinds": ("window",), **SMALL_HOST},
    "windows only, sockets": {"kinds": ("window",), "in_process": False},
    "full and windows": {"kinds": ("full", "full", "window")},
}
STATE_MODES: dict[str, dict[str, Any]] = {
    "state": {"kinds": ("full", "state", "state")},
    "state, async scheduling": {
        "kinds": (
            "full",
            "state",
        ),
        "async_scheduling": True,
    },
    "state, slow": {
        "kinds": (
            "full",
            "state",
        ),
        "slow": True,
        "fail_share": 0.0,
    },
    "state, slow, async scheduling": {
        "kinds": (
            "full",
            "state",
        ),
        "slow": True,
        "fail_share": 0.0,
        "async_scheduling": True,
    },
    "state only": {"kinds": ("state",)},
    "all groups": {"kinds": ("full", "full", "window", "state")},
    "all groups, small host": {"kinds": ("full", "full", "window", "state"), **SMALL_HOST},
}
if compat.CAN_LOAD_STATES:
    MODES |= STATE_MODES
if compat.CAN_FAIL_REQUESTS:
    MODES |= {
        "all groups, flaky": {"kinds": ("full", "full", "window", "state"), "flaky": True},
        "windows only, flaky": {"kinds": ("window",), "flaky": True},
        "all groups, slow": {"kinds": ("full", "full", "window", "state"), "slow": True},
        "windows, flaky, failed requests": {
            "kinds": (
                "full",
                "window",
            ),
            "flaky": True,
            "failure_policy": "fail",
        },
    }
EXTRA = ("load", "write_policy", "in_process")


def use_device(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines in this process use a device for tests."""

    def make(config: Any, regions: Any, _: str, **options: Any) -> SyncEngine:
        return SyncEngine(config, regions, device, **options)

    monkeypatch.setattr(opening, "SyncEngine", make)


class Walk:
    """A server under a random load, and the generated tokens that are expected of it."""

    def __init__(self, seed: int, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        options = dict(mode)
        extra: dict[str, Any] = {key: options.pop(key) for key in EXTRA if key in options}
        host_blocks = options.pop("host_blocks", 400)
        extra["follow_resets"] = seed % 2 == 0
        self.kinds = options.get("kinds", ("full",))
        num_ranks = options.get("num_ranks", 1) * options.get("num_stages", 1)
        extra["cpu_bytes_to_use"] = host_blocks * 256 * len(self.kinds) * num_ranks
        self.chaos: ChaosDevice | None = None
        if options.pop("flaky", False):
            flaky = FlakyDevice(random.Random(seed), refuse_share=0.05, fail_share=0.2)
            use_device(flaky, monkeypatch)
        elif options.pop("slow", False):
            fail_share = options.pop("fail_share", 0.05)
            self.chaos = ChaosDevice(random.Random(seed), refuse_share=0.0, fail_share=fail_share)
            use_device(self.chaos, monkeypatch)
            monkeypatch.setattr(HostCache, "wait_idle", self._move_until)
            monkeypatch.setattr(
                link, "FRONT_SECONDS", 0.0
            )  # the request of a load behind another one waits
            # Steps wait for the end of a load whenever the load mode allows it.
            monkeypatch.setattr(StepPace, "step_seconds", property(lambda pace: 60.0))
            wait_layer, wait_all = EngineTransfers.wait_layer, EngineTransfers.wait_all

            def moved(load: EngineTransfers) -> bool:
                self.num_in_step += not load.is_done
                while not load.is_done:
                    self.chaos.move(1)
                return True

            monkeypatch.setattr(
                EngineTransfers,
                "wait_layer",
                lambda load, *args: moved(load) and wait_layer(load, *args),
            )
            monkeypatch.setattr(
                EngineTransfers,
                "wait_all",
                lambda load, *args: moved(load) and wait_all(load, *args),
            )
        num_blocks = options.pop("device_blocks", None) or self.rng.choice([32, 40, 64])
        num_blocks += sum({"full": 32, "window": 12, "state": 4}[kind] for kind in self.kinds[1:])
        config = vllm_config(extra=extra, num_blocks=num_blocks, **options)
        self.server = Server(
            config,
            self.rng,
            self.rng.choice(SHARED_LAYOUTS if self.kinds != ("full",) else LAYOUTS),
            num_drafts=options.get("num_drafts", 0),
            kinds=self.kinds,
        )
        self.num_step_waits = 0  # waits of loads for a step that writes to their blocks
        monkeypatch.setattr(HostCache, "wait_computed", self._compute_in_flight)
        self.expected: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.sessions: list[tuple[list[int], str | None, int]] = []
        self.num_waits = 0  # of steps for a copy
        self.num_in_step = 0  # waits of steps for one of their loads
        self.num_saved_again = 0  # retired leases whose blocks were copied before vLLM reused them
        take_ending = RetiredLeases.take_ending

        def counted(leases: RetiredLeases) -> list[Ending]:
            endings = take_ending(leases)
            self.num_saved_again += sum(ending.kept < ending.valid for ending in endings)
            return endings

        monkeypatch.setattr(RetiredLeases, "take_ending", counted)
        self.num_beside = 0  # steps during which requests wait for loads

    def _move_until(self, idle: Idle, timeout: float) -> None:
        """Let the slow device end copies until those of a lease have ended."""
        assert self.chaos is not None
        self.num_waits += 1
        while not idle.done():
            self.chaos.move(1)
            with suppress(TimeoutError):
                idle.result(0.001)

    def _compute_in_flight(self, step: int) -> None:
        self.num_step_waits += 1
        self.server.compute_in_flight()

    def act(self) -> None:
        """Do one random thing, and run one step."""
        choice = self.rng.random()
        if choice < 0.5 and len(self.server.scheduler.requests) < 10:
            self._add()
        elif choice < 0.53:
            alive = [n for n in self.requests if n in self.server.scheduler.requests]
            if alive:
                name = self.rng.choice(alive)
                self.aborted.add(name)
                self.server.abort(name)
        elif choice < 0.533 and self.chaos is None:
            self.server.scheduler.reset_prefix_cache(reset_connector=self.rng.random() < 0.5)
        self.step()

    def step(self) -> None:
        """Run one step, during which a slow device ends some layers of some copies."""
        self.server.step()
        self.num_beside += any(
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for request in self.server.scheduler.requests.values()
        )
        if self.chaos is not None:
            self.chaos.move(self.rng.randrange(4))

    def finish(self) -> None:
        """Run until all requests have finished."""
        for _ in range(10_000):
            if not self.server.is_busy:
                return
            self.step()
        raise AssertionError("requests have not finished")

    def close(self) -> None:
        """Close the server, and let a slow device end all copies."""
        closing = Thread(target=self.server.close)
        closing.start()
        while closing.is_alive():
            if self.chaos is not None:
                self.chaos.move(4)
            closing.join(0.001)

    def _add(self) -> None:
        if self.sessions and self.rng.random() < 0.7:  # a further turn, or a shared beginning
            tokens, salt, adapter = self.rng.choice(self.sessions)
            tokens = tokens[: self.rng.randint(len(tokens) // 2, len(tokens))] + self._tokens(8)
        else:
            tokens = self._tokens(60)
            salt = self.rng.choice([None, None, "tenant"])
            adapter = self.rng.choice([0, 0, 1])
        tokens = tokens[:80]
        count = self.rng.randint(1, 30)
        name = f"r{len(self.requests)}"
        self.requests[name] = self.server.add(name, tokens, count, salt=salt, adapter=adapter)
        self.expected[name] = generate(tokens, adapter, count, self.kinds)
        self.sessions = [*self.sessions[-20:], (tokens + self.expected[name], salt, adapter)]

    def _tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, most))]

    def run(self) -> None:
        """Let things happen, end all requests, and check the tokens after each step."""
        for _ in range(STEPS):
            self.act()
            self.check()
        self.finish()
        self.check()

    def check(self) -> None:
        """Compare the generated tokens of all requests."""
        for name, tokens in self.server.outputs.items():
            expected = self.expected[name]
            ended = self.aborted | self.server.errors | self.server.scheduler.requests.keys()
            assert tokens == (expected[: len(tokens)] if name in ended else expected), name


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
def test_random_load(mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(seed, MODES[mode], monkeypatch)
    if "layerwise, async scheduling" in mode:
        # Newer versions free blocks only when the step in flight has ended. The connector does not
        # depend on it.
        walk.server.scheduler.defer_block_free = False
    try:
        walk.run()
        if "slow" not in mode:  # there, many loads fail or belong to aborted requests
            assert walk.server.num_loaded > 0, "nothing was loaded"
        if "layerwise, async scheduling" in mode:
            assert walk.num_step_waits > 0
        if mode.startswith("small host"):
            assert walk.num_saved_again > 0
        if "slow" in mode:
            assert walk.num_beside > 0
        if "slow, layerwise" in mode or "slow, auto" in mode:
            assert walk.num_in_step > 0
    finally:
        walk.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_load_while_the_engine_notes_the_ends_of_transfers_late(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = PlanTable.send_report

    def send_late(table: PlanTable, entry: Any) -> None:
        asyncio.get_running_loop().call_later(0.03, send, table, entry)

    monkeypatch.setattr(PlanTable, "send_report", send_late)
    # vLLM frees windows, and gives their blocks to other loads, while requests run.
    walk = Walk(seed, MODES["windows only"], monkeypatch)
    try:
        walk.run()
        assert walk.server.num_loaded > 0
    finally:
        walk.close()
