"""``aiokv serve``: the demo's model behind an OpenAI-like HTTP endpoint."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from aiokv.cli.arguments import add_count, add_option, from_arguments
from aiokv.cli.listening import listen
from aiokv.cli.running import Terminated
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    import socket

    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

EPILOG = """\
The model has random weights, so its text has no meaning; a token is a byte. The source to copy is
aiokv/demo/http_server.py. /aiokv/ on the same port is the live page of the cache, /aiokv/metrics
is for Prometheus, and /aiokv/readyz is for readiness probes.

    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "hello", "stream": true}'

After SIGTERM or Ctrl-C, the server refuses new connections and waits at most --grace seconds for
the answers in flight. Streams of /aiokv/events end at once.

exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 the engine could not be opened, 2 bad usage
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``serve`` command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve the demo's model over HTTP, like OpenAI's completions",
        description="Serve the demo's model on the cpu device at POST /v1/completions.",
        epilog=EPILOG,
    )
    add_option(parser, "--host", str, "127.0.0.1", "address to bind", "HOST")
    add_count(parser, "--port", 8000, "port to bind; 0 for any free port", minimum=0)
    add_count(parser, "--block-tokens", 16, "tokens per block")
    add_count(parser, "--device-blocks", 1024, "blocks of the device tier")
    add_count(parser, "--host-blocks", 4096, "blocks of the host tier; 0 for none", minimum=0)
    add_count(parser, "--grace", 30, "seconds to wait for answers in flight", "S", minimum=0)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives.

    Raises:
        ConfigError: starlette or uvicorn is not installed, or a value is out of range.
        UsageError: the address cannot be bound.
    """
    try:
        import uvicorn

        app = _make_app(args)
    except ImportError as error:
        raise ConfigError(
            f"aiokv serve needs the package {error.name}", hint="pip install 'aiokv[serve]'"
        ) from None
    level = "info" if args.log_level == "warning" else args.log_level
    config = uvicorn.Config(
        _refusing_at_the_end(app),
        loop="uvloop",
        log_level=level,
        timeout_graceful_shutdown=args.grace,
    )

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.end_streams()  # streams of /aiokv/events do not end by themselves
            await super().shutdown(sockets)

    server = Server(config)
    with listen("--port", args.host, args.port) as listener:
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        print(f"aiokv: running on {address} (Ctrl-C stops)", file=sys.stderr, flush=True)
        with suppress(Terminated):  # uvicorn raises the signal again when it has shut down
            server.run(sockets=[listener])
    return 0 if server.started else 1  # uvicorn has logged why the engine could not be opened


def _refusing_at_the_end(app: ASGIApp) -> ASGIApp:
    """Let answers that the server cancels end with an error for the client, not with a traceback.

    Args:
        app: answers with JSON, or with a stream of events.
    """
    from starlette.responses import JSONResponse

    error = JSONResponse({"error": {"message": "the server has shut down", "code": 503}}, 503)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError:  # --grace has passed
            if scope["type"] != "http":
                raise
            if not has_started:
                return await error(scope, receive, send)
            event = b"data: %b\n\n" % bytes(error.body)
            with suppress(RuntimeError):  # an answer with a length takes no further bytes
                await send({"type": "http.response.body", "body": event, "more_body": False})

    return answer


def _make_app(args: argparse.Namespace) -> Starlette:
    from aiokv import CacheConfig, CacheEngine
    from aiokv.demo.http_server import make_app
    from aiokv.demo.transformer import NumpyTransformer
    from aiokv.demo.weights import GroupedConfig, random_weights

    config = from_arguments(CacheConfig, args)
    sizes = GroupedConfig(vocab=256)
    max_context_tokens = args.device_blocks * args.block_tokens
    model = NumpyTransformer(sizes, random_weights(sizes), max_context_tokens=max_context_tokens)
    cache = model.new_cache(args.device_blocks, args.block_tokens)
    engine = CacheEngine(config, cache.regions(), model.new_device())
    return make_app(engine, model, cache)
