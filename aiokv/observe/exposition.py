"""Families of metrics, and their text in the exposition format 0.0.4 of Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiokv.base.statistics import Kind

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of an HTTP response with this text."""


class Sample(NamedTuple):
    """One number of a family.

    Attributes:
        suffix: appended to the name of the family: ``_bucket``, ``_sum`` or ``_count`` of a
            histogram; empty for the other kinds.
        labels: values by label name.
        value: the number.
    """

    suffix: str
    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """Samples of one name.

    Attributes:
        name: with its unit; a counter's ends in ``_total``.
        kind: as in the line ``# TYPE``.
        help: one sentence.
        samples: with different labels.
    """

    name: str
    kind: Kind
    help: str
    samples: list[Sample]


def text_of(families: Iterable[Family]) -> str:
    """Return families of different names in the text format 0.0.4."""
    return "".join(_family_text(family) for family in families)


def merged(families: Iterable[Family]) -> list[Family]:
    """Return one family per name, with the samples of all families of that name."""
    found: dict[str, Family] = {}
    for family in families:
        if family.name in found:
            found[family.name].samples.extend(family.samples)
        else:
            found[family.name] = family._replace(samples=list(family.samples))
    return list(found.values())


def labelled(families: Iterable[Family], labels: Mapping[str, str]) -> list[Family]:
    """Return the families with further labels on each sample."""
    return [
        Family(
            name,
            kind,
            text,
            [Sample(suffix, {**labels, **own}, value) for suffix, own, value in samples],
        )
        for name, kind, text, samples in families
    ]


def _family_text(family: Family) -> str:
    lines = [
        f"# HELP {family.name} {_escaped(family.help)}",
        f"# TYPE {family.name} {family.kind}",
        *(_sample_text(family.name, sample) for sample in family.samples),
    ]
    return "\n".join(lines) + "\n"


def _sample_text(name: str, sample: Sample) -> str:
    suffix, labels, value = sample
    pairs = ",".join([f'{label}="{_quoted(text)}"' for label, text in labels.items()])
    return f"{name}{suffix}{{{pairs}}} {value!r}" if pairs else f"{name}{suffix} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    if text.isidentifier():  # most labels: a scrape has thousands
        return text
    return _escaped(text).replace('"', '\\"')
