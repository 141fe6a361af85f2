"""Engines in two processes, of which one is killed, stopped, restarted, or has no room.

After each failure the other engine has the right bytes in all positions, holds nothing, and keeps
its invariants.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from aiokv import CacheConfig, CacheEngine, Peers
from aiokv.errors import ConfigError, LayoutError, PeerError
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.testing import run_until_idle, running_clock
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.peers.engines import SECRET, Side, prompt
from tests.peers.processes import Child, Nursery
from tests.peers.proxy import Proxy, Unit
from tests.stores.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiokv import Lease
    from tests.peers.proxy import Fault

pytestmark = pytest.mark.asyncio

KILLS = 50 if os.environ.get("AIOKV_DEEP") else 5  # of each side, on each loop
MOST_KILLS = KILLS + 20  # while none has cut a transfer: the other process may be faster
MOST = 0.6  # of the positions have arrived at the instant of a kill: some are still missing
LENGTH = 301
LAYERED: dict[str, Any] = {"layers": 5, "layer_ranges": 3}
MODELS = pytest.mark.parametrize("model", [{}, LAYERED], ids=["blocks", "layers"])
REQUESTS = 6
TICKET_SECONDS = 1.0  # a ticket that the killed server has not opened ends then


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


def options(**changed: Any) -> dict[str, Any]:
    """Return options of a side that has room for all requests."""
    return {"device_blocks": 1024, "host_blocks": 0, "ring_blocks": 16, **changed}


async def in_time(work: Any) -> Any:
    """Await some work, which must not take long."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await work


async def received(
    d: Side, p: Child, seed: int, length: int = LENGTH, timeout: float = TICKET_SECONDS
) -> str | None:
    """Receive a prompt from another process, compute what is missing; return the failure."""
    tokens = prompt(length, seed)
    async with await d.granted(tokens) as lease:
        async with lease.receive(timeout=timeout) as receiving:
            sent = p.send(seed, length, receiving.ticket)
            first = await in_time(receiving.wait())
        d.finish(lease, tokens, first)
        assert (first == length) == (receiving.failure is None)
        del sent
        return receiving.failure


async def sent(p: Side, d: Child, seed: int) -> str | None:
    """Send a prompt to another process; return the failure."""
    ticket, _ = d.receive(seed, LENGTH)
    try:
        _, failure = await in_time(p.prefill(prompt(LENGTH, seed), await ticket))
    except PeerError as error:
        return str(error)
    except ConnectionError:  # killed before it has made the ticket
        return "no ticket"
    return failure


async def progress(
    side: Side, field: str, share: float, moves: Sequence[asyncio.Task[Any]]
) -> None:
    """Wait until a share of all positions of ``moves`` has moved, or one of them has ended."""
    before = getattr(side.engine.statistics().peers, field)
    wanted = before + int(share * len(moves) * LENGTH)

    def is_reached() -> bool:
        moved = getattr(side.engine.statistics().peers, field)
        return moved >= wanted or any(move.done() for move in moves)

    await run_until_idle(is_reached)


def seeds(number: int) -> range:
    """Return the seeds of the prompts around a kill."""
    return range(1 + number * REQUESTS, 1 + (number + 1) * REQUESTS)


def reasons(logs: list[Any], event: str) -> list[str]:
    """Return the reasons of a kind of log line, each line of another ticket."""
    lines = [line for line in logs if line["event"] == event]
    assert len({line["ticket"] for line in lines}) == len(lines), "a reason is logged twice"
    return [line["reason"] for line in lines]


# --- killed -------------------------------------------------------------------------------------


@MODELS
async def test_prefill_server_is_killed_at_a_random_instant(nursery, model):
    rng = random.Random(1)
    failures = logged = 0
    async with Side(**options(**model)) as d:
        for number in range(MOST_KILLS):
            async with nursery.child(**options(listen=None, **model)) as p:
                receives = [asyncio.create_task(received(d, p, seed)) for seed in seeds(number)]
                await progress(d, "received_tokens", rng.uniform(0, MOST), receives)
                with structlog.testing.capture_logs() as logs:
                    await p.killed()
                    ends = await asyncio.gather(*receives)
                failed = sorted(end for end in ends if end is not None)
                assert Counter(reasons(logs, "receive.ended")) <= Counter(failed)
                logged += len(reasons(logs, "receive.ended"))
                failures += len(failed)
            await d.at_rest()
            if logged and number >= KILLS - 1:
                break
        await d.at_rest(empty=True)
    assert failures, "no receive was cut: the prompts are too short"
    assert logged, "no reason was logged"


@MODELS
async def test_decode_server_is_killed_at_a_random_instant(nursery, model):
    rng = random.Random(2)
    failures = 0
    async with Side(**options(listen=None, **model)) as p:
        for number in range(MOST_KILLS):
            async with nursery.child(**options(**model)) as d:
                sends = [asyncio.create_task(sent(p, d, seed)) for seed in seeds(number)]
                await progress(p, "delivered_tokens", rng.uniform(0, MOST), sends)
                await d.killed()
                ends = await asyncio.gather(*sends)
                failures += sum(end is not None for end in ends)
            await p.at_rest()
            if failures and number >= KILLS - 1:
                break
        await p.at_rest(empty=True)
    assert failures, "no send was cut: the prompts are too short"


async def test_lease_takes_the_blocks_of_a_receive_at_once_after_a_kill(nursery):
    """The pool has room for one lease: the next one gets the blocks that were being written."""
    blocks = -(-LENGTH // 4)
    async with Side(**options(device_blocks=blocks)) as d:
        for seed in range(1, 4):
            async with nursery.child(**options(listen=None)) as p:
                lease = await d.granted(prompt(LENGTH, seed))
                receiving = await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
                p.send(seed, LENGTH, receiving.ticket)
                await in_time(receiving.wait(8))
                p.signal(signal.SIGKILL)
                lease.release()
                other = prompt(LENGTH, 100 + seed)
                async with await in_time(d.granted(other)) as taker:
                    d.finish(taker, other, 0)
                    await receiving.__aexit__(None, None, None)
                    await p.killed()
                    await d.at_rest()
                    d.check(taker, other)
            await d.at_rest(empty=True)


# --- layers that were sent before their commit ---------------------------------------------------


@pytest.mark.parametrize(
    ("end", "committed"),
    [("kill", 0), ("kill", 64), ("stop", 64), ("cancel", 0), ("cancel", 64), ("release", 64)],
)
async def test_sender_ends_in_the_middle_of_a_chunk(nursery, end, committed):
    """All layers but the last range have arrived; the next lease gets their blocks."""
    blocks = -(-LENGTH // 4)
    child = options(listen=None, **LAYERED)
    async with Side(**options(device_blocks=blocks, **LAYERED)) as d, nursery.child(**child) as p:
        tokens, other = prompt(LENGTH, 1), prompt(LENGTH, 2)
        lease = await d.granted(tokens)
        receiving = await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
        sending = p.send(1, LENGTH, receiving.ticket, committed=committed)
        await run_until_idle(lambda: fragments(d) == 2 * blocks + committed // 4)
        first = await in_time(receiving.wait(committed))
        assert first == committed == receiving.received_tokens
        if end == "kill":
            await p.killed()
        elif end == "stop":
            p.signal(signal.SIGSTOP)
        elif end == "cancel":
            receiving.cancel()
        else:
            lease.release()
        first = await in_time(receiving.wait())
        assert first == (0 if end == "release" else committed)
        assert receiving.failure
        await receiving.__aexit__(None, None, None)
        lease.release()
        async with await in_time(d.granted(other)) as taker:
            d.finish(taker, other, 0)
            if end == "stop":
                p.signal(signal.SIGCONT)
            if end != "kill":
                assert (await in_time(sending))["delivered"] == committed
            d.check(taker, other)
        await d.at_rest(empty=True)


def fragments(side: Side) -> int:
    """Return the fragments that an engine has received and verified."""
    (rank,) = side.engine.statistics().peers.ranks
    return rank.received.fragments


# --- stopped and continued ----------------------------------------------------------------------


async def test_prefill_server_is_stopped_and_continued(nursery):
    blocks = -(-LENGTH // 4)
    async with (
        Side(**options(device_blocks=blocks)) as d,
        nursery.child(**options(listen=None)) as p,
    ):
        tokens, other = prompt(LENGTH, 1), prompt(LENGTH, 2)
        async with await d.granted(tokens) as lease:
            async with lease.receive(timeout=0.5) as receiving:
                sending = p.send(1, LENGTH, receiving.ticket, step=4)
                await in_time(receiving.wait(8))
                p.signal(signal.SIGSTOP)
                first = await in_time(receiving.wait())
            if first < LENGTH:
                assert receiving.failure == "the deadline of 0.5 s passed"
            d.finish(lease, tokens, first)
        async with await in_time(d.granted(other)) as taker:  # has the blocks of the first lease
            d.finish(taker, other, taker.cached_tokens)
            p.signal(signal.SIGCONT)  # what it sends now belongs to no ticket
            end = await in_time(sending)
            # The ticket may have ended before the send of a busy process began.
            assert end.get("error") or end["failure"] or end["delivered"] == LENGTH
            d.check(taker, other)
        assert await received(d, p, 3) in (None, "the deadline of 1 s passed")


async def test_decode_server_is_stopped_and_continued(nursery):
    async with (
        Side(**options(listen=None)) as p,
        nursery.child(**options()) as d,
    ):
        tokens = prompt(LENGTH, 1)
        async with await p.granted(tokens) as lease:
            ticket, receiving = d.receive(1, LENGTH, timeout=3.0)
            async with p.engine.send(lease, await ticket) as sending:
                p.compute(lease, tokens, 0, 8)
                d.signal(signal.SIGSTOP)
                p.compute(lease, tokens, 8, LENGTH)
            assert sending.failure
        d.signal(signal.SIGCONT)
        end = await in_time(receiving)  # it has computed the rest, and checked all bytes
        assert end["first"] < LENGTH
        ticket, receiving = d.receive(2, LENGTH)
        assert await in_time(p.prefill(prompt(LENGTH, 2), await ticket)) == (LENGTH, None)
        assert (await in_time(receiving))["first"] == LENGTH


# --- restarted ----------------------------------------------------------------------------------


async def test_ticket_of_an_engine_that_was_restarted_on_its_port_is_refused(nursery):
    tokens = prompt(LENGTH, 1)
    async with Side(**options(listen=None)) as p:
        port = free_port()  # that stays free while no process listens on it
        async with nursery.child(**options(listen=f"127.0.0.1:{port}")) as d:
            assert d.port == port
            used, receiving = d.receive(1, LENGTH)
            assert await in_time(p.prefill(tokens, await used)) == (LENGTH, None)
            await in_time(receiving)
            ticket, _ = d.receive(2, LENGTH)
            old = await ticket
            await d.killed()
        async with nursery.child(**options(listen=f"127.0.0.1:{port}")) as d:
            for blob, seed in ((await used, 1), (old, 2)):
                async with await p.granted(prompt(LENGTH, seed)) as lease:
                    with pytest.raises(PeerError):
                        await in_time(p.engine.send(lease, blob).__aenter__())
            ticket, receiving = d.receive(1, LENGTH)
            assert await in_time(p.prefill(tokens, await ticket)) == (LENGTH, None)
            assert (await in_time(receiving))["first"] == LENGTH
        await p.at_rest(empty=True)


async def test_ticket_goes_to_two_prefill_servers(nursery):
    """One of them sends it; each prompt is whole, and the other server learns why."""
    child = options(listen=None)
    async with Side(**options()) as d, nursery.child(**child) as a, nursery.child(**child) as b:
        for seed in range(1, 5):
            tokens = prompt(LENGTH, seed)
            async with await d.granted(tokens) as lease:
                async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                    ends = [p.send(seed, LENGTH, receiving.ticket) for p in (a, b)]
                    assert await in_time(receiving.wait()) == LENGTH
                d.finish(lease, tokens, LENGTH)
            one, two = sorted([await in_time(end) for end in ends], key=lambda end: "error" in end)
            assert one == {"delivered": LENGTH, "failure": None}
            assert "refuses the ticket" in two["error"], two
        await d.at_rest()


# --- bytes changed on their way -----------------------------------------------------------------


@pytest.mark.loop("uvloop")
@pytest.mark.parametrize(
    "fault", ["cut", "cut inside", "flip", "replay", "swap", "drop", "stall", "trickle"]
)
@MODELS
async def test_fault_between_the_processes_shortens_the_received_prefix(nursery, fault, model):
    rng = random.Random(fault)
    seconds = PATIENCE_SECONDS if fault == "trickle" else TICKET_SECONDS
    count = 0

    def choose(unit: Unit) -> Fault:
        nonlocal count
        count += 1
        return fault if count in places else "none"

    child = options(listen=None, **model)
    async with Side(**options(**model)) as d, nursery.child(**child) as p:
        (endpoint,) = d.engine.inspect.parts.worker.tickets.endpoints
        async with Proxy(endpoint.port, choose, rng) as proxy:
            for seed in range(1, 21):
                places = {count + rng.randint(1, 60), count + rng.randint(61, 200)}
                tokens = prompt(LENGTH, seed)
                async with await d.granted(tokens) as lease:
                    async with lease.receive(timeout=seconds) as receiving:
                        end = p.send(seed, LENGTH, proxy.via(receiving.ticket))
                        first = await in_time(receiving.wait())
                    d.finish(lease, tokens, first)
                    assert (first == LENGTH) == (receiving.failure is None)
                    await in_time(end)
                if fault == "trickle":
                    assert first == LENGTH
                if seed >= 4 and fault in proxy.faults:  # a ticket may end before its fault
                    break
            assert proxy.faults[fault]
        await in_time(d.at_rest(empty=True))


# --- many tickets, and little room --------------------------------------------------------------


@pytest.mark.loop("uvloop")
async def test_thousand_tickets_at_once_share_a_ring_of_two_slots(nursery):
    count, length = 1000, 6
    child = options(listen=None, device_blocks=2 * count)
    async with (
        Side(**options(device_blocks=2 * count, ring_blocks=2)) as d,
        nursery.child(**child) as p,
    ):

        async def decode(seed: int) -> int:
            tokens = prompt(length, seed)
            async with await d.granted(tokens) as lease:
                async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                    end = p.send(seed, length, receiving.ticket)
                    first = await receiving.wait()
                    assert await end == {"delivered": length, "failure": None}
                d.finish(lease, tokens, first)
                return first

        ends = await in_time(asyncio.gather(*map(decode, range(1, count + 1))))
        assert ends == [length] * count
        await d.at_rest(empty=True)
        assert not d.engine.statistics().peers.ranks[0].received.tickets


@pytest.mark.clock
async def test_tickets_that_no_engine_uses_leave_nothing_behind():
    async with Side(**options(device_blocks=2048)) as d:
        leases: list[Lease] = [await d.granted(prompt(6, seed)) for seed in range(1, 1001)]
        waits = []
        for lease in leases:
            receiving = await lease.receive(timeout=5.0).__aenter__()
            waits.append(asyncio.create_task(receiving.wait()))
        assert d.engine.statistics().peers.ranks[0].received.tickets == 1000
        await running_clock().advance(5.1)
        assert await asyncio.gather(*waits) == [0] * 1000
        assert not d.engine.statistics().peers.ranks[0].received.tickets
        assert not d.engine.statistics().peers.receiving
        for seed, lease in enumerate(leases, 1):
            d.finish(lease, prompt(6, seed), 0)
            lease.release()
        await d.at_rest(empty=True)


@pytest.mark.parametrize("chunk_blocks", [1, 16])
@MODELS
async def test_ring_of_one_slot(nursery, chunk_blocks, model):
    small = {"ring_blocks": 1, "chunk_blocks": chunk_blocks, **model}
    async with (
        Side(**options(**small)) as d,
        nursery.child(**options(listen=None, **small)) as p,
    ):
        ends = [received(d, p, seed, length=61) for seed in range(1, 5)]
        assert set(await asyncio.gather(*ends)) <= {None, "the deadline of 1 s passed"}
        await d.at_rest(empty=True)


async def test_slot_smaller_than_a_fragment_is_refused():
    """A block of the sender does not fit; the error names the sizes, and nothing is held."""
    tokens = prompt(LENGTH)
    async with Side(**options(listen=None, block_tokens=128)) as p:
        async with Side(**options()) as d, await d.granted(tokens) as lease:
            async with (
                lease.receive(timeout=PATIENCE_SECONDS) as receiving,
                await p.granted(tokens) as source,
            ):
                with pytest.raises(LayoutError, match="bytes, a landing slot of the receiver"):
                    await p.engine.send(source, receiving.ticket).__aenter__()
            d.finish(lease, tokens, 0)
        await p.at_rest()


async def test_ring_smaller_than_a_block_is_an_error_at_start():
    side = Side(ring_blocks=1)
    slot = side.memory.regions.payload_bytes + TRAILER_BYTES
    peers = Peers(secret=SECRET, listen="127.0.0.1", ring_bytes=slot - 1)
    config = CacheConfig(model="m", device_blocks=64, block_tokens=4)
    with pytest.raises(ConfigError, match="ring_bytes"):
        await CacheEngine(config, side.memory.regions, peers=peers).__aenter__()
