"""OpenAI-compatible HTTP server over one CacheEngine, in one file: copy it, or import ``make_app``.

A task per request waits for capacity; one loop computes the steps of all granted requests::

    request     match -> allocate ------------- await tokens ------------- release
                              | onloads start        ^
    Scheduler                 +-> model -> advance -> token -> ...

It serves any object with the methods of ``Model``::

    engine = aiokv.CacheEngine(config, regions, device="cuda:0")
    serve(make_app(engine, model), socket.create_server(("127.0.0.1", 8000)))
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Protocol
from uuid import uuid4

import msgspec
import numpy as np
import uvicorn
from msgspec.json import decode, encode
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse
from starlette.routing import Mount, Route

import aiokv
from aiokv.observe.asgi import asgi

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Collection

    from numpy.typing import NDArray
    from starlette.requests import Request as HttpRequest
    from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger(__name__)

PROMPT_CHUNK = 64  # prompt tokens per step, so that a long prompt does not stop other requests
MAX_RUNNING = 32  # requests per step; CacheConfig.reserve_blocks should have as many blocks
CAPACITY_WAIT_SECONDS = 30.0  # afterwards the client gets status 503
SEND_SECONDS = 30.0  # a client that does not read for so long loses its connection
MAX_BODY_BYTES = 1 << 20


# --- what to replace -------------------------------------------------------------------------


class Row(NamedTuple):
    """Positions of a request to compute: from ``first`` to the end of ``tokens``."""

    tokens: list[int]
    first: int
    block_table: NDArray[np.int32]


class ChatMessage(msgspec.Struct):
    role: str
    content: str


class Model(Protocol):
    """A model and its tokenizer.

    Attributes:
        name: for clients.
        vocabulary: number of tokens.
        end_tokens: tokens that end an answer, and are not a part of its text.
    """

    name: str
    vocabulary: int

    @property
    def end_tokens(self) -> Collection[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: list[ChatMessage]) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...

    def step(self, rows: list[Row], layers: aiokv.LayerView) -> list[int]:
        """Compute the rows, in a thread; return the next token of each.

        Before each layer, wait for its cached blocks: ``layers.host_wait(layer)``, or on a GPU
        ``layers.gpu_wait(layer, stream)``, with ``layers.raise_for_error()`` before the return.
        """


# --- the loop of steps -----------------------------------------------------------------------


class StepError(Exception):
    """A step failed. Each of its requests gets an error of its own; the log has the traceback."""


@dataclass(eq=False, slots=True)
class Request:
    """A granted request. The KV of the positions before ``computed`` is in the lease's blocks."""

    lease: aiokv.Lease
    tokens: list[int]  # prompt, then generated tokens
    prompt_length: int
    stop_length: int
    cached_tokens: int
    computed: int
    has_left: bool = False  # its client is gone, or has the whole answer: the lease is released
    # A generated token, the failure of a step, or None after a preemption.
    output: asyncio.Queue[int | StepError | None] = field(default_factory=asyncio.Queue)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def needs_position(self) -> bool:
        return len(self.tokens) > self.lease.num_tokens


class Scheduler:
    """Continuous batching: admission, chunked prefill, decoding, preemption.

    Args:
        engine: open while ``run`` computes.
        step: ``Model.step``.
        end_tokens: ``Model.end_tokens``.
    """

    def __init__(
        self,
        engine: aiokv.CacheEngine,
        step: Callable[[list[Row], aiokv.LayerView], list[int]],
        end_tokens: Collection[int] = (),
    ) -> None:
        self._engine, self._model, self._end_tokens = engine, step, end_tokens
        self._running: list[Request] = []  # in order of admission
        self._admitted, self._slots = asyncio.Event(), asyncio.Semaphore(MAX_RUNNING)
        config = engine.config
        self.max_tokens = (config.device_blocks - config.reserve_blocks) * config.block_tokens

    @asynccontextmanager
    async def admit(
        self, prompt: list[int], max_tokens: int, *, salt: str = "", name: str = "", label: str = ""
    ) -> AsyncIterator[Request]:
        """Wait for capacity, and compute the request until the block ends.

        When the client disconnects, the block is cancelled and the lease is released at once.
        Blocks that a step still computes with return to the pool after the step.
        """
        tokens, length = np.array(prompt, np.int32), len(prompt)
        async with self._slots, self._engine.match(tokens, salt=salt, owner=name) as lease:
            # The whole prompt, although it is computed in chunks.
            await lease.allocate(length, timeout=CAPACITY_WAIT_SECONDS)
            cached = lease.cached_tokens
            request = Request(lease, [*prompt], length, length + max_tokens, cached, cached)
            self._start(request)
            try:
                yield request
            finally:
                request.has_left = True
                self._stop(request)
            lease.release(returns=label)  # not after an error

    async def tokens(self, request: Request) -> AsyncIterator[int]:
        """Yield the tokens of the answer as they are generated."""
        for _ in range(request.stop_length - request.prompt_length):
            while (output := await request.output.get()) is None:  # it was preempted
                lease, length, config = request.lease, len(request.tokens), self._engine.config
                # Before new requests, but behind those that run: else two preempted requests could
                # take turns to get the blocks of the other, and leave none for the next token.
                left = config.device_blocks - -(-length // config.block_tokens)
                reserve = max(config.reserve_blocks, min(len(self._running), left))
                await lease.resume(length, priority=-1, reserve_blocks=reserve)
                request.computed = lease.cached_tokens
                lease.append(request.tokens[self._engine.lengths([lease])[0] :])
                self._start(request)
            if isinstance(output, StepError):
                raise output
            if output in self._end_tokens:
                return
            yield output

    def _start(self, request: Request) -> None:
        self._running.append(request)
        self._admitted.set()

    def _stop(self, request: Request) -> None:
        with suppress(ValueError):  # it was stopped already
            self._running.remove(request)

    async def run(self) -> None:
        """Compute steps until the task is cancelled."""
        while True:
            if not self._running:
                self._admitted.clear()
                await self._admitted.wait()
            batch = [(request, 1) for request in self._running]
            try:
                if batch := await self._next_batch():
                    try:
                        await self._step(batch)
                    finally:
                        self._engine.step()  # on a GPU: step(event), recorded after the work
            except Exception:  # the requests of this step fail, but this loop must not end
                log.exception("a step of %d requests failed", len(batch))
                for request, _ in batch:
                    self._stop(request)
                    request.output.put_nowait(
                        StepError("the step failed; see the log of the server")
                    )

    async def _next_batch(self) -> list[tuple[Request, int]]:
        """Return the requests of the next step, each with its number of positions."""
        while waiting := [request for request in self._running if request.needs_position]:
            await self._preempt(self._running[-1])  # requests come and go meanwhile: look again
            waiting = [request for request in waiting if request in self._running]
            batch = self._engine.batch([request.lease for request in waiting])
            self._engine.advance(batch, [request.tokens[-1] for request in waiting])
        chosen = [(request, 1) for request in self._running if request.pending == 1]
        if prefill := [request for request in self._running if request.pending > 1]:
            chosen.append((prefill[0], min(prefill[0].pending, PROMPT_CHUNK)))
        return chosen

    async def _preempt(self, request: Request) -> None:
        """Give the blocks of a request back, and keep their KV in host memory if it has room."""
        self._stop(request)
        with suppress(aiokv.errors.TransferError):
            await request.lease.layers.wait_all()  # a swap needs onloads that have ended
        if not request.has_left and request.needs_position:
            request.lease.commit(request.computed)  # `advance` has not committed it
        try:
            if not request.has_left:
                await request.lease.preempt(swap=True)
        except aiokv.errors.AiokvError:  # host memory has no room, or a copy has failed
            if not request.has_left:
                await request.lease.preempt()
        request.output.put_nowait(None)

    async def _step(self, chosen: list[tuple[Request, int]]) -> None:
        leases = self._engine.batch([request.lease for request, _ in chosen])
        rows = [Row(r.tokens[: r.computed + n], r.computed, r.lease.block_table) for r, n in chosen]
        try:
            with self._engine.computing(leases) as step:
                tokens = await step.run(self._model, rows, self._engine.layers(leases))
        except aiokv.errors.TransferError:  # cached blocks did not arrive: compute them
            for request, _ in chosen:
                with suppress(aiokv.errors.TransferError):
                    await request.lease.layers.wait_all()
                if not request.has_left:
                    first = request.lease.recompute_from()
                    request.computed = request.computed if first is None else first
            return
        named: list[list[int]] = []  # the new token of each row, for the rows that decode further
        for (request, count), token in zip(chosen, tokens, strict=True):
            named.append([])
            if request.has_left:
                continue
            request.computed += count
            if request.pending == 0:
                request.tokens.append(token)
                request.output.put_nowait(token)
                if len(request.tokens) < request.stop_length and token not in self._end_tokens:
                    named[-1].append(token)
                    continue
                self._stop(request)
            request.lease.commit(request.computed)  # its full blocks can be hit from now on
        self._engine.advance(step, named)  # without room for a token: see _next_batch


# --- HTTP ------------------------------------------------------------------------------------

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Body(msgspec.Struct, kw_only=True):
    """Fields of both endpoints; other fields of OpenAI's API are ignored."""

    model: str | None = None
    n: Literal[1] = 1
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stream: bool = False
    cache_salt: str = ""  # requests share cached blocks within one salt only

    id_prefix: ClassVar[str]
    object_names: ClassVar[tuple[str, str]]  # of a whole answer, and of an event
    default_max_tokens: ClassVar[int]

    def limit(self, room: int) -> int:
        """Return the number of tokens to generate; ``room`` limits the default only."""
        default = max(min(self.default_max_tokens, room), 1)
        return self.max_completion_tokens or self.max_tokens or default


class Completion(Body, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[Annotated[int, msgspec.Meta(ge=0)]]

    id_prefix = "cmpl"
    object_names = "text_completion", "text_completion"
    default_max_tokens = 16

    def tokens(self, model: Model) -> list[int]:
        return model.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt

    def content(self, text: str, *, is_first: bool) -> dict[str, object]:
        return {"text": text, "logprobs": None}


class Chat(Body, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]

    id_prefix = "chatcmpl"
    object_names = "chat.completion", "chat.completion.chunk"
    default_max_tokens = 256

    def tokens(self, model: Model) -> list[int]:
        return model.encode_chat(self.messages)

    def content(self, text: str, *, is_first: bool) -> dict[str, object]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta" if self.stream else "message": role | {"content": text}}


class RequestError(Exception):
    """A request that cannot be served, with the status and code of its answer."""

    def __init__(self, message: object, status: int = 400, code: str | None = None) -> None:
        super().__init__(str(message))
        self.status, self.code = status, code


class ClientStalled(OSError):
    """The client has not read for too long."""


class Reply:
    """Answer to a client: a JSON object, or events, the last of which may be an error."""

    def __init__(self, send: Send) -> None:
        self._send, self._has_started, self.is_stream = send, False, False

    async def json(self, content: object, status: int = 200) -> None:
        await self._start(status, b"application/json")
        await self._write({"type": "http.response.body", "body": encode(content)})

    async def event(self, content: object) -> None:
        if not self.is_stream:
            self.is_stream = True
            await self._start(200, b"text/event-stream; charset=utf-8")
        body = b"data: %b\n\n" % encode(content)
        await self._write({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self) -> None:
        await self._write({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def error(self, error: object, status: int, code: str | None = None) -> None:
        """Answer with an error; after the beginning of the answer, only events can say so."""
        with suppress(ClientStalled, RuntimeError):  # RuntimeError: the last event was sent
            if self.is_stream:
                await self.event(problem(error, status, code))
                await self.end_events()
            elif not self._has_started:
                await self.json(problem(error, status, code), status)

    async def _start(self, status: int, kind: bytes) -> None:
        self._has_started = True
        headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
        await self._write({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, message: Message) -> None:
        """Send, but not for ever: uvicorn waits while its buffer of unsent bytes is full."""
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            text = f"the client has read too little for {SEND_SECONDS:g} s"
            raise ClientStalled(text) from None


class Text:
    """The text of tokens, piece by piece: a character may be spread over several tokens."""

    def __init__(self, model: Model) -> None:
        self._decode, self._tokens, self._start, self._read = model.decode, list[int](), 0, 0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> str:
        """Return what the token adds to the text; nothing while a character is incomplete."""
        self._tokens.append(token)
        new = self.rest()
        if new.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return new

    def rest(self) -> str:
        """Return the text that was not returned yet."""
        # Together with the tokens before them: a tokenizer may drop the first space of a text.
        before = self._decode(self._tokens[self._start : self._read])
        return self._decode(self._tokens[self._start :])[len(before) :]


class Endpoint:
    """ASGI app of ``POST /v1/completions`` or ``POST /v1/chat/completions``."""

    def __init__(self, scheduler: Scheduler, model: Model, body: type[Completion | Chat]) -> None:
        self._scheduler, self._model, self._body = scheduler, model, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            label = dict(scope["headers"]).get(b"x-aiokv-returns", b"").decode("latin-1")
            if len(label) > 64:
                raise RequestError(f"X-Aiokv-Returns has {len(label)} characters; at most 64")
            body, prompt, limit = await self._request(receive)
            async with cancelled_on_disconnect(receive):
                await self._answer(body, prompt, limit, label, reply)
        except ClientStalled:
            pass  # uvicorn closes the connection of an answer that is incomplete
        except RequestError as error:
            await reply.error(error, error.status, error.code)
        except aiokv.errors.CapacityError as error:
            await reply.error(error, 503)
        except (aiokv.errors.AiokvError, StepError) as error:
            await reply.error(error, 500)
        except asyncio.CancelledError:  # the answer has outlasted the time that `serve` grants
            await reply.error("the server has shut down", 503)

    async def _request(self, receive: Receive) -> tuple[Completion | Chat, list[int], int]:
        """Return a valid body, its prompt, and the number of tokens to generate."""
        content = await _content(receive)
        try:
            body = decode(content, type=self._body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(error) from None
        if body.model not in (None, self._model.name):
            text = f"the model {body.model!r} does not exist; this server has {self._model.name!r}"
            raise RequestError(text, 404, "model_not_found")
        prompt, most = body.tokens(self._model), self._scheduler.max_tokens
        limit = body.limit(most - len(prompt))
        if not prompt or len(prompt) + limit > most:
            text = f"prompt ({len(prompt)}) and max_tokens ({limit}): 1 to {most} tokens in total"
            raise RequestError(text, code="context_length_exceeded" if prompt else None)
        if max(prompt) >= self._model.vocabulary:
            text = f"prompt has token {max(prompt)}; it must be <= {self._model.vocabulary - 1}"
            raise RequestError(text)
        return body, prompt, limit

    async def _answer(
        self, body: Completion | Chat, prompt: list[int], limit: int, label: str, reply: Reply
    ) -> None:
        name, text, pieces = f"{body.id_prefix}-{uuid4().hex}", Text(self._model), list[str]()
        head = {"id": name, "object": body.object_names[body.stream], "created": int(time.time())}
        head |= {"model": self._model.name, "usage": None}

        def answer(text: str, reason: str | None = None) -> dict[str, object]:
            content = body.content(text, is_first=not reply.is_stream)
            return head | {"choices": [{"index": 0, **content, "finish_reason": reason}]}

        salt, admit = body.cache_salt, self._scheduler.admit
        async with admit(prompt, limit, salt=salt, name=name, label=label) as request:
            async for token in self._scheduler.tokens(request):
                piece = text.add(token)
                if not body.stream:
                    pieces.append(piece)
                elif piece:
                    await reply.event(answer(piece))
        # The blocks are free again, even if the client reads slowly.
        length, total = request.prompt_length, len(request.tokens)
        reason = "length" if text.num_tokens == limit else "stop"
        last = answer("".join([*pieces, text.rest()]), reason)
        last["usage"] = {
            "prompt_tokens": length,
            "completion_tokens": total - length,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        }
        if body.stream:
            await reply.event(last)
            await reply.end_events()
        else:
            await reply.json(last)


async def _content(receive: Receive) -> bytes:
    """Return the body of a request, or as much of it as a client that left has sent."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES:,} bytes", 413)
    return bytes(body)


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client leaves, and end it without an error.

    Args:
        receive: ``receive`` of the ASGI call, after the body of the request was read.
    """
    task, left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left or task.uncancel():  # the server has cancelled it, too
            raise
    finally:
        watcher.cancel()


def problem(message: object, status: int, code: str | None = None) -> dict[str, object]:
    """Return an error as OpenAI's API has it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": str(message), "type": kind, "param": None, "code": code}}


# --- the app ---------------------------------------------------------------------------------


def make_app(engine: aiokv.CacheEngine, model: Model) -> Starlette:
    """Return the ASGI app, which opens and closes the engine.

    ``/`` leads to the live page; metrics and probes are beside it, under ``/aiokv``.
    """
    scheduler = Scheduler(engine, model.step, model.end_tokens)
    observer, created = asgi(engine), int(time.time())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine, asyncio.TaskGroup() as tasks:
            steps = tasks.create_task(scheduler.run())
            yield
            steps.cancel()

    async def models(request: HttpRequest) -> JSONResponse:
        entry = {"id": model.name, "object": "model", "created": created, "owned_by": "aiokv"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def refuse(request: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status, content = error.status_code, problem(error.detail, error.status_code)
        return JSONResponse(content, status, headers=error.headers)

    routes = [
        Route("/v1/models", models),
        Route("/v1/completions", Endpoint(scheduler, model, Completion), methods=["POST"]),
        Route("/v1/chat/completions", Endpoint(scheduler, model, Chat), methods=["POST"]),
        Route("/", RedirectResponse("aiokv/"), methods=["GET"]),
        Mount("/aiokv", observer),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refuse})
    app.state.end_streams = observer.end_streams
    return app


def serve(
    app: Starlette, listener: socket.socket, *, grace_seconds: int = 30, log_level: str = "info"
) -> bool:
    """Serve until SIGTERM or Ctrl-C; return False if the engine could not be opened.

    After the signal, the server refuses new connections and waits for the answers in flight. When
    ``grace_seconds`` have passed, these end with an error. The signal is then raised again.
    """
    config = uvicorn.Config(
        app, loop="uvloop", log_level=log_level, timeout_graceful_shutdown=grace_seconds
    )

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.end_streams()  # streams of /aiokv/events do not end by themselves
            await super().shutdown(sockets)

    server = Server(config)
    server.run(sockets=[listener])
    return server.started
