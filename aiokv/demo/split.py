"""The split demo: a prefill and a decode process serve what one server has served before."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

import aiokv
from aiokv.demo.ledger import Ledger
from aiokv.demo.processes import start_in_new_process
from aiokv.demo.report import Percentiles
from aiokv.demo.runs import run_on_one_server
from aiokv.demo.serving import first_error
from aiokv.demo.split_messages import (
    Arrived,
    Channel,
    FirstToken,
    NeedsPrefill,
    NotPrefilled,
    Serve,
    Served,
)
from aiokv.demo.split_report import Killed, SplitResult
from aiokv.demo.split_servers import ServerArguments, run_decode, run_prefill

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv import Item
    from aiokv.demo.processes import Child
    from aiokv.demo.report import RunResult
    from aiokv.demo.runs import DemoConfig, MakeScenario, Scenario, Stages
    from aiokv.demo.split_messages import Message
    from aiokv.demo.split_report import KillName, ServerResult
    from aiokv.demo.workload import Conversation, Workload
    from aiokv.peers.options import TransportName

    ServerMain = Callable[[ServerArguments], tuple[ServerResult, Ledger]]
    # of the prefill server, None if it was killed, and of the last decode server
    Servers = tuple[tuple[ServerResult, Ledger] | None, tuple[ServerResult, Ledger]]

A = TypeVar("A", FirstToken, Served)  # answers of a server

# Blocks of one transfer: small, because the prompts of the demo are short.
CHUNK_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Options of the split run.

    Attributes:
        transport: moves the blocks.
        kill: process to kill in the middle; None for none.
    """

    transport: TransportName = "tcp"
    kill: KillName | None = None


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
    for server in servers:
        if server is not None:
            ledger.add(server[1])
    # A killed process takes with it what it knows of its blocks; one server has computed them, too.
    ledger.add(Ledger(computed_blocks=reference.computed_blocks))
    compared = ledger.compare(reference)
    prefill, decode = servers
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


class ServerLostError(Exception):
    """A server has ended before it answered."""


class ServerHandle(Generic[A]):
    """Connection of the front to one server process.

    Attributes:
        child: the process.
        channel: messages.
        lost: the process has ended.
    """

    def __init__(self, child: Child[tuple[ServerResult, Ledger]], channel: Channel) -> None:
        self.child = child
        self.channel = channel
        self.lost = False
        self._answers: dict[str, asyncio.Future[A]] = {}

    async def ask(self, request: Serve) -> A:
        """Send a request and return its answer.

        Raises:
            ServerLostError: the server has ended.
        """
        while request.name in self._answers:  # sent for a decode server that was killed
            await asyncio.wait([self._answers[request.name]])
            await asyncio.sleep(0)
        if self.lost:
            raise ServerLostError
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._answers[request.name] = answer
        self.channel.send(request)
        try:
            return await answer
        finally:
            del self._answers[request.name]

    def answer(self, message: A) -> None:
        """Note the answer to a request."""
        answer = self._answers.get(message.name)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def lose(self) -> None:
        """Fail the requests that are not answered, and those to come."""
        self.lost = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ServerLostError())


class Front:
    """Users and router: sends requests to the decode server, and prompts to the prefill server.

    Attributes:
        ledger: tokens that users got.
        first_token_seconds: of all requests, time until a server had the first output token.
        first_decoded_seconds: until the decode server had computed its first output token.
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
        self._requests: dict[str, Serve] = {}  # that are not answered
        self._prefilled: dict[str, float] = {}  # seconds to the first token of the prefill server
        self._answered = 0
        self._half = 0  # of the requests
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
        with tempfile.TemporaryDirectory(prefix="aiokv-") as folder:
            self._folder = Path(folder)
            async with AsyncExitStack() as stack:
                self._stack = stack
                return await self._run(workload)

    async def _run(self, workload: Workload) -> Servers:
        self._decode: asyncio.Future[ServerHandle[Served]] = (
            asyncio.get_running_loop().create_future()
        )
        self._prefill, decode = await asyncio.gather(
            self._start("prefill", run_prefill), self._start("decode", run_decode)
        )
        self._decode.set_result(decode)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for server in (self._prefill, decode):
                    group.create_task(self._watch(server))
                began = time.perf_counter()
                async with asyncio.TaskGroup() as users:
                    for conversation in workload.conversations:
                        users.create_task(self._converse(conversation))
                self.seconds = time.perf_counter() - began
                return await self._stop()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors

    # --- users ----------------------------------------------------------------------------------

    async def _converse(self, conversation: Conversation) -> None:
        tokens: list[int] = []
        items: tuple[Item, ...] = ()
        for number, turn in enumerate(conversation.turns):
            items += tuple(item._replace(offset=len(tokens) + item.offset) for item in turn.items)
            tokens += turn.added.tolist()
            request = Serve(
                name=f"{conversation.name}/{number}",
                tokens=tokens,
                stop_length=len(tokens) + turn.output_tokens,
                items=items,
                arrived_seconds=time.perf_counter(),
            )
            tokens = tokens + await self._ask(request)

    async def _ask(self, request: Serve) -> list[int]:
        self._requests[request.name] = request
        answer = await self._decode_request(request)
        decoded = answer.first_token_seconds
        self.first_decoded_seconds.append(decoded)
        self.first_token_seconds.append(min(decoded, self._prefilled.get(request.name, decoded)))
        self.ledger.record_tokens(request.name, answer.tokens)
        self._answered += 1
        self._advance(1)
        return answer.tokens

    async def _decode_request(self, request: Serve) -> Served:
        while True:
            decode = await asyncio.shield(self._decode)
            try:
                return await decode.ask(
                    msgspec.structs.replace(request, has_prefill=not self._prefill.lost)
                )
            except ServerLostError:
                if self.killed is not None:
                    self.killed.sent_again += 1

    # --- servers --------------------------------------------------------------------------------

    async def _start(self, name: KillName, main: ServerMain) -> ServerHandle[Any]:
        """Start a server process; return when it has connected."""
        connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        path = self._folder / f"{name}-{secrets.token_hex(4)}"
        listener = await asyncio.start_unix_server(
            lambda reader, writer: connected.set_result(Channel(reader, writer)), path
        )
        peers = aiokv.Peers(
            secret=self._secret,
            listen="127.0.0.1" if name == "decode" else None,
            transport=self._split.transport,
            chunk_blocks=CHUNK_BLOCKS,
        )
        arguments = ServerArguments(self._make_scenario, self._config, peers, str(path))
        child = await self._stack.enter_async_context(start_in_new_process(main, arguments))
        ended = asyncio.ensure_future(child.ended())
        ended.add_done_callback(lambda _: connected.cancel())
        try:
            await asyncio.wait([connected])
        finally:
            ended.cancel()
            listener.close()
        if connected.cancelled():
            await child.result()  # raises the error of the start
        channel = connected.result()
        self._stack.push_async_callback(channel.aclose)
        return ServerHandle(child, channel)

    async def _watch(self, server: ServerHandle[Any]) -> None:
        """Handle the messages of a server, and its end."""
        async for message in server.channel:
            self._on_message(server, message)
        if self._stopping:
            return
        if self.killed is None:
            await server.child.result()  # raises
        decode = self._decode
        if server is not self._prefill:
            self._decode = asyncio.get_running_loop().create_future()
        server.lose()
        if decode is not self._decode:
            started = await self._start("decode", run_decode)
            self._group.create_task(self._watch(started))
            self._decode.set_result(started)

    def _on_message(self, server: ServerHandle[Any], message: Message) -> None:
        if isinstance(message, NeedsPrefill):
            self._group.create_task(self._compute_prompt(server, message))
        elif isinstance(message, Arrived):
            self._kill_in_the_middle(server, message)
        elif isinstance(message, NotPrefilled):
            self._tell_decode(message)
        elif isinstance(message, FirstToken | Served):
            server.answer(message)

    async def _compute_prompt(self, decode: ServerHandle[Served], needs: NeedsPrefill) -> None:
        request = self._requests[needs.name]
        stop_length = len(request.tokens) + 1
        request = msgspec.structs.replace(request, ticket=needs.ticket, stop_length=stop_length)
        try:
            await self._prefill.ask(request)
        except ServerLostError:
            decode.channel.send(NotPrefilled(request.name))
            return
        seconds = time.perf_counter() - request.arrived_seconds
        self._prefilled.setdefault(request.name, seconds)

    def _tell_decode(self, message: NotPrefilled) -> None:
        if self._decode.done():
            self._decode.result().channel.send(message)

    def _kill_in_the_middle(self, decode: ServerHandle[Served], arrived: Arrived) -> None:
        """Kill the process of ``--kill`` while blocks arrive, after half of the requests."""
        name = self._split.kill
        if name is None or self.killed is not None or self._answered < self._half:
            return
        self.killed = Killed(
            name=name,
            request=arrived.name,
            arrived_tokens=arrived.tokens,
            answered_requests=self._answered,
        )
        (self._prefill if name == "prefill" else decode).child.kill()

    async def _stop(self) -> Servers:
        """Let the servers end, and return their results."""
        self._stopping = True
        decode = await self._decode
        for server in (self._prefill, decode):
            await server.channel.aclose()
        prefill = None
        if self.killed is None or self.killed.name != "prefill":
            prefill = await self._prefill.child.result()
        return prefill, await decode.child.result()
