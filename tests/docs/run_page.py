"""Run the Python blocks of a page of the documentation: ``python -m tests.docs.run_page PAGE``.

The blocks of a page share names and one event loop, and may use ``await`` at the top level. A block
that starts a loop of its own is a program, and runs in a process of its own. After each block, the
runner prints a line that separates its output from that of the next one.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
SEPARATOR = "--- end of block ---"


class Block(NamedTuple):
    """A fenced block: its language, the rest of the first line, its text, and its first line."""

    language: str
    info: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent, language, info, body = match.groups()
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        found.append(Block(language, info.strip(), body, text[: match.start()].count("\n") + 2))
    return found


def is_program(block: Block) -> bool:
    return re.search(r"^ *(uvloop|asyncio)\.run\(", block.text, re.MULTILINE) is not None


def run_program(block: Block) -> None:
    named = re.match(r"# (\w+\.py)\n", block.text)
    script = Path(named[1] if named else f"line{block.line}.py")
    script.write_text(block.text)
    subprocess.run([sys.executable, script], check=True)


async def run(page: Path) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(page):
        if block.language != "python":
            continue
        if is_program(block):
            run_program(block)
        else:
            source = "\n" * (block.line - 1) + block.text  # so that errors name the line
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            result = eval(compile(source, page, "exec", flags, dont_inherit=True), names)
            if inspect.iscoroutine(result):
                await result
        print(SEPARATOR, flush=True)


if __name__ == "__main__":
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # no lines about slow callbacks
    asyncio.run(run(Path(sys.argv[1])), debug=True)  # strict mode: examples compute in batches
