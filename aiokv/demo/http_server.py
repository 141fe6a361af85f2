"""OpenAI-like HTTP server over one CacheEngine: an example to copy and adapt to your model.

A task per request waits for capacity; one loop computes the steps of all granted requests::

    request     match -> allocate ------------- await tokens ------------- release
                              | onloads start        ^
    step loop                 +-> model -> advance -> token -> ...

``Batch``, the model and its cache are the demo's. A token of the demo is a byte.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import msgspec
import numpy as np
from msgspec.json import decode, encode
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

import aiokv
from aiokv.demo.batch import Batch, Part
from aiokv.demo.disconnects import BodyTooLarge, body_of, cancelled_on_disconnect
from aiokv.observe.asgi import asgi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from aiokv import CacheEngine, Lease
    from aiokv.demo.transformer import NumpyCache, NumpyTransformer
    from aiokv.worker.views import LayerView

log = logging.getLogger(__name__)

PROMPT_CHUNK = 64  # prompt tokens per step, so that a long prompt does not stop other requests
MAX_RUNNING = 64  # requests per step; further ones wait before they are matched
CAPACITY_WAIT_SECONDS = 30.0  # afterwards the client gets status 503


class Completion(msgspec.Struct):
    """Body of ``POST /v1/completions``; other fields of OpenAI's API are ignored."""

    prompt: str | list[Annotated[int, msgspec.Meta(ge=0, lt=256)]]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    stream: bool = False
    cache_salt: str = ""  # requests share cached blocks within one salt only


class StepError(Exception):
    """A step failed. Each of its requests gets an error of its own; the log has the traceback."""


@dataclass(eq=False, slots=True)
class Running:
    """A granted request. The KV of the positions before ``computed`` is in the lease's blocks."""

    lease: Lease
    tokens: list[int]  # prompt, then generated tokens
    prompt_length: int
    stop_length: int
    cached_tokens: int
    computed: int
    arriving: bool = True  # its first step waits for each layer of the onloads
    # A generated token, the failure of a step, or None after a preemption.
    output: asyncio.Queue[int | StepError | None] = field(default_factory=asyncio.Queue)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Server:
    """Continuous batching over one engine, and its HTTP endpoint."""

    def __init__(self, engine: CacheEngine, model: NumpyTransformer, cache: NumpyCache) -> None:
        self._engine, self._model, self._cache = engine, model, cache
        self._running: list[Running] = []  # in order of admission
        self._admitted, self._slots = asyncio.Event(), asyncio.Semaphore(MAX_RUNNING)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Open the engine, and compute steps until the server stops."""
        async with self._engine, asyncio.TaskGroup() as tasks:
            steps = tasks.create_task(self._step_forever())
            yield
            steps.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/completions``."""
        most = self._engine.config.device_blocks * self._engine.config.block_tokens
        try:
            body = decode(await body_of(receive), type=Completion)
            prompt = list(body.prompt.encode() if isinstance(body.prompt, str) else body.prompt)
            if not prompt or len(prompt) + body.max_tokens > most:
                raise msgspec.ValidationError(f"prompt and max_tokens: 1 to {most} tokens in total")
        except (msgspec.DecodeError, ValueError) as error:  # no JSON, no UTF-8, too long
            status = 413 if isinstance(error, BodyTooLarge) else 400
            return await _refusal(status, error)(scope, receive, send)
        async with cancelled_on_disconnect(receive, send) as send, self._slots:
            try:
                async with self._admission(prompt, body) as running:
                    if body.stream:
                        events = StreamingResponse(
                            self._events(running), media_type="text/event-stream"
                        )
                        return await events.stream_response(send)
                    text = "".join([chr(token) async for token in self._tokens(running)])
                await JSONResponse(_answer(running, text, ended=True))(scope, receive, send)
            except (aiokv.errors.AiokvError, StepError) as error:
                status = 503 if isinstance(error, aiokv.errors.CapacityError) else 500
                await _refusal(status, error)(scope, receive, send)

    @asynccontextmanager
    async def _admission(self, prompt: list[int], body: Completion) -> AsyncIterator[Running]:
        """Wait for capacity, and compute the request until the block ends.

        When the client disconnects, the block is cancelled and the lease is released at once.
        Blocks that a step still computes with return to the pool after the step.
        """
        tokens, name = np.array(prompt, np.int32), f"cmpl-{uuid4().hex}"
        async with self._engine.match(tokens, salt=body.cache_salt, owner=name) as lease:
            await lease.allocate(len(prompt), timeout=CAPACITY_WAIT_SECONDS)
            stop, cached = len(prompt) + body.max_tokens, lease.cached_tokens
            running = Running(lease, prompt, len(prompt), stop, cached, cached)
            self._admit(running)
            try:
                yield running
            finally:
                self._end(running, None)

    async def _tokens(self, running: Running) -> AsyncIterator[int]:
        for _ in range(running.stop_length - running.prompt_length):
            while (output := await running.output.get()) is None:  # it was preempted
                await running.lease.resume(len(running.tokens))
                running.computed, running.arriving = running.lease.cached_tokens, True
                named = self._engine.lengths([running.lease])[0]
                running.lease.append(running.tokens[named:])
                self._admit(running)
            if isinstance(output, StepError):
                raise output
            yield output

    async def _events(self, running: Running) -> AsyncIterator[bytes]:
        try:
            async for token in self._tokens(running):
                yield b"data: %b\n\n" % encode(_answer(running, chr(token)))
            last = _answer(running, "", ended=True)
        except (aiokv.errors.AiokvError, StepError) as error:  # status 200 was sent already
            last = _problem(500, error)
        yield b"data: %b\n\ndata: [DONE]\n\n" % encode(last)

    def _admit(self, running: Running) -> None:
        self._running.append(running)
        self._admitted.set()

    def _end(self, running: Running, output: StepError | None) -> None:
        with suppress(ValueError):
            self._running.remove(running)
        running.output.put_nowait(output)

    async def _step_forever(self) -> None:
        while True:
            if not self._running:
                self._admitted.clear()
                await self._admitted.wait()
            chosen = [(running, 1) for running in self._running]
            try:
                chosen = [(running, 1) for running in self._running if running.pending == 1]
                if prompts := [running for running in self._running if running.pending > 1]:
                    chosen.append((prompts[0], min(prompts[0].pending, PROMPT_CHUNK)))
                try:
                    await self._step(chosen)
                finally:
                    self._engine.step()  # on a GPU: step(event), recorded after the work
            except Exception:  # the requests of this step fail, but this loop must not end
                log.exception("a step of %d requests failed", len(chosen))
                for running, _ in chosen:
                    self._end(running, StepError("the step failed; see the log of the server"))

    async def _step(self, chosen: list[tuple[Running, int]]) -> None:
        layers = self._engine.layers([running.lease for running, _ in chosen if running.arriving])
        rows = Batch.of(Part(r.tokens, r.computed, n, r.lease.block_table) for r, n in chosen)
        try:
            with self._engine.computing([running.lease for running, _ in chosen]) as batch:
                tokens = await batch.run(self._forward, rows, layers)  # in a thread
        except aiokv.errors.TransferError:  # a cached block did not arrive: compute it
            for running, _ in chosen:
                with suppress(aiokv.errors.TransferError):
                    await running.lease.layers.wait_all()
                if running in self._running:  # its client may have left during the wait
                    first = running.lease.recompute_from()
                    running.computed = running.computed if first is None else first
            return
        sampled = []  # the next step computes the tokens of these requests
        for (running, count), token in zip(chosen, tokens, strict=True):
            if running not in self._running:
                continue  # its client has left
            running.arriving, running.computed = False, running.computed + count
            if running.pending == 0:
                running.tokens.append(token)
                running.output.put_nowait(token)
                if len(running.tokens) < running.stop_length:
                    sampled.append(running)
                    continue
                self._running.remove(running)
            running.lease.commit(running.computed)  # its full blocks can be hit from now on
        await self._advance(sampled)

    async def _advance(self, sampled: list[Running]) -> None:
        """Commit, and give each new token a position; without room, preempt the newest request."""
        tokens = {running.lease: running.tokens[-1] for running in sampled}
        while tokens:
            batch = self._engine.batch(tokens)
            left = self._engine.advance(batch, list(tokens.values()))
            tokens = {lease: tokens[lease] for lease in left}
            if tokens:
                newest = self._running[-1]
                newest.lease.commit(newest.computed)
                await newest.lease.preempt()
                self._end(newest, None)
                tokens.pop(newest.lease, None)

    def _forward(self, rows: Batch, layers: LayerView) -> list[int]:
        """Compute in the thread; each layer waits until its cached blocks have arrived."""
        wait = partial(layers.gpu_wait, stream=self._model.stream)  # before each layer
        logits = self._model.forward(rows, self._cache, wait)
        layers.raise_for_error()  # before the outputs are used
        return [int(np.argmax(logits[span.stop - 1])) for span in rows.spans]


def make_app(engine: CacheEngine, model: NumpyTransformer, cache: NumpyCache) -> Starlette:
    """Return the ASGI app: completions, and metrics, probes and the live page under ``/aiokv``."""
    server, observer = Server(engine, model, cache), asgi(engine)
    routes = [Route("/v1/completions", server, methods=["POST"]), Mount("/aiokv", observer)]
    app = Starlette(routes=routes, lifespan=server.lifespan)
    app.state.end_streams = observer.end_streams  # for the server to call when it shuts down
    return app


def _answer(running: Running, text: str, *, ended: bool = False) -> dict[str, object]:
    choice = {"index": 0, "text": text, "finish_reason": "length" if ended else None}
    answer = {"id": running.lease.owner, "object": "text_completion", "choices": [choice]}
    usage = {
        "prompt_tokens": running.prompt_length,
        "completion_tokens": running.stop_length - running.prompt_length,
        "total_tokens": running.stop_length,
        "prompt_tokens_details": {"cached_tokens": running.cached_tokens},
    }
    return answer | {"usage": usage if ended else None}


def _problem(status: int, error: object) -> dict[str, object]:
    return {"error": {"message": str(error), "code": status}}


def _refusal(status: int, error: object) -> Response:
    return JSONResponse(_problem(status, error), status_code=status)
