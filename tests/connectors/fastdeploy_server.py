"""A scheduler and a worker with the request life cycle of FastDeploy, over the connector.

The scheduler is written after the public ``ResourceManagerV1``: waiting, match, room, blocks,
chunks of the prompt, blocks for decoding, preemption on shortage, abort. The worker computes real
bytes: the KV of a position depends on all tokens up to it, and each position that the worker reads
is compared with what it must be. A wrong, missing or early block is therefore an error.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Self

import numpy as np

from aiokv import Regions
from aiokv.connectors.fastdeploy import BatchRequest, CacheController, CacheManager

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
    prefill_start_index: int = 0
    prefill_end_index: int = 0
    need_prefill_tokens: int = 0
    status: Status = Status.WAITING
    task_type: Type = Type.PREFILL
    preempted_count: int = 0
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
    """A task of the batch that is no prefill: the worker continues or stops the request."""

    request: Request
    task_type: Type
    block_tables: list[int] = field(default_factory=list)


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
    """The model: reads and writes KV through block tables, and compares what it reads."""

    def __init__(self, layers: list[np.ndarray], controller: CacheController) -> None:
        self.layers = layers
        self.controller = controller
        self.running: dict[str, Request] = {}
        self.tables: dict[str, list[int]] = {}
        self.read_positions = 0
        self.computed_positions = 0

    def run(self, batch: BatchRequest) -> list[tuple[Request, int]]:
        """Compute a batch, then one decoding step of all running requests; return new tokens."""
        counter = self.controller.submit_swap_tasks(
            batch.cache_evict_metadata, batch.cache_swap_metadata
        )
        work: list[tuple[Request, int, int]] = []
        for task in batch:
            if isinstance(task, Task):
                if task.task_type is Type.DECODE:
                    self.tables[task.request.request_id] = list(task.block_tables)
                else:
                    self.running.pop(task.request.request_id, None)
            else:
                self.tables[task.request_id] = list(task.block_tables)
                work.append((task, task.prefill_start_index, task.prefill_end_index))
        for request in self.running.values():
            total = request.num_total_tokens
            if total <= len(self.tables[request.request_id]) * BLOCK:
                work.append((request, total - 1, total))
        for layer in range(LAYERS):
            if counter is not None:
                assert counter.wait_for_layer(layer, timeout=30.0)
            for request, first, last in work:
                self._compute(request, layer, first, last)
        answers = []
        for request, _, last in work:
            if last >= request.num_total_tokens:
                self.running[request.request_id] = request
                answers.append((request, next_token(request.tokens)))
        return answers

    def _compute(self, request: Request, layer: int, first: int, last: int) -> None:
        table = self.tables[request.request_id]
        expected = kv_of(request.tokens[:last], layer)
        kv = self.layers[layer]
        blocks = -(-last // BLOCK)
        assert len(set(table[:blocks])) == blocks, f"{request.request_id}: {table}"
        rows = kv[table[:blocks]].reshape(-1, WIDTH)
        wrong = np.flatnonzero((rows[:first] != expected[:first]).any(axis=1))
        assert wrong.size == 0, f"{request.request_id}: wrong KV at {wrong} of {first}"
        for position in range(first, last):
            kv[table[position // BLOCK], position % BLOCK] = expected[position]
        self.read_positions += first
        self.computed_positions += last - first

    def stop(self, request: Request) -> None:
        self.running.pop(request.request_id, None)


class Scheduler:
    """Waiting and running requests, and the batches made of them."""

    def __init__(self, manager: CacheManager, worker: Worker, max_requests: int = 64) -> None:
        self.manager = manager
        self.worker = worker
        self.config = manager.config
        self.max_requests = max_requests
        self.lock = threading.Lock()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []  # until the worker has stopped them
        self.aborted: set[str] = set()
        self.finished: list[Request] = []
        self.preemptions = 0

    def add(self, *requests: Request) -> None:
        with self.lock:
            self.waiting.extend(requests)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.preempted)

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
                    self.finished.append(request)
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
                    batch.add_request(Task(request, Type.DECODE, tables))
                else:
                    chunk = min(request.need_prefill_tokens - request.num_computed_tokens, budget)
                    if not self._make_room(request, self._new_blocks(request, chunk), batch):
                        has_preempted = True
                        continue
                    self._take(request, self._new_blocks(request, chunk))
                    self._prefill(request, chunk, batch)
                    budget -= chunk
            has_preempted = has_preempted or bool(self.preempted)
            while self.waiting and budget > 0 and not has_preempted:
                if len(self.running) >= self.max_requests:
                    break
                request = self.waiting[0]
                if request.request_id in self.aborted:
                    self.waiting.popleft()
                    self.finished.append(request)
                    continue
                if len(request.output_token_ids) >= request.max_outputs:
                    self.waiting.popleft()  # preempted after its last token; `finish` comes
                    continue
                request.need_prefill_tokens = request.num_total_tokens
                if self.config.cache_config.enable_prefix_caching:
                    self.manager.match_prefix(request, True)
                    found = request.match_result
                    request.block_tables = found.device_block_ids
                    request.num_computed_tokens = found.total_matched_blocks * BLOCK
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
            metadata = self.manager.issue_pending_backup_to_batch_request()
            if metadata is not None:
                batch.append_evict_metadata([metadata])
            self.manager.check_and_add_pending_backup()
            return batch

    def _new_blocks(self, request: Request, chunk: int) -> int:
        return -(-(request.num_computed_tokens + chunk) // BLOCK) - len(request.block_tables)

    def _take(self, request: Request, num_blocks: int) -> None:
        ids = self.manager.allocate_gpu_blocks(request, num_blocks)
        assert len(ids) == num_blocks, f"{request.request_id}: {len(ids)} of {num_blocks} blocks"
        request.block_tables.extend(ids)

    def _prefill(self, request: Request, chunk: int, batch: BatchRequest) -> None:
        request.prefill_start_index = request.num_computed_tokens
        request.num_computed_tokens += chunk
        request.prefill_end_index = request.num_computed_tokens
        batch.add_request(request)

    def _make_room(self, request: Request, num_blocks: int, batch: BatchRequest) -> bool:
        while not self.manager.can_allocate_gpu_blocks(num_blocks):
            victim = self.running[-1]
            self._drop(victim, batch, Type.PREEMPTED)
            victim.preempted_count += 1
            self.preemptions += 1
            self.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _drop(self, request: Request, batch: BatchRequest, why: Type) -> None:
        self.running.remove(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        self._free(request)
        batch.add_request(Task(request, why))

    def _free(self, request: Request) -> None:
        self.manager.request_finish(request)
        request.block_tables = []

    # --- results ----------------------------------------------------------------------------------

    def take_answers(self, answers: list[tuple[Request, int]]) -> list[Request]:
        """Append generated tokens; return the requests that have ended."""
        ended = []
        for request, token in answers:
            request.output_token_ids.append(token)
            if len(request.output_token_ids) >= request.max_outputs:
                self.worker.stop(request)
                ended.append(request)
        with self.lock:
            for request in self.preempted:
                self.waiting.appendleft(request)
            self.preempted = []
        return ended

    def finish(self, request: Request) -> None:
        with self.lock:
            if request in self.running:
                self.running.remove(request)
            request.status = Status.FINISHED
            if request in self.waiting:
                self.waiting.remove(request)
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
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.waiting} {self.running}")


class Server:
    """Manager, worker and scheduler of one process, on the cpu device."""

    def __init__(self, device_blocks: int, host_blocks: int = 0, device=None, **options) -> None:
        self.config = fd_config(device_blocks, host_blocks, **options)
        layers = tensors(device_blocks)
        self.manager = CacheManager(
            self.config,
            regions=regions_of(layers),
            device=device,
            verify="off" if device else "checksum",
        )
        self.worker = Worker(layers, CacheController(LAYERS, self.manager))
        self.scheduler = Scheduler(self.manager, self.worker)

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
        engine.call(engine.cache.drain, timeout=30.0)
