"""One screen of ``aiokv top``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from aiokv.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

    from aiokv.cli.top.figures import EngineFigures, HitFigures

BAR_CELLS: Final = 20
UNKNOWN: Final = "-"


def screen(
    title: str, engines: Mapping[str, EngineFigures], *, max_leases: int, problem: str = ""
) -> RenderableType:
    """Return everything that is shown.

    Args:
        title: first line.
        engines: figures by engine; empty before the first answer.
        max_leases: leases to show per engine.
        problem: reason why the figures are old; empty if they are current.
    """
    parts: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
    if problem:
        parts.append(_plain(problem, "bold red"))
    if not engines and not problem:
        parts.append(Text("the server has no engines"))
    for name, figures in engines.items():
        parts.append(Text())
        parts += _engine(name, figures, max_leases)
    return Group(*parts)


def fixed_lines(engines: Mapping[str, EngineFigures]) -> int:
    """Return the lines that a screen has without leases."""
    lines = 2
    for figures in engines.values():
        tables = (len(figures.tiers), len(figures.routes), len(figures.stores))
        lines += 6 + sum(rows + 1 for rows in tables if rows)
    return lines


def _engine(name: str, figures: EngineFigures, max_leases: int) -> Iterator[RenderableType]:
    yield _plain(f"engine {name}", "bold")
    yield Text(_hits("since the start", figures.total))
    if figures.recent is not None and figures.seconds is not None:
        recent = _hits(f"last {format_seconds(figures.seconds)}", figures.recent)
        yield Text(f"{recent}, {figures.recent.prompt_tokens / figures.seconds:,.0f} tokens/s")
    yield Text(
        f"leases {figures.num_leases:,}, waiting {figures.waiting:,}, granted "
        f"{_rate(figures.grants_per_second)}, evicted {_rate(figures.evictions_per_second)} blocks,"
        f" poller p99 {format_seconds(figures.poller_p99_seconds)}, CPU "
        f"{_share(figures.poller_share)}"
    )
    yield _tiers(figures)
    if figures.routes:
        yield _routes(figures)
    if figures.stores:
        yield _stores(figures)
    if figures.leases and max_leases > 0:
        yield _leases(figures, max_leases)


def _hits(name: str, hits: HitFigures) -> str:
    hit = hits.device + hits.host
    text = (
        f"{name}: {hits.prompt_tokens:,} prompt tokens, {_share(hits.share(hit))} cached "
        f"(device {_share(hits.share(hits.device))}, host {_share(hits.share(hits.host))})"
    )
    return f"{text}, {_share(hits.share(hits.store))} from stores" if hits.store else text


def _tiers(figures: EngineFigures) -> Table:
    table = _table("tier", "used", "", "blocks", "cached", "leased", "moving", "free", left=1)
    for tier in figures.tiers:
        share = tier.used_share
        filled = round(share * BAR_CELLS)
        table.add_row(
            tier.name,
            f"{share:.1%}",
            "█" * filled + "░" * (BAR_CELLS - filled),
            f"{tier.capacity:,}",
            f"{tier.cached:,}",
            f"{tier.leased:,}",
            f"{tier.in_flight:,}",
            f"{tier.free:,}",
        )
    return table


def _routes(figures: EngineFigures) -> Table:
    table = _table("route", "queued", "running", "done", "rate", "moved", "speed", "failed", left=1)
    for route in figures.routes:
        speed = UNKNOWN
        if route.bytes_per_second is not None:
            speed = f"{format_bytes(round(route.bytes_per_second))}/s"
        table.add_row(
            _plain(route.name.replace("_", " ")),
            f"{route.queued:,}",
            f"{route.submitted:,}",
            f"{route.done:,}",
            _rate(route.done_per_second),
            format_bytes(route.moved_bytes),
            speed,
            Text(f"{route.failed:,}", style="red" if route.failed else ""),
        )
    return table


def _stores(figures: EngineFigures) -> Table:
    table = _table(
        "store", "pool", "reads", "saves", "found", "loaded", "saved", "used", "failures"
    )
    for store in figures.stores:
        table.add_row(
            _plain(store.url),
            _plain(store.pool),
            _breaker(store.reading),
            _breaker(store.saving),
            _share(store.found_share),
            f"{store.loaded_blocks:,}",
            f"{store.saved_blocks:,}",
            format_bytes(store.used_bytes) if store.used_bytes >= 0 else UNKNOWN,
            Text(f"{store.failures:,}", style="red" if store.failures else ""),
        )
    return table


def _breaker(state: str) -> Text:
    """Return the state of a breaker: closed lets operations pass."""
    words = {"closed": ("up", "green"), "open": ("down", "red"), "probing": ("probing", "yellow")}
    word, style = words.get(state, (state, ""))
    return _plain(word, style)


def _leases(figures: EngineFigures, max_leases: int) -> Table:
    table = _table("lease", "state", "waits for", "prompt", "cached", "blocks", "age", left=3)
    for lease in figures.leases[:max_leases]:
        table.add_row(
            _plain(lease.owner),
            _plain(lease.state),
            _plain(lease.waits_for, "yellow"),
            f"{lease.prompt_tokens:,}",
            f"{lease.cached_tokens:,}",
            f"{lease.blocks:,}",
            format_seconds(lease.age_seconds),
        )
    return table


def _plain(text: str, style: str = "") -> Text:
    """Return text of the server without markup, and without the control codes of terminals."""
    return Text("".join(c if c.isprintable() else "\ufffd" for c in text), style=style)


def _table(*columns: str, left: int = 4) -> Table:
    """Return a table whose first ``left`` columns are aligned to the left."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def _rate(per_second: float | None) -> str:
    return UNKNOWN if per_second is None else f"{per_second:,.1f}/s"


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%}"
