"""The async serving loop: continuous batching over leases of the cache engine.

A task per conversation waits for capacity, one loop computes steps on the runner's thread::

    conversation    match -> allocate ------------- await the answer ------- release
                                | onload starts              ^
    step loop                   +-> run layers -> advance -> run layers -> ...

A step is one row of every decoding sequence and one chunk of one prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aiokv.demo.batch import Batch, Part
from aiokv.demo.ledger import Ledger
from aiokv.demo.report import ServingStatistics
from aiokv.demo.requests import Sequence, converse
from aiokv.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    import aiokv
    from aiokv.demo.batch import Span
    from aiokv.demo.requests import Request
    from aiokv.demo.runner import ModelRunner, StepOutput
    from aiokv.demo.runner import OnLayers as OnLayersOfStep
    from aiokv.demo.workload import Conversation, Workload
    from aiokv.worker.device.base import Event

    # Context manager for a request and its lease: entered when the lease is granted, left when the
    # attempt has ended. The value is the first position to compute.
    Handover = Callable[[Request, aiokv.Lease], AbstractAsyncContextManager[int]]
    # Called with a request, the end of its positions, the layers computed for them, and their
    # event.
    OnLayers = Callable[[Request, int, int, Event | None], None]


@asynccontextmanager
async def no_handover(request: Request, lease: aiokv.Lease) -> AsyncIterator[int]:
    """Let the model compute the blocks that are not cached."""
    yield lease.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Options of the serving loop.

    Attributes:
        max_running: requests in the batch at once.
        chunk_tokens: prompt tokens of a step.
        reuse: False gives every attempt a salt of its own, so that nothing is ever found.
        wait_store: seconds for which a request waits for the blocks that stores have.
        disconnect: share of requests whose client leaves while they are computed, at a random
            instant of a random step, and sends them again.
        seed: for the random choice of these.
    """

    max_running: int = 8
    chunk_tokens: int = 32
    reuse: bool = True
    wait_store: float = 0.0
    disconnect: float = 0.0
    seed: int = 0


class Server:
    """Serves one workload with one engine.

    Args:
        on_hit: called with the lease of every admission that found something cached, before the
            first step that reads it.
        on_done: called after every request.
        handover: receives the blocks of a request from another server, or sends them to one.
        on_layers: called while a step computes, with a request, the end of its positions, the
            number of layers that are computed for them, and an event after these layers.
    """

    def __init__(
        self,
        engine: aiokv.CacheEngine,
        runner: ModelRunner,
        config: ServingConfig,
        *,
        on_hit: Callable[[aiokv.Lease], None] | None = None,
        on_done: Callable[[], None] | None = None,
        handover: Handover = no_handover,
        on_layers: OnLayers | None = None,
    ) -> None:
        self.statistics = ServingStatistics()
        self.ledger = Ledger()
        self.ttft_seconds: list[float] = []
        self.capacity_wait_seconds: list[float] = []
        self._engine = engine
        self._runner = runner
        self._config = config
        self._on_hit = on_hit
        self._on_done = on_done
        self._handover = handover
        self._on_layers = on_layers
        self._random = random.Random(config.seed)
        self._slots = asyncio.Semaphore(config.max_running)
        self._running: list[Sequence] = []  # in order of admission
        self._admitted = asyncio.Event()

    async def serve(self, workload: Workload) -> None:
        """Serve all conversations to their end.

        Raises:
            AiokvError: the first failure; everything else is cancelled.

        Cancellation: every lease is given back; the blocks of a step that runs when it ends.
        """
        async with self.computing() as clients:
            for conversation in workload.conversations:
                clients.create_task(self.converse(conversation))

    @asynccontextmanager
    async def computing(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Compute steps until all tasks of the group, which call ``serve_request``, have ended.

        Raises:
            AiokvError: the first failure; everything else is cancelled.

        Cancellation: as of ``serve``.
        """
        try:
            async with asyncio.TaskGroup() as group:
                steps = group.create_task(self._step_forever())
                async with asyncio.TaskGroup() as clients:
                    yield clients
                steps.cancel()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors

    async def converse(self, conversation: Conversation) -> None:
        """Serve the turns of a conversation, one after the other, inside ``computing``."""
        await converse(conversation, self.serve_request)

    async def serve_request(self, request: Request) -> None:
        """Serve a request to its end, inside ``computing``."""
        async with self._slots:
            if self._random.random() < self._config.disconnect:
                steps = request.stop_length - request.prompt_length  # at least
                request.disconnect_in_step = self._random.randint(1, steps)
            finished = False
            while not finished:
                finished = await self._attempt_or_disconnect(request)
                if not self._running:  # no later step will close the one that released the blocks
                    self._engine.step(self._runner.record())
        self.statistics.add(request)
        self.capacity_wait_seconds.append(request.capacity_wait_seconds)
        self.ledger.record_tokens(request.name, request.generated)
        if self._on_done is not None:
            self._on_done()

    async def _attempt_or_disconnect(self, request: Request) -> bool:
        """Serve until finished (True), or until preempted or disconnected (False)."""
        try:
            if request.disconnect_in_step is None:
                finished = await self._attempt(request)
            else:  # in a task of its own, which can be cancelled alone
                finished = await asyncio.create_task(self._attempt(request))
        except asyncio.CancelledError:
            if not request.disconnected or _is_cancelled():
                raise
            self.statistics.disconnections += 1
            request.send_again()
            return False
        self.statistics.preemptions += not finished
        return finished

    async def _attempt(self, request: Request) -> bool:
        """Serve until finished (True) or preempted (False)."""
        salt = "" if self._config.reuse else f"{request.name}#{request.attempts}"
        tokens = np.array(request.tokens, dtype=np.int32)
        async with self._engine.match(
            tokens, salt=salt, items=request.items, owner=request.name
        ) as lease:
            await lease.allocate(len(tokens), wait_store=self._config.wait_store)
            async with self._handover(request, lease) as first_position:
                sequence = Sequence(request, lease, first_position)
                self._running.append(sequence)
                self._admitted.set()
                try:
                    return await sequence.ended
                except asyncio.CancelledError:
                    self._abandon(sequence)
                    raise

    def _abandon(self, sequence: Sequence) -> None:
        """Leave a request out of all later steps; a step that computes it drops its results."""
        sequence.abandoned = True
        if not sequence.ended.done():
            sequence.request.note_usage(sequence.lease.usage)
        if sequence in self._running:
            self._running.remove(sequence)

    async def _step_forever(self) -> None:
        while True:
            if not self._running:
                self._admitted.clear()
                await self._admitted.wait()
            self._make_room()
            if chosen := self._choose():
                await self._step(chosen)

    def _make_room(self) -> None:
        """Give every new token a position, preempting the newest request while there is none."""
        while waiting := [sequence for sequence in self._running if sequence.needs_position]:
            self._preempt(self._running[-1])
            left = [sequence for sequence in waiting if sequence in self._running]
            batch = self._engine.batch([sequence.lease for sequence in left])
            self._engine.advance(batch, [sequence.request.tokens[-1] for sequence in left])

    def _preempt(self, sequence: Sequence) -> None:
        """Give back a request's blocks. Committed ones may still be hit later."""
        self._running.remove(sequence)
        if sequence.needs_position:  # `advance` has not committed what the step has computed
            sequence.lease.commit(sequence.computed)
        sequence.end(finished=False)
        sequence.lease.release()

    def _choose(self) -> list[tuple[Sequence, int]]:
        """The next step: sequences and how many positions of each to compute."""
        chosen = [(sequence, 1) for sequence in self._running if sequence.pending == 1]
        prompts = (sequence for sequence in self._running if sequence.pending > 1)
        if (first := next(prompts, None)) is not None:
            chosen.append((first, min(first.pending, self._config.chunk_tokens)))
        return chosen

    async def _step(self, chosen: list[tuple[Sequence, int]]) -> None:
        fresh = [sequence.lease for sequence, _ in chosen if sequence.arriving]
        if self._on_hit is not None:
            for lease in fresh:
                if lease.cached_tokens:
                    self._on_hit(lease)
        views = (lease.layers for lease in fresh)
        arriving = [view for view in views if view.counters]
        batch = Batch.of(
            Part(s.request.tokens, s.computed, count, s.lease.block_table, s.request.items)
            for s, count in chosen
        )
        block_tokens = self._engine.config.block_tokens
        checks = [sequence.blocks_to_check(count, block_tokens) for sequence, count in chosen]
        read_back = [
            span.block_table[blocks.start : blocks.stop]
            for span, blocks in zip(batch.spans, checks, strict=True)
        ]
        try:
            # Requests keep their blocks until the thread has left the step, even if their clients
            # have left.
            leases = self._engine.batch([sequence.lease for sequence, _ in chosen])
            with self._engine.computing(leases) as computing:
                on_layers = None if arriving else self._layer_callback(chosen)
                work = self._runner.submit(batch, arriving, read_back, on_layers)
                computing.ends_with(work)
                self._disconnect(chosen)
                output = await asyncio.wrap_future(work)
        except TransferError as error:
            await self._recompute(chosen, error)
        else:
            for (sequence, _), blocks, digests in zip(
                chosen, checks, output.block_digests, strict=True
            ):
                if not sequence.abandoned:
                    self._record_blocks(sequence, blocks, digests)
            tokens = self._apply(chosen, batch.spans, output)
            self._engine.advance(computing, tokens)  # `_make_room` continues without room
        finally:
            self._engine.step(self._runner.record())

    def _layer_callback(self, chosen: list[tuple[Sequence, int]]) -> OnLayersOfStep | None:
        """Return the function that the runner calls for each layer of a step."""
        on_layers, loop = self._on_layers, asyncio.get_running_loop()
        if on_layers is None:
            return None
        ends = [(sequence.request, sequence.computed + count) for sequence, count in chosen]

        def note(layers: int, event: Event | None) -> None:
            for request, end in ends:
                on_layers(request, end, layers, event)

        return lambda layers, event: loop.call_soon_threadsafe(note, layers, event)

    def _disconnect(self, chosen: list[tuple[Sequence, int]]) -> None:
        """Disconnect the clients that leave in this step, at a random instant of it."""
        statistics = self.statistics
        step_seconds = statistics.compute_seconds / max(1, statistics.steps)
        for sequence, _ in chosen:
            sequence.steps += 1
            if sequence.steps == sequence.request.disconnect_in_step:
                sequence.request.disconnect_in_step = None
                delay = self._random.uniform(0, step_seconds)
                asyncio.get_running_loop().call_later(delay, sequence.disconnect)

    async def _recompute(self, chosen: list[tuple[Sequence, int]], error: TransferError) -> None:
        """Go on at the first block that did not arrive; the step's results are dropped."""
        for sequence, _ in chosen:
            if not sequence.abandoned:
                with contextlib.suppress(TransferError):
                    await sequence.lease.layers.wait_all()
        failed = 0
        for sequence in [sequence for sequence, _ in chosen if not sequence.abandoned]:
            sequence.arriving = False  # nothing writes its blocks any more
            first = sequence.lease.recompute_from()
            if first is not None:
                failed += 1
                sequence.computed = min(sequence.computed, first)
        if failed == 0 and not any(sequence.abandoned for sequence, _ in chosen):
            raise error
        self.statistics.failed_onloads += failed

    def _record_blocks(self, sequence: Sequence, blocks: range, digests: list[bytes]) -> None:
        """Check the blocks that were complete before the step, and record the new ones."""
        request, block_tokens = sequence.request, self._engine.config.block_tokens
        for block, digest in zip(blocks, digests, strict=True):
            prefix = request.prefix_key(block, block_tokens)
            if (block + 1) * block_tokens <= sequence.computed:
                self.ledger.check_read_block(request.name, block, prefix, digest)
            else:
                self.ledger.record_computed_block(prefix, digest)
        sequence.checked = True

    def _apply(
        self, chosen: list[tuple[Sequence, int]], spans: list[Span], output: StepOutput
    ) -> list[list[int]]:
        """Take the results of a step; return the new token of each row that decodes further."""
        statistics = self.statistics
        statistics.steps += 1
        statistics.compute_seconds += output.compute_seconds
        statistics.layer_wait_ms += 1e3 * output.layer_wait_seconds
        self.ledger.rows_not_finite += output.rows_not_finite
        tokens: list[list[int]] = []
        for (sequence, count), span, token in zip(chosen, spans, output.next_tokens, strict=True):
            tokens.append([])
            if sequence.abandoned:
                continue
            self.ledger.record_rows(
                sequence.request.name, sequence.computed, output.digests[span.start : span.stop]
            )
            sequence.arriving = False
            sequence.computed += count
            if sequence.pending or sequence.lacks_one_token:
                sequence.lease.commit(sequence.computed)
            else:
                tokens[-1].append(token)
            if not sequence.pending:
                self._take_token(sequence, token)
        return tokens

    def _take_token(self, sequence: Sequence, token: int) -> None:
        request = sequence.request
        request.tokens.append(token)
        if request.ttft_seconds is None:
            request.ttft_seconds = time.perf_counter() - request.arrived_seconds
            self.ttft_seconds.append(request.ttft_seconds)
        if len(request.tokens) == request.stop_length:
            self._running.remove(sequence)
            sequence.end(finished=True)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def first_error(errors: ExceptionGroup[Exception]) -> Exception:
    """Return the first error that is not a group."""
    first = errors.exceptions[0]
    return first_error(first) if isinstance(first, ExceptionGroup) else first
