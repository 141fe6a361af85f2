"""``aiokv serve``: the demo's model behind an OpenAI-like HTTP endpoint."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from aiokv.cli.arguments import add_count, add_option, from_arguments
from aiokv.cli.listening import listen
from aiokv.cli.running import Terminated
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from starlette.applications import Starlette

EPILOG = """\
The model has random weights, so its text has no meaning; a token is a byte. The source to copy is
aiokv/demo/http_server.py. The page at / shows the cache at work; /aiokv/metrics is for Prometheus,
and /aiokv/readyz is for readiness probes.

    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "hello", "stream": true}'

After SIGTERM or Ctrl-C, the server refuses new connections and waits at most --grace seconds for
the answers in flight. Streams of /aiokv/events end at once.

exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 the engine could not be opened, 2 bad usage
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``serve`` command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve the demo's model over HTTP, with OpenAI's API",
        description="Serve the demo's model on the cpu device. Paths: /v1/models, "
        "/v1/completions, /v1/chat/completions.",
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
        from aiokv.demo.http_server import serve

        app = _make_app(args)
    except ImportError as error:
        raise ConfigError(
            f"aiokv serve needs the package {error.name}", hint="pip install 'aiokv[serve]'"
        ) from None
    level = "info" if args.log_level == "warning" else args.log_level
    with listen("--port", args.host, args.port) as listener:
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        print(f"aiokv: running on {address} (Ctrl-C stops)", file=sys.stderr, flush=True)
        has_started = True
        with suppress(Terminated):  # the signal, which is raised again at the end
            has_started = serve(app, listener, grace_seconds=args.grace, log_level=level)
    return 0 if has_started else 1  # uvicorn has logged why the engine could not be opened


def _make_app(args: argparse.Namespace) -> Starlette:
    from aiokv import CacheConfig, CacheEngine
    from aiokv.demo.byte_model import ByteModel
    from aiokv.demo.http_server import MAX_RUNNING, make_app
    from aiokv.demo.transformer import NumpyTransformer
    from aiokv.demo.weights import GroupedConfig, random_weights

    config = from_arguments(CacheConfig, args)
    config = replace(config, reserve_blocks=min(MAX_RUNNING, args.device_blocks // 8))
    sizes = GroupedConfig(vocab=256)
    max_context_tokens = args.device_blocks * args.block_tokens
    model = NumpyTransformer(sizes, random_weights(sizes), max_context_tokens=max_context_tokens)
    cache = model.new_cache(args.device_blocks, args.block_tokens)
    engine = CacheEngine(config, cache.regions(), model.new_device())
    return make_app(engine, ByteModel(model, cache))
