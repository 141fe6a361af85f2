"""The import rules of the design, and what `import aiokv` loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "aiokv"

# A module imports from its own row and from the rows above it, the leaves first.
LAYERS = (
    ("_native",),
    ("errors",),
    ("base",),
    ("layout", "wire"),
    ("stores", "config"),
    ("worker", "peers"),  # the controller of a worker owns its transfers with peers
    ("frameworks", "ops"),
    ("model",),
    ("ranks",),
    ("scheduler",),
    ("engine", "events"),  # a KV event is read from the engine
    ("devices", "statistics"),
    ("observe",),
    ("sync",),
    ("connectors",),
    ("cli", "demo", "doctor", "testing", "trace", "__main__"),
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}

# Narrower than the order of the layers: what the modules of a folder may import.
ONLY = {
    "scheduler": (
        *("_native", "base.cached_rank", "base.checks", "base.groups", "base.misses", "base.plan"),
        *("base.state_guard", "base.statistics", "base.types"),
        *("config", "errors"),
    ),
    "connectors.fastdeploy": (
        *("base.checks", "base.logs", "base.types", "connectors.prefills", "devices", "errors"),
        *("frameworks.paddle", "ranks", "statistics", "sync"),
    ),
}


def modules(folder: str = "") -> list[Path]:
    found = sorted((PACKAGE / folder).rglob("*.py"))
    assert found
    return found


def name_of(path: Path) -> str:
    """Return the name of a module, without ``aiokv.``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


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


def rooms_imported(path: Path) -> set[str]:
    """Return the modules and folders directly in ``aiokv`` that a file imports from."""
    rooms = {name.split(".")[1] for name in imported(path) if name.count(".")}
    return rooms & LAYER_OF.keys()


def test_each_module_has_a_layer() -> None:
    assert {name_of(path).split(".")[0] for path in modules()} - {"__init__"} < LAYER_OF.keys()


def test_imports_go_down_the_layers() -> None:
    upward = {}
    for path in modules():
        level = LAYER_OF.get(name_of(path).split(".")[0], len(LAYERS))
        above = {room for room in rooms_imported(path) if LAYER_OF[room] > level}
        if above:
            upward[name_of(path)] = above
    assert upward == {}


def test_imports_of_the_scheduler_and_of_a_connector_are_few() -> None:
    found = {}
    for folder, allowed in ONLY.items():
        names = tuple(f"aiokv.{name}" for name in (*allowed, folder))
        for path in modules(folder.replace(".", "/")):
            loaded = {n for n in imported(path, "aiokv") if n.rpartition(".")[2].islower()}
            loaded -= {"aiokv", "aiokv.base"}
            other = {name for name in loaded if not name.startswith(names)}
            if other:
                found[name_of(path)] = other
    assert found == {}


def test_the_scheduler_knows_no_event_loop() -> None:
    assert [p.name for p in modules("scheduler") if "asyncio" in p.read_text()] == []


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


def test_only_the_scheduler_uses_the_core() -> None:
    found = {name_of(path): uses_of_the_core(path) for path in modules()}
    outside = {name: uses for name, uses in found.items() if not name.startswith("scheduler.")}
    assert {name: uses for name, uses in outside.items() if uses} == {}


def test_uses_of_the_core_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from aiokv._native import Core\nfrom aiokv import _native\n_native.Core\n"
        "self._scheduler._core.match\nx.core\npaddle.base.core\n"
    )
    assert uses_of_the_core(path) == [
        "line 1", "line 3: _native.Core", "line 5: x.core", "line 4: self._scheduler._core",
    ]  # fmt: skip


def test_the_worker_side_does_not_import_the_decisions() -> None:
    decisions = ("aiokv.scheduler", "aiokv.engine")
    below = [path for folder in ("worker", "peers", "stores", "ranks") for path in modules(folder)]
    found = {name_of(p): {n for n in imported(p) if n.startswith(decisions)} for p in below}
    assert {name: names for name, names in found.items() if names} == {}


def test_connectors_use_public_modules_and_not_one_another() -> None:
    packages = {f"aiokv.connectors.{p.name}" for p in PACKAGE.glob("connectors/*/")}
    found = {}
    for path in modules("connectors"):
        own = ".".join(f"aiokv.{name_of(path)}".split(".")[:3])
        others = tuple(packages - {own})
        forbidden = ("aiokv.scheduler", "aiokv.engine", *others)
        names = imported(path)
        private = {n for n in names if n.rpartition(".")[2].startswith("_")} - {"aiokv._native"}
        refused = private | {n for n in names if n.startswith(forbidden)}
        if refused:
            found[name_of(path)] = refused
    assert found == {}


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
    names = ("host", "disk", "redis", "mooncake", "s3", "directory")
    kinds = {f"aiokv.stores.{name}" for name in names}
    kinds |= {"aiokv.observe.metrics", "aiokv.observe.prometheus"}
    assert (heavy | kinds).isdisjoint(loaded.stdout.split())


def test_bytes_from_other_processes_are_not_unpickled() -> None:
    """Loading a pickle runs code that its writer has chosen."""
    loaders = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    paths = [p for folder in ("stores", "ranks", "peers", "worker") for p in modules(folder)]
    assert {n for p in paths for loader in loaders for n in imported(p, loader)} == set()


def test_tests_import_nothing_from_the_benches() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    assert [path.name for path in files if imported(path, "bench")] == []
    assert imported(ROOT / "bench" / "tests" / "test_benches.py", "bench")


def test_the_package_imports_neither_tests_nor_benches() -> None:
    names = {path: imported(path, "tests") | imported(path, "bench") for path in modules()}
    assert {path.name: found for path, found in names.items() if found} == {}
