"""CacheEngine: what a serving loop awaits. The only place that joins scheduler and worker.

    lease.allocate ─► CacheManager decides ─► plan ─► CacheController moves ─► report ─► manager
         ▲                                                                         │
         └──────────────── the next waiter in line ◄───────────────────────────────┘

There is no background task: everything happens in the caller's calls and in callbacks of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.checks import Unique, arguments
from aiokv.engine.recovery import Recovery
from aiokv.types import Statistics

if TYPE_CHECKING:
    from aiokv.worker.lanes import WorkerStatistics
    from aiokv.worker.poller import PollerStatistics


@arguments()
class CacheEngine(Recovery, Unique):
    """Prefix cache over device and host memory, for one event loop.

    Args:
        config: sizes and rules.
        regions: the device tensors. Without any, the cache keeps books only: transfers move
            nothing and are done in the next pass of the loop.
        device: where the regions live: ``"cpu"``, which is the default, ``"cuda"`` for the current
            GPU, ``"cuda:1"``, or a :class:`CpuDevice` or :class:`CudaDevice`.
        ranks: instead of both: the tensors are those of several processes.

    ``async with`` binds it to the running loop; every method is to be called on that loop. Methods
    that only read may be called before ``async with`` and after closing, too. In other threads,
    ``statistics()``, ``worker_statistics()``, ``asleep``, ``open_step`` and ``repr()`` may be
    called; all else raises ``UsageError`` there.

    Raises:
        ConfigError: an argument is of the wrong type, unknown, or contradicts another; or there is
            no memory for the index.
        UsageError: the regions are too small for ``config``.
    """

    def statistics(self) -> Statistics:
        """Return counts and the state of the pools. Any thread."""
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
        """Return what the worker has moved; zeros before ``async with``. Any thread."""
        return self._controller.statistics()

    def poller_statistics(self) -> PollerStatistics:
        """Return what waiting has cost; zeros before ``async with``."""
        self._check_thread()
        return self._poller.statistics()

    def dump(self) -> dict[str, object]:
        """Return which lease holds which blocks, as plain values that JSON can represent."""
        self._check_thread()
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
            "open_step": self._steps.open if self._entered else 0,
            "asleep": sorted(self.asleep),
            "statistics": msgspec.to_builtins(self.statistics()),
            "worker": msgspec.to_builtins(self.worker_statistics()),
            "ranks": self._controller.describe(),
        }

    def check_invariants(self) -> list[str]:
        """Return a description of each violated invariant: I1-I6, and those of the waiting lines.

        Scans everything.
        """
        self._check_thread()
        violations = self._core.violations() + self._check_lines()
        return violations + self._pins.violations(self._core)

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
