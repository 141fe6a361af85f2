"""The reference of all metrics: ``python -m tests.docs.metrics_reference`` writes it."""

from __future__ import annotations

from pathlib import Path

from aiokv.observe.metrics import families
from tests.harness.filled import engine_with, filled_records

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
HEAD = """\
# Metrics

Each metric also has the label `engine`. Metrics of stores, peers, ranks, window groups and salts
exist only for engines that have these. [Metrics](../operate/metrics.md) describes how to read them;
`python -m tests.docs.metrics_reference` generates this page.

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def reference() -> str:
    """Return the page."""
    rows = []
    for family in families(engine_with(filled_records())):
        labels = dict.fromkeys(
            name for sample in family.samples for name in sample.labels if name != "le"
        )
        names = ", ".join(f"`{name}`" for name in labels)
        text = family.help.replace("|", "\\|")
        rows.append(f"| `{family.name}` | {family.kind} | {names} | {text} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(reference())
