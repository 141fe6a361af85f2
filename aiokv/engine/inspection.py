"""Inspection: the state of an engine, its leases and prefixes, and its health, for tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.base import checks
from aiokv.base.statistics import Statistics
from aiokv.base.types import Health, HotPrefixes, LeaseInfo, PrefixInfo
from aiokv.engine.contexts import split_context
from aiokv.stores.guard_statistics import unavailable_stores

if TYPE_CHECKING:
    from aiokv.engine.parts import Parts
    from aiokv.engine.peers import Exchange
    from aiokv.engine.sleeping import Sleep


class Inspection:
    """Reads the state of an engine; changes nothing."""

    def __init__(self, parts: Parts, sleep: Sleep, exchange: Exchange) -> None:
        self._block_tokens = parts.config.block_tokens
        self._lifetime = parts.lifetime
        self._read = parts.scheduler.read
        self._requests = parts.requests
        self._worker = parts.worker
        self._poller = parts.poller
        self._layer_waits = parts.transfers.layer_waits
        self._sleep = sleep
        self._exchange = exchange

    def statistics(self) -> Statistics:
        """See ``CacheEngine.statistics``. Any thread."""
        state = self._worker.inspect()
        return Statistics(
            **msgspec.structs.asdict(self._read.statistics()),
            requests=self._requests.statistics(),
            worker=self._worker.statistics(),
            layer_waits=self._layer_waits.statistics(),
            poller=self._poller.statistics(),
            ranks=state.ranks,
            stores=state.stores,
            peers=self._exchange.statistics(state.peers),
        )

    def leases(self, limit: int) -> list[LeaseInfo]:
        """See ``CacheEngine.leases``."""
        self._lifetime.check_thread()
        return self._read.leases(checks.integer("limit", limit, minimum=0))

    def hottest_prefixes(self, limit: int) -> HotPrefixes:
        """See ``CacheEngine.hottest_prefixes``."""
        self._lifetime.check_thread()
        limit = checks.integer("limit", limit, minimum=0)
        stretches, is_complete = self._read.hottest_prefixes(limit)
        prefixes = []
        for parent, block, context, first_block, blocks, device, host, *counts in stretches:
            salt, adapter = split_context(context)
            uses, leases, branches = counts
            prefixes.append(
                PrefixInfo(
                    prefix_id=block,
                    parent=None if parent < 0 else parent,
                    salt=salt,
                    adapter=adapter,
                    first_token=first_block * self._block_tokens,
                    num_tokens=blocks * self._block_tokens,
                    blocks=blocks,
                    device_blocks=device,
                    host_blocks=host,
                    uses=uses,
                    leases=leases,
                    branches=branches,
                )
            )
        return HotPrefixes(prefixes=prefixes, is_complete=is_complete)

    def health(self) -> Health:
        """See ``CacheEngine.health``."""
        self._lifetime.check_thread()
        failure, state = self._lifetime.failure, self._worker.inspect()
        return Health(
            phase=self._lifetime.phase_name,
            failure="" if failure is None else str(failure) or type(failure).__name__,
            asleep=sorted(self._sleep.asleep),
            is_paused=self._read.is_paused,
            unpinned_bytes=state.unpinned_bytes,
            unavailable_stores=unavailable_stores(state.stores),
        )

    def dump(self) -> dict[str, object]:
        """See ``CacheEngine.dump``."""
        self._lifetime.check_thread()
        return {
            **self._read.describe(),
            "open_step": self._read.open_step,
            "asleep": sorted(self._sleep.asleep),
            "statistics": msgspec.to_builtins(self.statistics()),
        }
