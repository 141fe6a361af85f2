"""Loads of the requests of vLLM, from the blocks that vLLM gives to the message to the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.connectors.vllm.cache import Watched
from aiokv.connectors.vllm.messages import Load
from aiokv.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

    from aiokv.connectors.vllm.arrivals import Arrivals
    from aiokv.connectors.vllm.blocks import FreedBlocks
    from aiokv.connectors.vllm.cache import HostCache
    from aiokv.connectors.vllm.groups import KVGroups
    from aiokv.connectors.vllm.link import LoadQueue
    from aiokv.connectors.vllm.requests import CachedRequest, Onload
    from aiokv.connectors.vllm.saves import Saves
    from aiokv.sync import SyncLayers


class Loads:
    """Begins loads when nothing else uses their blocks, and tells the workers.

    Args:
        cache: the engine.
        groups: the groups of vLLM's KV cache.
        freed: blocks that something still uses.
        link: the loads in flight.
        arrivals: loads that are about to end.
        saves: ends the leases of loads that cannot begin.
        timeout: longest wait for transfers in seconds.

    Attributes:
        requests: the requests that wait for a load, or hold loaded blocks that no step has computed
            with, in the order of their loads.
        missing_blocks: blocks that the prompts of these requests need, beside those that they have.
        deferred: the requests whose loads have yet to begin.
        deferred_blocks: blocks of these loads.
        messages: loads for the message of the next step.
    """

    def __init__(
        self,
        cache: HostCache,
        groups: KVGroups,
        freed: FreedBlocks,
        link: LoadQueue,
        arrivals: Arrivals,
        saves: Saves,
        timeout: float,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._freed = freed
        self._link = link
        self._arrivals = arrivals
        self._saves = saves
        self._timeout = timeout
        self.requests: dict[str, CachedRequest] = {}
        self.missing_blocks = 0
        self.deferred_blocks = 0
        self.deferred: list[CachedRequest] = []
        self.messages: list[Load] = []

    def add(self, cached: CachedRequest, needed_blocks: int) -> None:
        """Note that a request waits for a load, with the blocks that it has.

        Args:
            cached: the request.
            needed_blocks: blocks that its prompt needs.
        """
        missing = needed_blocks - len(cached.tables.ids())
        self.missing_blocks += missing - cached.missing_blocks
        cached.missing_blocks = missing
        self.requests[cached.request_id] = cached

    def remove(self, request_id: str) -> None:
        """Forget a request whose blocks a step computes with, or that has ended."""
        cached = self.requests.pop(request_id, None)
        if cached is not None:
            self.missing_blocks -= cached.missing_blocks
            cached.missing_blocks = 0

    def defer(self, cached: CachedRequest) -> None:
        """Let the load of a request begin when nothing uses its blocks."""
        self.deferred.append(cached)
        self.deferred_blocks += self._num_blocks(cached)

    def report(self, request_id: str) -> None:
        """Let the workers report the end of a load that has not begun: vLLM waits for it."""
        self.messages.append(Load(request_id))

    def take_messages(self) -> list[Load]:
        """Return the loads for the message of the next step."""
        messages, self.messages = self.messages, []
        return messages

    @property
    def has_step_loads(self) -> bool:
        """True if the next step waits for a load layer by layer."""
        return any(load.in_step for load in self.messages)

    def written_blocks(self) -> set[int]:
        """Return the blocks that loads of requests that wait, or of this step, write."""
        loading = {block for load in self.messages for block in load.block_ids}
        return loading.union(*(self._targets(cached) for cached in self.deferred))

    def loads_hit_of(self, request: Request, local: int) -> bool:
        """Return True if vLLM's own hit of a request has blocks that a load of this step writes.

        vLLM finds these blocks before the load has ended. If it fails, vLLM lets its request
        compute them again, and takes them as computed for all others, also if that request ends
        before.
        """
        for loading in self.deferred:
            onload = loading.onload
            if onload is not None and onload.in_step and local > onload.first:
                end = onload.first + self._groups.block_tokens
                if request.all_token_ids[:end] == loading.request.all_token_ids[:end]:
                    return True
        return False

    def wait_for_transfers(self, block_ids: Sequence[int]) -> None:
        """Block until no transfer of an earlier request uses blocks that a step or load writes."""
        if self._freed.used_by_transfers(block_ids):
            self._cache.wait_posted()  # begins their saves, and ends leases without a transfer
            for idle in self._freed.used_by_transfers(block_ids):
                self._cache.wait_idle(idle, self._timeout)

    def begin(self) -> None:
        """Begin the loads whose blocks are not in use, in one crossing."""
        self._cache.wait_posted()  # so that released blocks without a transfer count as unused
        deferred, self.deferred = self.deferred, []
        loads = []
        for cached in deferred:
            onload = cached.onload
            if cached.ended or onload is None:
                continue
            # A step in flight may read blocks of windows and states that vLLM has freed since.
            after_step = onload.after_step if self._groups.sides else 0
            if cached.loads_in_step:
                self._wait_until_unused(self._targets(cached), after_step)
            elif after_step > self._freed.ended_step or self._freed.are_used(self._targets(cached)):
                self.deferred.append(cached)
                continue
            loads.append((cached, onload))
        self.deferred_blocks = sum(self._num_blocks(cached) for cached in self.deferred)
        if loads:
            self._begin(loads)

    def _begin(self, loads: Sequence[tuple[CachedRequest, Onload]]) -> None:
        calls = self._cache.calls()
        answers = []
        for cached, onload in loads:
            onload.started = True
            if cached.lease is not None:
                blocks = onload.end // self._groups.block_tokens
                answer = calls.assign(
                    cached.lease,
                    cached.table[:blocks],
                    computed_tokens=onload.first,
                    # A step waits for its loads, so they are not copied behind other ones.
                    priority=0 if cached.loads_in_step else cached.parameters.load_priority,
                    groups=cached.tables.sides_of_hit(self._groups, blocks),
                )
                answers.append((cached, cached.lease, answer))
        self._cache.run(calls)
        begun: dict[str, SyncLayers] = {}
        for cached, lease, answer in answers:
            if self._cache.succeeded([answer], f"load of request {cached.request_id}"):
                begun[cached.request_id] = lease.layers
                if self._groups.sides:
                    # vLLM frees blocks of windows and states while the request runs, and bytes
                    # arrive before the engine notes the end of their transfer.
                    self._freed.add(self._targets(cached), 0, Watched(lease, answer))
            else:
                self._saves.leave(cached)
        for cached, onload in loads:
            targets = tuple(self._targets(cached))
            layers = begun.get(cached.request_id)
            if layers is not None:
                cached.assigned = onload.end // self._groups.block_tokens
                self._cache.note_load(layers)
                self._link.add(layers, self._num_blocks(cached))
                if not onload.in_step:
                    onload.layers = layers
                    if cached.loads_in_step:
                        self._arrivals.join(cached)
            elif cached.loads_in_step and not onload.in_step:
                raise TransferError(
                    f"the load of request {cached.request_id} could not begin, and vLLM has "
                    "scheduled its step"
                )
            ids = () if layers is None else layers.transfer_ids
            self.messages.append(
                Load(cached.request_id, ids, targets, onload.in_step, failed=layers is None)
            )

    def _wait_until_unused(self, block_ids: Sequence[int], after_step: int) -> None:
        """Block until no transfer and no step in flight uses blocks that a load writes to.

        With asynchronous scheduling, a request may have ended while its next step is computed.

        Args:
            block_ids: the blocks.
            after_step: a step that may use them, too.
        """
        self.wait_for_transfers(block_ids)
        step = max(after_step, self._freed.step_with(block_ids))
        if step > self._freed.ended_step:
            self._cache.wait_computed(step)

    def _targets(self, cached: CachedRequest) -> list[int]:
        onload = cached.onload
        assert onload is not None
        size = self._groups.block_tokens
        return cached.tables.ids(onload.first // size, onload.end // size)

    def _num_blocks(self, cached: CachedRequest) -> int:
        assert cached.onload is not None
        return (cached.onload.end - cached.onload.first) // self._groups.block_tokens
