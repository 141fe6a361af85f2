"""Inspection: the leases, prefixes and transfers of an engine, and records of its work."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, final

import msgspec

from aiokv.base import checks
from aiokv.base.checks import Unique
from aiokv.base.types import HotPrefixes, LeaseInfo, PrefixInfo
from aiokv.engine.contexts import split_context
from aiokv.engine.observation import DEFAULT_LIMIT, Observation, record_timeline

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.engine.observers import Observer, TransferSpan
    from aiokv.engine.parts import Parts
    from aiokv.engine.sleeping import Sleep
    from aiokv.engine.status import Status


@final
class Inspection(Unique):
    """State and records of one engine for pages, tools and tests; see ``CacheEngine.inspect``.

    Methods that list state may be called before ``async with`` and after closing, too. All methods
    but ``device_blocks_by_salt`` raise ``UsageError`` in another thread than that of the engine's
    loop.

    Attributes:
        parts: scheduler, worker and other parts of the engine, for its own tests. They are no part
            of the interface: another version may have others. A transition of the scheduler that
            is called here has effects that nothing applies.
    """

    def __init__(self, parts: Parts, status: Status, sleep: Sleep) -> None:
        self.parts = parts
        self._block_tokens = parts.config.block_tokens
        self._lifetime = parts.lifetime
        self._read = parts.scheduler.read
        self._observers = parts.observers
        self._status = status
        self._sleep = sleep

    # --- state ------------------------------------------------------------------------------------

    def leases(self, limit: int = 1000, *, max_waiting: int | None = None) -> list[LeaseInfo]:
        """List leases: first the waiting ones in line order, then the oldest ones.

        Leases of pins and prefetches are included. The call takes about 2 µs per listed lease; it
        examines at most 4,096 leases.

        Args:
            limit: most leases to list, from 0.
            max_waiting: most waiting leases among them, from 0; None for ``limit``.

        Raises:
            UsageError: a limit is negative or not an integer; or the call is made in another
                thread.
        """
        self._lifetime.check_thread()
        limit = checks.integer("limit", limit, minimum=0)
        if max_waiting is None:
            return self._read.leases(limit, limit)
        most = checks.integer("max_waiting", max_waiting, minimum=0)
        return self._read.leases(limit, min(most, limit))

    def hottest_prefixes(self, limit: int = 32) -> HotPrefixes:
        """Return the cached prefixes that were used most, as a tree.

        The call takes at most about 1 ms for a cache of any size: it follows the most used blocks
        first, and reads at most 4,096 blocks.

        Args:
            limit: most stretches of blocks to return, from 0.

        Raises:
            UsageError: ``limit`` is negative or not an integer; or the call is made in another
                thread.
        """
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

    def in_flight(self) -> list[TransferSpan]:
        """List the transfers in flight, as records that end now; needs no observer.

        ``lease_id`` is 0 for transfers that began before an observer was added.

        Raises:
            UsageError: the call is made in another thread.
        """
        self._lifetime.check_thread()
        return self._observers.in_flight()

    def device_blocks_by_salt(self) -> dict[str, int]:
        """Return the number of device blocks that the leases of each salt hold. Any thread.

        Salts that hold none are absent; without ``salt_quota_blocks``, the dict is empty.
        """
        return self._read.quota_by_salt()

    def retained_blocks_by_salt(self) -> dict[str, int]:
        """Return the number of retained blocks that no lease uses, by salt. Any thread.

        Blocks that stay for blocks below them are not counted. Takes time in proportion to the
        number of retained prompts. Salts that have none are absent.
        """
        blocks: Counter[str] = Counter()
        for context, number in self._read.retained_by_context().items():
            blocks[split_context(context)[0]] += number
        return dict(blocks)

    def dump(self) -> dict[str, object]:
        """Return the state of all leases, waiting lines and ranks as values that JSON can hold.

        Raises:
            UsageError: the call is made in another thread.
        """
        self._lifetime.check_thread()
        return {
            **self._read.describe(),
            "open_step": self._read.open_step,
            "asleep": sorted(self._sleep.asleep),
            "statistics": msgspec.to_builtins(self._status.statistics()),
        }

    # --- records ----------------------------------------------------------------------------------

    def observing(self, limit: int = DEFAULT_LIMIT) -> Observation:
        """Keep the newest records of transfers, leases and batches inside a ``with`` block.

        ::

            with engine.inspect.observing() as seen:
                ...
            for span in seen.transfers:
                print(span.route, span.num_bytes, span.ended_at - span.queued_at)

        Without an observer, the engine makes no records.

        Args:
            limit: records to keep per kind; newer ones displace the oldest.

        Returns:
            A context manager that can be entered once. Its records stay after the block.

        Raises:
            UsageError: ``limit`` is less than 1; or the call is made in another thread.
            ClosedError: raised on entry: the engine is closed.
        """
        self._lifetime.check_thread()
        return Observation(self._observers, limit)

    def add_observer(self, observer: Observer) -> None:
        """Call ``observer(record, context)`` for each record from now on.

        The engine calls it on its loop at the end of a pass, with a ``TransferSpan``,
        ``LeasePhase`` or ``BatchSpan`` that has ended, and the context variables of the task that
        called ``match`` for the lease of the record. The context is None for records without a
        lease, and for leases that were matched before any observer was added. The engine delivers
        the last records while it closes.

        When an observer raises an exception, the loop's exception handler gets it, and the observer
        is removed.

        Args:
            observer: function of a record and a context; returns quickly.

        Raises:
            UsageError: ``observer`` cannot be called, or was added already; or the call is made in
                another thread. Nothing changed.
            ClosedError: the engine is closed.
        """
        self._lifetime.check_thread()
        self._observers.add(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Call an observer with the records up to now, then remove it. Idempotent.

        Raises:
            UsageError: the call is made in another thread. Nothing changed.
        """
        self._lifetime.check_thread()
        self._observers.remove(observer)

    async def timeline(self, seconds: float, path: Path | str | None = None) -> dict[str, Any]:
        """Record transfers, leases and batches for some seconds, as a trace for ui.perfetto.dev.

        The trace has a track per route with its transfers, a track per lease with its waits and
        the time during which it holds blocks, the batches of the model, and counters of queues.
        ``chrome://tracing`` shows it, too.

        Args:
            seconds: duration of the recording, above 0 and at most 3600. Of each kind of record,
                the newest 65,536 are kept.
            path: file to write; compressed if the name ends with ``.gz``. None to write no file.

        Returns:
            The trace, in the format of Chrome's trace events: ``json.dump`` writes it.

        Raises:
            UsageError: ``seconds`` is out of range, or the file cannot be written.
            ClosedError: the engine is closed.

        Cancellation: nothing is written, and nothing is recorded any more.
        """
        self._lifetime.check_loop()
        return await record_timeline(self._observers, seconds, path)
