"""Arguments of ``aiokv replay`` about sizes: bytes per block, capacities to sweep, and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aiokv.base.units import format_bytes
from aiokv.cli.arguments import add_count, at_least, size_bytes
from aiokv.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from aiokv.trace.report import CapacityPoint, ReplayReport

DEFAULT_BLOCK_BYTES = 2 << 20  # of 16 tokens of an 8B model
PLOT_SUFFIXES = (".svg", ".png")


class Capacity(NamedTuple):
    """Size of a tier, as it was written: in bytes, or in blocks."""

    amount: int
    is_bytes: bool

    def blocks(self, block_bytes: int, flag: str) -> int:
        """Return the number of whole blocks.

        Raises:
            UsageError: the size is not 0, but smaller than a block.
        """
        if not self.is_bytes:
            return self.amount
        if 0 < self.amount < block_bytes:
            raise UsageError(
                f"{flag} has {format_bytes(self.amount)}, which is less than a block of "
                f"{format_bytes(block_bytes)}"
            )
        return self.amount // block_bytes


class Sweep(NamedTuple):
    """Numbers of blocks of each tier; an empty list is not varied, all empty: by the trace."""

    device: list[int]
    host: list[int]
    disk: list[int]


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments about sizes."""
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--model",
        metavar="PATH",
        help="config.json, its folder, or ORG/NAME in the local cache of Hugging Face: the model "
        "that determines the bytes per block",
    )
    size.add_argument(
        "--bytes-per-token",
        type=size_bytes,
        metavar="SIZE",
        help="KV bytes per token of a rank (default: 2 MiB per block)",
    )
    group.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="DTYPE",
        help="with --model: dtype of KV (default: auto)",
    )
    add_count(group, "--tensor-parallel", 1, "with --model: ranks; sizes are those of one rank")
    for tier, minimum in (("", 1), ("host-", 0), ("disk-", 0)):
        name = tier.removesuffix("-") or "device"
        group.add_argument(
            f"--{tier}capacities",
            type=_capacities(minimum),
            metavar="SIZE,SIZE,...",
            help=f"sizes of the {name} tier to replay, as 40GiB or in blocks",
        )


def add_plot(group: argparse._ArgumentGroup) -> None:
    """Add the argument of the plot."""
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg|FILE.png",
        help="draw the hit rate over the capacities, by default over eight device sizes "
        "up to one that holds all blocks of the trace; needs matplotlib",
    )


def block_bytes(args: argparse.Namespace) -> int:
    """Return the bytes per block.

    Raises:
        ConfigError: the model cannot be read.
    """
    if args.model is not None:
        from aiokv.model.shape import ModelShape

        shape = ModelShape.from_config(args.model)
        return shape.bytes_per_block(
            args.block_tokens, kv_dtype=args.kv_dtype, tensor_parallel=args.tensor_parallel
        )
    if args.bytes_per_token is not None:
        per_token: int = args.bytes_per_token
        return per_token * int(args.block_tokens)
    return DEFAULT_BLOCK_BYTES


def sweep_of(args: argparse.Namespace) -> Sweep | None:
    """Return the capacities to replay; None if none were asked for.

    Raises:
        UsageError: a size is smaller than a block.
        ConfigError: the model cannot be read.
    """
    per_block = block_bytes(args)

    def blocks(flag: str, capacities: Sequence[Capacity] | None) -> list[int]:
        return sorted({capacity.blocks(per_block, flag) for capacity in capacities or ()})

    found = Sweep(
        blocks("--capacities", args.capacities),
        blocks("--host-capacities", args.host_capacities),
        blocks("--disk-capacities", args.disk_capacities),
    )
    if not any(found):
        return found if args.plot else None
    return found if found.device else found._replace(device=[args.device_blocks])


def check_plot(plot: Path | None) -> None:
    """Check, before the work starts, that the chart can be drawn.

    Raises:
        UsageError: the suffix of the file is not supported, or matplotlib cannot be imported.
    """
    if plot is None:
        return
    if plot.suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(
            f"--plot {plot}: the suffix {plot.suffix!r} is not supported; it must be "
            f"{' or '.join(PLOT_SUFFIXES)}",
            hint=f"--plot {plot.with_suffix(PLOT_SUFFIXES[0])}",
        )
    from aiokv.trace.plot import check_plotting

    check_plotting()


def write_plot(path: Path, report: ReplayReport) -> None:
    """Draw the capacities of a report.

    Raises:
        UsageError: the file cannot be written, or there are too many lines.
    """
    from aiokv.cli.files import write_file
    from aiokv.trace.plot import draw_hit_rates
    from aiokv.trace.replay import swept_tier

    points = report.capacities or []
    title = f"{Path(report.trace).name}: prompt tokens found in the cache"
    data = draw_hit_rates(points, swept_tier(points), title, path.suffix.lower())
    write_file(path, data)


def sweep_rows(points: Sequence[CapacityPoint]) -> Iterator[tuple[str, str]]:
    """Yield a row per point of a sweep, then one per knee: more memory buys few more hits."""
    for point in points:
        hits = f"{point.hit_tokens['total']:,} ({point.hit_rate:.2%})"
        yield f"hit tokens with {_sizes(point)}", hits
    for point in points:
        if point.is_knee:
            yield "knee of the curve", f"{_sizes(point)}: {point.hit_rate:.2%}"


def _sizes(point: CapacityPoint) -> str:
    sizes = [("device", point.device_blocks)]
    sizes += [("host", point.host_blocks)] if point.host_blocks else []
    sizes += [("disk", point.disk_blocks)] if point.disk_blocks else []
    return ", ".join(
        f"{blocks:,} {tier} blocks ({format_bytes(point.num_bytes(tier))})"
        for tier, blocks in sizes
    )


def _capacities(minimum: int) -> Callable[[str], list[Capacity]]:
    def parse(text: str) -> list[Capacity]:
        return [_capacity(part.strip(), minimum) for part in text.split(",")]

    return parse


def _capacity(text: str, minimum: int) -> Capacity:
    if text.isdecimal():
        return Capacity(at_least(minimum)(text), is_bytes=False)
    return Capacity(size_bytes(text), is_bytes=True)
