"""The page for language models, ``docs/llms.txt``: ``python -m tests.docs.llms`` writes it.

It has a line per page of the site: title, link, and the first sentence of the page. The format is
that of llmstxt.org.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "llms.txt"


def text() -> str:
    """Return the page."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}", ""]
    lines += ["Links name the Markdown sources, relative to this file.", ""]
    single = [entry for entry in site["nav"] if isinstance(next(iter(entry.values())), str)]
    for title, entries in [
        ("Start", single),
        *(pair for entry in site["nav"] if entry not in single for pair in entry.items()),
    ]:
        lines += [f"## {title}", "", *_links(entries), ""]
    return "\n".join(lines)


def _links(entries: list[dict[str, object]]) -> list[str]:
    lines = []
    for entry in entries:
        for title, target in entry.items():
            if isinstance(target, str):
                lines.append(f"- [{title}]({target}): {first_sentence(DOCS / target)}")
            else:
                lines += _links(target)
    return lines


def first_sentence(page: Path) -> str:
    """Return the first sentence of the text of a page, without links."""
    paragraphs = re.split(r"\n\s*\n", page.read_text())
    paragraph = next((p for p in paragraphs if re.match(r"[A-Za-z`\[*](?!``)", p)), "")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.?]) |: ", plain.replace("**", ""))[0]


if __name__ == "__main__":
    PAGE.write_text(text())
