"""Taking: device blocks for the requests of one scheduler."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiokv.connectors.fastdeploy.requests import tokens_of
from aiokv.errors import RequestTooLarge, TransferError, WouldBlock

if TYPE_CHECKING:
    from aiokv.connectors.fastdeploy.holding import Holding
    from aiokv.connectors.fastdeploy.holdings import Holdings
    from aiokv.connectors.fastdeploy.room import Room
    from aiokv.connectors.fastdeploy.steps import Steps
    from aiokv.sync import Answer, SyncEngine


class Taking:
    """Takes blocks from one engine. The caller holds the lock of :class:`RequestBlocks`.

    Args:
        engine: the cache.
        holdings: requests with blocks.
        steps: closes the step in which blocks were given back.
        room: how many blocks there are.
    """

    def __init__(self, engine: SyncEngine, holdings: Holdings, steps: Steps, room: Room) -> None:
        self._engine = engine
        self._holdings = holdings
        self._steps = steps
        self._room = room

    def take(self, holding: Holding, num_blocks: int, wait_seconds: float) -> bool:
        """Append blocks to the lease of a request, for which the engine may have to save others.

        Args:
            holding: the request.
            num_blocks: number of blocks.
            wait_seconds: how long to wait for copies of blocks.

        Returns:
            False without room.
        """
        if num_blocks > self._holdings.sizes.device_blocks:
            return False
        return self._extend(holding, num_blocks) or (
            self.find(num_blocks, holding, wait_seconds) and self._extend(holding, num_blocks)
        )

    def _extend(self, holding: Holding, num_blocks: int) -> bool:
        """Append blocks to the lease of a request; return False without room."""
        num_tokens = num_blocks * self._holdings.sizes.block_tokens
        calls = self._engine.calls()
        self._room.record_unreserve(calls)
        if holding.table and holding.lease is not None:
            answer: Answer[Any] = calls.extend([holding.lease], num_tokens)
        else:
            if holding.lease is not None:  # a grant without a hit; it is too late for a later hit
                calls.release(holding.lease)
            tokens = tokens_of(holding.request)[: holding.prefill_tokens]
            holding.lease = holding.record_match(calls, tokens, read=False)
            answer = calls.try_allocate(holding.lease, num_tokens)
        calls.run(raise_errors=False)
        if isinstance(answer.error, WouldBlock | RequestTooLarge) or answer.value is False:
            return False
        self._holdings.read_table(holding, holding.given)
        self._steps.has_changed = True
        self._room.certain = max(self._room.certain - num_blocks, 0)
        return True

    def find(self, num_blocks: int, user: Holding | None, wait_seconds: float = 0.0) -> bool:
        """Ask the engine for room; take spare blocks back, and begin saves, if that helps.

        Args:
            num_blocks: number of blocks.
            user: the request that needs them, and keeps its spare blocks.
            wait_seconds: how long to wait for copies of blocks.
        """
        holdings = self._holdings
        empty = self._engine.free_device_blocks + self._engine.evictable_device_blocks
        empty += self._room.reserved_blocks
        held = holdings.spare_blocks - (0 if user is None else user.spare)
        held += 0 if holdings.parked is None else holdings.parked.given
        if empty + held + holdings.leaving_blocks < num_blocks:
            return False  # no crossing
        if self._room.has(num_blocks):
            return True
        if held:
            self._take_back(user)
            if self._room.has(num_blocks):
                return True
        if self._wait_for_departures(wait_seconds) and self._room.has(num_blocks):
            return True
        if self._engine.free_device_blocks + self._engine.evictable_device_blocks < num_blocks:
            return False
        return self._room.make(num_blocks, wait_seconds)

    def _take_back(self, user: Holding | None) -> None:
        """Give the parked blocks back, and the spare blocks of all requests but ``user``."""
        others = [
            other for other in self._holdings.by_id.values() if other.spare and other is not user
        ]
        calls = self._engine.calls()
        self._holdings.record_parked(calls)
        for other in others:
            if other.lease is not None:
                calls.truncate(other.lease, other.given * self._holdings.sizes.block_tokens)
        self._steps.record_close(calls)
        calls.run(raise_errors=False)
        for other in others:
            self._holdings.read_table(other, other.given)

    def _wait_for_departures(self, wait_seconds: float) -> bool:
        """Release ended requests when their onloads have arrived; return True if there are any.

        Requests that wait in the scheduler's queue lose the blocks that have arrived for them.
        """
        for request_id, holding in list(self._holdings.onloading.items()):
            if holding.has_arrived:
                self._holdings.stop_waiting(request_id)
        if not self._holdings.leaving:
            return False
        deadline = time.monotonic() + wait_seconds
        for holding in self._holdings.leaving if wait_seconds else ():
            if holding.lease is not None:
                with suppress(TransferError, TimeoutError):
                    left = deadline - time.monotonic()
                    holding.lease.layers.wait_all(max(left, 0.0))
        calls = self._engine.calls()
        has_departed = self._holdings.record_departures(calls)
        self._steps.record_close(calls)
        calls.run()
        return has_departed
