"""Wheels of ``make wheel``: complete, and usable in a new environment outside the repository."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import aiokv

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
FLAVOURS = ("cpu", "cuda")

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1_200)]


def wheels(flavour: str) -> list[Path]:
    """Return the wheels of a flavour; skip the test if this machine cannot build it."""
    found = sorted((DIST / flavour).glob("*.whl"))
    if not found:
        if flavour == "cuda" and shutil.which("nvcc") is None:
            pytest.skip("a wheel with the cuda device needs nvcc")
        pytest.fail(f"{DIST / flavour} has no wheel: run `make wheel`")
    return found


def interpreter(version: str) -> str:
    """Return a Python of a version, or skip the test."""
    python = runpy.run_path(str(ROOT / "native" / "wheels.py"))["find_python"](version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    return python


def clean_environment() -> dict[str, str]:
    """Return the environment without variables that let Python find this repository."""
    names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in names}


class Environment(NamedTuple):
    """A virtual environment that has only the wheel and what it depends on."""

    flavour: str
    folder: Path

    def run(self, *command: str) -> str:
        """Return what a command of the environment prints, outside the repository."""
        done = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder.parent,
            env=clean_environment(),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=[(f, v) for f in FLAVOURS for v in PYTHONS], ids="-".join)
def installed(request, tmp_path_factory) -> Environment:
    flavour, version = request.param
    found = wheels(flavour)
    environment = Environment(flavour, tmp_path_factory.mktemp("wheel") / "venv")
    subprocess.run([interpreter(version), "-m", "venv", environment.folder], check=True)
    environment.run(
        "pip", "--disable-pip-version-check", "install", "-q", "--only-binary=:all:",
        "--find-links", str(found[0].parent), "aiokv",
    )  # fmt: skip
    return environment


def test_the_demo_runs(installed, tmp_path):
    result = tmp_path / "demo.json"
    few = ("--conversations", "4", "--turns", "2")
    installed.run("aiokv", "demo", *few, "--json", str(result))
    assert json.loads(result.read_bytes())


def test_a_replay_moves_bytes(installed):
    trace = str(ROOT / "tests" / "data" / "small.jsonl")
    printed = installed.run(
        "aiokv", "replay", trace, "--limit", "50", "--host-blocks", "2000", "--device-blocks",
        "1000", "--execute", "--execute-mib", "8",
    )  # fmt: skip
    assert "cached blocks verified" in printed


def test_the_package_comes_from_the_wheel(installed):
    code = (
        "import aiokv, aiokv._native as n, importlib.metadata as m;"
        "print(aiokv.__file__, n.__file__, m.version('aiokv'), hasattr(n, 'cuda'))"
    )
    package, native, version, has_cuda = installed.run("python", "-c", code).split()
    assert package.startswith(str(installed.folder))
    assert native.startswith(str(installed.folder))
    assert version == aiokv.__version__
    assert has_cuda == str(installed.flavour == "cuda")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_there_is_one_wheel_for_3_11_and_one_for_all_later_versions(flavour):
    tags = [wheel.name.split("-", 2)[2] for wheel in wheels(flavour)]
    assert [tag.rsplit("-", 1)[0] for tag in tags] == ["cp311-cp311", "cp312-abi3"]
    for tag in tags:
        glibc = re.search(r"manylinux_2_(\d+)_x86_64", tag)
        assert glibc is not None, tag
        assert int(glibc[1]) <= 34, tag


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_extension_needs_only_libraries_that_each_linux_has(flavour, tmp_path):
    """Of CUDA, the driver is loaded when it is used: a machine without a GPU has none."""
    for wheel in wheels(flavour):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".so")]
            path = archive.extract(name, tmp_path)
            assert not [n for n in archive.namelist() if ".libs/" in n], "a library was copied in"
        dynamic = subprocess.run(
            ["readelf", "-d", path], capture_output=True, text=True, check=True
        )
        needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic.stdout))
        assert needed <= {
            "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
            "libgcc_s.so.1", "ld-linux-x86-64.so.2",
        }  # fmt: skip


@cache
def tracked() -> frozenset[str]:
    listed = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return frozenset(listed.stdout.split())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_wheels_have_all_files_of_the_package_and_no_other(flavour):
    for wheel in wheels(flavour):
        with zipfile.ZipFile(wheel) as archive:
            files = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
        names = {name for name in files if ".dist-info/" not in name}
        extension = {name for name in names if name.endswith(".so")}
        assert len(extension) == 1
        assert names - extension == {name for name in tracked() if name.startswith("aiokv/")}


def test_the_sdist_has_all_that_is_tracked():
    (sdist,) = DIST.glob("aiokv-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    missing = {
        name for name in tracked() - names if not name.startswith((".ci/", "bench/results/"))
    }
    assert missing == set()
    assert {name for name in names - tracked() if name.startswith(("aiokv/", "native/"))} == set()


def test_an_older_cmake_builds_for_a_newer_cuda_compiler(tmp_path):
    """``pip install .`` uses the CMake of the system, which may not know the flags of its nvcc."""
    system = next(
        (p for p in map(Path, ("/usr/bin/cmake", "/usr/local/bin/cmake")) if p.exists()), None
    )
    if system is None or shutil.which("nvcc") is None:
        pytest.skip("needs nvcc, and a CMake of the system")
    version = subprocess.run([system, "--version"], capture_output=True, text=True, check=True)
    if not re.search(r"version 3\.2[45]\.", version.stdout):
        pytest.skip(f"the CMake of the system is not an old one: {version.stdout.splitlines()[0]}")
    ninja = ROOT / ".venv" / "bin" / "ninja"
    configure = [system, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", ROOT / "native"]
    subprocess.run([*configure, "-B", tmp_path], check=True)
    kernel = "CMakeFiles/aiokv_cuda.dir/src/cuda/upload.cu.o"
    subprocess.run([system, "--build", tmp_path, "--target", kernel], check=True)
    assert (tmp_path / kernel).stat().st_size > 0
