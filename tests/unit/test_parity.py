"""PARITY.md names tests that exist, and each test of the drill shows one defect."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
QUOTED = re.compile(r"`([^`]+)`")
SOURCE = re.compile(r"(?:aiokv|native|bench)/[\w/]+\.(?:py|cpp|hpp|cu)")
TEST = re.compile(r"(?:^\s*(?:async )?def |\bTEST\()(\w+)", re.MULTILINE)


def rows() -> list[tuple[int, str]]:
    """Return (line number, last cell) of every row of a table."""
    lines = (TESTS / "PARITY.md").read_text().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        cells = line.strip().strip("|").split("|")
        if line.startswith("|") and not line.startswith("|---") and cells[-1].strip() != "test":
            assert len(cells) == 3, f"line {number} has {len(cells)} cells"
            found.append((number, cells[-1]))
    return found


def names_in(path: Path) -> set[str]:
    return set(TEST.findall(path.read_text()))


def missing(cell: str) -> list[str]:
    """Return the tests and files of a cell that do not exist."""
    lost: list[str] = []
    path: Path | None = None
    for quoted in QUOTED.findall(cell):
        if " " in quoted:
            continue  # a command
        if "/" in quoted or quoted.endswith(".py"):
            path = next((at / quoted for at in (TESTS, ROOT) if (at / quoted).is_file()), None)
            if path is None:
                lost.append(quoted)
        elif path is not None and not any(fnmatchcase(name, quoted) for name in names_in(path)):
            lost.append(f"{path.name}: {quoted}")
    return lost


def test_every_row_names_a_test():
    found = rows()
    assert len(found) > 80
    without = [(number, cell.strip()) for number, cell in found if not QUOTED.search(cell)]
    assert [number for number, cell in without if not cell.startswith("no: ")] == []


def test_each_named_test_and_file_exists():
    assert {number: lost for number, cell in rows() if (lost := missing(cell))} == {}


@pytest.mark.parametrize(
    ("cell", "lost"),
    [
        ("`unit/test_parity.py` `test_every_row_names_a_test`", []),
        ("`unit/test_parity.py` `test_every_*`", []),
        ("`unit/test_missing.py`", ["unit/test_missing.py"]),
        ("`unit/test_parity.py` (`test_gone`, `test_every_*`)", ["test_parity.py: test_gone"]),
        ("`native/tests/test_index.cpp` `pool_resizes` `pool_gone`", ["test_index.cpp: pool_gone"]),
    ],
)
def test_missing_test_or_file_is_reported(cell: str, lost: list[str]):
    assert missing(cell) == lost


# Numbers of a list that is not in the repository, such as B7.11.
LIST_NUMBER = re.compile(r"\b(?:[ABC]\d+\.\d+|C\d+_\d+)")


def test_no_test_is_named_after_a_number_of_a_list():
    files = [
        TESTS / "PARITY.md",
        *(path for path in TESTS.rglob("*.py") if path != Path(__file__)),
        *(ROOT / "native" / "tests").glob("*.cpp"),
    ]
    assert len(files) > 100
    assert [path.name for path in files if LIST_NUMBER.search(path.read_text())] == []


@pytest.mark.parametrize("text", ["served wrong (B5.9)", "// C1.3", "A18.1, A18.2"])
def test_numbers_of_a_list_are_found(text: str):
    assert LIST_NUMBER.search(text)


def drills() -> dict[str, str]:
    """Return the file of each test of the drill, by name."""
    return {
        name: path.name
        for path in sorted((TESTS / "drill").glob("test_*.py"))
        for name in TEST.findall(path.read_text())
        if name.startswith("test_")
    }


def test_each_drill_has_a_row_that_names_it():
    text = (TESTS / "PARITY.md").read_text().partition("## Defects that do not occur")[2]
    found = drills()
    assert len(found) > 60
    unlisted = [name for name, file in found.items() if f"`drill/{file}` `{name}`" not in text]
    assert unlisted == []


def test_each_drill_states_its_defect():
    for path in (TESTS / "drill").glob("test_*.py"):
        text = path.read_text()
        stated = re.findall(r'def (test_\w+)\([^)]*\)[^:]*:\n    """Defect: ', text)
        assert stated == [name for name in TEST.findall(text) if name.startswith("test_")]


def test_each_named_source_file_exists():
    """A path in backquotes that begins with a folder of the repository."""
    text = (TESTS / "PARITY.md").read_text()
    paths = {path for path in QUOTED.findall(text) if SOURCE.fullmatch(path)}
    assert len(paths) > 20
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
