"""Engines on GPUs exchange blocks through slots in the memory of the GPUs.

With one GPU, both engines use it.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import PeerError
from aiokv.peers.cuda_ipc import CudaIpcEndpoint
from aiokv.worker.device.cuda_slots import CudaSlots
from tests.peers.engines import prompt, two_engines
from tests.peers.processes import Child, Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.gpu.sides import GpuSide

pytestmark = pytest.mark.asyncio

BLOCK_TOKENS = 2048  # 192 KiB in 4 tensors
LENGTH = 40 * BLOCK_TOKENS + 100
KILLS, REQUESTS = 4, 4
PATIENCE = 30.0
TICKET_SECONDS = 2.0


def side(*, is_sender: bool, **options: Any) -> GpuSide:
    import cupy

    from tests.gpu.sides import GpuSide

    last = cupy.cuda.runtime.getDeviceCount() - 1
    return GpuSide(gpu=last if is_sender else 0, **choices(is_sender=is_sender, **options))


def choices(*, is_sender: bool, **options: Any) -> dict[str, Any]:
    """Return options of a side."""
    listen = None if is_sender else "127.0.0.1"
    sizes = {"device_blocks": 256, "host_blocks": 0, "ring_blocks": 16, "chunk_blocks": 4}
    return {"listen": listen, "block_tokens": BLOCK_TOKENS, **sizes, **options}


def engines(**options: Any) -> Any:
    return two_engines(side(is_sender=True, **options), side(is_sender=False, **options))


def change_byte(address: int) -> None:
    """Change a byte in the memory of a GPU."""
    import cupy

    memory = cupy.cuda.UnownedMemory(address, 1, None)
    cupy.ndarray(1, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))[:] ^= 1
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS, LENGTH])
@pytest.mark.parametrize("block_tokens", [4, BLOCK_TOKENS])
async def test_prompt_arrives_whole(length: int, block_tokens: int) -> None:
    length = max(length * block_tokens // BLOCK_TOKENS, 1)
    tokens = prompt(length)
    async with engines(block_tokens=block_tokens) as (p, d):
        for _ in range(2):
            async with await d.granted(tokens) as lease:
                async with lease.receive(timeout=PATIENCE) as receiving:
                    step = 5 * block_tokens + 1
                    sending = asyncio.create_task(p.prefill(tokens, receiving.ticket, step=step))
                    assert await receiving.wait() == length, receiving.failure
                assert await sending == (length, None)
                d.check(lease, tokens)
            await d.at_rest(empty=True)
            await p.at_rest(empty=True)


async def test_changed_bytes_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, changed = prompt(LENGTH), []
    write = CudaIpcEndpoint.write

    def wrong(endpoint: Any, pieces: Any, unwanted: Any) -> None:
        write(endpoint, pieces, unwanted)
        for piece in pieces:
            if len(changed) < 5:
                changed.append(piece)
                change_byte(piece.target + random.randrange(piece.num_bytes))

    monkeypatch.setattr(CudaIpcEndpoint, "write", wrong)
    async with engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE) as receiving:
            assert await p.prefill(tokens, receiving.ticket, step=LENGTH) == (LENGTH, None)
            assert await receiving.wait() == LENGTH
        d.check(lease, tokens)
        (rank,) = d.engine.statistics().peers.ranks
        assert rank.received.wrong == len(changed) == 5


async def test_bytes_that_change_behind_their_proof_are_not_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, calls = prompt(LENGTH), []
    scatter = CudaSlots.scatter_verified

    def changed(slots: CudaSlots, ids: Any, *arguments: Any) -> Any:
        calls.append(ids)
        if len(calls) == 3:
            change_byte(slots.address + int(ids[-1]) * slots.slot_bytes + 1000)
        return scatter(slots, ids, *arguments)

    monkeypatch.setattr(CudaSlots, "scatter_verified", changed)
    async with engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE) as receiving:
            await p.prefill(tokens, receiving.ticket, step=LENGTH)
            first = await receiving.wait()
            assert first < LENGTH
            assert "proof" in (receiving.failure or "")
        d.finish(lease, tokens, first)


async def test_blocks_arrive_after_the_sleep_of_the_device() -> None:
    tokens = prompt(LENGTH)
    async with engines() as (p, d):
        for _ in range(2):
            async with await d.granted(tokens) as lease:
                async with lease.receive(timeout=PATIENCE) as receiving:
                    sent = await p.prefill(tokens, receiving.ticket, step=LENGTH)
                    assert sent == (LENGTH, None)
                    assert await receiving.wait() == LENGTH
                d.check(lease, tokens)
            regions = d.memory.regions
            await d.at_rest(empty=True)
            await d.engine.sleep(["device", "host"])
            await d.engine.wake_up(regions=regions)


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


def child(nursery: Nursery, *, is_sender: bool) -> Child:
    import cupy

    last = cupy.cuda.runtime.getDeviceCount() - 1
    return nursery.child(gpu=last if is_sender else 0, **choices(is_sender=is_sender))


async def received(d: GpuSide, p: Child, seed: int, seconds: float) -> str | None:
    """Receive a prompt from another process, compute what is missing; return the failure."""
    tokens = prompt(LENGTH, seed)
    async with await d.granted(tokens) as lease:
        async with lease.receive(timeout=seconds) as receiving:
            p.send(seed, LENGTH, receiving.ticket, step=10 * BLOCK_TOKENS)
            first = await receiving.wait()
        d.finish(lease, tokens, first)
        assert (first == LENGTH) == (receiving.failure is None)
        return receiving.failure


async def sent(p: GpuSide, d: Child, seed: int) -> str | None:
    """Send a prompt to another process; return the failure."""
    ticket, _ = d.receive(seed, LENGTH)
    try:
        tokens = prompt(LENGTH, seed)
        _, failure = await p.prefill(tokens, await ticket, step=10 * BLOCK_TOKENS)
    except PeerError as error:
        return str(error)
    except ConnectionError:  # killed before it has made the ticket
        return "no ticket"
    return failure


async def test_prefill_process_is_killed_at_a_random_instant(nursery: Nursery) -> None:
    rng = random.Random(1)
    failures = 0
    async with side(is_sender=False) as d:
        for number in range(KILLS):
            async with asyncio.timeout(PATIENCE), child(nursery, is_sender=True) as p:
                assert await received(d, p, 1000 + number, PATIENCE) is None
                seeds = range(1 + number * REQUESTS, 1 + (number + 1) * REQUESTS)
                receives = [
                    asyncio.create_task(received(d, p, seed, TICKET_SECONDS)) for seed in seeds
                ]
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                await p.killed()
                failures += sum(end is not None for end in await asyncio.gather(*receives))
            await d.at_rest(empty=True)
    assert failures, "no receive was cut: the prompts are too short"


async def test_decode_process_is_killed_at_a_random_instant(nursery: Nursery) -> None:
    rng = random.Random(2)
    failures = 0
    async with side(is_sender=True) as p:
        for number in range(KILLS):
            async with asyncio.timeout(PATIENCE), child(nursery, is_sender=False) as d:
                assert await sent(p, d, 1000 + number) is None
                seeds = range(1 + number * REQUESTS, 1 + (number + 1) * REQUESTS)
                sends = [asyncio.create_task(sent(p, d, seed)) for seed in seeds]
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                await d.killed()
                failures += sum(end is not None for end in await asyncio.gather(*sends))
            await p.at_rest(empty=True)
    assert failures, "no send was cut: the prompts are too short"
