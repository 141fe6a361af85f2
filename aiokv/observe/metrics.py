"""Metrics of an engine for Prometheus, read from its statistics at each scrape.

::

    text = exposition(engine)                           # one engine, label engine="default"
    text = exposition({"chat": engine, "code": other})  # several

The fields of the statistics name their metrics: see :mod:`aiokv.base.statistics`. The text is a
valid response to a scrape; see ``CONTENT_TYPE``. Labels are bounded: no metric has a label of
tokens, requests or owners, and salts beyond the largest ones are summed up as ``"other"``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

import aiokv
from aiokv.base.statistics import UNKNOWN, DurationHistogram, Label, Metric, mark_of
from aiokv.observe.exposition import CONTENT_TYPE, Family, Sample, labelled, merged, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.base.statistics import GuardStatistics
    from aiokv.engine import CacheEngine

__all__ = ["CONTENT_TYPE", "DEFAULT_ENGINE", "MAX_SALTS", "exposition", "families", "named_engines"]

DEFAULT_ENGINE: Final = "default"
"""Name of an engine that is given without one."""

MAX_SALTS: Final = 20
"""Number of salts that are labels, those with the most blocks; the others are ``"other"``."""

OTHER_SALTS: Final = "other"


def exposition(
    engines: CacheEngine | Mapping[str, CacheEngine], *, salt_label: Callable[[str], str] = str
) -> str:
    """Return the metrics of one or several engines as Prometheus text, format 0.0.4.

    Args:
        engines: an engine, or engines by name, on whose loops the call is made. The name is the
            label ``engine``.
        salt_label: returns the label of a salt, which may name a tenant.

    Raises:
        UsageError: the call is made in another thread than that of an engine's loop.
    """
    return text_of(
        merged(
            family
            for name, engine in named_engines(engines).items()
            for family in labelled(families(engine, salt_label=salt_label), {"engine": name})
        )
    )


def named_engines(
    engines: CacheEngine | Mapping[str, CacheEngine],
) -> Mapping[str, CacheEngine]:
    """Return engines by name; one without a name is ``DEFAULT_ENGINE``."""
    return engines if isinstance(engines, Mapping) else {DEFAULT_ENGINE: engines}


def families(engine: CacheEngine, *, salt_label: Callable[[str], str] = str) -> list[Family]:
    """Return all metrics of an engine, without the label ``engine``.

    Args:
        engine: the engine.
        salt_label: as for ``exposition``.

    Raises:
        UsageError: the call is made in another thread than that of the engine's loop.
    """
    return merged(_families(engine, salt_label))


def _families(engine: CacheEngine, salt_label: Callable[[str], str]) -> Iterator[Family]:
    statistics = engine.statistics()
    yield _one("aiokv_info", "Version of aiokv.", 1, version=aiokv.__version__)
    yield _one("aiokv_block_tokens", "Tokens per block.", engine.config.block_tokens)
    yield _one(
        "aiokv_failed",
        "1 after the device or a rank has failed, so that no request is granted; else 0.",
        int(engine.health().failure != ""),
    )
    yield Family(
        "aiokv_asleep",
        "gauge",
        "1 while the memory of the tier is freed by sleep; else 0.",
        [Sample("", {"tier": t}, int(t in engine.asleep)) for t in ("device", "host")],
    )
    yield from _quota_families(engine, salt_label)
    yield from _rows(
        msgspec.structs.replace(statistics, stores=list(_with_names(statistics.stores))), {}
    )
    failures = [Sample("", {"kind": kind}, count) for kind, count in statistics.failures.items()]
    yield Family("aiokv_failures_total", "counter", "Failures by kind.", failures)


_RETAINED: Final = "Blocks of a salt that CacheEngine.retain keeps and no lease uses"


def _quota_families(engine: CacheEngine, salt_label: Callable[[str], str]) -> Iterator[Family]:
    """Yield the blocks of the largest salts, and the sum of the others."""
    retained = engine.inspect.retained_blocks_by_salt()
    if retained:
        yield _by_salt("aiokv_salt_retained_blocks", _RETAINED, retained, salt_label)
    if engine.config.salt_quota_blocks is None:
        return
    yield _one(
        "aiokv_salt_quota_blocks",
        "Device blocks that the leases of one salt may hold.",
        engine.config.salt_quota_blocks,
    )
    held = engine.inspect.device_blocks_by_salt()
    yield _one("aiokv_salts", "Salts whose leases hold device blocks.", len(held))
    yield _by_salt(
        "aiokv_salt_blocks", "Device blocks that the leases of a salt hold", held, salt_label
    )


def _by_salt(
    name: str, text: str, held: dict[str, int], salt_label: Callable[[str], str]
) -> Family:
    others = held.pop(OTHER_SALTS, 0)  # a salt with this name is counted with the others
    largest = sorted(held, key=lambda salt: (-held[salt], salt))[:MAX_SALTS]
    others += sum(held.values()) - sum(held[salt] for salt in largest)
    return Family(
        name,
        "gauge",
        f"{text}; beyond the {MAX_SALTS} largest salts, the sum is {OTHER_SALTS}.",
        [
            *(Sample("", {"salt": salt_label(salt)}, held[salt]) for salt in largest),
            Sample("", {"salt": OTHER_SALTS}, others),
        ],
    )


def _with_names(stores: list[GuardStatistics]) -> Iterator[GuardStatistics]:
    """Yield each store with ``#2`` and so on behind a URL that occurs again.

    A scrape with two samples of equal labels is invalid.
    """
    seen: Counter[tuple[object, ...]] = Counter()
    for store in stores:
        place = (store.url, store.kind, store.group, store.rank)
        seen[place] += 1
        number = seen[place]
        yield store if number == 1 else msgspec.structs.replace(store, url=f"{store.url}#{number}")


def _one(name: str, text: str, value: float, **labels: str) -> Family:
    return Family(name, "gauge", text, [Sample("", labels, value)])


# --- from the fields of statistics ----------------------------------------------------------------


class _Fields(NamedTuple):
    """Fields of a record: labels of all its numbers, and what it shows, in order."""

    labels: list[tuple[str, str]]  # field and label
    # A number has a metric, a branch has a label or None.
    shown: list[tuple[str, Metric | Label | None]]


@cache
def _fields_of(kind: type[msgspec.Struct]) -> _Fields:
    hints = get_type_hints(kind)
    fields = _Fields([], [])
    for name in kind.__struct_fields__:
        mark = mark_of(kind, name)
        if isinstance(mark, Metric) or _is_branch(hints[name]):
            fields.shown.append((name, mark))
        elif mark is not None:
            fields.labels.append((name, mark.name))
    return fields


def _is_branch(hint: Any) -> bool:
    """Return True for the type of a record, or of a list or a dict of records."""
    if get_origin(hint) in (list, dict):
        hint = get_args(hint)[-1]
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _rows(record: msgspec.Struct, labels: Mapping[str, str]) -> Iterator[Family]:
    """Yield the families of a record and of its branches, with these labels."""
    fields = _fields_of(type(record))
    if fields.labels:
        labels = {**labels, **{name: _text(getattr(record, f)) for f, name in fields.labels}}
    for field, mark in fields.shown:
        value = getattr(record, field)
        if isinstance(mark, Metric):
            samples = list(_samples(mark, value, {**labels, **dict(mark.labels)}))
            if samples:
                yield Family(f"aiokv_{mark.name}", mark.kind, mark.help, samples)
        elif isinstance(value, dict):
            assert mark is not None, field
            for key, branch in value.items():
                yield from _rows(branch, {**labels, mark.name: key})
        elif isinstance(value, list):
            for branch in value:
                yield from _rows(branch, labels)
        elif mark is None:
            yield from _rows(value, labels)
        else:
            yield from _rows(value, {**labels, mark.name: mark.value or ""})


def _text(value: object) -> str:
    """Return the value of a label; Prometheus treats an empty label as one that is absent."""
    return "" if value is None else str(value)


def _samples(metric: Metric, value: Any, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yield the samples of a field; a size that is not known has none."""
    if isinstance(value, DurationHistogram):
        yield from _histogram(value, labels)
    elif metric.states:
        for state in metric.states:
            yield Sample("", {**labels, metric.key_label: state}, int(state == value))
    elif isinstance(value, dict):
        for key, number in value.items():
            yield Sample("", {**labels, metric.key_label: key}, number)
    elif isinstance(value, list):
        for index, number in enumerate(value):
            yield Sample("", {**labels, metric.key_label: str(index)}, number)
    elif value != UNKNOWN:
        yield Sample("", labels, int(value) if isinstance(value, bool) else value)


def _histogram(histogram: DurationHistogram, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yield cumulative buckets, the sum and the count."""
    bounds = [*map(repr, histogram.bounds_seconds), "+Inf"]
    for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
        yield Sample("_bucket", {**labels, "le": bound}, count)
    yield Sample("_sum", labels, histogram.sum_seconds)
    yield Sample("_count", labels, histogram.count)
