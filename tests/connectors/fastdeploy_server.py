"""A scheduler and a worker with the request life cycle of FastDeploy, over the connector.

The scheduler is written after the public ``ResourceManagerV1``: waiting, match, room, blocks,
chunks of the prompt, blocks for decoding, preemption on shortage, abort. The worker computes real
bytes: the KV of a position depends on all tokens up to it, and each position that the worker reads
is compared with what it must be. A wrong, missing or early block is therefore an error.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Self

import numpy as np

from aiokv import Regions
from aiokv.connectors.fastdeploy import (
    BatchRequest,
    CacheController,
    CacheManager,
    LayerDoneCounter,
    PrefixCacheManager,
)
from aiokv.devices import CpuEvent
from aiokv.ranks import RankGroup
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 4  # positions per block
LAYERS = 2
WIDTH = 3  # numbers per position
VOCABULARY = 1_000


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Type(Enum):
    PREFILL = 0
    DECODE = 1
    PREEMPTED = 2
    ABORT = 4


@dataclass(eq=False)
class Request:
    """Fields of FastDeploy's ``Request`` that scheduler, worker and connector use."""

    request_id: str
    prompt_token_ids: list[int]
    max_outputs: int = 8
    multimodal_inputs: dict | None = None
    output_token_ids: list[int] = field(default_factory=list)
    block_tables: list[int] = field(default_factory=list)
    cache_swap_metadata: list = field(default_factory=list)
    cache_evict_metadata: list = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_cached_blocks: int = 0
    need_prefill_tokens: int = 0
    status: Status = Status.WAITING
    task_type: Type = Type.PREFILL
    preempted_count: int = 0
    async_process_futures: list[Future] = field(default_factory=list)
    _match_result: object = None

    def __post_init__(self) -> None:
        self.need_prefill_tokens = len(self.prompt_token_ids)

    @property
    def match_result(self):
        return self._match_result

    @property
    def tokens(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass
class Task:
    """Parts of a request that the workers get: copies, as through the pickled batch of a queue."""

    request_id: str
    task_type: Type
    block_tables: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0
    max_tokens: int = 0
    cache_swap_metadata: list = field(default_factory=list)
    cache_evict_metadata: list = field(default_factory=list)


def fd_config(
    device_blocks: int,
    host_blocks: int = 0,
    *,
    write_policy: str = "write_through_selective",
    threshold: int = 1,
    prefix_caching: bool = True,
    batch_tokens: int = 32,
    decode_blocks: int = 1,
    speculative: int | None = None,
) -> SimpleNamespace:
    """Return the fields of ``FDConfig`` that the connector reads."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=BLOCK,
            total_block_num=device_blocks,
            num_cpu_blocks=host_blocks,
            enable_prefix_caching=prefix_caching,
            write_policy=write_policy,
            write_through_threshold=threshold,
            enc_dec_block_num=decode_blocks,
            prealloc_dec_block_slot_num_threshold=0,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batch_tokens),
        model_config=SimpleNamespace(num_hidden_layers=LAYERS, dtype="int64"),
        speculative_config=SimpleNamespace(
            method=None if speculative is None else "mtp", num_speculative_tokens=speculative
        ),
    )


def tensors(device_blocks: int) -> list[np.ndarray]:
    return [np.zeros((device_blocks, BLOCK, WIDTH), np.int64) for _ in range(LAYERS)]


def regions_of(layers: list[np.ndarray]) -> Regions:
    regions = Regions(num_layers=LAYERS)
    regions.add("kv", layers=layers)
    return regions


def kv_of(tokens: list[int], layer: int) -> np.ndarray:
    """Return the KV of all positions, ``[len(tokens), WIDTH]``: a hash of the tokens up to each."""
    value, rows = layer + 1, []
    for token in tokens:
        value = (value * 1_000_003 + token + 7) % (2**61 - 1)
        rows.append([value, value ^ layer, value + token])
    return np.asarray(rows, np.int64).reshape(-1, WIDTH)


def next_token(tokens: list[int]) -> int:
    """Return the token that the model generates after these."""
    return int(kv_of(tokens, 0)[-1, 0]) % VOCABULARY


class Worker:
    """The model: reads and writes KV through block tables, and compares what it reads.

    As in FastDeploy, a request that has its first token decodes in each step of the worker, until
    it has its last token, or no position left, or the scheduler stops it.

    Attributes:
        writes_first: True if a batch writes a layer before any of its requests reads that layer.
    """

    writes_first = False

    def __init__(self, layers: list[np.ndarray], controller: CacheController) -> None:
        self.layers = layers
        self.controller = controller
        self.running: dict[str, Task] = {}
        self.read_positions = 0

    def run(self, batch: BatchRequest) -> list[tuple[str, int | None]]:
        """Compute a batch, and one step of all requests that decode.

        Returns:
            Generated tokens by request, and None for a request that was stopped.
        """
        return self.execute(batch, self.begin(batch))

    def begin(self, batch: BatchRequest) -> LayerDoneCounter | None:
        """Tell the connector that a batch begins, behind all work that was submitted before."""
        return self.controller.submit_swap_tasks(
            batch.cache_evict_metadata, batch.cache_swap_metadata
        )

    def execute(
        self, batch: BatchRequest, counter: LayerDoneCounter | None
    ) -> list[tuple[str, int | None]]:
        """Compute, as the GPU does; see ``run``."""
        answers: list[tuple[str, int | None]] = []
        work: list[tuple[Task, int, int]] = []
        for task in batch:
            if task.task_type is Type.DECODE:
                if task.request_id in self.running:
                    self.running[task.request_id].block_tables = task.block_tables
            elif task.task_type is Type.PREFILL:
                work.append((task, task.first, task.last))
            else:
                self.running.pop(task.request_id, None)
                answers.append((task.request_id, None))
        for task in self.running.values():
            total = len(task.tokens)
            if total <= len(task.block_tables) * BLOCK:
                work.append((task, total - 1, total))
        for layer in range(LAYERS):
            if counter is not None:
                assert counter.wait_for_layer(layer, timeout=PATIENCE_SECONDS)
            if not self.writes_first:
                for task, first, _ in work:
                    self._read(task, layer, first)
            for task, first, last in work:
                self._write(task, layer, first, last)
            for task, _, last in work:
                self._read(task, layer, last)
        for task, _, last in work:
            if last == len(task.tokens):
                self.running[task.request_id] = task
                task.tokens.append(next_token(task.tokens))
                answers.append((task.request_id, task.tokens[-1]))
                if len(task.tokens) == task.max_tokens:
                    del self.running[task.request_id]
        return answers

    def _write(self, task: Task, layer: int, first: int, last: int) -> None:
        table, kv = task.block_tables, self.layers[layer]
        expected = kv_of(task.tokens[:last], layer)
        for position in range(first, last):
            kv[table[position // BLOCK], position % BLOCK] = expected[position]

    def _read(self, task: Task, layer: int, last: int) -> None:
        table = task.block_tables
        expected = kv_of(task.tokens[:last], layer)
        blocks = -(-last // BLOCK)
        assert len(set(table[:blocks])) == blocks, f"{task.request_id}: {table}"
        rows = self.layers[layer][table[:blocks]].reshape(-1, WIDTH)
        wrong = np.flatnonzero((rows[:last] != expected).any(axis=1))
        assert wrong.size == 0, f"{task.request_id}: wrong KV at {wrong} of {last}, {table}"
        self.read_positions += last


class Scheduler:
    """Waiting and running requests, and the batches made of them."""

    def __init__(self, manager: CacheManager, worker: Worker, max_requests: int = 64) -> None:
        self.manager = manager
        self.worker = worker
        self.config = manager.config
        self.max_requests = max_requests
        self.lock = threading.Lock()
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: dict[str, Request] = {}  # until the worker has stopped them
        self.stopping: dict[str, Request] = {}  # aborted ones, likewise
        self.aborted: set[str] = set()
        self.finished: list[Request] = []
        self.preemptions = 0

    def add(self, *requests: Request) -> None:
        with self.lock:
            self.requests |= {request.request_id: request for request in requests}
            for request in requests:
                self.manager.begin_fetch(request)
            self.waiting.extend(requests)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.preempted or self.stopping)

    # --- schedule() -------------------------------------------------------------------------------

    def schedule(self) -> BatchRequest:
        with self.lock:
            batch = BatchRequest()
            budget = self.config.scheduler_config.max_num_batched_tokens
            has_preempted = False
            for request in list(self.running):
                if request not in self.running or budget <= 0:
                    continue
                if request.request_id in self.aborted:
                    self._drop(request, batch, Type.ABORT)
                    self.stopping[request.request_id] = request
                    continue
                if request.num_computed_tokens >= request.need_prefill_tokens:
                    if request.num_total_tokens > request.need_prefill_tokens:
                        request.num_computed_tokens = request.num_total_tokens - 1
                    slots = len(request.block_tables) * BLOCK
                    if slots - request.num_total_tokens > 0:
                        continue
                    num_blocks = self.config.cache_config.enc_dec_block_num
                    if not self._make_room(request, num_blocks, batch):
                        has_preempted = True
                        continue
                    self._take(request, num_blocks)
                    tables = list(request.block_tables)
                    batch.add_request(Task(request.request_id, Type.DECODE, tables))
                else:
                    chunk = min(request.need_prefill_tokens - request.num_computed_tokens, budget)
                    if not self._make_room(request, self._new_blocks(request, chunk), batch):
                        has_preempted = True
                        continue
                    self._take(request, self._new_blocks(request, chunk))
                    self._prefill(request, chunk, batch)
                    budget -= chunk
            has_preempted = has_preempted or bool(self.preempted)
            skipped: list[Request] = []
            while self.waiting and budget > 0 and not has_preempted:
                if len(self.running) >= self.max_requests:
                    break
                request = self.waiting[0]
                if request.request_id in self.aborted:
                    self.waiting.popleft()
                    self.finished.append(request)
                    continue
                if not all(future.done() for future in request.async_process_futures):
                    skipped.append(self.waiting.popleft())
                    continue
                if len(request.output_token_ids) >= request.max_outputs:
                    self.waiting.popleft()  # preempted after its last token; `finish` comes
                    continue
                request.need_prefill_tokens = request.num_total_tokens
                if self.config.cache_config.enable_prefix_caching:
                    request.block_tables, request.num_computed_tokens = self._match(request)
                    request.num_cached_tokens = request.num_computed_tokens
                chunk = min(request.need_prefill_tokens - request.num_computed_tokens, budget)
                num_blocks = self._new_blocks(request, chunk)
                if not self.manager.can_allocate_gpu_blocks(num_blocks):
                    self._free(request)
                    request.num_computed_tokens = 0
                    break
                self._take(request, num_blocks)
                self.waiting.popleft()
                self.running.append(request)
                request.status = Status.RUNNING
                self._prefill(request, chunk, batch)
                budget -= chunk
            self.waiting.extend(skipped)
            metadata = self.manager.issue_pending_backup_to_batch_request()
            if metadata is not None:
                batch.append_evict_metadata([metadata])
            return batch

    def _new_blocks(self, request: Request, chunk: int) -> int:
        return -(-(request.num_computed_tokens + chunk) // BLOCK) - len(request.block_tables)

    def _match(self, request: Request) -> tuple[list[int], int]:
        self.manager.match_prefix(request, True)
        found = request.match_result
        return found.device_block_ids, found.total_matched_blocks * BLOCK

    def _allocate(self, request: Request, num_blocks: int) -> list[int]:
        return self.manager.allocate_gpu_blocks(request, num_blocks)

    def _take(self, request: Request, num_blocks: int) -> None:
        ids = self._allocate(request, num_blocks)
        assert len(ids) == num_blocks, f"{request.request_id}: {len(ids)} of {num_blocks} blocks"
        request.block_tables.extend(ids)

    def _prefill(self, request: Request, chunk: int, batch: BatchRequest) -> None:
        request.num_computed_tokens += chunk
        task = Task(
            request.request_id,
            Type.PREFILL,
            list(request.block_tables),
            list(request.tokens),
            request.num_computed_tokens - chunk,
            request.num_computed_tokens,
            len(request.prompt_token_ids) + request.max_outputs,
            request.cache_swap_metadata,
        )
        request.cache_swap_metadata = []
        batch.add_request(task)

    def _make_room(self, request: Request, num_blocks: int, batch: BatchRequest) -> bool:
        while not self.manager.can_allocate_gpu_blocks(num_blocks):
            victim = self.running[-1]
            self._drop(victim, batch, Type.PREEMPTED)
            victim.preempted_count += 1
            self.preemptions += 1
            self.preempted[victim.request_id] = victim
            if victim is request:
                return False
        return True

    def _drop(self, request: Request, batch: BatchRequest, why: Type) -> None:
        self.running.remove(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        self._free(request)
        batch.add_request(Task(request.request_id, why))

    def _free(self, request: Request) -> None:
        self.manager.request_finish(request)
        request.block_tables = []

    # --- results ----------------------------------------------------------------------------------

    def take_answers(self, answers: list[tuple[str, int | None]]) -> list[Request]:
        """Append generated tokens, and queue stopped requests; return the requests that ended."""
        ended = []
        for request_id, token in answers:
            request = self.requests[request_id]
            if token is not None:
                request.output_token_ids.append(token)
                if len(request.output_token_ids) == request.max_outputs:
                    ended.append(request)
                continue
            with self.lock:
                if self.stopping.pop(request_id, None):
                    self.finished.append(request)
                elif self.preempted.pop(request_id, None) and request not in ended:
                    self.waiting.appendleft(request)
        return ended

    def finish(self, request: Request) -> None:
        with self.lock:
            if request in self.finished:
                return
            if request in self.running:
                self.running.remove(request)
            if request in self.waiting:
                self.waiting.remove(request)
            self.preempted.pop(request.request_id, None)
            request.status = Status.FINISHED
            self._free(request)
            self.manager.write_cache_to_storage(request)
            self.finished.append(request)

    def step(self) -> None:
        """Schedule one batch, compute it, and take its results."""
        for request in self.take_answers(self.worker.run(self.schedule())):
            self.finish(request)

    def run(self, max_steps: int = 2_000) -> None:
        for _ in range(max_steps):
            if self.is_idle:
                return
            if not self.running and self.waiting:
                for future in self.waiting[0].async_process_futures:
                    future.exception(PATIENCE_SECONDS)
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.waiting} {self.running}")


class OldScheduler(Scheduler):
    """The same scheduler without cache manager v1: it calls ``PrefixCacheManager``."""

    manager: PrefixCacheManager

    def __init__(self, manager: PrefixCacheManager, worker: Worker) -> None:
        super().__init__(manager.cache, worker)
        self.manager = manager

    def _match(self, request: Request) -> tuple[list[int], int]:
        ids, num_tokens, figures = self.manager.request_match_blocks(request, BLOCK)
        assert len(ids) * BLOCK == num_tokens
        assert ids == figures["match_gpu_block_ids"] + figures["gpu_recv_block_ids"]
        return ids, num_tokens

    def _allocate(self, request: Request, num_blocks: int) -> list[int]:
        return self.manager.allocate_gpu_blocks(num_blocks, request.request_id)

    def _prefill(self, request: Request, chunk: int, batch: BatchRequest) -> None:
        super()._prefill(request, chunk, batch)
        self.manager.update_cache_blocks(request, BLOCK, request.num_computed_tokens)

    def _free(self, request: Request) -> None:
        self.manager.release_block_ids(request)
        self.manager.recycle_gpu_blocks(
            request.block_tables[request.num_cached_blocks :], request.request_id
        )
        request.block_tables = []


class Server:
    """Manager, worker and scheduler of one process, on the cpu device.

    ``kind`` is "v1"; "layers", whose worker waits for layers of onloads; or "v0" without cache
    manager v1.
    """

    def __init__(
        self,
        device_blocks: int,
        host_blocks: int = 0,
        device=None,
        kind="v1",
        cache_options=None,
        **options,
    ) -> None:
        config = fd_config(device_blocks, host_blocks, **options)
        layers = tensors(device_blocks)
        cache_options = {
            "regions": regions_of(layers),
            "device": device,
            "verify": "off" if device else "checksum",
            "waits_for_onloads": kind != "layers",
            **(cache_options or {}),
        }
        prefix = PrefixCacheManager(config, **cache_options) if kind == "v0" else None
        self.manager = CacheManager(config, **cache_options) if prefix is None else prefix.cache
        self.worker = Worker(layers, CacheController(config, source=self.manager))
        if prefix is None:
            self.scheduler = Scheduler(self.manager, self.worker)
        else:
            self.scheduler = OldScheduler(prefix, self.worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                self.check()
        finally:
            self.manager.close()

    def check(self) -> None:
        engine = self.manager.engine
        assert engine.call(engine.cache.check_invariants) == []

    def drain(self) -> None:
        engine = self.manager.engine
        engine.call(engine.cache.drain, timeout=PATIENCE_SECONDS)


class Backend:
    """Attention backend that creates cache tensors, as those of FastDeploy do."""

    def create_kv_cache(self, max_num_blocks, cache_dtype, kv_cache_quant_type):
        assert cache_dtype == "int64"
        assert kv_cache_quant_type is None
        return {"key": np.zeros((max_num_blocks, BLOCK, WIDTH), np.int64)}


class Stream:
    """Computes submitted work in order, in a thread of its own, as the stream of a GPU does."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.submit = self._thread.submit

    def new_event(self) -> CpuEvent:
        """Record an event behind all work that was submitted."""
        event = CpuEvent()
        event.begin()
        self.submit(event.finish)
        return event

    def close(self) -> None:
        self._thread.shutdown()


class Cluster:
    """A scheduler, and two workers with a rank each, in threads: each goes at its own pace.

    The scheduler hands a batch to the workers and schedules the next one while they compute, as
    soon as they have taken it; batches are pickled. The workers submit a batch to their streams
    while these compute the batch before.
    """

    RANKS = 2
    AHEAD = 2  # batches in the streams

    def __init__(
        self, path: Path, device_blocks: int, host_blocks: int, kind="v1", **options
    ) -> None:
        config = fd_config(device_blocks, host_blocks, **options)
        config.parallel_config = SimpleNamespace(tensor_parallel_size=self.RANKS)
        group = RankGroup(self.RANKS, path=path / "ranks")
        in_batch = kind == "in_batch"
        options = {
            "ranks": group,
            "waits_for_onloads": kind != "layers",
            "shares_in_batch": in_batch,
        }
        prefix = PrefixCacheManager(config, self.RANKS, **options) if kind == "v0" else None
        self.manager = CacheManager(config, **options) if prefix is None else prefix.cache
        self.streams = [Stream() for _ in range(self.RANKS)]
        self.workers = []
        for number, stream in enumerate(self.streams):
            controller = CacheController(
                config, number, path=path / "ranks", step_event=stream.new_event
            )
            layers = controller.initialize_kv_cache(Backend(), device_blocks)
            self.workers.append(Worker(layers, controller))
            self.workers[-1].writes_first = in_batch
        self.scheduler = (
            Scheduler(self.manager, self.workers[0])
            if prefix is None
            else OldScheduler(prefix, self.workers[0])
        )
        self.batches: queue.Queue[bytes | None] = queue.Queue(1)
        self.answers: queue.Queue = queue.Queue()
        self.threads = ThreadPoolExecutor(2)
        self.sent_batches = 0
        self.empty_batches = 0

    def __enter__(self) -> Self:
        self.manager.open()
        self.ends = [self.threads.submit(self._compute), self.threads.submit(self._take_answers)]
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(queue.Full):
            self.batches.put(None, timeout=PATIENCE_SECONDS)
        try:
            for end in self.ends:
                end.result(PATIENCE_SECONDS)
            if exc[0] is None:
                engine = self.manager.engine
                assert engine.call(engine.cache.check_invariants) == []
        finally:
            self.manager.close()
            for worker, stream in zip(self.workers, self.streams, strict=True):
                stream.close()
                worker.controller.stop()
            self.threads.shutdown()

    def _compute(self) -> None:
        """The loop of the workers: a batch if there is one, else one more token of each request."""
        submitted: deque[list[Future]] = deque()
        try:
            while True:
                is_idle = not submitted and not self.workers[0].running
                try:
                    pickled = self.batches.get(block=is_idle)
                except queue.Empty:
                    pickled = pickle.dumps(BatchRequest())
                    if submitted:
                        self._collect(submitted.popleft())
                        continue
                if pickled is None:
                    return
                futures = []
                for worker, stream in zip(self.workers, self.streams, strict=True):
                    batch = pickle.loads(pickled)
                    counter = worker.begin(batch)
                    futures.append(stream.submit(worker.execute, batch, counter))
                submitted.append(futures)
                if len(submitted) > self.AHEAD:
                    self._collect(submitted.popleft())
        finally:
            self.answers.put(None)

    def _collect(self, futures: list[Future]) -> None:
        answers = [future.result(60.0) for future in futures]
        assert answers[0] == answers[1]
        self.answers.put(answers[0])

    def _take_answers(self) -> None:
        while (answers := self.answers.get()) is not None:
            for request in self.scheduler.take_answers(answers):
                self.scheduler.finish(request)

    def run(self) -> None:
        """Schedule until all requests have ended."""
        while not self.scheduler.is_idle:
            for end in self.ends:
                if end.done():
                    end.result()
                    raise AssertionError("a thread has ended")
            batch = self.scheduler.schedule()
            if batch.has_pending_work:
                self.sent_batches += 1
                self.empty_batches += not len(batch)
                self.batches.put(pickle.dumps(batch), timeout=PATIENCE_SECONDS)
