"""FastDeploy's own scheduler over the connector, from a tree of its source.

The tree is copied and changed by ``docs/guide/fastdeploy.patch``. Packages that it imports and that
are not installed become empty modules.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import pickle
import runpy
import shutil
import sys
import time
import types
import warnings
from collections import deque
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock
from unittest.mock import MagicMock

import numpy as np

from aiokv.connectors.fastdeploy import BatchRequest, CacheController
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_server import (
    BLOCK,
    LAYERS,
    Backend,
    Task,
    Type,
    Worker,
    next_token,
    tensors,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
ABSENT = {
    *("aistudio_sdk", "decord", "etcd3", "fast_dataindex", "flash_mask", "flashinfer", "gradio"),
    *("modelscope", "moviepy", "p2pstore", "paddlecodec", "paddleformers", "pynvml", "tiktoken"),
    *("triton", "use_triton_in_paddle"),
}
IMAGE = 999  # token of all positions of images


class _AnyNames(type):
    """Class of classes that have any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Absent(types.ModuleType):
    """A module with any attribute: a class for a name with a capital letter, else a mock."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnyNames(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


def import_tree(tree: Path, folder: Path) -> None:
    """Copy the tree's package into a folder, apply the patch, and let it be imported from there."""
    shutil.copytree(tree / "fastdeploy", folder / "fastdeploy")
    patch = runpy.run_path(str(GUIDE / "fastdeploy_patch.py"))
    changes = patch["read_patch"]((GUIDE / "fastdeploy.patch").read_text())
    assert patch["apply"](folder, changes, writes=True) == []
    os.environ["ENABLE_V1_KVCACHE_MANAGER"] = "1"
    # No block is kept free for decoding, so that requests are preempted.
    os.environ["FD_USE_NEW_TOKEN_RATIO_RESERVE"] = "0"
    os.environ["FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL"] = "0"
    os.environ["FD_LOG_DIR"] = str(folder / "log")
    sys.meta_path.append(_Finder())  # last: only what is not installed
    sys.path.insert(0, str(folder))
    warnings.filterwarnings("ignore")
    import paddle

    if not hasattr(paddle, "enable_compat"):
        paddle.enable_compat = lambda *_, **__: None
    import fastdeploy.engine.sched.resource_manager_v1  # noqa: F401

    logging.disable(logging.ERROR)


def fd_config(
    device_blocks: int,
    host_blocks: int,
    *,
    seats: int,
    policy: str,
    drafts: int,
    images: bool,
    port: int,
    ranks: int = 1,
    batch_tokens: int = 32,
    storage: str | None = None,
    max_tokens: int = 128,
    role: str = "mixed",
) -> Any:
    from fastdeploy.config import CacheConfig, FDConfig, ParallelConfig, SchedulerConfig
    from fastdeploy.engine.args_utils import EngineArgs

    arguments = EngineArgs(
        max_num_seqs=seats,
        num_gpu_blocks_override=device_blocks,
        max_num_batched_tokens=batch_tokens,
    )
    fields = asdict(arguments)
    cache = CacheConfig(fields)
    cache.block_size = BLOCK
    cache.max_block_num_per_seq = max_tokens // 2
    cache.enc_dec_block_num = 1
    cache.prealloc_dec_block_slot_num_threshold = 0
    cache.enable_prefix_caching = cache.enable_chunked_prefill = True
    cache.enable_output_caching = True
    cache.write_policy, cache.write_through_threshold = policy, 1
    cache.num_cpu_blocks = host_blocks
    cache.total_block_num = device_blocks
    cache.kv_cache_ratio, cache.bytes_per_token_per_layer = 1.0, 1
    cache.kvcache_storage_backend = storage
    model = SimpleNamespace(
        enable_mm=images, max_model_len=max_tokens, architectures=["test"], version=None,
        mm_max_tokens_per_item=None, num_hidden_layers=LAYERS, dtype="int64", print=print,
        model="test",
    )  # fmt: skip
    speculative = SimpleNamespace(
        method="mtp" if drafts else None, num_speculative_tokens=drafts, num_extra_cache_layer=0
    )
    scheduler = SchedulerConfig(fields)
    scheduler.splitwise_role = role
    config = FDConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=ParallelConfig(fields),
        graph_opt_config=arguments.create_graph_optimization_config(),
        speculative_config=speculative,
        scheduler_config=scheduler,
    )
    config.cache_config.enable_prefix_caching = True  # off without its scheduler v1
    config.cache_config.disable_chunked_mm_input = False
    config.parallel_config.local_engine_worker_queue_port = port
    config.parallel_config.tensor_parallel_size = ranks
    return config


class Drive:
    """FastDeploy's ``ResourceManagerV1``, and workers that compare each KV that they read.

    Args:
        config: as made by ``fd_config``.
        seats: number of requests at a time.
        ranks: number of workers.
        chance: source of the order of events.
        device: makes the device of a worker.
        shares_in_batch: True to share blocks within a batch.
        is_own: True for FastDeploy's own manager, without host blocks.
    """

    def __init__(
        self,
        config: Any,
        seats: int,
        ranks: int,
        chance: random.Random,
        device: Callable[[], Any] = lambda: None,
        *,
        shares_in_batch: bool = False,
        is_own: bool = False,
    ) -> None:
        from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1
        from fastdeploy.platforms import current_platform

        with mock.patch.object(type(current_platform), "is_cuda", return_value=shares_in_batch):
            self.manager = ResourceManagerV1(
                seats, config, ranks, config.scheduler_config.splitwise_role
            )
        self.chance = chance
        self.workers = []
        self.block_hasher = None
        if is_own:
            from fastdeploy.cache_manager.v1 import CacheManager
            from fastdeploy.cache_manager.v1.cache_utils import get_request_block_hasher

            self.manager.cache_manager.close()
            own = self.manager.cache_manager = CacheManager(config)
            own.begin_fetch = own.cache_output_blocks = lambda *_: None
            own.expired_requests = list
            self.block_hasher = get_request_block_hasher(block_size=BLOCK)
            self.workers.append(Worker(tensors(config.cache_config.total_block_num), None))
            self.workers[-1].writes_first = True
            ranks = 0
        for rank in range(ranks):
            controller = CacheController.for_worker(config, rank, rank, device=device())
            layers = controller.initialize_kv_cache(Backend(), config.cache_config.total_block_num)
            self.workers.append(Worker(layers, controller))
            self.workers[-1].writes_first = shares_in_batch
        self.batches: deque[bytes] = deque()
        self.answers: deque[list[tuple[str, int | None]]] = deque()
        self.requests: dict[str, Any] = {}
        self.contents: dict[str, list[int]] = {}  # the prompt; images as their content
        self.limits: dict[str, int] = {}
        self.ended: set[str] = set()
        self.aborted: set[str] = set()
        self.errors: dict[str, str] = {}  # for clients, by request
        self.cached_tokens = 0
        self.computed_tokens = 0  # positions of prompts
        self.preemptions = 0

    def close(self) -> None:
        self.manager.finish_execution_pool.shutdown()
        self.manager.async_preprocess_pool.shutdown()
        self.manager.need_block_num_signal.clear()
        if self.block_hasher is None:
            self.manager.cache_manager.close()
            for worker in self.workers:
                worker.controller.stop()

    def add(self, name: str, prompt: list[int], max_outputs: int, images=()) -> None:
        """Add a request; ``images`` has the offset, the length and the content of each."""
        self.manager.add_request(self.make(name, prompt, max_outputs, images))

    def make(self, name: str, prompt: list[int], max_outputs: int, images=()) -> Any:
        """Return a request that the manager does not know yet."""
        from fastdeploy.engine.request import ImagePosition, Request, RequestMetrics

        tokens, content = list(prompt), list(prompt)
        for offset, length, number in images:
            tokens[offset : offset + length] = [IMAGE] * length
            content[offset : offset + length] = [10_000 + number] * length
        inputs = {
            "mm_positions": [ImagePosition(offset, length) for offset, length, _ in images],
            "mm_hashes": [f"image {number}" for _, _, number in images],
        }
        request = Request.from_dict({"request_id": name, "multimodal_inputs": inputs})
        request.prompt_token_ids = tokens
        request.prompt_token_ids_len = request.need_prefill_tokens = len(tokens)
        request.output_token_ids = []
        request.metrics = RequestMetrics()
        request.set_block_hasher(self.block_hasher)
        self.requests[name], self.contents[name], self.limits[name] = request, content, max_outputs
        return request

    def abort(self, name: str) -> None:
        self.aborted.add(name)
        self.manager.add_abort_req_ids(name)

    @property
    def is_idle(self) -> bool:
        return not (self.manager.requests or self.batches or self.answers)

    def run(self, num_steps: int = 20_000) -> None:
        """Let scheduler, workers and results take turns in a random order until all have ended."""
        for _ in range(num_steps):
            if self.is_idle:
                break
            turn = self.chance.random()
            if turn < 0.4 and len(self.batches) < 3:
                self.schedule()
            elif turn < 0.75:
                self.compute()
            elif self.answers:
                self.take(self.answers.popleft())
        assert self.is_idle, f"{len(self.manager.requests)} requests are left"
        assert self.errors == {}
        if self.block_hasher is not None:
            return
        engine = self.manager.cache_manager.engine
        assert engine.call(engine.cache.check_invariants) == []

    def run_in_lockstep(self, num_steps: int = 2_000) -> None:
        """Compute each batch, and take its results, before the next one is scheduled."""
        for _ in range(num_steps):
            if self.is_idle:
                assert self.errors == {}
                return
            self.schedule()
            self.compute()
            while self.answers:
                self.take(self.answers.popleft())
        raise AssertionError(f"{len(self.manager.requests)} requests are left")

    def schedule(self) -> None:
        batch, errors = self.manager.schedule()
        self.errors.update(errors)
        if len(batch) or batch.cache_evict_metadata:
            for task in batch:
                if task.task_type.value == Type.PREFILL.value:
                    self.cached_tokens += task.num_cached_tokens
                    self.computed_tokens += task.prefill_end_index - task.prefill_start_index
                    task.num_cached_tokens = 0
            self.batches.append(pickle.dumps(batch))
        waiting = self.manager.waiting
        # An onload may wait for a step that the workers close with a batch.
        if waiting and not self.manager.running and not self.batches:
            for future in waiting[0].async_process_futures:
                future.exception(PATIENCE_SECONDS)

    def compute(self) -> None:
        """Let the workers compute the next batch; without one, another token of each request."""
        batch = pickle.loads(self.batches.popleft()) if self.batches else BatchRequest()
        answers = []
        for worker in self.workers:
            counter = None if worker.controller is None else worker.begin(batch)
            tasks = BatchRequest()
            for request in batch:
                tasks.add_request(self._task(request))
            answers.append(worker.execute(tasks, counter))
        assert all(answer == answers[0] for answer in answers)
        if answers[0]:
            self.answers.append(answers[0])

    def _task(self, request: Any) -> Task:
        kind = Type(request.task_type.value)
        task = Task(request.request_id, kind, list(getattr(request, "block_tables", [])))
        if kind is Type.PREFILL:
            content = self.contents[request.request_id]
            task.tokens = content + list(request.output_token_ids)
            task.first, task.last = request.prefill_start_index, request.prefill_end_index
            task.max_tokens = len(content) + self.limits[request.request_id]
        return task

    def take(self, answers: list[tuple[str, int | None]]) -> None:
        """Take results, as FastDeploy's token processor does."""
        manager = self.manager
        for name, token in answers:
            request = self.requests[name]
            if token is None:
                if name in manager.to_be_aborted_req_id_set:
                    manager.recycle_abort_task(name)
                    self.ended.add(name)
                if name in manager.to_be_rescheduled_request_id_set:
                    manager.reschedule_preempt_task(name)
                    self.preemptions += 1
                continue
            if name in self.ended:
                continue
            from fastdeploy.engine.request import RequestStatus

            if request.status is RequestStatus.RUNNING_PREFILL:
                request.status = RequestStatus.RUNNING_DECODE
            request.output_token_ids.append(token)
            if len(request.output_token_ids) == self.limits[name]:
                self.ended.add(name)
                manager.finish_requests_async(name).result(PATIENCE_SECONDS)
            else:
                manager.cache_output_tokens(request)

    def check_outputs(self) -> None:
        """Compare the outputs of the requests that were not aborted with those of the model."""
        for name, request in self.requests.items():
            if name in self.aborted:
                continue
            tokens = list(self.contents[name])
            for _ in range(self.limits[name]):
                tokens.append(next_token(tokens))
            assert request.output_token_ids == tokens[len(self.contents[name]) :], name

    def metrics(self) -> dict[str, float]:
        """Return the hit rates of FastDeploy's own metrics."""
        from fastdeploy.metrics.metrics import main_process_metrics

        names = ("hit_req_rate", "hit_token_rate", "gpu_hit_token_rate", "cpu_hit_token_rate")
        gauges = {name: getattr(main_process_metrics, name) for name in names}
        return {name: gauge.collect()[0].samples[0].value for name, gauge in gauges.items()}

    @property
    def read_positions(self) -> int:
        return int(np.sum([worker.read_positions for worker in self.workers]))


class Roles:
    """A prefill server and a decode server, and a transport that copies the KV of prompts.

    Args:
        prefill, decode: the servers.
        chance: source of the order of events.
        lost: share of requests that the prefill server loses.
    """

    def __init__(self, prefill: Drive, decode: Drive, chance: random.Random, lost: float) -> None:
        self.prefill, self.decode, self.chance, self.lost = prefill, decode, chance, lost
        self.waiting: deque[tuple[str, list[int], int]] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.sources: dict[str, list[int]] = {}
        self.not_before: dict[str, int] = {}  # batches that the decode server computes first
        self.computed: deque[tuple[str, int]] = deque()
        self.lost_requests: set[str] = set()
        self.dropped: set[str] = set()
        self.decode_batches = 0
        self.outputs: deque[Any] = deque()  # first tokens whose KV may still be on its way

    def add(self, name: str, prompt: list[int], max_outputs: int) -> None:
        self.waiting.append((name, prompt, max_outputs))

    def preallocate(self) -> None:
        """Take blocks on both servers for the first request, as FastDeploy's engines do."""
        name, prompt, max_outputs = self.waiting[0]
        source = self.prefill.make(name, prompt, 1)
        source.disaggregate_info = {"role": "prefill"}
        if not self.prefill.manager.preallocate_resource_in_p(source):
            return
        target = self.decode.make(name, prompt, max_outputs)
        target.disaggregate_info = {"role": "decode"}
        if not self.decode.manager.preallocate_resource_in_d(target):
            self.prefill.manager.pre_recycle_resource(name)
            return
        self.waiting.popleft()
        self.prompts[name], self.sources[name] = prompt, list(source.block_tables)
        self.not_before[name] = self.decode_batches + len(self.decode.batches) + 2
        self.prefill.cached_tokens += source.num_cached_tokens
        source.num_cached_tokens = 0
        self._reserve(source, target)
        self.prefill.manager.add_request_in_p([source])

    def _reserve(self, source: Any, target: Any) -> None:
        """Prepare the transfer of a prompt: both servers have its blocks."""

    def step_prefill(self) -> None:
        self.prefill.schedule()
        self.prefill.compute()
        while self.prefill.answers:
            for name, token in self.prefill.answers.popleft():
                self.prefill.requests[name].output_token_ids.append(token)
                self.computed.append((name, token))

    def step_decode(self) -> None:
        turn = self.chance.random()
        if turn < 0.4 and len(self.decode.batches) < 3:
            self.decode.schedule()
        elif turn < 0.75:
            self.decode.compute()
            self.decode_batches += 1
        elif self.decode.answers:
            self.decode.take(self.decode.answers.popleft())

    def send(self) -> None:
        """Copy the blocks of a prompt, let the decode server know, and finish the request here."""
        name, token = self.computed[0]
        if self.decode_batches < self.not_before[name]:
            return
        self.computed.popleft()
        if self.chance.random() < self.lost:
            self.lost_requests.add(name)
        elif name in self.decode.manager.requests:
            blocks = -(-len(self.prompts[name]) // BLOCK)
            table = self.decode.requests[name].block_tables
            for source, target in zip(self.prefill.workers, self.decode.workers, strict=True):
                for old, new in zip(source.layers, target.layers, strict=True):
                    new[table[:blocks]] = old[self.sources[name][:blocks]]
            self._tell(self.output(name, token))
        self.prefill.manager.finish_requests(name)

    def receive(self) -> None:
        """Take a first token whose KV may still be on its way."""

    def output(self, name: str, token: int) -> SimpleNamespace:
        return SimpleNamespace(
            request_id=name,
            outputs=SimpleNamespace(token_ids=[token], draft_token_ids=[]),
            num_cached_tokens=0,
            metrics=self.decode.requests[name].metrics,
            error_code=200,
            error_msg="",
        )

    def _tell(self, output: Any) -> None:
        name = output.request_id
        self.decode.manager.add_prefilled_request(output)
        if len(self.decode.requests[name].output_token_ids) == self.decode.limits[name]:
            self.decode.ended.add(name)
            self.decode.manager.finish_requests(name)

    def run(self, expire: Callable[[], None] = lambda: None) -> None:
        """Let all parts take turns; ``expire`` lets the time to live of lost requests pass."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            left = set(self.decode.manager.requests) - self.lost_requests
            if not (self.waiting or self.computed or left or self.prefill.manager.requests):
                break
            turn = self.chance.random()
            if turn < 0.2 and self.waiting:
                self.preallocate()
            elif turn < 0.5:
                self.step_prefill()
            elif turn < 0.6 and self.computed:
                self.send()
            elif turn < 0.61:
                expire()
            elif turn < 0.7 and self.outputs:
                self.receive()
            else:
                self.step_decode()
        assert not [*self.waiting, *self.computed, *left]
        assert not self.prefill.manager.requests
        assert self.prefill.errors == {}
        assert self.decode.errors.keys() <= self.lost_requests


class PeerRoles(Roles):
    """A prefill server and a decode server whose aiokv engines move the KV of prompts.

    The calls are those that the patch adds to FastDeploy.

    Attributes:
        sent: outcomes of the sends that were reported, by request.
        failed: errors that the decode server answers with, by request.
    """

    def __init__(self, prefill: Drive, decode: Drive, chance: random.Random) -> None:
        super().__init__(prefill, decode, chance, 0.0)
        self.sent: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def _reserve(self, source: Any, target: Any) -> None:
        ticket = self.decode.manager.cache_manager.begin_receive(target)
        self.prefill.manager.cache_manager.begin_send(source.request_id, ticket)

    def send(self) -> None:
        """Take the outcome of a send, or let the next request have its turn."""
        name, token = self.computed.popleft()
        outcomes = self.prefill.manager.cache_manager.finished_sends(name)
        if not outcomes:
            self.computed.append((name, token))
            return
        ((_, outcome),) = outcomes
        self.sent[name] = outcome
        output = self.output(name, token)
        if outcome != "finished":
            output.error_code, output.error_msg = 501, outcome
        self.outputs.append(output)
        self.prefill.manager.finish_requests(name)

    def receive(self) -> None:
        """Do with a first token as FastDeploy's loop for prefilled requests does."""
        output = self.outputs.popleft()
        if not self.decode.manager.cache_manager.has_received(output):
            self.outputs.append(output)
        elif output.error_code != 200:
            self.failed[output.request_id] = output.error_msg
            self.decode.manager.pre_recycle_resource(output.request_id)
        else:
            self._tell(output)
