"""Mutants that survive for a reason that somebody has written down."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "explained.toml"


def load(folder: Path) -> dict[tuple[str, str, str], str]:
    """The reason, by (path, line before, line after)."""
    entries = tomllib.loads((folder / FILE_NAME).read_text()).get("mutant", [])
    return {(each["path"], each["before"], each["after"]): each["reason"] for each in entries}
