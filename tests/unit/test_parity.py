"""PARITY.md names tests that exist, and every test of the drill stands for one defect."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
QUOTED = re.compile(r"`([^`]+)`")
TEST = re.compile(r"(?:^\s*(?:async )?def |\bTEST\()(\w+)", re.MULTILINE)


def rows() -> list[tuple[int, str]]:
    """(line number, last cell) of every row of a table."""
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
    """What a cell names and nobody finds."""
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
    assert [number for number, cell in found if not QUOTED.search(cell)] == []


def test_everything_named_exists():
    assert {number: lost for number, cell in rows() if (lost := missing(cell))} == {}


@pytest.mark.parametrize(
    ("cell", "lost"),
    [
        ("`unit/test_parity.py` `test_every_row_names_a_test`", []),
        ("`unit/test_parity.py` `test_every_*`", []),
        ("`unit/test_nobody.py`", ["unit/test_nobody.py"]),
        ("`unit/test_parity.py` (`test_gone`, `test_every_*`)", ["test_parity.py: test_gone"]),
        ("`native/tests/test_index.cpp` `pool_resizes` `pool_gone`", ["test_index.cpp: pool_gone"]),
    ],
)
def test_what_does_not_exist_is_found(cell: str, lost: list[str]):
    assert missing(cell) == lost


# How many numbered statements each group of the inventory has; 0: the group is one statement.
STATEMENTS = {
    "A": (0, 7, 8, 7, 9, 5, 6, 5, 9, 9, 4, 11, 5, 7, 3, 2, 1, 2, 2, 0),
    "B": (14, 12, 26, 19, 9, 11, 16, 9, 7, 2, 4, 16, 7, 3),
}
NUMBER = re.compile(r"\b([AB]\d+)(?:\.(\d+)(?:-(?:[AB]\d+\.)?(\d+))?)?")


def numbers_named(text: str) -> set[str]:
    """``"A3.1-A3.3, B7"`` names A3.1, A3.2, A3.3 and all of B7."""
    named = set()
    for group, first, last in NUMBER.findall(text):
        if not first:
            named.add(group)
        else:
            named |= {f"{group}.{n}" for n in range(int(first), int(last or first) + 1)}
    return named


def test_no_number_of_the_inventory_is_passed_over():
    named = numbers_named((TESTS / "PARITY.md").read_text())
    for part, sizes in STATEMENTS.items():
        for index, size in enumerate(sizes, 1):
            group = f"{part}{index}"
            silent = [f"{group}.{n}" for n in range(1, size + 1) if f"{group}.{n}" not in named]
            assert group in named or (silent == [] and size > 0), silent or group


def test_ranges_of_numbers_are_understood():
    assert numbers_named("A3.1-A3.3, B12.4-6; B7") == {
        *("A3.1", "A3.2", "A3.3", "B12.4", "B12.5", "B12.6", "B7")
    }


@pytest.mark.parametrize(("group", "numbers"), [(1, 20), (2, 3), (3, 19)])
def test_every_defect_of_the_list_has_its_drill(group: int, numbers: int):
    names = names_in(TESTS / "drill" / f"test_c{group}.py")
    for number in range(1, numbers + 1):
        assert any(name.startswith(f"test_not_c{group}_{number}_") for name in names), number


def test_the_drill_says_what_each_defect_is():
    for path in (TESTS / "drill").glob("test_c*.py"):
        text = path.read_text()
        drills = re.findall(r'def (test_\w+)\([^)]*\)[^:]*:\n    """', text)
        assert drills == [name for name in TEST.findall(text) if name.startswith("test_")]
        assert all(
            name.startswith(f"test_not_{path.stem.removeprefix('test_')}_") for name in drills
        )
