"""Figures of an engine that are shown: statistics, and changes since the previous dump."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aiokv.base.statistics import DurationHistogram, Statistics, metric_of
from aiokv.cli.top.dump import Lease  # noqa: TC001  (msgspec)

if TYPE_CHECKING:
    from aiokv.cli.top.dump import Dump, EngineState

T = TypeVar("T")


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        seconds: time since the dump before; None for the first.
        total: statistics of the engine.
        recent: statistics whose counters are changes since the dump before; None for the first.
        leases: leases; those that wait first, then the oldest.
    """

    seconds: float | None
    total: Statistics
    recent: Statistics | None
    leases: list[Lease]


def figures_of(dump: Dump, before: Dump | None) -> dict[str, EngineFigures]:
    """Return the figures of each engine.

    Args:
        dump: the newest dump.
        before: an earlier one; None for none. An engine whose counters are smaller now, as after a
            restart, has no recent changes.
    """
    found = {}
    for name, engine in dump.engines.items():
        old = None if before is None else before.engines.get(name)
        seconds = 0.0 if before is None else dump.time_seconds - before.time_seconds
        is_later = old is not None and seconds > 0 and not _has_restarted(engine, old)
        found[name] = EngineFigures(
            seconds=seconds if is_later else None,
            total=engine.statistics,
            recent=since(engine.statistics, old.statistics) if is_later and old else None,
            leases=sorted(
                engine.leases, key=lambda lease: (not lease.waits_for, -lease.age_seconds)
            ),
        )
    return found


def _has_restarted(now: EngineState, before: EngineState) -> bool:
    now_, before_ = now.statistics, before.statistics
    return now_.prompt_tokens < before_.prompt_tokens or now_.grants < before_.grants


def since(now: T, before: T) -> T:
    """Return statistics whose counters are the changes since earlier ones; gauges are those of now.

    A branch that the earlier statistics lack, such as a store that was added, is that of now.
    """
    if not isinstance(now, msgspec.Struct) or isinstance(now, DurationHistogram):
        return now
    changed: dict[str, Any] = {}
    for field in now.__struct_fields__:
        new, old = getattr(now, field), getattr(before, field)
        metric = metric_of(type(now), field)
        is_counter = metric is not None and metric.kind == "counter"
        if isinstance(new, dict):
            pairs = {key: (value, old.get(key)) for key, value in new.items()}
            changed[field] = {key: _change(*pair, is_counter) for key, pair in pairs.items()}
        elif isinstance(new, list):
            old = old if len(old) == len(new) else [None] * len(new)
            changed[field] = [_change(*pair, is_counter) for pair in zip(new, old, strict=True)]
        else:
            changed[field] = _change(new, old, is_counter)
    return type(now)(**changed)


def _change(new: Any, old: Any, is_counter: bool) -> Any:
    if old is None:
        return new
    return new - old if is_counter else since(new, old)
