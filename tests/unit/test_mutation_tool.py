"""`make mutate`: changed places, unchanged places, and explanations of surviving mutants."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.mutation import explanations, selection
from tests.mutation.explanations import Explanation
from tests.mutation.native_mutants import native_mutants
from tests.mutation.python_mutants import PythonMutants
from tests.unit.test_parity import ROOT, TESTS

if TYPE_CHECKING:
    from tests.mutation.mutant import Mutant


@cache
def python_mutants() -> list[Mutant]:
    return selection.python_mutants_of(ROOT)


@cache
def native_mutants_of_all_files() -> list[Mutant]:
    return selection.native_mutants_of(ROOT)


def python_lines(source: str) -> list[tuple[str, str, str]]:
    text = source.encode()
    return [(m.kind, *m.shown(text)) for m in PythonMutants("a.py", text).all()]


def native_lines(source: str) -> list[tuple[str, str, str]]:
    text = source.encode()
    return [(m.kind, *m.shown(text)) for m in native_mutants("a.cpp", text)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b\n", [("comparison", "x = a < b", "x = a <= b")]),
        ("x = a is not b\n", [("comparison", "x = a is not b", "x = a is b")]),
        ("x = (a) in (b)\n", [("comparison", "x = (a) in (b)", "x = (a) not in (b)")]),
        ("x = a and b\n", [("and-or", "x = a and b", "x = a or b")]),
        ("x += a\n", [("arithmetic", "x += a", "x -= a")]),
        ("x = 7\n", [("constant", "x = 7", "x = 8")]),
        ("x = True\n", [("constant", "x = True", "x = False")]),
        ("x = min(a, b)\n", [("min-max", "x = min(a, b)", "x = max(a, b)")]),
        ("f(a)\n", [("dropped call", "f(a)", "pass")]),
        ("if a:\n    x = y\n", [("negated condition", "if a:", "if (not (a)):")]),
        ("x = f(a, b=c)\n", [("dropped argument", "x = f(a, b=c)", "x = f(a, )")]),
        ("x = 'ä' if a == b else c\n", 2),
    ],
)
def test_each_place_of_a_python_module_is_changed(source: str, expected: list | int):
    lines = python_lines(source)
    if isinstance(expected, int):
        assert len(lines) == expected
    else:
        assert lines == expected


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError(1)\n",
        "x = f'{a + 1}'\n",
        "log.debug('x', n=1)\n",
        "def f(a: Literal[1]) -> Literal[2]: ...\n",
        "class A:\n    def __repr__(self):\n        return a + b\n",
        "if TYPE_CHECKING:\n    import a\n",
        '"""Text of 1."""\n',
    ],
)
def test_messages_and_annotations_of_python_are_not_mutated(source: str):
    assert python_lines(source) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("    x = a < b;\n", [("comparison", "x = a < b;", "x = a <= b;")]),
        ("    x = a && b;\n", [("comparison", "x = a && b;", "x = a || b;")]),
        ("    x = a + b;\n", [("arithmetic", "x = a + b;", "x = a - b;")]),
        ("    x = 3u;\n", [("constant", "x = 3u;", "x = 4u;")]),
        ("    ++x;\n", [("arithmetic", "++x;", "--x;")]),
        ("    x = std::min(a, b);\n", [("min-max", "x = std::min(a, b);", "x = std::max(a, b);")]),
        ("    x = !a;\n", [("negated condition", "x = !a;", "x = a;")]),
        (
            "    if (a(b)) return;\n",
            [("negated condition", "if (a(b)) return;", "if (!(a(b))) return;")],
        ),
        ("    pool.take(id);\n", [("dropped call", "pool.take(id);", ";")]),
        ("        continue;\n", [("dropped jump", "continue;", ";")]),
        ("    f(a,\n      b);\n", []),
    ],
)
def test_each_place_of_a_native_file_is_changed(source: str, expected: list[tuple[str, str, str]]):
    assert native_lines(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "// a < b\n",
        '    x = "a < b";\n',
        "#include <a>\n",
        "    throw A(str(1) +\n            b(2));\n",
        "    std::vector<std::uint32_t> a;\n",
        "void A::check(Report& report) const {\n    if (a < b) c();\n}\n",
        "void A::check_group(Report& report, int g) const {\n    c();\n}\n",
    ],
)
def test_comments_strings_errors_and_checks_of_native_files_are_not_mutated(source: str):
    assert native_lines(source) == []


@pytest.mark.slow
def test_mutants_of_python_are_valid_python_and_differ():
    found = [m for m in python_mutants() if m.path == "aiokv/worker/layers.py"]
    source = (ROOT / "aiokv/worker/layers.py").read_bytes()
    assert len(found) > 20
    texts = {mutant.apply(source) for mutant in found}
    assert len(texts) == len(found)
    assert source not in texts
    for text in texts:
        ast.parse(text)


def test_mutated_files_and_their_likely_tests_exist():
    paths = {mutant.path for mutant in native_mutants_of_all_files()}
    assert len(paths) > 15
    assert not any(path.endswith(selection.LEFT_ALONE) for path in paths)
    for prefix, names in selection.LIKELY.items():
        assert (ROOT / prefix).exists(), prefix
        for name in names:
            assert (TESTS / name).exists(), (prefix, name)
    for prefix, names in selection.NATIVE_TESTS.items():
        assert (ROOT / prefix).exists(), prefix
        for name in names:
            assert (ROOT / "native" / "tests" / f"test_{name}.cpp").exists(), name
    for name in (*selection.EVERYTHING, *selection.TOO_SLOW):
        assert (TESTS / name).exists(), name
    for prefix in ("aiokv/engine/pins.py", "aiokv/engine"):
        path = prefix if prefix.endswith(".py") else f"{prefix}/new.py"
        assert selection.likely_tests(path) == selection.LIKELY[prefix]


@pytest.mark.slow
def test_each_folder_is_mutated_and_has_tests():
    mutated = {mutant.path for mutant in (*python_mutants(), *native_mutants_of_all_files())}
    for path in (
        "aiokv/stores/guard.py",
        "aiokv/stores/disk/journal.py",
        "aiokv/peers/ring.py",
        "aiokv/events/schema.py",
        "aiokv/connectors/pages.py",
        "aiokv/connectors/fastdeploy/manager.py",
        "native/src/store/slot_table.cpp",
        "native/src/digest/sha256.cpp",
        "native/src/io/ring_loop.cpp",
        "native/src/io/job_line.hpp",
        "native/src/index/lease_table.cpp",
    ):
        assert path in mutated
        assert selection.likely_tests(path), path
        assert path.endswith(".py") or selection.native_tests(path), path


def test_each_native_test_runs_for_some_mutants():
    files = {path.stem.removeprefix("test_") for path in (ROOT / "native/tests").glob("test_*.cpp")}
    chosen = {name for names in selection.NATIVE_TESTS.values() for name in names}
    assert files - chosen == {"copy", "cuda_plan", "repack"}, "copies are not mutated"


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True])
def test_connectors_are_mutated_where_their_servers_are_installed(monkeypatch, installed):
    monkeypatch.setattr(
        selection.importlib.util, "find_spec", lambda name: object() if installed else None
    )
    monkeypatch.setattr(
        selection, "PYTHON_FILES", [p for p in selection.PYTHON_FILES if "connectors" in p]
    )
    paths = {mutant.path for mutant in selection.python_mutants_of(ROOT)}
    assert "aiokv/connectors/pages.py" in paths
    for path in ("aiokv/connectors/vllm/scheduler.py", "aiokv/connectors/sglang.py"):
        assert (path in paths) is installed


def test_explanation_applies_to_its_lines_only():
    each = Explanation("aiokv/*", "x[*] = zip(*)", "*", "because", kinds=("constant",))
    assert each.explains("aiokv/a.py", "constant", "x[1] = zip(a, 1)", "x[2] = zip(a, 1)")
    assert not each.explains("aiokv/a.py", "comparison", "x[1] = zip(a, 1)", "y")
    assert not each.explains("native/a.cpp", "constant", "x[1] = zip(a, 1)", "y")
    assert not each.explains("aiokv/a.py", "constant", "x1 = zip(a, 1)", "y")


def test_each_explanation_has_a_reason():
    for each in explanations.load(TESTS / "mutation"):
        assert len(each.reason.split()) > 3, each


@pytest.mark.slow
def test_each_explanation_matches_an_existing_line():
    mutated = [*python_mutants(), *native_mutants_of_all_files()]
    lines = {mutant.path: (ROOT / mutant.path).read_text().splitlines() for mutant in mutated}
    stale = [
        each.before
        for each in explanations.load(TESTS / "mutation")
        if not any(each.is_of(path, line.strip()) for path in lines for line in lines[path])
    ]
    assert stale == []
