"""Agents that wait for vLLM's scheduler in simulated time, in one process, no model.

``.venv-vllm-0.22.1/bin/python -m bench.vllm_agents --agents-trace FILE``, of ``make test-vllm``,
lets 32 agents send their turns one after the other, as the load ``agents`` of ``bench.vllm``. The
KV cache on the device has 98,304 tokens (12 GiB of KV of Llama 3 8B), host memory 131,072 (16 GiB).
A step takes 3 ms and the time of its prompt tokens at 47,000 per second, at least 7 ms, as on an
H100; loads take no time. The first 25 s are not counted.

``none``: vLLM alone. ``offloading``: with its own ``OffloadingConnector``. ``arrival`` and
``cached_first``: with ``AiokvConnector`` and these orders of admission. ``cached_first_5s`` and
``cached_first_20s``: other values of ``max_overtake_seconds``, whose default is 2.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import sys
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv.connectors.vllm import connector as aiokv_connector
from aiokv.connectors.vllm.waiting import WaitingOrder
from aiokv.trace.format import read_trace
from bench import harness
from bench.vllm.from_trace import agent_sessions
from bench.vllm_hits import DEVICE_BLOCKS, HOST_BLOCKS
from bench.vllm_scheduler import IDLE_SECONDS, Server

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from bench.vllm.workload import AgentTurn

AGENTS: Final = 32
WARM_UP_SECONDS: Final = 25.0
VOCABULARY: Final = 50_000
STEP_SECONDS: Final = 0.003
SHORTEST_STEP_SECONDS: Final = 0.007
TOKENS_PER_SECOND: Final = 47_000
IDLE_STEP_SECONDS: Final = 0.001  # of a step in which all requests wait for loads
SERVERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "none": ("", {}),
    "offloading": ("OffloadingConnector", {}),
    "arrival": ("AiokvConnector", {"admission": "arrival"}),
    "cached_first": ("AiokvConnector", {}),
    "cached_first_5s": ("AiokvConnector", {"max_overtake_seconds": 5.0}),
    "cached_first_20s": ("AiokvConnector", {"max_overtake_seconds": 20.0}),
}


class Agents:
    """Agents at a server, and the simulated time."""

    def __init__(
        self, sessions: list[list[AgentTurn]], name: str, extra: dict[str, Any], agents: int
    ) -> None:
        self.now = 0.0
        aiokv_connector.WaitingOrder = functools.partial(  # type: ignore[misc,assignment]
            WaitingOrder, clock=lambda: self.now
        )
        self.server = Server(DEVICE_BLOCKS, name, host_blocks=HOST_BLOCKS, extra=extra)
        self._sessions = iter(sessions)
        self._numbers = count()
        self._pausing: list[tuple[float, int, list[AgentTurn]]] = []  # turns that are left
        self._active: dict[str, tuple[float, list[AgentTurn], Request]] = {}
        self._begun: set[str] = set()
        self.first_token_seconds: list[float] = []
        self.prompt_tokens = self.ended = 0
        for _ in range(agents):
            self._pause(next(self._sessions))

    def _pause(self, turns: list[AgentTurn]) -> None:
        at = self.now + turns[0].pause_seconds
        heapq.heappush(self._pausing, (at, next(self._numbers), turns))

    def run_until(self, end: float) -> None:
        """Serve until a time."""
        while self.now < end:
            while self._pausing and self._pausing[0][0] <= self.now:
                at, _, turns = heapq.heappop(self._pausing)
                prompt = turns[0].prompt.token_ids(VOCABULARY)
                request = self.server.add(prompt, turns[0].output_tokens)
                self._active[request.request_id] = at, turns, request
            if not self._active:
                self.now = self._pausing[0][0]
                continue
            if self.server.step():
                tokens = self.server.scheduled_prompt_tokens
                self.now += max(SHORTEST_STEP_SECONDS, STEP_SECONDS + tokens / TOKENS_PER_SECOND)
            else:
                self.now += IDLE_STEP_SECONDS
                time.sleep(IDLE_SECONDS)  # copies take real time
            self._note_answers()

    def _note_answers(self) -> None:
        for request_id, (at, turns, request) in list(self._active.items()):
            if request.num_output_tokens and request_id not in self._begun:
                self._begun.add(request_id)
                self.first_token_seconds.append(self.now - at)
                self.prompt_tokens += request.num_prompt_tokens
            if request.is_finished():
                del self._active[request_id]
                self.ended += 1
                self._pause(turns[1:] or next(self._sessions))

    def figures(self, seconds: float) -> dict[str, float]:
        """Return the figures of the next ``seconds``."""
        cached = self.server.cached_tokens
        self.first_token_seconds = []
        self.prompt_tokens = self.ended = 0
        self.run_until(self.now + seconds)
        p50, p90, p99 = np.percentile(self.first_token_seconds, [50, 90, 99]).tolist()
        return {
            "requests_per_second": self.ended / seconds,
            "hit_share": (self.server.cached_tokens - cached) / max(self.prompt_tokens, 1),
            "first_token_mean_seconds": float(np.mean(self.first_token_seconds)),
            "first_token_p50_seconds": p50,
            "first_token_p90_seconds": p90,
            "first_token_p99_seconds": p99,
        }


def run(trace: Path, seconds: float, servers: list[str]) -> dict[str, Any]:
    sessions = agent_sessions(read_trace(trace))
    results = {}
    for name in servers:
        agents = Agents(sessions, *SERVERS[name], AGENTS)
        agents.run_until(WARM_UP_SECONDS)
        results[name] = agents.figures(seconds)
        agents.server.close()
        print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_agents")
    names = ", ".join(SERVERS)
    parser.add_argument("servers", nargs="*", default=list(SERVERS), help=f"of {names}")
    parser.add_argument("--agents-trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=120.0, help="default: %(default)s")
    args = parser.parse_args()
    if unknown := [name for name in args.servers if name not in SERVERS]:
        parser.error(f"unknown server {unknown[0]!r}; one of {names}")
    results = run(args.agents_trace, args.seconds, args.servers)
    measured = harness.Run(machine=harness.machine(), benches={"vllm_agents": results})
    harness.save_each(measured, measured.benches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
