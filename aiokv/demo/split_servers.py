"""The servers of the split demo: one process computes prompts, another one the output tokens.

::

    front     serve(request) ──► decode: allocate, lease.receive ──► prefill(ticket) ──► front
    front     serve(request, ticket) ──► prefill: engine.send, compute the prompt
    prefill   blocks, while it computes ──► decode: receiving.wait, compute the rest ──► answer
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.demo.channel import Channel
from aiokv.demo.requests import Request
from aiokv.demo.runner import ModelRunner
from aiokv.demo.runs import check_idle, open_engine
from aiokv.demo.serving import Server
from aiokv.demo.split_report import SentBlocks, ServerResult
from aiokv.errors import LayoutError, PeerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    import aiokv
    from aiokv.demo.channel import Handlers
    from aiokv.demo.ledger import Ledger
    from aiokv.demo.runs import DemoConfig, MakeScenario
    from aiokv.demo.serving import OnLayers
    from aiokv.demo.split_report import ServerName
    from aiokv.worker.device.base import Event

# Seconds after which the decode server computes the missing blocks.
RECEIVE_TIMEOUT = 30.0


async def run_server(
    name: ServerName,
    make_scenario: MakeScenario,
    config: DemoConfig,
    peers: aiokv.Peers,
    socket_fd: int,
) -> tuple[ServerResult, Ledger]:
    """Serve until the front closes the channel.

    Args:
        name: the role of the server.
        make_scenario: returns the model.
        config: sizes.
        peers: settings of the transfers between servers.
        socket_fd: end of the socket pair of the front.
    """
    logging.basicConfig(format=f"{name} process: %(levelname)s %(name)s: %(message)s")
    scenario = make_scenario()
    cache = scenario.model.new_cache(config.device_blocks, config.block_tokens)
    async with open_engine(scenario, config, cache, peers=peers) as engine:
        channel = await Channel.over(socket.socket(fileno=socket_fd))
        channel.open()
        with ModelRunner(scenario.model, cache) as runner:
            role = (Prefill if name == "prefill" else Decode)(engine, channel)
            server = role.server = Server(
                engine, runner, config.serving, handover=role.handover, on_layers=role.on_layers
            )
            async with server.computing() as role.clients:
                await channel.run(role.clients, role.handlers())
        await channel.aclose()
        await check_idle(engine, name)
        return ServerResult.of(server, engine.statistics().peers, role.sent), server.ledger


class Role(ABC):
    """Calls and transfers of blocks of one server.

    Attributes:
        server: computes.
        clients: tasks of the requests.
        sent: blocks that other servers have acknowledged.
        on_layers: notes the layers that are computed; see :class:`Server`.
    """

    server: Server
    clients: asyncio.TaskGroup
    on_layers: OnLayers | None = None

    def __init__(self, engine: aiokv.CacheEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self.sent = SentBlocks()

    @abstractmethod
    def handlers(self) -> Handlers:
        """Return the functions that the front may call, by name."""

    @abstractmethod
    def handover(self, request: Request, lease: aiokv.Lease) -> AbstractAsyncContextManager[int]:
        """Exchange the blocks of a request with the other server."""


@dataclass(slots=True, kw_only=True)
class Prompt(Request):
    """A request of a decode server, whose blocks are sent while its prompt is computed.

    Attributes:
        ticket: ticket of the decode server; empty once it was used.
        sending: the blocks of the attempt.
        is_sent: the result tells the decode server if blocks come.
    """

    ticket: bytes
    sending: aiokv.Sending | None = None
    is_sent: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def answer(self, *, is_sent: bool) -> None:
        """Set the result; the first one counts."""
        if not self.is_sent.done():
            self.is_sent.set_result(is_sent)


class Prefill(Role):
    """Sends the blocks of each prompt while it computes the prompt."""

    def __init__(self, engine: aiokv.CacheEngine, channel: Channel) -> None:
        super().__init__(engine, channel)
        self.on_layers = self._send_layers

    def handlers(self) -> Handlers:
        """See :class:`Role`."""
        return {"serve": self._serve}

    async def _serve(self, request: Request, ticket: bytes) -> bool:
        """Compute one output token; return False at once when no block can be sent."""
        prompt = Prompt(
            request.name,
            request.tokens,
            request.prompt_length,
            request.prompt_length + 1,
            request.items,
            request.arrived_seconds,
            ticket=ticket,
        )
        self.clients.create_task(self.server.serve_request(prompt))
        return await prompt.is_sent

    @asynccontextmanager
    async def handover(self, request: Request, lease: aiokv.Lease) -> AsyncIterator[int]:
        """Send the blocks of a request in its first attempt: a ticket can be sent only once."""
        assert isinstance(request, Prompt)
        async with AsyncExitStack() as stack:
            ticket, request.ticket = request.ticket, b""
            if ticket:
                try:
                    request.sending = await stack.enter_async_context(
                        self._engine.send(lease, ticket)
                    )
                except (PeerError, LayoutError):
                    request.answer(is_sent=False)
            yield lease.cached_tokens
            sending, request.sending = request.sending, None
            if sending is not None:
                self.sent.early_blocks += sending.delivered_blocks
            if request.generated:
                request.answer(is_sent=True)
        if sending is not None:
            self.sent.tokens += sending.delivered_tokens
            self.sent.blocks += sending.delivered_blocks

    def _send_layers(
        self, request: Request, num_tokens: int, num_layers: int, event: Event | None
    ) -> None:
        """Send the layers that are computed."""
        assert isinstance(request, Prompt)
        if request.sending is not None:
            request.sending.layers_done(num_tokens, num_layers, event)


class Decode(Role):
    """Receives the blocks of each prompt, and computes the missing ones."""

    def handlers(self) -> Handlers:
        """See :class:`Role`."""
        return {"serve": self._serve}

    async def _serve(self, request: Request) -> tuple[list[int], float]:
        """Return all output tokens, and the seconds until the first one was computed."""
        await self.server.serve_request(request)
        return request.generated, request.ttft_seconds or 0.0

    @asynccontextmanager
    async def handover(self, request: Request, lease: aiokv.Lease) -> AsyncIterator[int]:
        """Receive all positions but the last one, whose logits give the first output token."""
        first, needed = lease.cached_tokens, request.prompt_length - 1
        if not request.attempts and first < needed:
            async with lease.receive(needed, timeout=RECEIVE_TIMEOUT) as receiving:
                self.clients.create_task(self._have_computed(request, receiving))
                if (arrived := await receiving.wait(first + 1)) > first:
                    await self._channel.call("arrived", request.name, arrived - first)
                first = await receiving.wait()
        yield first

    async def _have_computed(self, request: Request, receiving: aiokv.Receiving) -> None:
        """Have the prompt computed; wait for no block when no server does it."""
        if not await self._channel.call("prefill", request.name, receiving.ticket):
            receiving.cancel()
