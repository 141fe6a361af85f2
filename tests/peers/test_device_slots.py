"""Slots in the memory of the device, and the transport ``cuda_ipc``, on plain memory."""

# ruff: noqa: SIM117  (nested blocks show which of them ends first)

from __future__ import annotations

import asyncio
import ctypes

import pytest

from aiokv import CacheConfig, CacheEngine, Peers, WindowGroup
from aiokv.errors import ConfigError, LayoutError, PeerError
from aiokv.peers import cuda_ipc
from aiokv.testing import run_until_idle
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.memory import Memory
from tests.peers.engines import SECRET, Side, prompt, two_engines
from tests.peers.slot_device import FakeCuda, SlotDevice

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(cuda_ipc, "_cuda", fake)
    monkeypatch.setattr(cuda_ipc, "LAST_COPIES_SECONDS", 0.0)
    monkeypatch.setattr(Side, "default_transport", "cuda_ipc")
    return fake


def engines(**decode):
    return two_engines(Side(SlotDevice(), listen=None), Side(SlotDevice(), **decode))


@pytest.mark.parametrize("length", [1, 4, 30, 131])
async def test_prompt_arrives_whole(cuda, length):
    tokens = prompt(length)
    async with engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
            assert await receiving.wait() == length
            assert receiving.failure is None
        assert await prefill == (length, None)
        d.check(lease, tokens)
    assert not cuda.open_copies


async def test_changed_bytes_are_sent_again(cuda):
    tokens, changed = prompt(30), []

    def change(target, num_bytes):
        if len(changed) < 2:
            byte = ctypes.c_uint8.from_address(target + num_bytes // 2)
            byte.value ^= 1
            changed.append(target)

    cuda.after_copy = change
    async with engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            assert await p.prefill(tokens, receiving.ticket) == (30, None)
            assert await receiving.wait() == 30
        d.check(lease, tokens)
        (rank,) = d.engine.statistics().peers.ranks
        assert rank.received.wrong == 2


async def test_bytes_that_change_behind_their_proof_are_not_received():
    tokens = prompt(30)
    async with engines() as (p, d), await d.granted(tokens) as lease:
        calls = []

        def change(slot):
            calls.append(slot)
            if len(calls) == 3:
                d.device.slots.arena.blocks[:, 0] ^= 1

        d.device.before_receive = change
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            await p.prefill(tokens, receiving.ticket)
            end = await receiving.wait()
            assert end < 30
            assert "proof" in receiving.failure
        d.check(lease, tokens, end)
        d.device.before_receive = lambda slot: None
        d.compute(lease, tokens, end, 30)


async def test_a_sender_on_another_server_is_refused(monkeypatch):
    tokens = prompt(30)
    create = cuda_ipc.CudaIpcBackend.create

    def created(backend, memory, *, receives):
        here = backend if receives else cuda_ipc.CudaIpcBackend("another")
        return create(here, memory, receives=receives)

    monkeypatch.setattr(cuda_ipc.CudaIpcBackend, "create", created)
    async with engines() as (p, d):
        async with await d.granted(tokens) as lease, await p.granted(tokens) as source:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                with pytest.raises(PeerError, match="another server"):
                    async with p.engine.send(source, receiving.ticket):
                        pass
            p.compute(source, tokens, 0, 30)
            d.compute(lease, tokens, 0, 30)


async def test_blocks_of_another_size_are_refused():
    tokens = prompt(32)
    sides = Side(SlotDevice(), listen=None, block_tokens=8), Side(SlotDevice())
    async with two_engines(*sides) as (p, d):
        async with await d.granted(tokens) as lease, await p.granted(tokens) as source:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                with pytest.raises(LayoutError):
                    async with p.engine.send(source, receiving.ticket):
                        pass
            p.compute(source, tokens, 0, 32)
            d.compute(lease, tokens, 0, 32)


async def test_sleep_frees_the_slots_and_wake_up_makes_new_ones():
    tokens = prompt(30)
    async with engines() as (p, d):
        first = d.device.slots
        await d.engine.sleep(["host"])
        await d.engine.wake_up()
        assert d.device.slots is not first
        async with await d.granted(tokens) as lease:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                assert await p.prefill(tokens, receiving.ticket) == (30, None)
                assert await receiving.wait() == 30
            d.check(lease, tokens)
        await run_until_idle(d.is_at_rest)


async def test_a_device_without_slots_is_refused():
    memory = Memory(8, 4)
    peers = Peers(secret=SECRET, transport="cuda_ipc")
    engine = CacheEngine(
        CacheConfig(model="m", block_tokens=4, device_blocks=8, host_blocks=8),
        memory.regions,
        peers=peers,
    )
    with pytest.raises(ConfigError, match="no memory for peers"):
        await engine.__aenter__()


@pytest.mark.parametrize(
    "sides",
    [{"state_slots": 4}, {"windows": {"w": WindowGroup(window_tokens=8, device_blocks=16)}}],
    ids=["state", "windows"],
)
async def test_state_and_windows_are_refused(sides):
    side = Side(SlotDevice(), **sides)
    with pytest.raises(ConfigError, match="recurrent state and no blocks of sliding windows"):
        await side.engine.__aenter__()


async def test_options_of_the_transport_are_refused():
    with pytest.raises(ConfigError, match="'cuda_ipc' has no options"):
        Peers(secret=SECRET, transport="cuda_ipc", transport_options={"devices": "mlx5_0"})
