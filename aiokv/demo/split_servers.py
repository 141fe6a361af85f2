"""The servers of the split demo: one process computes prompts, another one the output tokens.

::

    front     Serve ──► decode: allocate, lease.receive ──► NeedsPrefill(ticket) ──► front
    front     Serve(ticket) ──► prefill: engine.send, compute the prompt ──► FirstToken ──► front
    prefill   blocks, while it computes ──► decode: receiving.wait, compute the rest ──► Served
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import uvloop

import aiokv
from aiokv.demo.requests import Request
from aiokv.demo.runner import ModelRunner
from aiokv.demo.serving import Server
from aiokv.demo.split_messages import (
    Arrived,
    Channel,
    FirstToken,
    Held,
    NeedsPrefill,
    NotPrefilled,
    Serve,
    Served,
    WouldHit,
)
from aiokv.demo.split_report import ServerResult
from aiokv.errors import InternalError, LayoutError, PeerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokv.demo.ledger import Ledger
    from aiokv.demo.runs import DemoConfig, MakeScenario
    from aiokv.demo.split_messages import Message
    from aiokv.worker.device.base import Event

# Seconds after which the decode server computes what has not arrived.
RECEIVE_TIMEOUT = 30.0


class ServerArguments(NamedTuple):
    """Arguments of both servers.

    Attributes:
        make_scenario: returns the model; it is pickled.
        config: sizes.
        peers: how blocks travel.
        socket_path: of the front.
    """

    make_scenario: MakeScenario
    config: DemoConfig
    peers: aiokv.Peers
    socket_path: str


def run_prefill(arguments: ServerArguments) -> tuple[ServerResult, Ledger]:
    """Compute prompts and send their blocks, until the front closes the channel."""
    return uvloop.run(_serve(arguments, Prefill, "prefill"))


def run_decode(arguments: ServerArguments) -> tuple[ServerResult, Ledger]:
    """Receive blocks of prompts and compute output tokens, until the front closes the channel."""
    return uvloop.run(_serve(arguments, Decode, "decode"))


class Prefill:
    """Sends the blocks of each prompt while it computes the prompt.

    Attributes:
        sent_tokens: positions that the decode server has acknowledged.
        sent_blocks: blocks that it has acknowledged; some layers of a block are a part of it.
        sent_early_blocks: those of them that it had acknowledged when the prompt was computed.
    """

    def __init__(self, engine: aiokv.CacheEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._tickets: dict[str, bytes] = {}
        self._sendings: dict[str, aiokv.Sending] = {}
        self.sent_tokens = 0
        self.sent_blocks = 0.0
        self.sent_early_blocks = 0.0

    @asynccontextmanager
    async def handover(self, request: Request, lease: aiokv.Lease) -> AsyncIterator[int]:
        """Send the blocks of a request; its first attempt only, as a ticket is sent once."""
        async with AsyncExitStack() as stack:
            sending: aiokv.Sending | None = None
            if ticket := self._tickets.pop(request.name, b""):
                try:
                    sending = await stack.enter_async_context(self._engine.send(lease, ticket))
                    self._sendings[request.name] = sending
                except (PeerError, LayoutError):
                    self._channel.send(NotPrefilled(request.name))
            yield lease.cached_tokens
            if sending is not None:
                self.sent_early_blocks += sending.delivered_blocks
                del self._sendings[request.name]
            if request.generated:
                self._channel.send(FirstToken(request.name, request.generated[0]))
        if sending is not None:
            self.sent_tokens += sending.delivered_tokens
            self.sent_blocks += sending.delivered_blocks

    def on_layers(
        self, request: Request, num_tokens: int, num_layers: int, event: Event | None
    ) -> None:
        """Send the layers that are computed."""
        if (sending := self._sendings.get(request.name)) is not None:
            sending.layers_done(num_tokens, num_layers, event)

    async def serve(self, server: Server, message: Serve) -> None:
        """Compute one output token."""
        self._tickets[message.name] = message.ticket
        await server.serve_request(_request(message))

    def on_message(self, message: Message) -> None:
        """Ignore a message."""


class Decode:
    """Receives the blocks of each prompt, and computes what has not arrived."""

    sent_tokens = 0
    sent_blocks = sent_early_blocks = 0.0
    on_layers = None

    def __init__(self, engine: aiokv.CacheEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._prefilled: set[str] = set()  # requests whose first attempt receives
        self._receiving: dict[str, aiokv.Receiving] = {}

    @asynccontextmanager
    async def handover(self, request: Request, lease: aiokv.Lease) -> AsyncIterator[int]:
        """Receive all positions but the last one, whose logits give the first output token."""
        first, name = lease.cached_tokens, request.name
        needed = request.prompt_length - 1
        receives = name in self._prefilled
        self._prefilled.discard(name)
        if receives and first < needed:
            async with lease.receive(needed, timeout=RECEIVE_TIMEOUT) as receiving:
                self._receiving[name] = receiving
                self._channel.send(NeedsPrefill(name, receiving.ticket))
                if (arrived := await receiving.wait(first + 1)) > first:
                    self._channel.send(Arrived(name, arrived - first))
                first = await receiving.wait()
            del self._receiving[name]
        yield first

    async def serve(self, server: Server, message: Serve) -> None:
        """Compute all output tokens."""
        request = _request(message)
        if message.has_prefill:
            self._prefilled.add(request.name)
        await server.serve_request(request)
        self._channel.send(Served(request.name, request.generated, request.ttft_seconds or 0.0))

    def on_message(self, message: Message) -> None:
        """Answer the router; wait no more for a prompt that no server computes."""
        if isinstance(message, WouldHit):
            tokens = np.array(message.tokens, np.int32)
            held = self._engine.would_hit(tokens, items=message.items).device_tokens
            self._channel.send(Held(message.name, held))
        elif isinstance(message, NotPrefilled) and message.name in self._receiving:
            self._receiving[message.name].cancel()


def _request(message: Serve) -> Request:
    return Request(
        message.name,
        list(message.tokens),
        len(message.tokens),
        message.stop_length,
        message.items,
        arrived_seconds=message.arrived_seconds,
    )


async def _serve(
    arguments: ServerArguments, role_type: type[Prefill | Decode], name: str
) -> tuple[ServerResult, Ledger]:
    logging.basicConfig(format=f"{name} process: %(levelname)s %(name)s: %(message)s")
    config, scenario = arguments.config, arguments.make_scenario()
    model = scenario.model
    cache = model.new_cache(config.device_blocks, config.block_tokens)
    cache_config = aiokv.CacheConfig(
        block_tokens=config.block_tokens,
        device_blocks=config.device_blocks,
        model=f"aiokv demo, {model.description}",
        weights_version=scenario.weights_version,
    )
    async with aiokv.CacheEngine(
        cache_config, cache.regions(), model.new_device(), peers=arguments.peers
    ) as engine:
        channel = Channel(*await asyncio.open_unix_connection(arguments.socket_path))
        role = role_type(engine, channel)
        with ModelRunner(model, cache) as runner:
            server = Server(
                engine,
                runner,
                config.serving,
                handover=role.handover,
                on_layers=role.on_layers,
            )
            async with server.computing() as clients:
                async for message in channel:
                    if isinstance(message, Serve):
                        clients.create_task(role.serve(server, message))
                    else:
                        role.on_message(message)
        await channel.aclose()
        await engine.drain()
        if violations := engine.check_invariants():
            raise InternalError(f"after {name}: {'; '.join(violations)}")
        statistics = engine.peer_statistics()
    sent_blocks = (role.sent_early_blocks, role.sent_blocks)
    result = ServerResult.of(server, statistics, role.sent_tokens, sent_blocks)
    return result, server.ledger
