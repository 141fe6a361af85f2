"""Every block of the documentation runs, and prints what the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import aiokv
import aiokv.ranks
import aiokv.stores
import aiokv.sync
from tests.docs.run_page import SEPARATOR, Block, blocks_of
from tests.harness.patience import PROGRAM_SECONDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GPU_PAGES = {"guide/gpu.md"}  # run by tests/gpu/test_docs.py

# First words of commands that no test runs, and what checks them instead.
UNCHECKED = {
    "cat": "writes a file that another command reads",
    "pip": "the tests of wheels install the package",
    "make": "CI runs the targets",
    "docker": "test_deploy.py checks the files; no image can be built without a registry",
    "git": "needs the network",
    "python": "the command of another server, which needs a GPU",
    "vllm": "the command of another server, which needs a GPU",
    "curl": "the tests of the HTTP server send such requests",
}


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def test_there_are_pages():
    assert len(PAGES) > 20


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if name_of(p) not in GPU_PAGES], ids=name_of)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path):
    blocks = blocks_of(page)
    if not any(block.language == "python" for block in blocks):
        pytest.skip("no Python on this page")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.docs.run_page", str(page)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    printed = [part.lstrip("\n") for part in done.stdout.split(SEPARATOR)]
    outputs = iter(printed)
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python":
            output = next(outputs)
            if after is not None and after.language == "text":
                assert output == after.text, f"{page.name}, line {after.line}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_other_blocks_of_a_page_are_valid(page, tmp_path):
    for block in blocks_of(page):
        check_block(block, tmp_path, f"{page.name}, line {block.line}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_with_commands_say_what_to_install(page):
    commands = [block.text for block in blocks_of(page) if block.language == "console"]
    if any(re.search(r"^\$ (aiokv|vllm|python) ", text, re.MULTILINE) for text in commands):
        assert re.search(r"pip install|install\.md", page.read_text())


@pytest.mark.parametrize(
    ("owner", "classes"),
    [
        ("engine", (aiokv.CacheEngine, aiokv.sync.SyncEngine)),
        ("engine.inspect", (aiokv.statistics.Inspection,)),
        ("lease", (aiokv.Lease, aiokv.sync.SyncLease)),
        ("regions", (aiokv.Regions,)),
        ("receiving", (aiokv.Receiving,)),
        ("sending", (aiokv.Sending,)),
    ],
)
def test_each_method_that_the_documentation_names_exists(owner, classes):
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"])
    names = set(re.findall(rf"`(?:await |async with |with )?{re.escape(owner)}\.(\w+)", text))
    assert names
    known = {name for cls in classes for name in dir(cls)}
    known |= set(re.findall(rf"`{owner}\.(\w+)`", (ROOT / "aiokv/observe/EVENTS.md").read_text()))
    assert sorted(names - known) == []


@pytest.mark.parametrize(
    "module",
    [aiokv, aiokv.devices, aiokv.statistics, aiokv.sync, aiokv.stores, aiokv.ranks],
    ids=repr,
)
def test_the_reference_has_each_public_name(module):
    page = "".join(path.read_text() for path in (DOCS / "reference/api").glob("*.md"))
    names = {
        f"{module.__name__}.{name}"
        for name in module.__all__
        if not (isinstance(value := getattr(module, name), type) and issubclass(value, Exception))
    }
    assert sorted(names - set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))) == []


def check_block(block: Block, folder: Path, place: str) -> None:
    match block.language:
        case "python" | "text":
            pass
        case "console":
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    check_command(line.removeprefix("$ "), folder, place)
        case "toml":
            tomllib.loads(block.text)
        case "json":
            json.loads(block.text)
        case "yaml":
            yaml.safe_load(block.text)
        case other:
            pytest.fail(f"{place}: no test checks blocks of the language {other!r}")


def check_command(command: str, folder: Path, place: str) -> None:
    words = shlex.split(command)
    if words[0] in UNCHECKED:
        return
    assert words[0] == "aiokv", place
    done = subprocess.run(
        [sys.executable, "-m", "aiokv", *words[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert done.returncode == 0, f"{place}: {done.stderr}"
