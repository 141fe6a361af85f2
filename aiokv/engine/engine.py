"""CacheEngine: what a serving loop awaits. The only place that joins scheduler and worker.

    lease.allocate ─► CacheManager decides ─► plan ─► CacheController moves ─► report ─► manager
         ▲                                                                         │
         └──────────────── the next waiter in line ◄───────────────────────────────┘

There is no background task: everything happens in the caller's calls and in callbacks of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.engine.recovery import Recovery
from aiokv.types import Statistics

if TYPE_CHECKING:
    from aiokv.worker.lanes import WorkerStatistics
    from aiokv.worker.poller import PollerStatistics


class CacheEngine(Recovery):
    """Prefix cache over device and host memory, for one event loop.

    Args:
        config: sizes and rules.
        regions: the device tensors. Without any, the cache keeps books only: transfers move
            nothing and are done in the next pass of the loop.
        device: where the regions live; the cpu device by default.
        ranks: instead of both: the tensors are those of several processes.

    ``async with`` binds it to the running loop; every method is to be called on that loop.
    """

    def statistics(self) -> Statistics:
        core = self._core.statistics()
        fields = {name: getattr(core, name) for name in _CORE_FIELDS}
        return Statistics(
            device_blocks=self._core.device_blocks,
            host_blocks=self.config.host_blocks,
            state_slots=self.config.state_slots,
            waiting=len(self._waiting),
            **fields,
        )

    def worker_statistics(self) -> WorkerStatistics:
        return self._controller.statistics()

    def poller_statistics(self) -> PollerStatistics:
        return self._poller.statistics()

    def dump(self) -> dict[str, object]:
        """Who holds what, for a person to read; plain values, ready for JSON."""
        return {
            "leases": [
                {"owner": owner or "unnamed", **self._manager.describe(lease_id)}
                for lease_id, owner in self._owners.items()
            ],
            "waiting": [
                {"owner": lease.owner or "unnamed", "num_tokens": num_tokens}
                for lease, num_tokens in self._waiting.entries()
            ],
            "waiting_for_quota": [
                {
                    "owner": self._owners.get(lease_id) or "unnamed",
                    "salt": salt,
                    "num_blocks": num_blocks,
                }
                for salt, lease_id, num_blocks in self._quota.entries()
            ],
            "quota": self._quota.held_by_salt(),
            "pins": len(self._pins),
            "paused": self._admissions.paused,
            "open_step": self._steps.open,
            "asleep": sorted(self.asleep),
            "statistics": msgspec.to_builtins(self.statistics()),
            "worker": msgspec.to_builtins(self._controller.statistics()),
            "ranks": [] if self._ranks is None else self._ranks.describe(),
        }

    def check_invariants(self) -> list[str]:
        """Return a description of each violated invariant: I1-I6, and those of the waiting lines.

        Scans everything.
        """
        return self._core.violations() + self._check_lines()

    def __repr__(self) -> str:
        s = self._core.statistics()
        return (
            f"<CacheEngine device {self.config.device_blocks - s.device_free}/"
            f"{self.config.device_blocks} host {self.config.host_blocks - s.host_free}/"
            f"{self.config.host_blocks}, {len(self._owners)} leases, "
            f"{len(self._waiting)} waiting>"
        )


_CORE_FIELDS = tuple(
    name
    for name in Statistics.__struct_fields__
    if name not in ("device_blocks", "host_blocks", "state_slots", "waiting")
)
