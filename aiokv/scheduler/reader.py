"""CacheReader: read access to the state of the cache; changes no decision."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from aiokv._native import STATE_GROUP, CoreStatistics
from aiokv._native import LeaseState as NativeState
from aiokv.base.groups import ATTENTION, STATE
from aiokv.base.statistics import (
    BlockGroupStatistics,
    CacheStatistics,
    DurationHistogram,
    TierStatistics,
)
from aiokv.base.types import GroupHit, Hit, LeaseInfo, LeaseState, as_block_ids
from aiokv.errors import UsageError
from aiokv.scheduler.events import BlockEvents
from aiokv.scheduler.groups import block_groups, is_storable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from aiokv._native import Core, GroupStatistics, TierCounts
    from aiokv.base.groups import BlockGroup
    from aiokv.base.types import LeaseIds, LeaseWait, TokenIds
    from aiokv.config.cache_config import CacheConfig
    from aiokv.scheduler.admission import Admission
    from aiokv.scheduler.clock import StepClock
    from aiokv.scheduler.gate import Gate
    from aiokv.scheduler.owners import Owners
    from aiokv.scheduler.pending import PendingBlocks
    from aiokv.scheduler.pins import Pins
    from aiokv.scheduler.preemption import Preemption
    from aiokv.scheduler.quota import SaltQuota
    from aiokv.scheduler.releases import Releases
    from aiokv.scheduler.waits import Entry

MAX_EXPLAINED_LEASES: Final = 1_000
STEP_HINT: Final = "call engine.step(event) after the last submitted work"


_Described: TypeAlias = tuple[int, float, int, int, int, int, int]
_Stretch: TypeAlias = tuple[int, int, str, int, int, int, int, int, int, int]


class Boundaries(NamedTuple):
    """Blocks of a prompt behind its hit, of which a tier may have some.

    Attributes:
        hit: blocks of the hit.
        cached: leading blocks of the prompt that a tier has, also where no hit may end.
        first: block of the first digest.
        digests: 32 bytes per block, up to the hit limit.
        may_end: ``[N]`` bool; False where a hit that ends behind the block would cut an item.
    """

    hit: int
    cached: int
    first: int
    digests: bytes
    may_end: NDArray[np.bool_]


class CacheReader:
    """Read access to leases, pools and waiting lines.

    Args:
        config: configuration of the cache.
        core: native state of the cache.
        owners: names of all leases that hold blocks or have a handle, by lease id.
        clock: numbers of the steps.
        gate: pauses and holds.
        quota: blocks per salt.
        admission: requests that wait for capacity.
        lost: leases whose blocks were lost with a rank, and the reason.
        pins: pins of the cache.
        pending: leases that wait for other leases to compute.
        preemption: counts of preempted leases.
        releases: count of expired leases.

    Attributes:
        lost: leases whose blocks were lost with a rank, and the reason; removed by the next grant.
    """

    def __init__(
        self,
        config: CacheConfig,
        core: Core,
        *,
        owners: Owners,
        clock: StepClock,
        gate: Gate,
        quota: SaltQuota,
        admission: Admission,
        lost: Mapping[int, str],
        pins: Pins,
        pending: PendingBlocks,
        preemption: Preemption,
        releases: Releases,
    ) -> None:
        self._config = config
        self._groups = block_groups(config)
        self.groups = list(self._groups.values()) if is_storable(config) else []
        self._core = core
        self._owners = owners
        self._clock = clock
        self._gate = gate
        self._quota = quota
        self._admission = admission
        self.lost = lost
        self._pins = pins
        self._pending = pending
        self._preemption = preemption
        self._releases = releases
        self._windows = {group: index for index, group in enumerate(config.windows)}

    # --- one lease ------------------------------------------------------------------------------

    def state(self, lease_id: int) -> LeaseState:
        """Return the state of the lease."""
        if lease_id not in self._owners:
            return LeaseState.RELEASED
        if lease_id in self._admission.requests:
            return LeaseState.WAITING
        if lease_id in self.lost:
            return LeaseState.LOST
        return _STATES[self._core.lease_state(lease_id)]

    def is_granted(self, lease_id: int) -> bool:
        """Return True if the lease, which must exist, is granted."""
        return self._core.is_granted(lease_id)

    def holds_blocks(self, lease_id: int) -> bool:
        """Return True if the lease exists and holds blocks on a tier."""
        return lease_id in self._owners and (
            self._core.is_granted(lease_id) or self._core.is_swapped(lease_id)
        )

    def hit(self, lease_id: int) -> Hit:
        """Return the cached prefix in tokens by tier."""
        device_blocks, host_blocks = self._core.hit(lease_id)
        block_tokens = self._config.block_tokens
        return Hit(device_blocks * block_tokens, host_blocks * block_tokens)

    def hit_blocks(self, lease_id: int) -> NDArray[np.int32]:
        """Return the device ids of the hit: of a match made now, or of the grant."""
        return self._core.hit_blocks(lease_id)

    def pending_tokens(self, lease_id: int) -> int:
        """Return the number of tokens after the hit that another lease is computing."""
        return self._core.pending(lease_id)[1] * self._config.block_tokens

    def cached_tokens(self, lease_id: int) -> int:
        """Return the number of leading positions that need no computing."""
        return self._core.cached_tokens(lease_id)

    def computed_tokens(self, lease_id: int) -> int:
        """Return the number of leading positions that are cached or committed."""
        return self._core.computed_tokens(lease_id)

    def uncovered_tokens(self, lease_id: int, num_tokens: int) -> int:
        """Return how many of the first ``num_tokens`` positions no batch computes.

        Positions that are cached, committed or received count as computed. The result is 0 if the
        lease has fewer positions.
        """
        return self._core.uncovered_tokens(lease_id, num_tokens)

    def num_tokens(self, lease_id: int) -> int:
        """Return the number of positions of the block table."""
        return self._core.num_tokens(lease_id)

    def usage(self, lease_id: int) -> tuple[int, int, int, int]:
        """Return (prompt_tokens, cached_device_tokens, cached_host_tokens, computed_blocks)."""
        return self._core.usage(lease_id)

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._config.block_tokens

    def missed(self, lease_id: int) -> list[Any]:
        """Return the causes of the missed blocks of the last grant; see ``Core.missed``."""
        return self._core.missed(lease_id)

    def group_hits(self, lease_id: int) -> dict[str, GroupHit]:
        """Return the hits of the last grant in the groups besides attention."""
        groups = self._groups.items()
        return {name: GroupHit(*self._core.group_hit(lease_id, g.number)) for name, g in groups}

    def cached_store_tokens(self, lease_id: int) -> int:
        """Return the cached tokens that were fetched from a store, and hit first by this lease."""
        return self._core.cached_store_tokens(lease_id)

    def missing(self, lease_id: int, blocks: int = 2_048) -> tuple[int, bytes]:
        """Return the first blocks of a matched lease's prompt that no tier has.

        One call returns at most 2,048 blocks and 32,768 tokens, so that it takes at most 1 ms. The
        blocks behind them are returned by later calls, when those before them are cached.

        Args:
            lease_id: the lease.
            blocks: number of blocks; fewer are returned at the end of the prompt.

        Returns:
            (block, digests): index of the first one, and 32 bytes per block, up to the hit limit.
            No digests if there is none, or there are no stores. With further groups, ``boundaries``
            says where a hit may end.
        """
        return self._core.missing(lease_id, blocks)

    def boundaries(self, lease_id: int, skip: int = 0) -> Boundaries:
        """Return the blocks behind the hit of a matched lease, and where a hit may end.

        One call returns as many blocks as one of ``missing``.

        Args:
            lease_id: the lease.
            skip: blocks behind the hit that are left out.
        """
        hit, cached, first, digests, may_end = self._core.boundaries(lease_id, skip)
        return Boundaries(
            hit=hit,
            cached=cached,
            first=first,
            digests=digests,
            may_end=np.frombuffer(may_end, np.bool_),
        )

    def has_copies(
        self, lease_id: int, group: BlockGroup, first: int, end: int
    ) -> NDArray[np.bool_]:
        """Return for each cached block from ``first`` to ``end`` of the prompt of a matched lease
        whether a tier has its copy in a group."""
        return np.frombuffer(self._core.has_copies(lease_id, group.number, first, end), np.bool_)

    def block_table(self, lease_id: int, group: str | None = None) -> NDArray[np.int32]:
        """Return a copy of the block table of a window group, or of all other layers. Any thread.

        Raises:
            UsageError: the group is unknown.
        """
        if group is None:
            return self._core.block_table(lease_id)
        return self._core.block_table(lease_id, self._window(group))

    def lengths(self, lease_ids: LeaseIds) -> NDArray[np.int32]:
        """Return the number of named positions of each lease; 0 for a released one."""
        return self._core.lengths(lease_ids)

    def longest_table(self, lease_ids: LeaseIds) -> int:
        """Return the number of blocks of the longest block table."""
        return self._core.longest_table(lease_ids)

    def block_tables(
        self, lease_ids: LeaseIds, out: NDArray[np.int32], fill: int, group: str | None
    ) -> None:
        """Write the block tables into rows of ``out``; see ``CacheEngine.block_tables``."""
        self._core.block_tables(lease_ids, out, fill, self._window(group))

    def group_ids(self, groups: Mapping[str, TokenIds], num_blocks: int) -> NDArray[np.int32]:
        """Return external ids as ``[G * num_blocks]`` int32, a row per group of the configuration.

        Raises:
            UsageError: a group is unknown, or has another number of ids.
        """
        rows = np.full((len(self._windows), num_blocks), -1, np.int32)
        for name, ids in groups.items():
            row = as_block_ids(ids)
            if len(row) != num_blocks:
                raise UsageError(
                    f"assign: group {name!r} has {len(row)} ids for {num_blocks} blocks",
                    hint="pass -1 for a block that the server does not have",
                )
            rows[self._window(name)] = row
        return rows.reshape(-1)

    def _window(self, group: str | None) -> int:
        if group is None:
            return -1
        if group not in self._windows:
            raise UsageError(
                f"group is {group!r}; it must be a name in CacheConfig.windows, which has "
                f"{list(self._windows)}"
            )
        return self._windows[group]

    def max_extend_tokens(self, lease_id: int) -> int:
        """Return the first position without a block in some window group."""
        return self._core.max_extend_tokens(lease_id)

    def state_slot(self, lease_id: int) -> int:
        """Return the row of the recurrent state; -1 for none."""
        return self._core.state_slot(lease_id)

    def snapshot_points(self, lease_id: int) -> tuple[int, ...]:
        """Return the positions at which a snapshot of the state helps later prompts most."""
        return tuple(self._core.snapshot_points(lease_id))

    def onloads(self, lease_id: int) -> list[int]:
        """Return the transfers in flight that write blocks of the lease."""
        return self._core.onloads(lease_id)

    def is_idle(self, lease_id: int) -> bool:
        """Return True if no transfer uses device blocks that the lease has named.

        The lease may have been released. Always True where the engine owns the device blocks.
        """
        return self._core.is_idle(lease_id)

    def idle_after_step(self, lease_id: int) -> int:
        """Return the newest unfinished step that the end of these transfers waits for; 0: none."""
        return self._core.idle_after_step(lease_id)

    def saving(self, lease_id: int) -> int:
        """Return a backup in flight that a swap of the lease must wait for; 0 for none."""
        return self._core.saving(lease_id)

    def batches(self, lease_id: int) -> list[int]:
        """Return the batches in flight that compute with the lease."""
        return self._core.batches(lease_id)

    def peer_transfers(self, lease_id: int) -> list[int]:
        """Return the transfers in flight that receive blocks of the lease, or send them."""
        return self._core.peer_transfers(lease_id)

    def digest(self, lease_id: int, num_tokens: int) -> bytes:
        """Return the digest of the first ``num_tokens`` positions of a lease, 32 bytes.

        It covers salt, adapter, tokens and items, and is the same in every process and for any
        ``block_tokens``.

        Raises:
            LeaseError: tokens of these positions are not known.
        """
        return self._core.prompt_digest(lease_id, num_tokens)

    def is_current(self, lease_id: int) -> bool:
        """Return True if the lease is granted and its hit can still be matched."""
        return self._core.is_current(lease_id)

    def owner(self, lease_id: int) -> str:
        """Return the name of a lease for messages."""
        return self._owners.name(lease_id)

    def would_hit(
        self, tokens: NDArray[np.int32], context: str, items: Sequence[tuple[bytes, int, int]]
    ) -> Hit:
        """Return the hit that ``match`` would find; refreshes no recency."""
        device_blocks, host_blocks = self._core.would_hit(tokens, items, context)
        block_tokens = self._config.block_tokens
        return Hit(device_blocks * block_tokens, host_blocks * block_tokens)

    # --- all leases -----------------------------------------------------------------------------

    @property
    def num_leases(self) -> int:
        """Number of leases that hold blocks or have a handle."""
        return len(self._owners)

    @property
    def has_leases(self) -> bool:
        """True if a lease holds blocks or has a handle."""
        return bool(self._owners)

    @property
    def has_handles(self) -> bool:
        """True if a lease has a handle."""
        return bool(self._core.statistics().leases)

    @property
    def computed_prompt_tokens(self) -> int:
        """Number of prompt positions that leases have computed, over all leases so far."""
        return self._core.computed_prompt_tokens

    def has_onloads(self, lease_ids: LeaseIds) -> bool:
        """Return True while a lease has onloads in flight."""
        return self._core.has_onloads(lease_ids)

    @property
    def granted_leases(self) -> int:
        """Number of leases that hold device blocks."""
        return self._core.granted_leases

    @property
    def swapped_leases(self) -> int:
        """Number of leases whose tables are in host memory."""
        return self._core.swapped_leases

    def owners(self, which: Callable[[int], bool] = lambda lease_id: True) -> list[str]:
        """Return the sorted names of the leases for which ``which(lease_id)`` holds."""
        return sorted(self.owner(lease_id) for lease_id in self._owners if which(lease_id))

    def holders(self) -> list[str]:
        """Return the owners of leases that hold device blocks."""
        return self.owners(self._core.is_granted)

    def granted(self) -> list[tuple[int, str]]:
        """Return id and owner of each lease that holds device blocks."""
        owners = self._owners.items()
        return [(lease_id, owner) for lease_id, owner in owners if self._core.is_granted(lease_id)]

    def swapped(self) -> list[str]:
        """Return the owners of leases whose tables are in host memory."""
        return self.owners(self._core.is_swapped)

    # --- steps ----------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """Number of the step that is closed next."""
        return self._clock.next

    @property
    def open_step(self) -> int:
        """Number of the open step; 0 on a device that needs no steps."""
        return self._clock.open

    @property
    def steps_finished(self) -> bool:
        """True if every closed step has finished, and the open one uses no blocks."""
        return not self._clock.last_unfinished and not self._core.unfinished_step()

    def explain_steps(self) -> str:
        """Describe the step that ``steps_finished`` waits for; empty when there is none."""
        if self._core.unfinished_step() >= self._clock.next:
            step = self._clock.next
            return f"step {step} is open and uses blocks; close it with engine.step(event)"
        if step := self._clock.last_unfinished:
            return f"step {step} is closed, but its event is not done"
        return ""

    # --- capacity -------------------------------------------------------------------------------

    @property
    def device_blocks(self) -> int:
        """Capacity of the device tier in blocks."""
        return self._core.device_blocks

    def room(self) -> tuple[int, int, int]:
        """Return (free device blocks, evictable device blocks, state slots) in constant time."""
        return self._core.room()

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks of ``num_tokens`` positions."""
        return -(-num_tokens // self._config.block_tokens)

    def explain_wait(self, salt: str, num_tokens: int, open_step: str) -> tuple[str, str]:
        """Return the reason why a lease waits for capacity, and a hint.

        Args:
            salt: salt of the lease.
            num_tokens: absolute number of positions that the lease waits for.
            open_step: description of a step that transfers wait for; empty for none.
        """
        if self._gate.closed:
            return "admission is paused", "call resume() or wake_up()"
        running, limit = self._core.computing_leases, self._config.max_running_leases
        if limit is not None and running >= limit:
            return (
                f"{running} leases hold blocks, and CacheConfig.max_running_leases is {limit}",
                "raise CacheConfig.max_running_leases, or preempt a lease",
            )
        held = self._quota.held(salt)
        if not self._quota.fits(salt, self.blocks_for(num_tokens)):
            return (
                f"salt {salt!r} holds {held} of the {self._quota.limit_blocks} blocks of its quota",
                "raise CacheConfig.salt_quota_blocks, or preempt a lease of this salt",
            )
        if open_step:
            return open_step, STEP_HINT
        device_free, evictable, state_room = self._core.room()
        if self._config.state_slots and not state_room:
            return (
                f"leases use all {self._config.state_slots} state slots",
                "raise CacheConfig.state_slots, or preempt a lease",
            )
        free = f"{device_free} device blocks are free, and at most {evictable} can be evicted"
        return (
            free + self._largest_holders(),
            "raise CacheConfig.device_blocks, or preempt a lease",
        )

    def _largest_holders(self) -> str:
        """Return the largest holders of device blocks, for a message; examines some leases."""
        leases = self._core.oldest_leases(MAX_EXPLAINED_LEASES)
        held = sorted(((entry[-1], entry[0]) for entry in leases if entry[-1]), reverse=True)
        named = [
            f"; {self.owner(lease_id)!r} holds {blocks} blocks" for blocks, lease_id in held[:3]
        ]
        return "".join(named) + (f"; {len(held) - 3} more leases hold blocks" if held[3:] else "")

    @property
    def num_waiting(self) -> int:
        """Number of leases that wait for a store, their quota, capacity or pending blocks."""
        admission = self._admission
        in_line = len(admission) + len(self._quota.requests()) + len(admission.store_waits())
        return in_line + len(self._pending.waiters)

    def quota_by_salt(self) -> dict[str, int]:
        """Return the number of counted blocks per salt, without salts that have none."""
        return self._quota.held_by_salt()

    def retained_by_context(self) -> dict[str, int]:
        """Return the number of retained blocks that no lease uses, by context."""
        return self._core.retained_blocks()

    @property
    def is_paused(self) -> bool:
        """True while a pause or a hold stops granting."""
        return self._gate.closed

    def quota_held(self, salt: str) -> int:
        """Return the number of blocks that are counted for the salt."""
        return self._quota.held(salt)

    # --- statistics and dumps -------------------------------------------------------------------

    def hold_times(self) -> DurationHistogram:
        """Return how long computing leases had blocks, for leases that have given them back."""
        return DurationHistogram.of(self._core.hold_times)

    def statistics(self) -> CacheStatistics:
        """Return counters and the current state of the pools. Any thread."""
        core = self._core.statistics()
        fields = {name: getattr(core, name) for name in _CORE_FIELDS}
        state = self._core.group_statistics(STATE_GROUP)
        groups = {ATTENTION: _block_group(core.attention)}
        if self._config.state_slots:
            groups[STATE] = _block_group(state)
        for index, name in enumerate(self._config.windows):
            groups[name] = _block_group(self._core.group_statistics(index))
        return CacheStatistics(
            groups=groups,
            waiting=len(self._admission),
            waiting_for_quota=self._admission.waiting_for_quota,
            waiting_for_store=self._admission.waiting_for_store,
            waiting_for_pending=len(self._pending.waiters),
            preemptions=self._preemption.preemptions,
            swaps=self._preemption.swaps,
            lost_leases=self._preemption.lost_leases,
            expired_leases=self._releases.expired_leases,
            overdue_requests=self._admission.overdue_requests,
            restored_states=state.cloned + state.onloaded_blocks,
            **fields,
        )

    def leases(self, limit: int, max_waiting: int) -> list[LeaseInfo]:
        """Return at most ``limit`` leases in bounded time; see ``Inspection.leases``."""
        waits = self._waits(max_waiting)
        listed = [self._lease_info(self._core.describe(lease_id), waits) for lease_id in waits]
        waiting = self._admission.requests.keys() | self._pending.waiters.keys()
        for entry in self._core.oldest_leases(limit + len(waiting)):
            if len(listed) == limit:
                break
            if entry[0] in self._owners and entry[0] not in waiting:
                listed.append(self._lease_info(entry, waits))
        return listed

    def _waits(self, limit: int) -> dict[int, LeaseWait]:
        """Return the reasons for which the first ``limit`` waiting leases wait, by lease id."""
        lines: tuple[tuple[LeaseWait, Iterable[Entry]], ...] = (
            ("capacity", self._admission.entries(limit)),
            ("quota", self._quota.requests(limit)),
            ("store", self._admission.store_waits(limit)),
            ("pending", self._pending.waiters.values()),
        )
        waits = ((entry.lease_id, wait) for wait, line in lines for entry in line)
        return dict(islice(waits, limit))

    def _lease_info(self, entry: _Described, waits: Mapping[int, LeaseWait]) -> LeaseInfo:
        lease_id, age_seconds, prompt_tokens, cached_tokens, num_tokens, computed, blocks = entry
        return LeaseInfo(
            lease_id=lease_id,
            owner=self.owner(lease_id),
            state=self.state(lease_id),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            num_tokens=num_tokens,
            computed_tokens=computed,
            blocks=blocks,
            age_seconds=age_seconds,
            waits_for=waits.get(lease_id) or self._transfer_wait(lease_id),
        )

    def _transfer_wait(self, lease_id: int) -> LeaseWait:
        state = self._core.lease_state(lease_id)
        if state is NativeState.SWAPPING:
            return "offload"
        if state is NativeState.RELEASING:
            return "batch"
        return "onload" if self._core.onloads(lease_id) else ""

    def hottest_prefixes(self, limit: int) -> tuple[list[_Stretch], bool]:
        """Return the most used stretches of the tree, in bounded time.

        Returns:
            (stretches, complete): tuples (place of the parent or -1, block, context, first block,
            blocks, blocks on the device, blocks in host memory, uses, leases, branches).
        """
        return self._core.hottest_prefixes(limit)

    def describe(self) -> dict[str, Any]:
        """Return leases, waiting lines and quotas as plain values."""
        return {
            "leases": [
                {"owner": self.owner(lease_id), **self._describe_lease(lease_id)}
                for lease_id in self._owners
            ],
            "waiting": [
                {"owner": self.owner(request.lease_id), "num_tokens": request.num_tokens}
                for request in self._admission.entries()
            ],
            "waiting_for_quota": [
                {
                    "owner": self.owner(request.lease_id),
                    "salt": request.salt,
                    "num_blocks": request.num_blocks,
                }
                for request in self._quota.requests()
            ],
            "waiting_for_store": [
                {"owner": self.owner(request.lease_id), "num_tokens": request.num_tokens}
                for request in self._admission.store_waits()
            ],
            "quota": self._quota.held_by_salt(),
            "pins": len(self._pins),
            "paused": self._gate.closed,
        }

    def _describe_lease(self, lease_id: int) -> dict[str, object]:
        core = self._core
        device_blocks, host_blocks = core.hit(lease_id)
        return {
            "state": self.state(lease_id),
            "granted": core.is_granted(lease_id),
            "swapped": core.is_swapped(lease_id),
            "num_tokens": core.num_tokens(lease_id),
            "computed_tokens": core.computed_tokens(lease_id),
            "hit_blocks": {"device": device_blocks, "host": host_blocks},
            "block_table": core.block_table(lease_id).tolist(),
            "onloads": core.onloads(lease_id),
            "state_slot": core.state_slot(lease_id),
        }

    def cached_blocks(self) -> list[Any]:
        """Return every indexed block, for tests and tools: one tuple per block.

        A tuple is (context, prefix token ids as int32 bytes, device id, host id, flags, references,
        pins). Flags: 1 for a valid and 2 for a loading device copy, 4 and 8 for the host copy.
        """
        return self._core.blocks()

    def block_events(self, max_queued_blocks: int, *, with_stores: bool = False) -> BlockEvents:
        """Return a stream of the blocks that the tiers hold, and of their changes.

        See :class:`BlockEvents` for the arguments.
        """
        return BlockEvents(self._core, max_queued_blocks, with_stores=with_stores)

    @property
    def reports_stores(self) -> bool:
        """True if a stream of ``block_events`` reports the stores."""
        return self._core.reports_stores


_STATES = {
    NativeState.MATCHED: LeaseState.MATCHED,
    NativeState.GRANTED: LeaseState.GRANTED,
    NativeState.FAILED: LeaseState.FAILED,
    NativeState.SWAPPING: LeaseState.SWAPPING,
    NativeState.SWAPPED: LeaseState.SWAPPED,
    NativeState.RELEASING: LeaseState.RELEASED,
}
_CORE_FIELDS = tuple(
    name for name in CacheStatistics.__struct_fields__ if hasattr(CoreStatistics, name)
)


_GROUP_FIELDS = tuple(
    name for name in BlockGroupStatistics.__struct_fields__ if name not in ("device", "host")
)


def _block_group(counts: GroupStatistics) -> BlockGroupStatistics:
    fields = {name: getattr(counts, name) for name in _GROUP_FIELDS}
    return BlockGroupStatistics(device=_tier(counts.device), host=_tier(counts.host), **fields)


def _tier(counts: TierCounts) -> TierStatistics:
    fields = {name: getattr(counts, name) for name in TierStatistics.__struct_fields__}
    return TierStatistics(**fields)
