"""``advance`` decides as ``extend``, ``append`` and ``commit`` of each lease do.

Two engines serve the same random requests: one with a call of ``advance`` per step, the other with
the single verbs. Tables, counters and hits are equal after each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import Any, Final

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Lease, WindowGroup
from aiokv.errors import WouldBlock
from aiokv.testing import record, replay_transitions, spin

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

BLOCK_TOKENS: Final = 2
STEPS: Final = 60
PASSES: Final = 8  # of the loop, in which all transfers end
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "device": {"host_blocks": 0},
    "host": {"write_policy": "write_through"},
    "adaptive": {"write_policy": "nth_use:2", "eviction_policy": "adaptive"},
    "quota": {"salt_quota_blocks": 14, "host_blocks": 0},
    "state": {"state_slots": 8, "host_state_slots": 4},
    "windows": {
        "windows": {"local": WindowGroup(device_blocks=30, window_tokens=4, step_tokens=4)},
    },
    "checksums": {"verify": "checksum"},
}


class Server(ABC):
    """An engine, and the decode steps of its requests."""

    def __init__(self, config: CacheConfig) -> None:
        self.engine = CacheEngine(config)
        self.leases: list[Lease] = []

    async def begin(self, tokens: np.ndarray, salt: str) -> bool:
        lease = self.engine.match(tokens, salt=salt)
        if not lease.try_allocate(len(tokens)):
            lease.release()
            return False
        await lease.layers.wait_all()
        for end in range(lease.cached_tokens + 3, len(tokens), 3):
            lease.commit(end)
        self.leases.append(lease)
        return True

    def end(self, row: int) -> None:
        lease = self.leases.pop(row)
        lease.release()

    @abstractmethod
    def advance(self, tokens: list[int]) -> list[int]:
        """Return the rows without room."""

    def state(self) -> list[object]:
        found: list[object] = [lease.block_table.tolist() for lease in self.leases]
        found += [lease.num_tokens for lease in self.leases]
        found += [lease.usage.computed_blocks for lease in self.leases]
        if self.engine.config.windows:
            found += [lease.window_table("local").tolist() for lease in self.leases]
        found.append(self.engine.lengths(self.leases).tolist())
        return [*found, self.engine.cache_statistics(), self.engine.check_invariants()]


class ByAdvance(Server):
    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.batch = self.engine.batch()

    def advance(self, tokens: list[int]) -> list[int]:
        for lease in list(self.batch):
            if lease not in self.leases:
                self.batch.remove(lease)
        for lease in self.leases:
            if lease not in self.batch:
                self.batch.add(lease)
        assert list(self.batch) == self.leases
        with self.engine.computing(self.batch) as step:
            pass
        refused = self.engine.advance(step, tokens)
        return [self.leases.index(lease) for lease in refused]


class BySingleVerbs(Server):
    def advance(self, tokens: list[int]) -> list[int]:
        with self.engine.computing(self.leases):
            pass
        lengths = self.engine.lengths(self.leases).tolist()
        growing = [
            lease
            for lease, length in zip(self.leases, lengths, strict=True)
            if lease.num_tokens == length
        ]
        refused: list[Lease] = []
        try:
            self.engine.extend(growing, 1)
        except WouldBlock:
            for lease in growing:
                try:
                    self.engine.extend([lease], 1)
                except WouldBlock:
                    refused.append(lease)
        for lease, token, length in zip(self.leases, tokens, lengths, strict=True):
            if lease not in refused:
                lease.append([token])
                lease.commit(length)
        return [self.leases.index(lease) for lease in refused]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CONFIGS)
async def test_advance_equals_the_single_verbs(name: str, seed: int) -> None:
    rng = Random(f"{name} {seed}")
    fields = {"device_blocks": 30, "host_blocks": 12, "block_tokens": BLOCK_TOKENS, **CONFIGS[name]}
    config = CacheConfig(**fields)
    servers = ByAdvance(config), BySingleVerbs(config)
    refusals = 0
    async with servers[0].engine, servers[1].engine:
        for _ in range(STEPS):
            for _ in range(rng.randint(0, 2)):
                tokens = np.array([rng.randint(0, 1) for _ in range(rng.randint(1, 12))], np.int32)
                salt = rng.choice(("", "a")) if name == "quota" else ""
                first, second = [await server.begin(tokens, salt) for server in servers]
                assert first == second
                await spin(PASSES)  # both engines have the reports of their transfers
            for row in reversed(range(len(servers[0].leases))):
                if rng.random() < 0.1:
                    for server in servers:
                        server.end(row)
            tokens_of_step = [rng.randint(0, 1) for _ in servers[0].leases]
            first_refused, second_refused = [s.advance(tokens_of_step) for s in servers]
            assert first_refused == second_refused
            refusals += len(first_refused)
            for row in reversed(first_refused):
                for server in servers:
                    server.end(row)
            if rng.random() < 0.03:
                for server in servers:
                    await server.engine.reset()
            if rng.random() < 0.03:
                for server in servers:
                    async with server.engine.updating_weights():
                        pass
            for server in servers:
                server.engine.step()
            await spin(PASSES)
            states = [server.state() for server in servers]
            assert states[0] == states[1]
            assert states[0][-1] == []
        for server in servers:
            while server.leases:
                server.end(0)
    assert refusals > 0 or name in ("quota", "state", "windows")


@pytest.mark.parametrize("name", [*CONFIGS, "write_back"])
async def test_recorded_advances_are_replayed(name: str) -> None:
    rng = Random(name)
    changes = CONFIGS.get(name, {"write_policy": "write_back", "host_blocks": 30})
    fields = {"device_blocks": 24, "host_blocks": 12, "block_tokens": BLOCK_TOKENS, **changes}
    server = ByAdvance(CacheConfig(**fields))
    refusals = 0
    with record(server.engine) as recording:
        async with server.engine as engine:
            for _ in range(40):
                await server.begin(np.array([rng.randint(0, 1) for _ in range(9)], np.int32), "")
                for row in reversed(server.advance([rng.randint(0, 1) for _ in server.leases])):
                    refusals += 1
                    server.end(row)
                engine.step()
                await spin(1)
                assert engine.check_invariants() == []
            while server.leases:
                server.end(0)
    assert "advance_batch" in {transition.name for transition in recording.log.transitions}
    assert replay_transitions(recording.log) == len(recording.log.transitions)
    assert refusals > 0 or name in ("quota", "state", "windows")
