"""Saves of the computed blocks of vLLM's requests, and the ends of their leases."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiokv.connectors.vllm.cache import Watched
from aiokv.connectors.vllm.groups import NO_BLOCK
from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv import Lease
    from aiokv.connectors.vllm.blocks import FreedBlocks
    from aiokv.connectors.vllm.cache import HostCache
    from aiokv.connectors.vllm.groups import KVGroups
    from aiokv.connectors.vllm.requests import CachedRequest
    from aiokv.connectors.vllm.retired import RetiredLeases
    from aiokv.sync import Answer, Calls, SyncLease
    from aiokv.worker.device.base import Event

# With stores, longest time from the match of a running request for which its blocks wait.
_STORE_DELAY_SECONDS: Final = 20.0


class Saves:
    """Commits blocks after the steps that compute them; ends and retires leases.

    Args:
        cache: the engine.
        groups: the groups of vLLM's KV cache.
        freed: gets the blocks that transfers use after vLLM has freed them.
        retired: the retired leases.
        timeout: longest wait for transfers in seconds.
        has_stores: True if the stores get each block when its request ends, at the latest.

    Attributes:
        finishing: requests that have finished, and whose last blocks the next commit saves.
    """

    def __init__(
        self,
        cache: HostCache,
        groups: KVGroups,
        freed: FreedBlocks,
        retired: RetiredLeases,
        timeout: float,
        *,
        has_stores: bool,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._freed = freed
        self._retired = retired
        self._timeout = timeout
        self._has_stores = has_stores
        self.finishing: list[CachedRequest] = []
        self._posted: _Commits | None = None  # the last commits, whose answers were not read yet

    def leave_finishing(self) -> None:
        """Release the leases of the requests whose last step vLLM has not reported."""
        while self.finishing:
            self.leave(self.finishing.pop())

    def are_wanted(self, cached: CachedRequest) -> bool:
        """Return True if the blocks that a request computes are to be saved."""
        return (
            cached.lease is not None
            and cached.parameters.write
            and self._cache.is_usable
            and not cached.was_preempted
        )

    def commit(
        self,
        requests: Iterable[CachedRequest],
        event: Event | None,
        prefill: tuple[int, float] | None,
    ) -> None:
        """Commit the full blocks that are computed, and close the step, in one crossing.

        It also releases or retires the leases of the requests that have finished in the step, and
        lets retired leases end. These calls are held until the next step was scheduled, or a call
        of one of the leases, so that no request waits for them.
        """
        self.note_answers()  # blocks of a lease whose last commit has failed are not committed
        calls = self._cache.calls()
        committed = []
        keeps = self._retired.keeps
        oldest = time.monotonic() - _STORE_DELAY_SECONDS if keeps and self._has_stores else 0.0
        for cached in requests:
            blocks, lease = self._num_complete(cached), cached.lease
            if blocks > cached.committed and lease is not None:
                waits = keeps and cached.matched_at >= oldest
                answer = self._add_commit(calls, lease, cached, blocks, keeps=waits)
                committed.append((cached, answer))
        ends = self._end_retired(calls)
        retired = self._retire_finished(calls, ends)
        saves = committed or any(end.saves for end in ends)
        if self._cache.is_usable and (saves or self._cache.closes_steps_on_ranks):
            if prefill is not None:
                calls.note_prefill(*prefill)
            calls.step(event)  # transfers of the blocks wait for this event
        # vLLM frees blocks of windows and states while their request runs.
        for cached, answer in committed:
            if cached.saving and cached.lease is not None:
                self._freed.add(cached.saving, 0, Watched(cached.lease, answer))
                cached.saving = []
        for end in ends:
            answer = calls.release(end.lease, returns=end.label)
            self._freed.add(end.block_ids, 0, Watched(end.lease, answer))
        self._cache.hold(calls)
        self._posted = _Commits(calls, committed, retired)

    def note_answers(self, *, waits: bool = True) -> None:
        """Give up the leases of the last commits that have failed.

        Args:
            waits: False to do nothing while the engine has yet to make them.
        """
        if self._posted is None or not (waits or self._posted.calls.done):
            return
        posted, self._posted = self._posted, None
        self._cache.run(posted.calls)
        for cached, answer in posted.answers:
            if answer.error is not None:
                self._cache.succeeded([answer], f"commit of request {cached.request_id}")
                self.leave(cached)
        for lease, ids, label, answer in posted.retired:
            if answer.error is not None or not answer.value:
                self._retired.remove(lease, ids)
                self._freed.add(ids, 0, self._cache.release_and_watch(lease, label))

    def leave(self, cached: CachedRequest) -> None:
        """Release the lease; its transfers go on.

        If vLLM was told that its load ends, it ends first: another request may compute with the
        blocks.
        """
        lease, cached.lease = cached.lease, None
        onload = cached.onload
        if onload is not None and onload.is_told and onload.layers is not None:
            with contextlib.suppress(AiokvError):  # the failure is noted with the step
                onload.layers.wait_all(self._timeout)
        if cached.granting is not None:
            cached.granting.cancel()
            cached.granting = None
        if lease is None:
            return
        idle = self._cache.release_and_watch(lease)
        self._freed.add(cached.tables.ids(0, cached.assigned), 0, idle)

    def release_retired(self) -> None:
        """Release all retired leases."""
        for lease in self._retired.take_all():
            self._cache.release_and_watch(lease)

    def _num_complete(self, cached: CachedRequest) -> int:
        """Return how many leading blocks of a request can be committed; 0 for none."""
        lease = cached.lease
        blocks = min(cached.computed // self._groups.block_tokens, len(cached.table))
        if lease is None or not self.are_wanted(cached) or blocks < cached.assigned:
            return 0
        # The first blocks have to cover the hit, also one that vLLM does not load.
        size = self._groups.block_tokens
        is_covered = cached.assigned or blocks * size >= lease.cached_tokens
        return blocks if is_covered else 0

    def _add_commit(
        self, calls: Calls, lease: SyncLease, cached: CachedRequest, blocks: int, *, keeps: bool
    ) -> Answer[Any]:
        end = max(blocks * self._groups.block_tokens, cached.known_tokens)
        sides = cached.tables.sides_to_save(
            self._groups, cached.assigned, blocks, cached.kept_tokens
        )
        answer = calls.commit_blocks(
            lease,
            cached.table[cached.assigned : blocks],
            cached.request.all_token_ids[cached.known_tokens : end],
            groups=sides,
            kept_blocks=blocks if keeps else 0,
        )
        for side in sides.values():
            cached.saving += [block for block in side if block != NO_BLOCK]
        self._retired.note_saved(blocks - cached.assigned)
        cached.known_tokens = end
        cached.assigned = cached.committed = blocks
        return answer

    def _end_retired(self, calls: Calls) -> list[_End]:
        """Copy what host memory lacks of the retired leases whose blocks vLLM reuses soon.

        Returns:
            The leases, which have to be released.
        """
        ending = self._retired.take_ending() if self._cache.is_usable else []
        for lease, block_ids, kept, valid in ending:
            if kept < valid:
                end = valid * self._groups.block_tokens if valid < len(block_ids) else None
                calls.add(_save_rest, lease.inner, end, kept)
        return [_End(other.lease, other.block_ids, other.kept < other.valid) for other in ending]

    def _retire_finished(self, calls: Calls, ends: list[_End]) -> list[_Retiring]:
        """Retire the leases of the requests that have finished; add the others to ``ends``."""
        finished, self.finishing = self.finishing, []
        retires = self._cache.is_usable and self._retired.should_retire
        retired = []
        for cached in finished:
            lease, cached.lease = cached.lease, None
            if lease is None:
                continue
            ids, label = cached.tables.ids(0, cached.assigned), cached.parameters.returns
            if not (retires and ids):
                saves = bool(ids) and self._retired.is_active
                if saves:
                    calls.commit_blocks(lease, [], [])
                ends.append(_End(lease, ids, saves, label))
                continue
            if self._has_stores:
                calls.commit_blocks(lease, [], [])
            retired.append(_Retiring(lease, ids, label, calls.retire(lease, returns=label)))
            self._retired.add(lease, ids)
            self._freed.add(ids, 0, Watched(lease, retired[-1].answer))
        return retired


class _End(NamedTuple):
    """A lease that is released with the commits of a step, and its blocks, which it may save."""

    lease: SyncLease
    block_ids: list[int]
    saves: bool
    label: str = ""


class _Retiring(NamedTuple):
    """A lease that is retired with the commits of a step, and its blocks."""

    lease: SyncLease
    block_ids: list[int]
    label: str
    answer: Answer[bool]


class _Commits(NamedTuple):
    """Commits whose answers were not read yet.

    Attributes:
        calls: the calls of the crossing.
        answers: the requests, with the answers of their commits.
        retired: the leases that were to be retired.
    """

    calls: Calls
    answers: list[tuple[CachedRequest, Answer[Any]]]
    retired: list[_Retiring]


def _save_rest(lease: Lease, end: int | None, kept_blocks: int) -> None:
    """Save what host memory lacks of a retired lease. On the loop.

    Args:
        lease: the lease.
        end: vLLM has reused the blocks from this position on; None if it has reused none.
        kept_blocks: leading blocks that newer requests share.

    Raises:
        UsageError: the position is inside an item; nothing is saved.
    """
    if end is not None:
        lease.truncate(end)
    lease.commit_blocks([], [], kept_blocks=kept_blocks)
