"""The split demo: a prefill and a decode process serve what one server has served before."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import aiokv
from aiokv.demo.channel import Channel, ServerLostError
from aiokv.demo.ledger import Ledger
from aiokv.demo.processes import start_in_new_process
from aiokv.demo.report import Percentiles
from aiokv.demo.requests import converse
from aiokv.demo.runs import run_on_one_server
from aiokv.demo.serving import first_error
from aiokv.demo.split_report import Killed, ServerResult, SplitResult
from aiokv.demo.split_servers import run_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.demo.channel import Handlers
    from aiokv.demo.processes import Child
    from aiokv.demo.report import RunResult
    from aiokv.demo.requests import Request
    from aiokv.demo.runs import DemoConfig, MakeScenario, Scenario, Stages
    from aiokv.demo.split_report import ServerName
    from aiokv.demo.workload import Workload
    from aiokv.peers.options import TransportName

    ServerEnd = tuple[ServerResult, Ledger]
    # The end of the prefill server, None if it was killed, and that of the decode server.
    Servers = tuple[ServerEnd | None, ServerEnd]

# Blocks of one transfer: small, because the prompts of the demo are short.
CHUNK_BLOCKS = 4
LAYER_RANGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Options of the split run.

    Attributes:
        transport: moves the blocks.
        kill: process to kill in the middle; None for none.
    """

    transport: TransportName = "tcp"
    kill: ServerName | None = None


async def run_split_demo(
    make_scenario: MakeScenario, config: DemoConfig, split: SplitConfig, stages: Stages
) -> SplitResult:
    """Serve the workload with one server, then with a prefill and a decode process.

    Args:
        make_scenario: returns what to serve; it is pickled, and called in each process.
        config: sizes of the cache and of the batch.
        split: options of the second run.
        stages: reports progress.

    Raises:
        ConfigError: a conversation does not fit into the device blocks; or the transport is not
            installed.
    """
    scenario = make_scenario()
    config.check_fits(scenario.workload)
    advance = stages("one server", scenario.workload.requests)
    one_server = await run_on_one_server(scenario, config, advance)
    advance = stages("prefill and decode", scenario.workload.requests)
    front = Front(make_scenario, config, split, advance)
    servers = await front.run(scenario.workload)
    return _result(scenario, split, front, one_server, servers)


def _result(
    scenario: Scenario,
    split: SplitConfig,
    front: Front,
    one_server: tuple[RunResult, Ledger],
    servers: Servers,
) -> SplitResult:
    result, reference = one_server
    ledger = front.ledger
    prefill, decode = servers
    ledger.add(decode[1])
    if prefill is not None:
        ledger.add(prefill[1])
    # A killed process does not report its blocks. They are those of one server that computed them,
    # too.
    ledger.add(Ledger(computed_blocks=reference.computed_blocks))
    compared = ledger.compare(reference)
    return SplitResult(
        tokens_equal=not compared.tokens_different,
        logits_equal=not compared.rows_different,
        blocks_equal=not compared.blocks_wrong,
        workload=scenario.workload.title,
        model=scenario.model.description,
        transport=split.transport,
        one_server=result,
        prefill=None if prefill is None else prefill[0],
        decode=decode[0],
        killed=front.killed,
        first_token_ms=Percentiles.of(front.first_token_seconds, 1e3),
        first_decoded_ms=Percentiles.of(front.first_decoded_seconds, 1e3),
        seconds=front.seconds,
        compared=compared,
    )


class ServerHandle(NamedTuple):
    """A server process, and the channel of the front to it."""

    child: Child[ServerEnd]
    channel: Channel


class Front:
    """Users: sends requests to the decode server, and prompts to the prefill server.

    Attributes:
        ledger: tokens that users got.
        first_token_seconds: time until a server had the first output token, per request.
        first_decoded_seconds: time until the decode server had computed its first one, per request.
        seconds: from the first request to the last answer.
        killed: the process that was killed, if one was.
    """

    def __init__(
        self,
        make_scenario: MakeScenario,
        config: DemoConfig,
        split: SplitConfig,
        advance: Callable[[int], None],
    ) -> None:
        self._make_scenario = make_scenario
        self._config = config
        self._split = split
        self._advance = advance
        self._secret = secrets.token_bytes(32)
        self._requests: dict[str, Request] = {}
        self._prefilled: dict[str, float] = {}  # seconds to the first token of the prefill server
        self._restarted = asyncio.Event()
        self._answered = 0
        self._half = 0  # half of the requests
        self._stopping = False
        self.ledger = Ledger()
        self.first_token_seconds: list[float] = []
        self.first_decoded_seconds: list[float] = []
        self.seconds = 0.0
        self.killed: Killed | None = None

    async def run(self, workload: Workload) -> Servers:
        """Start the servers, serve the workload, and return the results of the servers.

        Raises:
            AiokvError: a server has failed.

        Cancellation: the servers are killed.
        """
        self._half = max(1, workload.requests // 2)
        async with AsyncExitStack() as self._stack:
            self._prefill, self._decode = await asyncio.gather(
                self._start("prefill"), self._start("decode")
            )
            try:
                async with asyncio.TaskGroup() as self._group:
                    for server in (self._prefill, self._decode):
                        self._group.create_task(self._watch(server))
                    began = time.perf_counter()
                    async with asyncio.TaskGroup() as users:
                        for conversation in workload.conversations:
                            users.create_task(converse(conversation, self._ask))
                    self.seconds = time.perf_counter() - began
                    return await self._stop()
            except ExceptionGroup as errors:
                raise first_error(errors) from errors

    # --- users ----------------------------------------------------------------------------------

    async def _ask(self, request: Request) -> None:
        """Append the answer of the decode server to the tokens of a request."""
        self._requests[request.name] = request
        tokens, decoded = await self._answer(request)
        self.first_decoded_seconds.append(decoded)
        self.first_token_seconds.append(min(decoded, self._prefilled.get(request.name, decoded)))
        self.ledger.record_tokens(request.name, tokens)
        request.tokens += tokens
        self._answered += 1
        self._advance(1)

    async def _answer(self, request: Request) -> tuple[list[int], float]:
        """Return the output tokens, and the seconds until the first one was computed."""
        while True:
            try:
                channel = self._decode.channel
                answer: tuple[list[int], float] = await channel.call("serve", request)
            except ServerLostError:
                if self.killed is not None:
                    self.killed.sent_again += 1
                await self._restarted.wait()
            else:
                return answer

    # --- servers --------------------------------------------------------------------------------

    async def _start(self, name: ServerName) -> ServerHandle:
        """Start a server process; return when it answers calls."""
        peers = aiokv.Peers(
            secret=self._secret,
            listen="127.0.0.1" if name == "decode" else None,
            transport=self._split.transport,
            chunk_blocks=CHUNK_BLOCKS,
            # The transport 'cuda_ipc' moves whole blocks.
            layer_ranges=1 if self._split.transport == "cuda_ipc" else LAYER_RANGES,
        )
        ours, theirs = socket.socketpair()
        channel = await Channel.over(ours)
        self._stack.push_async_callback(channel.aclose)
        with theirs:
            fd = theirs.fileno()
            process = start_in_new_process(
                run_server, name, self._make_scenario, self._config, peers, fd, pass_fds=[fd]
            )
            child = await self._stack.enter_async_context(process)
        if not await channel.opened():
            await child.result()  # raises the error of the start
        return ServerHandle(child, channel)

    async def _watch(self, server: ServerHandle) -> None:
        """Answer the calls of a server, and start a new decode server when one was killed."""
        handlers: Handlers = {
            "prefill": self._compute_prompt,
            "arrived": partial(self._kill, server),
        }
        await server.channel.run(self._group, handlers)
        if self._stopping:
            return
        self._restarted.clear()
        if self.killed is None:
            await server.child.result()  # raises
        if server is self._prefill:
            return
        self._decode = await self._start("decode")
        self._group.create_task(self._watch(self._decode))
        self._restarted.set()

    async def _compute_prompt(self, name: str, ticket: bytes) -> bool:
        """Have the prefill server compute a prompt; return False when it sends no block."""
        request = self._requests[name]
        try:
            is_sent: bool = await self._prefill.channel.call("serve", request, ticket)
        except ServerLostError:
            return False
        self._prefilled.setdefault(name, time.perf_counter() - request.arrived_seconds)
        return is_sent

    async def _kill(self, decode: ServerHandle, request: str, tokens: int) -> None:
        """Kill the process of ``--kill`` while blocks arrive, after half of the requests."""
        name = self._split.kill
        if name is None or self.killed is not None or self._answered < self._half:
            return
        self.killed = Killed(
            name=name, request=request, arrived_tokens=tokens, answered_requests=self._answered
        )
        (self._prefill if name == "prefill" else decode).child.kill()

    async def _stop(self) -> Servers:
        """Let the servers end, and return their results."""
        self._stopping = True
        for server in (self._prefill, self._decode):
            await server.channel.aclose()
        prefill = None
        if self.killed is None or self.killed.name != "prefill":
            prefill = await self._prefill.child.result()
        return prefill, await self._decode.child.result()
