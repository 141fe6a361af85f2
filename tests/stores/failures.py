"""Failures that every store must survive behind its guard, for requests that go on without it.

A test module of a store with a server defines a fixture ``rig`` and subclasses
:class:`ObjectFailures` and :class:`ServerFailures`. Required in each: no exception, no wait beyond
the deadline, about a millisecond per request after the breaker has opened, and blocks again when
the server is back.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from aiokv.stores.base import KEY_BYTES, Store
from aiokv.stores.guard import StoreGuard
from aiokv.stores.proof import Proof
from aiokv.stores.use import StoreUse
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.conformance import (
    DONE,
    FAILED,
    MISSING,
    PRESENT,
    REFUSED,
    WRONG,
    Blocks,
    Medium,
    eventually,
    ids,
    keys_of,
)
from tests.stores.servers import ProxyServer, free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

DEADLINE_SECONDS: Final = 0.5  # while a server fails
RETURN_SECONDS: Final = 5.0  # deadline when the server is back, of operations that are repeated
TICK_SECONDS: Final = 0.1
MAX_TICKS: Final = 25  # of one operation with that deadline; a stall of the machine is one tick
ENOUGH_REQUESTS: Final = 20  # until a breaker must have opened


class ObjectRig(Medium):
    """A medium whose objects a test replaces."""

    def replace(self, key: bytes, content: bytes) -> None:
        """Store other bytes for a key, past the store."""
        raise AssertionError(f"{type(self).__name__} must define replace()")

    def full(self) -> Store:
        """Return a store on a medium that takes fewer than 24 objects of 10,048 bytes."""
        raise AssertionError(f"{type(self).__name__} must define full()")


class ServerRig(ObjectRig):
    """A medium with a server that a test kills, stops and starts."""

    def store_at(self, port: int) -> Store:
        """Return a store of the server behind a port of 127.0.0.1, not opened."""
        raise AssertionError(f"{type(self).__name__} must define store_at()")

    @property
    def port(self) -> int:
        """Port of the server."""
        raise AssertionError(f"{type(self).__name__} must define port")

    def kill(self) -> None:
        """End the server with SIGKILL."""
        raise AssertionError(f"{type(self).__name__} must define kill()")

    def start(self) -> None:
        """Start the server on the same port, with or without its old objects."""
        raise AssertionError(f"{type(self).__name__} must define start()")

    def stop(self) -> None:
        """Stop the server with SIGSTOP."""
        raise AssertionError(f"{type(self).__name__} must define stop()")

    def resume(self) -> None:
        """Let the server continue."""
        raise AssertionError(f"{type(self).__name__} must define resume()")


class Requests:
    """Requests that use a store through its guard, as an engine does."""

    def __init__(self, guard: StoreGuard, proof: Proof, blocks: Blocks) -> None:
        self.guard = guard
        self._proof = proof
        self._blocks = blocks
        self._overdue: set[asyncio.Task[object]] = set()

    @property
    def can_read(self) -> bool:
        """True while the guard asks the store."""
        return self.guard.statistics().reading == "closed"

    async def save(self, numbers: Iterable[int]) -> list[int]:
        """Save sealed objects, from blocks 0, 1, ...; return the results, with ``DONE`` for those
        that were present."""
        keys = keys_of(numbers)
        blocks = np.arange(len(keys) // KEY_BYTES, dtype=np.int32)
        await self._blocks_are_free()
        for block in blocks:
            self._blocks.write(int(block), keys[block * KEY_BYTES :][:KEY_BYTES])
        await self._proof.seal(keys, blocks)
        reply = await self._in_time(self.guard.save(keys, blocks))
        self._note(reply.overdue)
        return np.where(reply.results == PRESENT, DONE, reply.results).tolist()

    async def load(self, numbers: Iterable[int]) -> list[int]:
        """Load objects, compare the bytes of those that are ``DONE``, and return the results."""
        keys = keys_of(numbers)
        await self._blocks_are_free()
        self._blocks.fill(0)
        blocks = np.arange(len(keys) // KEY_BYTES, dtype=np.int32)
        reply = await self._in_time(self.guard.load(keys, blocks))
        self._note(reply.overdue)
        for block, result in zip(blocks, reply.results, strict=True):
            if result == DONE:
                probe = Blocks(1, self._blocks.memory.payload_bytes)
                expected = probe.write(0, keys[block * KEY_BYTES :][:KEY_BYTES])
                payload = probe.memory.payload_bytes
                assert self._blocks.read(int(block))[:payload] == expected[:payload]
        return reply.results.tolist()

    async def lookup(self, numbers: Iterable[int]) -> list[bool]:
        """Look keys up."""
        return (await self._in_time(self.guard.lookup(keys_of(numbers)))).tolist()

    def have_deadline(self, seconds: float) -> None:
        """Set the deadline of the operations that follow."""
        use = self.guard.use
        self.guard.use = replace(use, deadline_seconds=seconds, lookup_deadline_seconds=seconds)

    async def until_refused(self) -> None:
        """Make requests until the guard refuses them without asking the store.

        They have a short deadline from now on.
        """
        self.have_deadline(DEADLINE_SECONDS)
        for _ in range(ENOUGH_REQUESTS):
            await self.lookup([1])
            await self.load([1])
            if not self.can_read:
                return
        pytest.fail(f"the breaker is closed after {ENOUGH_REQUESTS} failed requests")

    def cost_a_millisecond(self) -> None:
        """Check that a request does not wait while the breaker is open, and its CPU time."""
        keys = keys_of([1])
        shortest = float("inf")
        for _ in range(5):
            began = time.thread_time()
            for _ in range(20):
                assert not without_waiting(self.guard.lookup(keys)).any()
                reply = without_waiting(self.guard.load(keys, ids(23)))
                assert reply.results.tolist() == [FAILED]
            shortest = min(shortest, (time.thread_time() - began) / 20)
        assert shortest < 1e-3, f"a request takes {shortest * 1e3:.2f} ms"

    async def are_served_again(self) -> bool:
        """Return whether a block could be saved, found and loaded."""
        self.have_deadline(RETURN_SECONDS)
        await self.lookup([7])
        if await self.save([7]) != [DONE] or not all(await self.lookup([7])):
            return False
        return await self.load([7]) == [DONE]

    async def _in_time(self, operation):
        """Await an operation; with the short deadline, check that it does not wait longer."""
        if self.guard.use.deadline_seconds > DEADLINE_SECONDS:
            return await operation
        task = asyncio.ensure_future(operation)
        for _ in range(MAX_TICKS):
            if (await asyncio.wait([task], timeout=TICK_SECONDS))[0]:
                return task.result()
        task.cancel()
        pytest.fail(f"a request waited for {MAX_TICKS * TICK_SECONDS} s")

    def _note(self, overdue: asyncio.Task[object] | None) -> None:
        if overdue is not None:
            self._overdue.add(overdue)
            overdue.add_done_callback(self._overdue.discard)

    async def _blocks_are_free(self) -> None:
        """Wait until no operation that is overdue accesses the blocks."""
        if self._overdue:
            await asyncio.wait(self._overdue)


def without_waiting(operation):
    """Return the result of a coroutine that must not suspend."""
    try:
        operation.send(None)
    except StopIteration as end:
        return end.value
    pytest.fail("a request waits")


@asynccontextmanager
async def guarded(store: Store) -> AsyncIterator[Requests]:
    """Open a store behind a guard, with deadlines that a busy machine keeps."""
    blocks = Blocks()
    proof = Proof(blocks.memory)
    use = StoreUse(
        store, deadline_seconds=PATIENCE_SECONDS, lookup_deadline_seconds=PATIENCE_SECONDS
    )
    guard = StoreGuard(use)
    try:
        await guard.open(blocks.memory, proof)
        yield Requests(guard, proof, blocks)
    finally:
        assert await guard.aclose(), "the store still accesses its memory"
        proof.close()


@pytest.mark.asyncio
class ObjectFailures:
    """Objects that are wrong, and a medium that is full."""

    async def test_wrong_bytes_are_found_and_replaced(self, rig: ObjectRig) -> None:
        async with guarded(rig.store()) as requests:
            assert await requests.save([1, 2]) == [DONE, DONE]
            sealed = bytearray(await sealed_object(1))
            sealed[5_000] ^= 1
            rig.replace(keys_of([1]), bytes(sealed))
            assert await requests.load([1, 2]) == [WRONG, DONE]
            await eventually(lambda: replaced(requests))

    async def test_the_object_of_another_key_is_wrong(self, rig: ObjectRig) -> None:
        async with guarded(rig.store()) as requests:
            assert await requests.save([1, 2]) == [DONE, DONE]
            rig.replace(keys_of([1]), await sealed_object(2))
            assert await requests.load([1, 2]) == [WRONG, DONE]
            await eventually(lambda: replaced(requests))

    async def test_values_of_other_lengths_are_wrong(self, rig: ObjectRig) -> None:
        sealed = await sealed_object(1)
        async with guarded(rig.store()) as requests:
            assert await requests.save([1, 2]) == [DONE, DONE]
            for length in (1, 5_000, 10_047, 10_049, 20_096):
                rig.replace(keys_of([1]), (2 * sealed)[:length])
                results = await requests.load([1, 2])
                assert results[0] in (WRONG, MISSING), length
                assert results[1] == DONE
                await eventually(lambda: replaced(requests))

    async def test_a_full_medium_refuses_and_still_serves(self, rig: ObjectRig) -> None:
        async with guarded(rig.full()) as requests:
            results = [(await requests.save([number]))[0] for number in range(24)]
            assert set(results) <= {DONE, REFUSED}
            assert REFUSED in results
            assert requests.can_read
            stored = [number for number, result in enumerate(results) if result == DONE]
            loaded = await requests.load(stored)
            assert set(loaded) <= {DONE, MISSING}
            statistics = requests.guard.statistics()
        assert statistics.refused_blocks == results.count(REFUSED)
        assert (statistics.saving, statistics.failed_blocks) == ("closed", 0)


@pytest.mark.asyncio
class ServerFailures:
    """A server that is gone, does not answer, or is slow."""

    async def test_a_killed_server_costs_nothing_and_is_used_when_it_is_back(
        self, rig: ServerRig
    ) -> None:
        async with guarded(rig.store()) as requests:
            assert await requests.save([1]) == [DONE]
            assert await requests.load([1]) == [DONE]
            rig.kill()
            await requests.until_refused()
            requests.cost_a_millisecond()
            assert await requests.save([2]) != [DONE]
            rig.start()
            await eventually(requests.are_served_again)

    async def test_a_stopped_server_costs_one_deadline_and_is_used_when_it_continues(
        self, rig: ServerRig
    ) -> None:
        async with guarded(rig.store()) as requests:
            assert await requests.save([1]) == [DONE]
            rig.stop()
            try:
                await requests.until_refused()
                requests.cost_a_millisecond()
                assert await requests.save([2]) != [DONE]
            finally:
                rig.resume()
            await eventually(requests.are_served_again)

    async def test_a_slow_server_is_not_waited_for(self, rig: ServerRig, tmp_path: Path) -> None:
        proxy = ProxyServer(rig.port, tmp_path / "proxy.log")
        proxy.start()
        try:
            async with guarded(rig.store_at(proxy.port)) as requests:
                assert await requests.save([1]) == [DONE]
                proxy.slow_down()
                await requests.until_refused()
                requests.cost_a_millisecond()
                proxy.speed_up()
                await eventually(requests.are_served_again)
        finally:
            proxy.kill()

    async def test_a_server_that_is_absent_at_first_is_used_when_it_comes(
        self, rig: ServerRig
    ) -> None:
        rig.kill()
        async with guarded(rig.store()) as requests:
            await requests.until_refused()
            requests.cost_a_millisecond()
            assert await requests.save([1]) != [DONE]
            rig.start()
            await eventually(requests.are_served_again)

    async def test_an_address_without_a_server(self, rig: ServerRig) -> None:
        async with guarded(rig.store_at(free_port())) as requests:
            await requests.until_refused()
            requests.cost_a_millisecond()
            assert await requests.save([1]) != [DONE]
            assert requests.guard.statistics().opened >= 1


async def sealed_object(number: int) -> bytes:
    """Return the object of a key as a guard saves it."""
    blocks = Blocks(1)
    blocks.write(0, keys_of([number]))
    proof = Proof(blocks.memory)
    try:
        await proof.seal(keys_of([number]), ids(0))
    finally:
        proof.close()
    return blocks.read(0)


async def replaced(requests: Requests) -> bool:
    """Return whether the wrong object of key 1 was removed and saved again."""
    assert set(await requests.save([1])) <= {DONE, REFUSED}
    return await requests.load([1]) == [DONE]
