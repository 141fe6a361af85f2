"""Scheduler half: matches prompts, starts loads, and saves computed blocks.

A step of vLLM, and the calls that it makes here:

    schedule()            matched()          match, and refs on the host blocks of the hit
                          allocated()        the load begins, beside the steps that run
                          build()            the message to the workers, the record of the step
    (workers compute)
    update_from_output()  finished()         requests that have ended
                          step_ended()       commits: blocks are saved only when the step that has
                                             computed them, and all loads it used, have ended well

So a save never reads a block before it is computed, and nothing that was computed with a failed
load is saved. vLLM frees blocks at once: :class:`FreedBlocks` keeps a load, or a step, from writing
to a block that something still uses.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiokv.base.logs import Log
from aiokv.connectors.prefills import PrefillClock
from aiokv.connectors.vllm import compat
from aiokv.connectors.vllm.blocks import FreedBlocks
from aiokv.connectors.vllm.loads import Loads
from aiokv.connectors.vllm.messages import StepMetadata
from aiokv.connectors.vllm.requests import (
    CachedRequest,
    Onload,
    Parameters,
    is_cacheable,
    names_of,
)
from aiokv.connectors.vllm.retired import RetiredLeases
from aiokv.connectors.vllm.saves import Saves
from aiokv.errors import BrokenEngineError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from concurrent.futures import Future

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from aiokv.connectors.vllm.arrivals import Arrivals, StepPace
    from aiokv.connectors.vllm.blocks import VllmBlocks
    from aiokv.connectors.vllm.cache import HostCache
    from aiokv.connectors.vllm.groups import KVGroups
    from aiokv.connectors.vllm.link import LoadQueue
    from aiokv.connectors.vllm.options import Options
    from aiokv.connectors.vllm.waiting import WaitingOrder
    from aiokv.sync import SyncLayers

log = Log(__name__)

# Time per step to wait for decisions to fetch nothing, which is the decision for most requests.
# Otherwise vLLM would ask again only after a step, which takes much longer while it computes other
# prompts.
DECISION_SECONDS: Final = 0.002

# A request that decodes saves its blocks when it has passed a multiple of SAVED_TOKENS, in the next
# of every SAVED_STEPS steps. Otherwise, with many requests, each step would begin a save, which
# costs the scheduler's thread more than the rest of the step.
SAVED_TOKENS: Final = 64
SAVED_STEPS: Final = 8

# Longest time for which a request that vLLM has no room for keeps its match. Blocks that other
# requests have saved since are found after this time, or as soon as vLLM has room.
KEEP_SECONDS: Final = 1.0


class SchedulerHalf:
    """Decides which blocks are loaded and saved. Its methods follow vLLM's scheduler.

    Args:
        cache: the engine.
        options: settings of the connector.
        is_active: False to compute all requests without the cache.
        groups: the groups of vLLM's KV cache.
        step_tokens: most positions that a step of vLLM computes.
        pool: vLLM's blocks.
        link: the loads in flight.
        pace: the steps in flight.
        arrivals: loads that are about to end.
        order: the order in which waiting requests begin.
    """

    def __init__(
        self,
        cache: HostCache,
        options: Options,
        *,
        is_active: bool = True,
        groups: KVGroups,
        step_tokens: int,
        pool: VllmBlocks,
        link: LoadQueue,
        pace: StepPace,
        arrivals: Arrivals,
        order: WaitingOrder,
    ) -> None:
        self._cache = cache
        self._order = order
        self._pool = pool
        self._link = link
        self._pace = pace
        self._arrivals = arrivals
        self._waited: dict[int, list[SyncLayers]] = {}  # loads by the step that waits for them
        self._is_active = is_active
        self._groups = groups
        self._step_tokens = step_tokens
        self._block_tokens = groups.block_tokens
        # vLLM frees blocks of windows and states while the request runs.
        self._saved_tokens = max(groups.block_tokens, 0 if groups.sides else SAVED_TOKENS)
        self._saved_steps = 1 if groups.sides else SAVED_STEPS
        self._layerwise = options.load == "layerwise"
        self._follows_resets = options.follow_resets
        self._wait_store = options.store_wait_seconds if options.stores else 0.0
        self._timeout = options.transfer_timeout_seconds
        self._step = 0
        self._requests: dict[str, CachedRequest] = {}
        self._computed_anew: set[str] = set()  # requests whose loads have failed
        self._waiting: dict[str, CachedRequest] = {}  # matched, without blocks of vLLM
        self._computing: int | None = None  # see `_num_computing`; None if it has to be counted
        self._has_no_room = False  # the step that is being scheduled has no room for a load
        self._computes_more = False  # that step computes more than the step before
        self._decision_seconds = DECISION_SECONDS  # time left for waits in that step
        self._given: list[int] = []  # blocks of that step that another connector may load into
        self._queued: int | None = None  # tokens of running prompts that are left to compute
        self._records: dict[int, _Record] = {}  # by step, of those that have not ended
        self._due: dict[int, list[CachedRequest]] = {}  # by the next step to look at them
        self._most_generated = 1  # most tokens that a step has computed of a request that decodes
        self._last_scheduled: Mapping[str, int] = {}  # tokens of the last step, by request
        self._missed_preemption = False  # vLLM has preempted a request that no step lists
        self._freed = FreedBlocks()
        self._retired = RetiredLeases(
            pool,
            -(-step_tokens // groups.block_tokens),
            None if groups.sides else cache.host_blocks,
        )
        self._saves = Saves(
            cache,
            groups,
            self._freed,
            self._retired,
            self._timeout,
            has_stores=bool(options.stores),
        )
        self._loads = Loads(cache, groups, self._freed, link, arrivals, self._saves, self._timeout)
        self._prefills = PrefillClock()

    # --- schedule() -------------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        """Note a request that is new in vLLM's line."""
        if self._serves(request):
            self._order.add(request)

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Return how many positions behind vLLM's own hit can be loaded.

        Returns:
            The number, or None if vLLM is to call again later; and True if the request waits for
            the load while other requests compute, False if its first step waits layer by layer.
        """
        if request.request_id in self._arrivals.unreported:
            return None, False  # preempted; the workers have yet to report its last load
        if self._has_no_room:
            if (waiting := self._waiting.get(request.request_id)) is not None:
                waiting.asked_after = self._step
            return None, False
        if self._follows_resets and self._pool.take_reset():
            self._follow_reset()
        if self._order.is_overtaken(request, local):
            return None, False
        if self._layerwise and self._loads.loads_hit_of(request, local):
            self._order.skip(request.request_id)
            return None, False
        cached = self._requests.get(request.request_id)
        if cached is not None and cached.was_preempted:
            self._missed_preemption = True
            self._leave(cached)
            cached = None
        if cached is not None and not self._keeps_match(cached, local):
            # vLLM still reserves the blocks of a load that has failed, and might wait forever for
            # as many again: such a request is computed.
            if cached.onload is not None:
                self._computed_anew.add(cached.request_id)
            self._leave(cached)
            cached = None
        if cached is None:
            cached = self._match(request, local)
            self._requests[request.request_id] = self._waiting[request.request_id] = cached
        cached.asked_after = self._step
        cached.local = local
        if cached.granting is not None:
            if not cached.granting.done():
                self._order.skip(request.request_id)
                return None, False
            cached.granting = None
        found = self._loadable(cached)
        cached.loads_in_step = found > 0 and self._suits_step(cached, found)
        if not self._has_room(cached):
            self._has_no_room = True  # requests behind it do not overtake it
            return None, False
        return found, found > 0 and not cached.loads_in_step

    def _keeps_match(self, cached: CachedRequest, local: int) -> bool:
        """Return True if a request that vLLM asks for again need not be matched anew.

        A lease keeps its blocks in host memory, so its hit stays valid. It may have become longer;
        so a request for which vLLM has room is matched anew.
        """
        if cached.granting is not None:
            return True
        if cached.table or (cached.uses_cache and cached.lease is None):
            return False  # its load has failed, or all leases were released
        if not cached.uses_cache:
            return True
        if cached.parameters.max_load_tokens is not None and local != cached.local:
            return False  # the limit counts from vLLM's own hit
        if time.monotonic() - cached.matched_at >= KEEP_SECONDS:
            return False
        return self._blocks_of(cached) - local // self._block_tokens > self._room

    def _suits_step(self, cached: CachedRequest, found: int) -> bool:
        """Return True if the step that is being scheduled should wait for the load of a request."""
        num_blocks = found // self._block_tokens
        if not self._layerwise:
            # vLLM takes the blocks that it has freed last only after all other free ones. A load to
            # blocks that something still uses would hold the step.
            return (
                self._arrivals.steps_wait
                and self._blocks_of(cached) + self._freed.num_blocks <= self._pool.num_free
                and self._arrivals.suits_step(
                    self._loads.deferred_blocks + num_blocks, self._num_computing
                )
            )
        return self._link.suits_step(
            num_blocks,
            deferred_blocks=self._loads.deferred_blocks,
            has_others=self._computes_more
            or any(
                request_id in self._requests and request_id != cached.request_id
                for request_id in self._last_scheduled
            ),
        )

    @property
    def _num_computing(self) -> int:
        """Number of requests that have their blocks, and neither wait for a load nor for vLLM.

        They are counted once per step; :meth:`allocated` adds the requests that join the step.
        """
        if self._computing is None:
            waiting = self._waiting.keys() | {
                request_id
                for request_id, cached in self._loads.requests.items()
                if cached.onload is None or not cached.onload.is_told
            }
            self._computing = len(self._requests) - len(waiting)
        return self._computing

    def _match(self, request: Request, local: int) -> CachedRequest:
        """Return a request with a lease, or without one if it is computed without the cache."""
        wishes = Parameters.of(request)
        cached = CachedRequest(request, request.request_id, local, request.num_preemptions, wishes)
        read = (
            wishes.read
            and not request.skip_reading_prefix_cache
            and request.request_id not in self._computed_anew
        )
        if not (read or wishes.write) or not self._serves(request):
            return cached
        cached.matched_at = time.monotonic()
        tokens = request.all_token_ids[:]  # the prompt, and then generated tokens
        calls = self._cache.calls()
        lease = calls.match(
            tokens,
            read=read,
            write=wishes.write,
            owner=request.request_id,
            **names_of(request),
        )
        granted = len(tokens)
        if wishes.max_load_tokens is not None:  # the hit ends before the last granted position
            size = self._block_tokens
            granted = min(granted, local + wishes.max_load_tokens // size * size + 1)
        future = None
        if self._wait_store and read:
            future = calls.allocate(
                lease,
                granted,
                wait_store=self._wait_store,
                queued_tokens=self._queued_tokens(),
            )
        else:
            calls.try_allocate(lease, granted)
        answers = self._cache.run(calls)
        if self._cache.succeeded(answers, f"match of request {request.request_id}"):
            cached.lease, cached.granting = lease, future
            cached.uses_cache = True
            cached.known_tokens = len(tokens)
            if future is not None:
                self._wait_for_decision(future)
        else:
            self._cache.release_and_watch(lease)
        return cached

    def _serves(self, request: Request) -> bool:
        return self._is_active and self._cache.is_usable and is_cacheable(request)

    def _wait_for_decision(self, future: Future[Any]) -> None:
        began = time.monotonic()
        wait([future], self._decision_seconds)
        self._decision_seconds = max(self._decision_seconds - (time.monotonic() - began), 0.0)

    def _queued_tokens(self) -> int:
        """Return the number of tokens of running prompts that are not computed yet.

        It is summed up once per step; :meth:`allocated` adds the requests that join the step.
        """
        if self._queued is None:
            self._queued = sum(cached.queued_tokens for cached in self._requests.values())
        return self._queued

    def _loadable(self, cached: CachedRequest) -> int:
        lease = cached.lease
        if lease is None:
            return 0
        if len(self._groups.layers) > 1 and cached.local and not compat.CAN_EXTEND_HITS:
            return 0
        size = self._block_tokens
        # vLLM computes at least the last position, for its logits.
        last = (cached.request.num_tokens - 1) // size * size
        end = lease.cached_tokens // size * size
        if end > last and self._groups.sides:
            return 0  # the other groups have what they need at the end of the hit only
        return int(max(min(end, last) - cached.local, 0))

    def _has_room(self, cached: CachedRequest) -> bool:
        """Return False if requests that hold loaded blocks might wait for one another.

        For a load, vLLM allocates only the blocks to load, not those that the request needs next,
        and it preempts no waiting request. So a load begins only when vLLM's free blocks are enough
        for the prompt of each request that waits with loaded blocks, and for this one. Without
        them, a request without a load does not begin either: vLLM would ask for no one behind it,
        and would not see that the loads of younger requests have ended.
        """
        if not self._loads.requests:
            return True  # vLLM's own check suffices
        return self._blocks_of(cached) <= self._room

    @property
    def _room(self) -> int:
        """Free blocks of vLLM that are left beside the requests with loaded blocks."""
        return self._pool.num_free - self._loads.missing_blocks

    def _blocks_of(self, cached: CachedRequest) -> int:
        return self._groups.most_blocks(cached.request.num_tokens + 1, self._step_tokens)

    def allocated(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_loaded: int
    ) -> None:
        """Note the blocks of a request in all groups, and its load.

        The load begins with the next message. vLLM may call this method after ``build`` for a
        request that waits for its load.
        """
        cached = self._requests.get(request.request_id)
        self._order.remove(request.request_id)
        first_new = 0 if cached is None else cached.local // self._block_tokens
        given = self._groups.blocks_of(block_ids, first_new)
        self._retired.note_given(given, is_counted=num_loaded > 0)
        if not num_loaded:  # another connector may load into them
            self._given += given
        if not any(block_ids):  # vLLM 0.22 does not tell which blocks another connector loads
            self._given += self._freed.block_ids
            self._saves.release_retired()
            self._retired.stop()
        if cached is None:
            return
        cached.tables.set(self._groups, block_ids)
        is_first = self._waiting.pop(cached.request_id, None) is not None
        self._computes_more |= num_loaded == 0 or cached.loads_in_step
        first = cached.local
        if num_loaded:
            in_step = cached.loads_in_step and self._layerwise
            cached.onload = Onload(first, first + num_loaded, in_step, self._step)
        if is_first and self._queued is not None:
            self._queued += cached.queued_tokens
        waits = num_loaded > 0 and not cached.loads_in_step
        if is_first and not waits and self._computing is not None:
            self._computing += 1
        if waits or cached.request_id in self._loads.requests:
            self._loads.add(cached, self._blocks_of(cached))
        if num_loaded:
            self._loads.defer(cached)

    def build(self, output: SchedulerOutput) -> StepMetadata:
        """Return the message to the workers for a step that was scheduled."""
        self._drop_preempted(output.preempted_req_ids or ())
        if self._waiting:
            self._leave_unasked()
        if self._saves.finishing:
            self._saves.leave_finishing()
        self._step += 1
        written = self._record(output)
        if self._groups.sides:
            compat.leave_unzeroed(output, self._loads.written_blocks())
        if written:
            self._retired.note_given(written)
        if written or self._given:
            self._loads.wait_for_transfers(written + self._given)
            self._given.clear()
        loads = self._loads
        if loads.deferred:
            loads.begin()
        self._cache.send_held()  # the engine makes these calls while the model computes the step
        waits = self._arrivals.take_waits() if self._arrivals.waits else []
        if waits:
            self._waited[self._step] = [
                cached.onload.layers
                for cached in waits
                if cached.onload is not None and cached.onload.layers is not None
            ]
        is_empty = not output.total_num_scheduled_tokens
        prompt_tokens = _prompt_tokens(output)
        if prompt_tokens and not waits and not loads.has_step_loads:
            self._prefills.begin(self._step, prompt_tokens)  # else the step waits for loads
        if not is_empty:
            self._pace.begin(self._step, prompt_tokens)
        message = StepMetadata(
            self._step,
            loads.take_messages() if loads.messages else [],
            [cached.request_id for cached in waits] if waits else [],
            is_empty,
        )
        self._queued = self._computing = None
        self._order.begin_step(is_idle=is_empty)
        self._has_no_room = False
        self._computes_more = False
        self._decision_seconds = DECISION_SECONDS
        return message

    def _leave_unasked(self) -> None:
        """Leave the waiting requests for which vLLM has not asked: it asks for others now."""
        for cached in list(self._waiting.values()):
            if cached.request.status.name == "WAITING_FOR_REMOTE_KVS":
                self._loads.add(cached, self._blocks_of(cached))  # `allocated` is called later
            elif cached.granting is None and cached.asked_after < self._step:
                self._leave(cached)  # let its blocks be evicted

    def _record(self, output: SchedulerOutput) -> list[int]:
        """Note the positions that the step computes; return the blocks that it may write to.

        It looks only at requests that get a block, are in prefill, or may complete a block: most
        requests of a step do none of these.
        """
        size, sides = self._block_tokens, self._groups.sides
        written: list[int] = []
        ends: list[tuple[CachedRequest, int]] = []
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            written += self._groups.blocks_of(new.block_ids, new.num_computed_tokens // size)
            self._begin_prefill(new.req_id, new.block_ids)
        running = output.scheduled_cached_reqs
        given = running.new_block_ids
        for i in [i for i, blocks in enumerate(given) if blocks is not None] if any(given) else ():
            blocks, request_id = given[i], running.req_ids[i]
            if request_id in running.resumed_req_ids:
                written += self._groups.blocks_of(blocks, running.num_computed_tokens[i] // size)
                self._begin_prefill(request_id, blocks)
            else:
                written += blocks[0] if not sides else self._groups.blocks_of(blocks, 0)
                if (cached := self._requests.get(request_id)) is not None:
                    cached.tables.extend(self._groups, blocks)
        if sides:
            for request_id in scheduled:
                if (cached := self._requests.get(request_id)) is not None:
                    request = cached.request
                    cached.kept_tokens = request.num_computed_tokens - compat.tokens_in_flight(
                        request
                    )
        if drafts := output.scheduled_spec_decode_tokens:
            longest = max(len(tokens) for tokens in drafts.values())
            self._most_generated = max(self._most_generated, 1 + longest)
        for cached in self._due.pop(self._step, ()):
            if cached.ended or cached.due_step != self._step:
                continue
            num_tokens = scheduled.get(cached.request_id, 0)
            end = cached.request.num_computed_tokens + num_tokens
            if num_tokens and end >= cached.due:
                ends.append((cached, end))
            self._look_again(cached, end)
        if self._groups.states:
            for cached, end in ends:
                cached.tables.note_states(self._groups, end)
            self._note_boundary_states(output)
        self._records[self._step] = _Record(scheduled, ends)
        self._last_scheduled = scheduled
        return written

    def _begin_prefill(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Note the blocks of a request that the present step is the first to compute."""
        self._loads.remove(request_id)
        cached = self._requests.get(request_id)
        if cached is not None:
            cached.tables.set(self._groups, block_ids)
            cached.due_step = self._step
            self._due.setdefault(self._step, []).append(cached)

    def _watch(self, cached: CachedRequest) -> None:
        """Let ``_record`` look at a request that decodes when it completes its next blocks."""
        if cached.computed < cached.request.num_tokens - 1:
            return
        cached.due, cached.due_step = sys.maxsize, 0
        if self._saves.are_wanted(cached):
            size = self._saved_tokens
            done = min(cached.computed, len(cached.table) * self._block_tokens)
            cached.due = (done // size + 1) * size
            self._look_again(cached, cached.request.num_computed_tokens)

    def _look_again(self, cached: CachedRequest, computed: int) -> None:
        """Let ``_record`` look at a request in the first step that may reach ``cached.due``.

        Args:
            cached: the request.
            computed: positions that the steps so far compute.
        """
        num_steps = -(-(cached.due - computed) // self._most_generated)
        cached.due_step = self._step + max(num_steps, 1)
        if cached.due:  # decodes
            cached.due_step += -cached.due_step % self._saved_steps
        self._due.setdefault(cached.due_step, []).append(cached)

    def _note_boundary_states(self, output: SchedulerOutput) -> None:
        """Note the states that the step leaves inside a prompt, where no step ends."""
        for request_id, states in compat.boundary_states(output).items():
            cached = self._requests.get(request_id)
            if cached is not None:
                for group, block, num_tokens in states:
                    cached.tables.note_state(self._groups, group, num_tokens, block)

    # --- update_from_output() ---------------------------------------------------------------------

    def finished(self, request: Request) -> None:
        """Note the end of a request, whose blocks vLLM frees now."""
        self._computed_anew.discard(request.request_id)
        self._order.remove(request.request_id)
        cached = self._requests.get(request.request_id)
        if cached is None:
            return
        self._drop(cached)
        onload = cached.onload
        if onload is not None and not onload.started:
            self._loads.report(cached.request_id)
        if request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            self._saves.finishing.append(cached)  # step_ended() commits its last blocks
        else:
            self._saves.leave(cached)

    def step_ended(self, step: int, failed_blocks: Collection[int]) -> None:
        """Commit the computed positions of a step. Call after vLLM has processed its output.

        Args:
            step: number of the step.
            failed_blocks: blocks whose loads have failed; vLLM computes them again.
        """
        if self._waited:
            self._check_waited(step)
        prefill = self._prefills.end(step)
        self._pace.end(step, prefill)
        event = self._cache.take_event(step)
        self._saves.note_answers(waits=False)
        if failed_blocks:
            self._note_failures(set(failed_blocks))
        ended: dict[CachedRequest, int] = {}
        records = self._records
        while records and (number := next(iter(records))) <= step:
            ended.update(records.pop(number).ends)
        for cached in self._saves.finishing:
            if cached.due:  # past its prompt: all tokens but the last one were computed
                ended[cached] = sys.maxsize
        if failed_blocks:
            failed = set(failed_blocks)
            ended = {each: end for each, end in ended.items() if failed.isdisjoint(each.table)}
        for cached, end in ended.items():
            # The model has not computed with the last token, and drafts behind it were rejected.
            cached.computed = max(cached.computed, min(end, cached.request.num_tokens - 1))
            if not cached.ended:
                self._watch(cached)
        if ended or self._saves.finishing or self._cache.closes_steps_on_ranks:
            self._saves.commit(ended, event, prefill)
        self._freed.note_ended(step)

    def ended_loads(self, reported: set[str] | None) -> set[str] | None:
        """Return the requests that may compute with their loads in the next step.

        Args:
            reported: those whose loads had ended when the workers began the step.
        """
        if not reported and not self._loads.requests:
            return None
        ended = self._arrivals.add_to(reported, self._loads.requests, self._num_computing)
        self._computing = None
        return ended

    def _check_waited(self, step: int) -> None:
        """Check the loads for which steps up to ``step`` have waited.

        Raises:
            TransferError: a load has failed, and vLLM has scheduled a step behind; the error ends
                the server before it sends the tokens of the step.
        """
        for number in [number for number in self._waited if number <= step]:
            for layers in self._waited.pop(number):
                layers.wait_all(self._timeout)

    def _note_failures(self, failed_blocks: set[int]) -> None:
        """Give up positions that were computed with blocks whose loads have failed.

        The leases of the loads are released: their requests go on without saves. vLLM has put the
        blocks of a load into its prefix cache when the step was scheduled, and leaves them there,
        to be computed again in place. If it preempts the request first, nothing computes them: so
        they leave its cache here.
        """
        computed_with = set(failed_blocks)
        for cached in [*self._requests.values(), *self._saves.finishing]:
            first = next(
                (i for i, block in enumerate(cached.table) if block in failed_blocks), None
            )
            if first is not None:
                computed_with.update(cached.table[first:])
                if cached.onload is not None:
                    self._saves.leave(cached)
        if self._layerwise or self._arrivals.steps_wait:
            self._pool.evict(computed_with)

    # --- ends of requests -------------------------------------------------------------------------

    def _leave(self, cached: CachedRequest) -> None:
        """Forget a request whose blocks vLLM has freed, or that has none."""
        self._drop(cached)
        self._saves.leave(cached)

    def _drop(self, cached: CachedRequest) -> None:
        """Follow a request no longer; steps in flight may still compute with its blocks."""
        request_id = cached.request_id
        for requests in (self._requests, self._waiting):
            requests.pop(request_id, None)
        self._loads.remove(request_id)
        self._computing = None
        cached.ended = True
        steps = (n for n, record in self._records.items() if request_id in record.scheduled)
        last_step = max(steps, default=0)
        self._freed.add(cached.tables.ids(), last_step, None)

    def _drop_preempted(self, listed: Collection[str]) -> None:
        """Drop the preempted requests.

        Args:
            listed: those that vLLM lists with the step. 0.22 does not list those of a reset of its
                cache, which preempts all requests that run: then all are looked at.
        """
        requests = self._requests
        for request_id in self._last_scheduled:
            cached = requests.get(request_id)
            if cached is not None and cached.uses_cache and not cached.was_preempted:
                break  # it ran before and runs now, or was matched again since: see `matched`
        else:
            self._missed_preemption = True
        if self._missed_preemption:
            listed = list(requests)
            self._missed_preemption = False
        for request_id in listed:
            cached = requests.get(request_id)
            if cached is not None and cached.was_preempted:
                self._leave(cached)

    def _follow_reset(self) -> None:
        """Forget all blocks after vLLM has emptied its cache: the weights may have changed."""
        if not self._cache.is_usable:
            return
        log.info("vllm.reset_followed")
        if not self.forget():
            self._cache.give_up(
                BrokenEngineError(
                    "vLLM has emptied its cache, and aiokv cannot forget its blocks while loads "
                    "and saves go on"
                )
            )

    def forget(self) -> bool:
        """Forget all blocks of host memory and stores, and save none that was computed before.

        Returns:
            False when transfers did not end in time, or a request waits for a load that must not
            fail: the blocks are still there.
        """
        if self._loads.requests and self._groups.sides and not compat.CAN_FAIL_REQUESTS:
            return False
        self.reset()
        is_done = self._cache.reset(self._timeout)
        if is_done:
            self._pool.take_reset()
        return is_done

    def reset(self) -> None:
        """Release all leases, so that no block of running requests is saved."""
        self._saves.note_answers()
        for cached in [*self._requests.values(), *self._saves.finishing]:
            self._saves.leave(cached)
        self._saves.release_retired()

    # --- statistics -------------------------------------------------------------------------------

    def fetched_tokens(self, request: Request) -> int:
        """Return how many cached tokens of a request came from stores."""
        cached = self._requests.get(request.request_id)
        if cached is None or cached.lease is None:
            return 0
        calls = self._cache.calls()
        usage = calls.usage(cached.lease)
        self._cache.run(calls)
        return 0 if usage.error is not None else usage.value.fetched_tokens

    @property
    def num_requests(self) -> int:
        """Number of requests that are followed."""
        return len(self._requests)


class _Record(NamedTuple):
    """A step that was sent to the workers.

    Attributes:
        scheduled: number of tokens by request.
        ends: requests in prefill, and those that complete a block, with their computed ends.
    """

    scheduled: Mapping[str, int]
    ends: list[tuple[CachedRequest, int]]


def _prompt_tokens(output: SchedulerOutput) -> int:
    """Return the number of tokens of a step that no request has generated or drafted."""
    drafts = output.scheduled_spec_decode_tokens
    if not drafts and output.total_num_scheduled_tokens == len(output.num_scheduled_tokens):
        return 0  # all requests decode: no loop over them
    return sum(
        num_tokens
        for request_id, num_tokens in output.num_scheduled_tokens.items()
        if num_tokens > 1 + len(drafts.get(request_id, ()))
    )
