"""``aiokv store serve``, ``stat``, ``hot`` and ``warm``: the shared memory of a host."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiokv.cli.arguments import add_count, add_json, positive_size_bytes
from aiokv.cli.running import Terminated, run_async

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from aiokv.stores import StoreUse
    from aiokv.stores.host.messages import Report

_SERVE = """\
Own memory that the engines of this host share. Each engine attaches with the store
host://PATH, and finds the blocks of all of them, also after its own restart.
"""
_STAT = "Print the blocks and the engines of a running `aiokv store serve`."
_HOT = """\
Print the blocks that a running `aiokv store serve` has used last, the last one used first: the key
and the bytes of a block per line.
"""
_WARM = """\
Copy blocks from a store that servers share to a store of this server, before it gets requests. The
list of the blocks comes from `aiokv store hot` on a server that has been running for a while:

  ssh server-1 aiokv store hot host:///run/aiokv/host.sock |
    aiokv store warm host:///run/aiokv/host.sock --source redis://cache:6379/0
"""


def add_actions(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the actions of ``ACTIONS``."""
    serve = actions.add_parser("serve", help="share memory among engines", description=_SERVE)
    serve.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="Unix socket to make, in a directory that no other user can write",
    )
    serve.add_argument(
        "--bytes",
        type=positive_size_bytes,
        required=True,
        metavar="SIZE",
        help="limit of the shared memory, such as 64GiB",
    )
    serve.add_argument(
        "--below",
        metavar="URL",
        help="disk store that gets all blocks, too, such as 'disk:/nvme/kv?bytes=400GiB'",
    )
    stat = actions.add_parser("stat", help="print counts of shared memory", description=_STAT)
    stat.add_argument("url", metavar="URL", help="host://PATH of the service")
    add_json(stat)
    hot = actions.add_parser("hot", help="list the blocks that were used last", description=_HOT)
    hot.add_argument("url", metavar="URL", help="host://PATH of the service")
    add_count(hot, "--blocks", 100_000, "most blocks of each size")
    warm = actions.add_parser(
        "warm", help="copy blocks to this server before it gets requests", description=_WARM
    )
    warm.add_argument("url", metavar="URL", help="store that gets the blocks, such as host://PATH")
    warm.add_argument("--source", metavar="URL", required=True, help="store that has the blocks")
    warm.add_argument(
        "--list", metavar="FILE", type=Path, help="list of the blocks (default: standard input)"
    )
    add_json(warm)


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the socket cannot be created, or ``--below`` is wrong.
    """
    from aiokv.base.units import format_bytes
    from aiokv.errors import ConfigError
    from aiokv.stores.host.service import HostService
    from aiokv.stores.options import store_path

    path = Path(store_path(args.path))
    below = _below(args.below)
    if args.bytes > sys.maxsize:
        raise ConfigError(f"--bytes is {args.bytes}; it must be at most {sys.maxsize}")

    async def run() -> None:
        async with HostService(path, args.bytes, below):
            size = format_bytes(args.bytes)
            print(f"aiokv: {size} at host://{path} (Ctrl-C stops)", file=sys.stderr, flush=True)
            await asyncio.get_running_loop().create_future()

    with suppress(Terminated):  # the signal, which is raised again at the end
        run_async(run())
    return 0


def _below(url: str | None) -> StoreUse | None:
    from aiokv.stores import stores_from

    return None if url is None else stores_from([url])[0]


def stat(args: argparse.Namespace) -> int:
    """Print the counts of a service.

    Raises:
        ConfigError: the URL is wrong.
        StoreError: no service listens there.
    """
    from msgspec.structs import asdict

    from aiokv.cli.files import print_json
    from aiokv.stores.host.link import inspect
    from aiokv.stores.options import url_path

    path = Path(url_path(args.url, "host:///run/aiokv/host.sock"))
    report = run_async(inspect(path))
    if args.json:
        sizes = [asdict(counts) for counts in report.sizes]
        print_json(args.json, asdict(report) | {"sizes": sizes})
    else:
        for name, value in _rows(report):
            print(f"{name}: {value}")
    return 0


def hot(args: argparse.Namespace) -> int:
    """Print the blocks that a service has used last.

    Raises:
        ConfigError: the URL is wrong.
        StoreError: no service listens there.
    """
    from aiokv.stores.options import url_path
    from aiokv.stores.warming import MAX_BLOCKS, hot_blocks

    path = Path(url_path(args.url, "host:///run/aiokv/host.sock"))
    for block in run_async(hot_blocks(path, min(args.blocks, MAX_BLOCKS))):
        print(block)
    return 0


def warm(args: argparse.Namespace) -> int:
    """Copy blocks between stores.

    Raises:
        AiokvError: a URL or the list is wrong, or a store failed.
        OSError: the list cannot be read.
    """
    from msgspec.structs import asdict

    from aiokv.cli.files import print_json
    from aiokv.cli.progress import show_progress
    from aiokv.stores import stores_from
    from aiokv.stores.warming import HotBlock, warm

    source, target = stores_from([args.source, args.url])
    lines = sys.stdin if args.list is None else args.list.read_text().splitlines()
    blocks = [HotBlock.parse(line) for line in lines]
    with show_progress("blocks", sys.stderr) as stages:
        result = run_async(warm(source.store, target.store, blocks, stages("copying", len(blocks))))
    if args.json:
        print_json(args.json, result)
    else:
        for name, count in asdict(result).items():
            print(f"{name.replace('_', ' ')}: {count:,}")
    return 0


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    from aiokv.base.units import format_bytes

    yield "limit", format_bytes(report.capacity_bytes)
    yield "memory in use", format_bytes(sum(counts.used_bytes for counts in report.sizes))
    if report.below:
        yield "store below", report.below
    for counts in report.sizes:
        text = f"{counts.blocks:,}, {format_bytes(counts.used_bytes)}, {counts.engines} engines"
        text += f", {counts.evicted_blocks:,} evicted"
        if report.below:
            text += f", {counts.saved_below:,} saved below, {counts.loaded_below:,} loaded from it"
        yield f"blocks of {counts.payload_bytes:,} bytes", text


ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "serve": serve,
    "stat": stat,
    "hot": hot,
    "warm": warm,
}
