"""Time that the connector adds to vLLM's scheduler, in one process, with the scheduler of vLLM.

``.venv-vllm-0.22.1/bin/python -m bench.vllm_scheduler``, of ``make test-vllm``, runs the requests
without a connector, with ``AiokvConnector`` and with vLLM's own ``OffloadingConnector``, and no
model: each step returns one token per request. Measured is the CPU time within ``add_request()``,
``schedule()`` and ``update_from_output()``, which other programs hardly change: ``vllm``, of the
scheduler's thread without a connector; ``added``, what ``AiokvConnector`` adds to it; ``engine``,
of its engine's thread at the same time, for which the scheduler seldom waits; ``offloading``, what
vLLM's own connector adds. Short rounds of the three alternate, and each figure is a median of
rounds; what is added is the median of differences within a round. Blocks have 16 tokens. With a
GPU, ``AiokvConnector`` copies its blocks; no worker of vLLM's own connector copies, whose transfers
end with the step that begins them.

* ``request_us``: per request of 1,024 prompt tokens and 16 generated ones, of which 8 run at once.
  ``miss``: of new prompts; ``hit``: of prompts of which host memory has all blocks and vLLM none.
* ``step_us.256``: per decode step of 256 requests, each of which completes a block every 16 steps.
  ``AiokvConnector`` saves four blocks of a request together, in every eighth step, so a round takes
  64 steps.
* ``waiting_us.100000``: per step with a prompt of 100,000 tokens that waits for device blocks, and
  half of which is in host memory; less the time of a step without this prompt.
  ``waiting_us.32_prompts``: the same of the first 64 steps with 32 prompts of 10,000 tokens, of
  which the last is in host memory.
* ``call_us``: per request of ``miss``, within each method of ``AiokvConnector`` that vLLM calls
  there. The rest of ``added`` is in vLLM itself, which also runs slower between these calls.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import sys
import threading
import time
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from aiokv.connectors.vllm import AiokvConnector
from aiokv.connectors.vllm.scheduler import SAVED_TOKENS
from aiokv.connectors.vllm.waiting import MOST_COMPARED
from aiokv.errors import InternalError
from bench import harness
from tests.connectors.vllm.configs import tensors_of, vllm_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]  # of the scheduler's thread, and of the engine's

BLOCK_TOKENS: Final = 16
MAX_TOKENS: Final = 131_072
PROMPT_TOKENS: Final = 1_024
GENERATED: Final = 16
IN_FLIGHT: Final = 8
RUNNING: Final = 256
WAITING_TOKENS: Final = 100_000
LINE_TOKENS: Final = 10_000  # of each prompt of a line
RUNNING_TOKENS: Final = 23_500  # of each of four prompts, which leave no room for another one
BLOCK_BYTES: Final = 2 * 4 * BLOCK_TOKENS  # one key and one value of int32 per token
HOST_BLOCKS: Final = (1 << 30) // BLOCK_BYTES
LAYER: Final = "model.layers.0.self_attn.attn"
PATIENCE_SECONDS: Final = 60.0
NO_SECONDS: Final = np.zeros(2)
CALLS: Final = (  # of vLLM, in its scheduler's thread
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "take_events",
)
IDLE_SECONDS: Final = 0.001  # vLLM's pause after a step in which all requests wait for loads


class Clock:
    """Reads the CPU time of this thread, and of the engine's thread, if there is one."""

    def __init__(self) -> None:
        threads = [t for t in threading.enumerate() if t.name == "aiokv-engine"]
        self._engines = [time.pthread_getcpuclockid(t.ident) for t in threads if t.ident]

    def now(self) -> Seconds:
        """Return the seconds of both since a fixed moment."""
        engine = sum(time.clock_gettime(clock) for clock in self._engines)
        return np.array((time.thread_time(), engine))


class Server:
    """vLLM's scheduler over a worker without a model.

    Args:
        num_blocks: device blocks.
        connector: ``"AiokvConnector"``, ``"OffloadingConnector"``, or "" for none.
        host_blocks: capacity of host memory.
        extra: more settings of the connector.
    """

    def __init__(
        self,
        num_blocks: int,
        connector: str = "",
        *,
        host_blocks: int = HOST_BLOCKS,
        extra: dict[str, Any] | None = None,
    ) -> None:
        init_none_hash(sha256)
        extra = {"cpu_bytes_to_use": host_blocks * BLOCK_BYTES} | (extra or {})
        if connector == "AiokvConnector":
            extra["follow_resets"] = False
        config = vllm_config(
            extra=extra if connector else None,
            connector=connector,
            num_blocks=num_blocks,
            max_seqs=RUNNING,
            max_tokens_per_step=8_192,
        )
        config.cache_config.block_size = BLOCK_TOKENS
        config.model_config.max_model_len = config.scheduler_config.max_model_len = MAX_TOKENS
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.int32
        )
        cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=tensors_of([LAYER], spec, num_blocks),
            kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)],
        )
        self._worker: Any = None
        if connector == "AiokvConnector":
            self._worker = AiokvConnector(config, KVConnectorRole.WORKER, cache)
            shape = (2, num_blocks, BLOCK_TOKENS, 1, 1)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            tensor = torch.zeros(shape, dtype=torch.int32, device=device)
            self._worker.register_kv_caches({LAYER: tensor})
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=SimpleNamespace(
                should_advance=lambda request: False, accept_tokens=lambda request, tokens: True
            ),
            block_size=BLOCK_TOKENS,
            mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda model_config: False),
            log_stats=True,
        )
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._computed: dict[str, int] = {}
        self.seconds = NO_SECONDS  # in the scheduler
        self._clock = Clock()
        self.call_seconds: dict[str, float] = {}  # by method of the connector; see time_calls()
        self.loaded_tokens = 0
        self.cached_tokens = 0
        self.scheduled_prompt_tokens = 0  # of the last step, without the steps that decode

    def add(self, prompt: list[int], num_tokens: int) -> Request:
        """Add a request."""
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        began = self._clock.now()
        self.scheduler.add_request(request)
        self.seconds = self.seconds + self._clock.now() - began
        return request

    def step(self) -> bool:
        """Run one step; return False if it has computed nothing."""
        began = self._clock.now()
        output = self.scheduler.schedule()
        self.seconds = self.seconds + self._clock.now() - began
        tokens = output.num_scheduled_tokens.values()
        self.scheduled_prompt_tokens = sum(number for number in tokens if number > 1)
        kv_output = None
        if self._worker is not None:
            kv_output = self._work(output)
        elif output.kv_connector_metadata is not None:
            kv_output = _transferred(output.kv_connector_metadata)
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[
                [7] if requests[i].num_computed_tokens >= requests[i].num_tokens else []
                for i in ids
            ],
            kv_connector_output=kv_output,
        )
        began = self._clock.now()
        outputs = self.scheduler.update_from_output(output, result)
        self.seconds = self.seconds + self._clock.now() - began
        for of_client in outputs.values():
            for one in of_client.outputs:
                if one.prefill_stats is not None:
                    self.loaded_tokens += one.prefill_stats.num_external_cached_tokens
                    self.cached_tokens += one.prefill_stats.num_cached_tokens
        return bool(ids)

    def _work(self, output: Any) -> KVConnectorOutput:
        """Make the calls of a worker."""
        worker, result = self._worker, KVConnectorOutput()
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(
            SimpleNamespace(
                attn_metadata=None, cudagraph_runtime_mode=CUDAGraphMode.NONE, ubatch_slices=None
            )
        )
        result.finished_sending, result.finished_recving = worker.get_finished(
            output.finished_req_ids
        )
        result.invalid_block_ids = worker.get_block_ids_with_load_errors()
        result.kv_connector_stats = worker.get_kv_connector_stats()
        result.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return result

    def run(self) -> None:
        """Run until all requests have ended."""
        while self.scheduler.has_requests():
            if not self.step():
                time.sleep(IDLE_SECONDS)

    def drain(self) -> None:
        """Wait for the saves."""
        if self._worker is not None:
            engine = self.scheduler.connector.engine
            engine.call(engine.cache.drain, timeout=PATIENCE_SECONDS)

    def time_calls(self) -> None:
        """Note the CPU time within the methods of the connector from now on."""
        for name in CALLS:
            method = getattr(self.scheduler.connector, name)
            setattr(self.scheduler.connector, name, functools.partial(self._timed, name, method))

    def _timed(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        began = time.thread_time()
        value = method(*args)
        seconds = time.thread_time() - began
        self.call_seconds[name] = self.call_seconds.get(name, 0.0) + seconds
        return value

    def close(self) -> None:
        """End the engine."""
        if self._worker is not None:
            self.scheduler.connector.shutdown()
            self._worker.shutdown()


def _transferred(metadata: Any) -> KVConnectorOutput:
    """Return the report of a worker of vLLM's own connector whose transfers have all ended."""
    loads = metadata.load_jobs
    return KVConnectorOutput(
        finished_recving={job.req_id for job in loads.values()},
        kv_connector_worker_meta=OffloadingWorkerMetadata(
            dict.fromkeys([*loads, *metadata.store_jobs], 1)
        ),
    )


def run(quick: bool) -> dict[str, Any]:
    rounds = 3 if quick else 15
    requests = _measure(_requests, 4_096, 10 * rounds)
    steps = _measure(_steps, 2 * RUNNING * (PROMPT_TOKENS // BLOCK_TOKENS), rounds)
    waiting = _measure(_waiting, 6_400, rounds)
    calls = _measure_calls(4_096, 10 * rounds)
    return {"request_us": requests, "step_us": steps, "waiting_us": waiting, "call_us": calls}


def _measure(
    scenario: Callable[[Server, random.Random], dict[str, Seconds]], num_blocks: int, rounds: int
) -> dict[str, Any]:
    """Return the medians of a scenario in microseconds."""
    servers = [Server(num_blocks, name) for name in ("", "AiokvConnector", "OffloadingConnector")]
    measured: dict[str, list[list[Seconds]]] = {}
    gc.collect()
    gc.freeze()  # as vLLM does before it serves
    for seed in range(rounds + 1):
        of_servers = [scenario(server, random.Random(seed)) for server in servers]
        if seed:  # the first round warms up
            for name in of_servers[0]:
                measured.setdefault(name, []).append([seconds[name] for seconds in of_servers])
    for server in servers:
        server.close()
    return {name: _compared(of_name) for name, of_name in measured.items()}


def _measure_calls(num_blocks: int, rounds: int) -> dict[str, float]:
    """Return the medians of the time per request and method in microseconds."""
    server = Server(num_blocks, "AiokvConnector")
    server.time_calls()
    measured = []
    for seed in range(rounds + 1):
        server.call_seconds = dict.fromkeys(CALLS, 0.0)
        _serve(server, _prompts(random.Random(seed)))
        if seed:
            measured.append([server.call_seconds[name] / IN_FLIGHT for name in CALLS])
    server.close()
    return dict(zip(CALLS, (1e6 * np.median(measured, axis=0)).tolist(), strict=True))


def _compared(rounds: list[list[Seconds]]) -> dict[str, float]:
    seconds = {
        "vllm": [without[0] for without, _, _ in rounds],
        "added": [aiokv[0] - without[0] for without, aiokv, _ in rounds],
        "engine": [aiokv[1] for _, aiokv, _ in rounds],
        "offloading": [own[0] - without[0] for without, _, own in rounds],
    }
    return {name: 1e6 * float(np.median(values)) for name, values in seconds.items()}


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(num_tokens)]


def _prompts(rng: random.Random) -> list[list[int]]:
    return [_prompt(rng, PROMPT_TOKENS) for _ in range(IN_FLIGHT)]


def _requests(server: Server, rng: random.Random) -> dict[str, Seconds]:
    prompts = _prompts(rng)
    seconds = {"miss": _serve(server, prompts)}
    loaded = server.loaded_tokens
    seconds["hit"] = _serve(server, prompts)
    if server.scheduler.connector is not None:
        loaded = server.loaded_tokens - loaded
        least = IN_FLIGHT * (PROMPT_TOKENS - BLOCK_TOKENS)
        if loaded < least:
            raise InternalError(f"{loaded} tokens were loaded; it must be at least {least}")
    return seconds


def _serve(server: Server, prompts: list[list[int]], num_tokens: int = GENERATED) -> Seconds:
    """Return the time per request; then empty vLLM's prefix cache."""
    server.seconds = NO_SECONDS
    for prompt in prompts:
        server.add(prompt, num_tokens)
    server.run()
    seconds = server.seconds / len(prompts)
    server.drain()
    if not server.scheduler.kv_cache_manager.reset_prefix_cache():
        raise InternalError("vLLM did not empty its prefix cache")
    return seconds


def _steps(server: Server, rng: random.Random) -> dict[str, Seconds]:
    for i in range(RUNNING):
        # The requests complete their blocks in different steps.
        server.add(_prompt(rng, 64 + i % BLOCK_TOKENS), 6 * BLOCK_TOKENS)
    while any(r.num_output_tokens == 0 for r in server.scheduler.requests.values()):
        server.step()
    seconds = _steps_of(server)
    server.run()
    return {str(RUNNING): seconds}


def _waiting(server: Server, rng: random.Random) -> dict[str, Seconds]:
    prompt = _prompt(rng, WAITING_TOKENS)
    line = [_prompt(rng, LINE_TOKENS) for _ in range(MOST_COMPARED)]
    for cached in (prompt[: WAITING_TOKENS // 2], line[-1]):
        _serve(server, [cached], 1)
    running = [server.add(_prompt(rng, RUNNING_TOKENS), 256) for _ in range(4)]
    while not all(request.num_output_tokens for request in running):
        server.step()
    alone = _steps_of(server)
    seconds = {}
    for name, prompts in ((str(WAITING_TOKENS), [prompt]), (f"{MOST_COMPARED}_prompts", line)):
        waiting = [server.add(tokens, 1) for tokens in prompts]
        if name == str(WAITING_TOKENS):
            server.step()  # which matches it
        seconds[name] = _steps_of(server) - alone
        for request in waiting:
            if request.num_computed_tokens:
                raise InternalError("a waiting request was scheduled")
            server.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    server.run()
    return seconds


def _steps_of(server: Server) -> Seconds:
    """Return the mean time of a step; in these steps, each request saves the same blocks."""
    server.seconds, num_steps = NO_SECONDS, SAVED_TOKENS
    for _ in range(num_steps):
        server.step()
    return server.seconds / num_steps


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_scheduler", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    args = parser.parse_args()
    results = run(args.quick)
    measured = harness.Run(machine=harness.machine(), benches={"vllm_scheduler": results})
    harness.save_each(measured, measured.benches)
    for name, value in harness.flatten(results).items():
        print(f"{name:30} {value:10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
