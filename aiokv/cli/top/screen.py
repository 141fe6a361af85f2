"""One screen of ``aiokv top``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from aiokv.base.groups import ATTENTION
from aiokv.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

    from aiokv.base.statistics import RouteStatistics, Statistics, TierStatistics
    from aiokv.cli.top.figures import EngineFigures

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


def _engine(name: str, figures: EngineFigures, max_leases: int) -> Iterator[RenderableType]:
    total, recent, seconds = figures.total, figures.recent, figures.seconds
    yield _plain(f"engine {name}", "bold")
    yield Text(_hits("since the start", total))
    if recent is not None and seconds is not None:
        text = _hits(f"last {format_seconds(seconds)}", recent)
        yield Text(f"{text}, {recent.prompt_tokens / seconds:,.0f} tokens/s")
    granted, evicted, cpu = UNKNOWN, UNKNOWN, UNKNOWN
    if recent is not None and seconds is not None:
        granted = _rate(recent.grants / seconds)
        evicted = _rate(recent.attention.device.evicted_blocks / seconds)
        cpu = _share(recent.poller.busy_seconds / seconds)
    yield Text(
        f"leases {total.leases:,}, waiting {total.waiting:,}, granted {granted}, "
        f"evicted {evicted} blocks, poller p99 "
        f"{format_seconds(total.poller.latency_p99_seconds)}, CPU {cpu}"
    )
    yield _tiers(total)
    if _shown_routes(total):
        yield _routes(figures)
    if total.stores:
        yield _stores(total)
    if figures.leases and max_leases > 0:
        yield _leases(figures, max_leases)


def _hits(name: str, statistics: Statistics) -> str:
    def share(tokens: int) -> str:
        return _share(tokens / statistics.prompt_tokens if statistics.prompt_tokens else None)

    text = (
        f"{name}: {statistics.prompt_tokens:,} prompt tokens, {share(statistics.hit_tokens)} "
        f"cached (device {share(statistics.hit_device_tokens)}, "
        f"host {share(statistics.hit_host_tokens)})"
    )
    store = statistics.hit_store_tokens
    return f"{text}, {share(store)} from stores" if store else text


def _shown_tiers(statistics: Statistics) -> dict[str, TierStatistics]:
    """Return the tiers of each group that have a capacity, by name."""
    found = {}
    for name, group in statistics.groups.items():
        is_attention = name == ATTENTION
        found["device" if is_attention else name] = group.device
        if group.host.blocks:
            found["host" if is_attention else f"{name}, host"] = group.host
    return found


def _tiers(statistics: Statistics) -> Table:
    table = _table("tier", "used", "", "blocks", "cached", "leased", "moving", "free", left=1)
    for name, tier in _shown_tiers(statistics).items():
        share = tier.used_share
        filled = round(share * BAR_CELLS)
        table.add_row(
            _plain(name),
            f"{share:.1%}",
            "█" * filled + "░" * (BAR_CELLS - filled),
            f"{tier.blocks:,}",
            f"{tier.cached:,}",
            f"{tier.leased:,}",
            f"{tier.in_flight:,}",
            f"{tier.free:,}",
        )
    return table


def _shown_routes(statistics: Statistics) -> dict[tuple[str, str], RouteStatistics]:
    """Return the groups and routes that have moved something, or are to."""
    return {
        (group, name): route
        for group, transfers in statistics.worker.groups.items()
        for name, route in transfers.routes.items()
        if route.queued or route.submitted or route.done or route.failed
    }


def _routes(figures: EngineFigures) -> Table:
    table = _table("route", "queued", "running", "done", "rate", "moved", "speed", "failed", left=1)
    for (group, name), route in _shown_routes(figures.total).items():
        rate = speed = UNKNOWN
        if figures.recent is not None and figures.seconds is not None:
            recent = figures.recent.worker.groups[group].routes[name]
            rate = _rate(recent.done / figures.seconds)
            speed = f"{format_bytes(round(recent.moved_bytes / figures.seconds))}/s"
        table.add_row(
            _plain(name if group == ATTENTION else f"{group} {name}"),
            f"{route.queued:,}",
            f"{route.submitted:,}",
            f"{route.done:,}",
            rate,
            format_bytes(route.moved_bytes),
            speed,
            Text(f"{route.failed:,}", style="red" if route.failed else ""),
        )
    return table


def _stores(statistics: Statistics) -> Table:
    table = _table(
        "store", "group", "reads", "saves", "found", "loaded", "saved", "used", "failures"
    )
    for store in statistics.stores:
        failures = store.wrong_blocks + store.failed_blocks + store.timeouts
        used_bytes = store.store.used_bytes
        table.add_row(
            _plain(store.url),
            _plain(store.group),
            _breaker(store.reading),
            _breaker(store.saving),
            _share(store.found_keys / store.lookup_keys if store.lookup_keys else None),
            f"{store.loaded_blocks:,}",
            f"{store.saved_blocks:,}",
            format_bytes(used_bytes) if used_bytes >= 0 else UNKNOWN,
            Text(f"{failures:,}", style="red" if failures else ""),
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


def _rate(per_second: float) -> str:
    return f"{per_second:,.1f}/s"


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%}"
