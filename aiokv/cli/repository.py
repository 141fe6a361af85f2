"""Import of demo modules that only the repository has, not the wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiokv
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

FOLDER: Final = Path("tests", "models", "demo")


def from_repository(name: str, option: str) -> ModuleType:
    """Import a module of ``tests/models/demo`` of the checkout from which aiokv is imported.

    Args:
        name: name of the module.
        option: command-line option that needs the module, for the error message.

    Raises:
        UsageError: aiokv is not imported from a checkout.
    """
    root = Path(aiokv.__file__).parents[1]
    if not (root / FOLDER / f"{name}.py").is_file():
        raise UsageError(
            f"{option} needs {FOLDER / name}.py, which only the repository of aiokv has",
            hint=f"in a checkout: make demo ARGS='{option}'",
        )
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))  # before any other package named tests
    return importlib.import_module(".".join((*FOLDER.parts, name)))
