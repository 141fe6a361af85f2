"""CPU time of FastDeploy's ``schedule()``, with its own cache manager and with aiokv's.

``FASTDEPLOY_TREE=/path/to/FastDeploy python -m bench.fastdeploy_scheduler``, in a Python with
Paddle, runs the same random requests with both managers, a step of each in turn, and no model: each
step returns one token per running request. Measured is the CPU time of the process within
``schedule()``, so that of aiokv's thread is included. With host blocks, aiokv's worker is another
process, as in FastDeploy; FastDeploy's own manager has no worker here.

All seats are taken: prompts have 576 to 1,212 tokens, of which 512 are shared with others, requests
generate 150 to 450 tokens, and blocks have 64 positions. Steps while the seats fill are left out.
Objects from before the first step are left out of garbage collections, which would fall on steps of
either manager. Keys are the number of seats and of host blocks, and the write policy; "reserve" for
FastDeploy's default, with which a request waits for room while running requests may need the free
blocks.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from aiokv.base.percentiles import percentile
from aiokv.connectors.fastdeploy import CacheController, CacheManager
from aiokv.errors import InternalError
from bench import harness
from tests.connectors.fastdeploy_tree import fd_config, import_tree

BLOCK_TOKENS: Final = 64
SEAT_BLOCKS: Final = 40
SELECTIVE: Final = "write_through_selective"
SIZES: Final = (  # seats, host blocks, write policy, whether blocks are reserved
    (64, 0, SELECTIVE, False),
    (256, 0, SELECTIVE, False),
    (64, 2_000, SELECTIVE, False),
    (64, 2_000, "write_back", False),
    (64, 0, SELECTIVE, True),
    (64, 2_000, SELECTIVE, True),
)
PORT: Final = 30_000


class Backend:
    """Creates small tensors: nothing is computed."""

    def create_kv_cache(self, max_num_blocks: int, *_: Any, **__: Any) -> dict[str, Any]:
        return {name: np.zeros((max_num_blocks, 8), np.int64) for name in ("key", "value")}


class Server:
    """FastDeploy's scheduler, and requests that fill its seats.

    Args:
        seats: number of requests at a time.
        host_blocks: size of host memory.
        policy: FastDeploy's write policy.
        is_own: True for FastDeploy's own cache manager.
        port: port that no other server has.
    """

    def __init__(
        self, seats: int, host_blocks: int, policy: str, *, is_own: bool, port: int
    ) -> None:
        from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1

        blocks = seats * SEAT_BLOCKS
        config = fd_config(
            blocks, host_blocks, seats=seats, policy=policy, drafts=0, images=False, port=port,
            batch_tokens=8_192,
        )  # fmt: skip
        config.cache_config.block_size = BLOCK_TOKENS
        config.cache_config.enc_dec_block_num = 2
        config.model_config.max_model_len = 4_096
        has_worker = bool(host_blocks) and not is_own
        for_workers = CacheManager.for_workers
        if not has_worker:
            make = _own if is_own else CacheManager

            def for_workers(config: Any, _: int) -> Any:
                return make(config)

        with patch.object(CacheManager, "for_workers", for_workers):
            self.manager = ResourceManagerV1(seats, config, 1, "mixed")
        self._block_hasher = _block_hasher() if is_own else None
        self._worker: Any = None
        if has_worker:
            fork = multiprocessing.get_context("fork")
            received, self._batches = fork.Pipe(duplex=False)
            self._worker = fork.Process(target=_work, args=(config, blocks, received))
            self._worker.start()
        self._chance = random.Random(seats)
        self._shared = [self._tokens(512) for _ in range(20)]
        self._seats, self._limits, self._count = seats, {}, 0
        self.microseconds: list[float] = []

    def close(self) -> None:
        if self._worker is not None:
            self._batches.send(None)
            self._worker.join()
        self.manager.finish_execution_pool.shutdown()
        self.manager.async_preprocess_pool.shutdown()
        self.manager.need_block_num_signal.clear()
        if isinstance(self.manager.cache_manager, CacheManager):
            self.manager.cache_manager.close()

    def step(self) -> None:
        """Fill the seats, schedule, and return a token per running request."""
        from fastdeploy.engine.request import RequestStatus

        while len(self._limits) < self._seats:
            self._add()
        begin = time.process_time_ns()
        batch, errors = self.manager.schedule()
        self.microseconds.append((time.process_time_ns() - begin) / 1e3)
        if errors:
            raise InternalError(str(errors))
        if self._worker is not None:
            self._batches.send((batch.cache_evict_metadata, batch.cache_swap_metadata))
        for request in list(self.manager.running):
            if request.num_computed_tokens < request.need_prefill_tokens:
                continue
            request.status = RequestStatus.RUNNING_DECODE
            request.output_token_ids.append(7)
            if len(request.output_token_ids) < self._limits[request.request_id]:
                self.manager.cache_output_tokens(request)
            else:
                del self._limits[request.request_id]
                self.manager.finish_requests_async(request.request_id).result()

    def _tokens(self, num: int) -> list[int]:
        return [self._chance.randrange(50_000) for _ in range(num)]

    def _add(self) -> None:
        from fastdeploy.engine.request import Request, RequestMetrics

        self._count += 1
        request = Request.from_dict({"request_id": f"r{self._count}"})
        tokens = self._chance.choice(self._shared) + self._tokens(self._chance.randrange(64, 700))
        request.prompt_token_ids, request.output_token_ids = tokens, []
        request.prompt_token_ids_len = request.need_prefill_tokens = len(tokens)
        request.metrics = RequestMetrics()
        request.set_block_hasher(self._block_hasher)
        self._limits[request.request_id] = self._chance.randrange(150, 450)
        self.manager.add_request(request)


def _work(config: Any, blocks: int, batches: Any) -> None:
    """Make the copies of batches, in the process of a worker."""
    controller = CacheController.for_worker(config, 0, 0)
    controller.initialize_kv_cache(Backend(), blocks)
    while (batch := batches.recv()) is not None:
        controller.submit_swap_tasks(*batch)
    controller.stop()


def _own(config: Any) -> Any:
    """Return FastDeploy's own manager, with the methods that other parts of FastDeploy call."""
    from fastdeploy.cache_manager.v1.cache_manager import CacheManager as Own

    Own.begin_fetch = lambda *_: None
    Own.cache_output_blocks = lambda *_: None
    Own.expired_requests = lambda _: []
    return Own(config)


def _block_hasher() -> Any:
    """Return the function with which FastDeploy's engine names the blocks of a request."""
    from fastdeploy.cache_manager.v1.cache_utils import get_request_block_hasher

    return get_request_block_hasher(block_size=BLOCK_TOKENS)


def run(steps: int) -> dict[str, Any]:
    """Return percentiles of ``schedule()`` in microseconds, by manager."""
    results: dict[str, Any] = {}
    for number, (seats, host_blocks, policy, reserves) in enumerate(SIZES):
        port = PORT + 2 * number
        os.environ["FD_USE_NEW_TOKEN_RATIO_RESERVE"] = str(int(reserves))
        servers = {
            name: Server(seats, host_blocks, policy, is_own=name == "fastdeploy", port=port)
            for name in ("fastdeploy", "aiokv")
        }
        gc.collect()
        gc.freeze()
        for _ in range(steps):
            for server in servers.values():
                server.step()
        name = f"{seats}_seats_{host_blocks}_host_blocks_{policy}" + "_reserve" * reserves
        found = results[name] = {}
        for name, server in servers.items():
            samples = sorted(server.microseconds[steps // 5 :])
            found[name] = {
                "mean": sum(samples) / len(samples),
                "p50": percentile(samples, 50),
                "p99": percentile(samples, 99),
            }
            server.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fastdeploy_scheduler")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        import_tree(Path(os.environ["FASTDEPLOY_TREE"]), Path(folder))
        results = run(args.steps)
    for size, managers in results.items():
        for name, figures in managers.items():
            print(size, name, {key: round(value, 1) for key, value in figures.items()})
    if args.save:
        measured = harness.Run(machine=harness.machine(), benches={"fastdeploy_scheduler": results})
        harness.save_each(measured, measured.benches)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
