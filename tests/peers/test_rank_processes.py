"""Engines of several ranks in real processes, of which one side or one rank is killed.

After each kill the other side has the right bytes in all positions, holds nothing, and keeps its
invariants; so does the side whose rank was killed, when the rank has been replaced.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import AiokvError, LayoutError
from aiokv.testing import run_until_idle
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.peers.engines import prompt
from tests.peers.processes import Nursery
from tests.peers.ranked import LocalServer, RankedSide, Server
from tests.peers.test_cancelled_requests import REQUESTS as CONCURRENT
from tests.peers.test_cancelled_requests import Request
from tests.peers.test_processes import (
    LENGTH,
    MOST,
    fragments,
    in_time,
    progress,
    received,
    seeds,
    sent,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Options = Callable[..., dict[str, Any]]

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("uvloop")]

ROUNDS = 10 if os.environ.get("AIOKV_DEEP") else 3  # of requests, of which some are cancelled
KILLS = 25 if os.environ.get("AIOKV_DEEP") else 2  # of each layout and victim
MOST_KILLS = KILLS + 20  # while none has cut a transfer: the other processes may be faster
ONE_TO_TWO, TWO_TO_ONE, TWO_TO_FOUR = layouts = [
    pytest.param(1, 2, 4, id="1 to 2"),
    pytest.param(2, 1, 4, id="2 to 1"),
    pytest.param(2, 4, 8, id="2 to 4, other blocks"),
]
TICKET_SECONDS = 3.0  # a ticket that the killed side has not opened ends then
LAYERED = {"layers": 5, "layer_ranges": 2}
NAMES = ("senders", "receivers", "block_tokens")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Return a function that makes the options of a side in a directory of its own."""

    def make(name: str, num_ranks: int, **changed: Any) -> dict[str, Any]:
        directory = tmp_path / name
        directory.mkdir()
        common = {"device_blocks": 1024, "block_tokens": 4, "ring_blocks": 64, "chunk_blocks": 2}
        return {"directory": str(directory), "num_ranks": num_ranks, **common, **changed}

    return make


# --- one side is killed -------------------------------------------------------------------------


@pytest.mark.parametrize(NAMES, layouts)
async def test_all_processes_of_the_prefill_side_are_killed(
    nursery, options, senders, receivers, block_tokens
):
    rng = random.Random(1)
    failures = 0
    async with LocalServer(nursery, options("d", receivers)) as d:
        for number in range(MOST_KILLS):
            prefill = options(f"p{number}", senders, listen=None, block_tokens=block_tokens)
            async with Server(nursery, prefill) as p:
                moves = [
                    asyncio.create_task(received(d.side, p.manager, seed, timeout=TICKET_SECONDS))
                    for seed in seeds(number)
                ]
                await progress(d.side, "received_tokens", rng.uniform(0, MOST), moves)
                await p.killed()
                ends = await asyncio.gather(*moves)
                failures += sum(end is not None for end in ends)
            await d.side.at_rest()
            if failures and number >= KILLS - 1:
                break
        await d.side.at_rest(empty=True)
    assert failures, "no receive was cut: the prompts are too short"


@pytest.mark.parametrize(NAMES, layouts)
async def test_all_processes_of_the_decode_side_are_killed(
    nursery, options, senders, receivers, block_tokens
):
    rng = random.Random(2)
    failures = 0
    prefill = options("p", senders, listen=None, block_tokens=block_tokens)
    async with LocalServer(nursery, prefill) as p:
        for number in range(MOST_KILLS):
            async with Server(nursery, options(f"d{number}", receivers)) as d:
                moves = [
                    asyncio.create_task(sent(p.side, d.manager, seed)) for seed in seeds(number)
                ]
                await progress(p.side, "delivered_tokens", rng.uniform(0, MOST), moves)
                await d.killed()
                ends = await asyncio.gather(*moves)
                failures += sum(end is not None for end in ends)
            await p.side.at_rest()
            if failures and number >= KILLS - 1:
                break
        await p.side.at_rest(empty=True)
    assert failures, "no send was cut: the prompts are too short"


# --- layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(NAMES, layouts)
async def test_ranks_send_layers_before_the_commit(
    nursery, options, senders, receivers, block_tokens
):
    prefill = options("p", senders, listen=None, block_tokens=block_tokens, **LAYERED)
    async with (
        LocalServer(nursery, prefill) as p,
        LocalServer(nursery, options("d", receivers, **LAYERED)) as d,
    ):
        tokens = prompt(LENGTH)
        async with await d.side.granted(tokens) as lease:
            async with (
                lease.receive(timeout=PATIENCE_SECONDS) as receiving,
                await p.side.granted(tokens) as source,
            ):
                await d.side.heard()  # of the ticket
                async with p.side.engine.send(source, receiving.ticket) as sending:
                    p.side.compute_layers(source, tokens, range(LENGTH), sending)
                    if receivers == 1:  # ranks tell their counts with the next heartbeat only
                        await run_until_idle(lambda: fragments(d.side) > 0)
                    assert receiving.received_tokens == 0
                    source.commit(LENGTH)
                    p.side.step()
                    assert await in_time(receiving.wait()) == LENGTH
                    assert await in_time(sending.ended()) is None
            d.side.finish(lease, tokens, LENGTH)


async def test_end_of_a_ticket_is_told_by_the_ranks(nursery, options):
    async with (
        LocalServer(nursery, options("p", 2, listen=None)) as p,
        LocalServer(nursery, options("d", 1)) as d,
    ):
        tokens = prompt(LENGTH)
        async with await d.side.granted(tokens) as lease, await p.side.granted(tokens) as source:
            receiving = await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
            async with p.side.engine.send(source, receiving.ticket) as sending:
                receiving.cancel()
                assert "the receiver gave up" in str(await in_time(sending.ended()))
                assert sending.failure is not None
            await receiving.__aexit__(None, None, None)


async def test_ranks_with_other_ranges_of_layers_cannot_send(nursery, options):
    prefill = options("p", 2, listen=None, **LAYERED)
    async with (
        LocalServer(nursery, prefill) as p,
        LocalServer(nursery, options("d", 1, layers=5)) as d,
    ):
        tokens = prompt(LENGTH)
        async with (
            await d.side.granted(tokens) as lease,
            await p.side.granted(tokens) as source,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            with pytest.raises(LayoutError, match="into 2 ranges, the receiver into 1"):
                await p.side.engine.send(source, receiving.ticket).__aenter__()


# --- one rank is killed -------------------------------------------------------------------------


async def moved(
    p: RankedSide, d: RankedSide, seed: int, timeout: float = TICKET_SECONDS
) -> str | None:
    """Move a prompt between two engines of this process; return the failure of either side."""
    tokens = prompt(LENGTH, seed)
    sending: asyncio.Task[tuple[int, str | None]] | None = None
    failures: list[str | None] = []
    try:
        async with await d.granted(tokens) as lease:
            async with lease.receive(timeout=timeout) as receiving:
                sending = asyncio.create_task(p.prefill(tokens, receiving.ticket))
                first = await in_time(receiving.wait())
            assert (first == LENGTH) == (receiving.failure is None)
            failures.append(receiving.failure)
            d.finish(lease, tokens, first)
    except AiokvError as error:  # this engine has lost a rank
        failures.append(str(error))
    try:
        if sending is not None:
            failures.append((await in_time(sending))[1])
    except AiokvError as error:
        failures.append(str(error))
    return next((failure for failure in failures if failure is not None), None)


async def kill_ranks(
    p: LocalServer, d: LocalServer, loser: LocalServer, rng: random.Random
) -> None:
    """Kill and replace ranks of one side; after each, both sides work together again."""
    other = d if loser is p else p
    failures = 0
    for number in range(MOST_KILLS):
        moves = [asyncio.create_task(moved(p.side, d.side, seed)) for seed in seeds(number)]
        await progress(d.side, "received_tokens", rng.uniform(0, MOST), moves)
        rank = rng.randrange(loser.side.num_ranks)
        await loser.ranks.killed(rank)
        ends = await asyncio.gather(*moves)
        failures += sum(end is not None for end in ends)
        await other.side.at_rest()
        await loser.restart(rank)
        await loser.side.at_rest(empty=True)
        assert await moved(p.side, d.side, 1000 + number, timeout=PATIENCE_SECONDS) is None
        if failures and number >= KILLS - 1:
            break
    for side in (p.side, d.side):
        await side.at_rest(empty=True)
    assert failures, "nothing was cut: the prompts are too short"


@pytest.mark.parametrize(NAMES, [TWO_TO_ONE, TWO_TO_FOUR])
@pytest.mark.parametrize("model", [{}, LAYERED], ids=["blocks", "layers"])
async def test_rank_of_the_prefill_side_is_killed(
    nursery, options, senders, receivers, block_tokens, model
):
    prefill = options("p", senders, listen=None, block_tokens=block_tokens, **model)
    async with (
        LocalServer(nursery, prefill) as p,
        LocalServer(nursery, options("d", receivers, **model)) as d,
    ):
        await kill_ranks(p, d, p, random.Random(3))


@pytest.mark.parametrize(NAMES, [ONE_TO_TWO, TWO_TO_FOUR])
async def test_rank_of_the_decode_side_is_killed(
    nursery, options, senders, receivers, block_tokens
):
    prefill = options("p", senders, listen=None, block_tokens=block_tokens)
    async with (
        LocalServer(nursery, prefill) as p,
        LocalServer(nursery, options("d", receivers)) as d,
    ):
        await kill_ranks(p, d, d, random.Random(4))


# --- requests are cancelled ---------------------------------------------------------------------


@pytest.mark.parametrize("layered", [{}, LAYERED], ids=["blocks", "layers"])
@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 2)])
async def test_cancelled_requests_do_not_delay_others(
    nursery, options, senders, receivers, layered
):
    small = {"device_blocks": 400, "ring_blocks": 8, **layered}
    prefill, decode = options("p", senders, listen=None, **small), options("d", receivers, **small)
    async with LocalServer(nursery, prefill) as p, LocalServer(nursery, decode) as d:
        for number in range(ROUNDS):
            rng = random.Random(number)
            requests = [Request(rng, CONCURRENT * number + i) for i in range(CONCURRENT)]
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    tasks.create_task(request.run(p.side, d.side))
