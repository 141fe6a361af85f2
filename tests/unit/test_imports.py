"""The import rules of the design, and what `import aiokv` loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "aiokv"
DECIDES = ("aiokv.types", "aiokv.errors", "aiokv.config", "aiokv.plan", "aiokv._native")
LEAVES = ("aiokv.cli", "aiokv.trace", "aiokv.testing", "aiokv.demo", "aiokv.doctor")
ABOVE_THE_ENGINE = (*LEAVES, "aiokv.connectors", "aiokv.observe", "aiokv.sync")
ANYWHERE = ("logs", "units", "percentiles")  # modules of observe/ that any module may import


def modules(folder: str = "") -> list[Path]:
    found = sorted((PACKAGE / folder).rglob("*.py"))
    assert found
    return found


def imported(path: Path, package: str = "aiokv") -> set[str]:
    """Return the modules of a package that a file imports, anywhere in it."""
    return {name for name in all_imported(path) if f"{name}.".startswith(f"{package}.")}


@cache
def all_imported(path: Path) -> set[str]:
    """Return all modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules("scheduler"), ids=lambda p: p.stem)
def test_the_scheduler_imports_neither_worker_nor_asyncio(path: Path) -> None:
    assert {n for n in imported(path) if not n.startswith((*DECIDES, "aiokv.scheduler"))} == set()
    assert "asyncio" not in path.read_text()


@pytest.mark.parametrize("path", modules("worker"), ids=lambda p: p.stem)
def test_the_worker_does_not_import_the_scheduler(path: Path) -> None:
    assert {n for n in imported(path) if n.startswith(("aiokv.scheduler", "aiokv.engine"))} == set()


@pytest.mark.parametrize("path", modules("stores"), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_stores_import_neither_scheduler_nor_engine(path: Path) -> None:
    above = ("aiokv.scheduler", "aiokv.engine", "aiokv.ranks", "aiokv.lease")
    assert {n for n in imported(path) if n.startswith(above)} == set()


@pytest.mark.parametrize("path", modules("peers"), ids=lambda p: p.stem)
def test_peers_import_neither_scheduler_nor_engine(path: Path) -> None:
    above = ("aiokv.scheduler", "aiokv.engine", "aiokv.ranks", "aiokv.lease")
    assert {n for n in imported(path) if n.startswith(above)} == set()


def uses_of_the_core(path: Path) -> list[str]:
    """Return lines that use the native ``Core``, or the attribute ``core`` of an object."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "aiokv._native":
            found += [f"line {node.lineno}" for alias in node.names if alias.name == "Core"]
        elif isinstance(node, ast.Attribute) and node.attr in ("Core", "core", "_core"):
            text = ast.unparse(node)
            if not text.startswith("paddle."):
                found.append(f"line {node.lineno}: {text}")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_scheduler_uses_the_core(path: Path) -> None:
    if path.parent.name != "scheduler":
        assert uses_of_the_core(path) == []


def test_uses_of_the_core_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from aiokv._native import Core\nfrom aiokv import _native\n_native.Core\n"
        "self._scheduler._core.match\nx.core\npaddle.base.core\n"
    )
    assert uses_of_the_core(path) == [
        "line 1", "line 3: _native.Core", "line 5: x.core", "line 4: self._scheduler._core",
    ]  # fmt: skip


@pytest.mark.parametrize("path", modules("ranks"), ids=lambda p: p.stem)
def test_ranks_do_not_import_the_scheduler(path: Path) -> None:
    assert {n for n in imported(path) if n.startswith(("aiokv.scheduler", "aiokv.engine"))} == set()


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_are_imported_by_leaves_only(leaf: str) -> None:
    for path in modules():
        name = ".".join(("aiokv", *path.relative_to(PACKAGE).with_suffix("").parts))
        if not name.startswith(LEAVES) and name != "aiokv.__main__":
            assert not any(n.startswith(leaf) for n in imported(path)), name


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_observers_are_imported_above_the_engine_only(path: Path) -> None:
    """Only three leaves of ``observe/`` may be used below it, and these import errors only."""
    name = ".".join(("aiokv", *path.relative_to(PACKAGE).with_suffix("").parts))
    leaves = {f"aiokv.observe.{leaf}" for leaf in ANYWHERE}
    if name in leaves:
        assert {n for n in imported(path) if not n.startswith("aiokv.errors")} == set()
    elif not name.startswith(ABOVE_THE_ENGINE) and name != "aiokv.__main__":
        observers = {n for n in imported(path) if n.startswith("aiokv.observe.")}
        allowed = {n for n in observers if n in leaves or n.rpartition(".")[0] in leaves}
        assert observers - allowed == set()


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_connectors_are_above_everything(path: Path) -> None:
    """Nothing imports a connector; connectors import neither internals nor one another."""
    name = ".".join(("aiokv", *path.relative_to(PACKAGE).with_suffix("").parts))
    found = {n for n in imported(path) if n.startswith("aiokv.connectors.")}
    if not name.startswith("aiokv.connectors."):
        assert found == set()
        return
    own = ".".join(name.split(".")[:3])
    packages = {f"aiokv.connectors.{p.name}" for p in PACKAGE.glob("connectors/*/")}
    assert {n for n in found if not n.startswith(own) and n.startswith(tuple(packages))} == set()
    internals = ("aiokv.scheduler", "aiokv.engine")
    assert {n for n in imported(path) if n.startswith(internals)} == set()
    private = {n for n in imported(path) if n.rpartition(".")[2].startswith("_")}
    assert private - {"aiokv._native"} == set()


@pytest.mark.parametrize("path", modules("connectors/fastdeploy"), ids=lambda p: p.stem)
def test_the_fastdeploy_connector_imports_public_modules_only(path: Path) -> None:
    public = {
        *("aiokv", "aiokv.sync", "aiokv.ranks", "aiokv.types", "aiokv.observe.logs"),
        "aiokv.frameworks.paddle",
    }
    loaded = {n for n in imported(path) if n.rpartition(".")[2].islower()} - public
    assert {
        n
        for n in loaded
        if not n.startswith("aiokv.connectors.fastdeploy") and n.rpartition(".")[0] not in public
    } == set()


def test_import_of_the_fastdeploy_connector_loads_no_framework() -> None:
    code = "import sys, aiokv.connectors.fastdeploy; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert {"paddle", "torch", "cupy", "fastdeploy"}.isdisjoint(loaded.stdout.split())


def test_import_loads_no_framework() -> None:
    code = "import sys, aiokv; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    heavy = {
        "cupy",
        "paddle",
        "torch",
        "uvloop",
        "rich",
        "structlog",
        "redis",
        "obstore",
        "mooncake",
        "prometheus_client",
    }
    kinds = {f"aiokv.stores.{kind}" for kind in ("disk", "redis", "mooncake", "s3", "directory")}
    kinds |= {"aiokv.observe.metrics", "aiokv.observe.prometheus"}
    assert (heavy | kinds).isdisjoint(loaded.stdout.split())


@pytest.mark.parametrize("folder", ["stores", "ranks", "worker"])
def test_bytes_from_other_processes_are_not_unpickled(folder: str) -> None:
    """Loading a pickle runs code that its writer has chosen."""
    loaders = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    names = {
        name for path in modules(folder) for loader in loaders for name in imported(path, loader)
    }
    assert names == set()


def test_tests_import_nothing_from_the_benches() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    assert [path.name for path in files if imported(path, "bench")] == []
    assert imported(ROOT / "bench" / "tests" / "test_benches.py", "bench")


def test_the_package_imports_neither_tests_nor_benches() -> None:
    names = {path: imported(path, "tests") | imported(path, "bench") for path in modules()}
    assert {path.name: found for path, found in names.items() if found} == {}
