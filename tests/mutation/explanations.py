"""Surviving mutants with a documented reason."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "explained.toml"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of all mutants of some files whose line matches; ``*`` matches any text.

    Attributes:
        kinds: of mutants; empty for all.
    """

    path: str
    before: str
    after: str
    reason: str
    kinds: tuple[str, ...] = ()

    def is_of(self, path: str, before: str) -> bool:
        """Return True if the explanation applies to mutants of this line."""
        return fnmatchcase(path, self.path) and _matches(before, self.before)

    def explains(self, path: str, kind: str, before: str, after: str) -> bool:
        return (
            self.is_of(path, before)
            and (not self.kinds or kind in self.kinds)
            and _matches(after, self.after)
        )


def load(folder: Path) -> list[Explanation]:
    entries = tomllib.loads((folder / FILE_NAME).read_text()).get("mutant", [])
    return [Explanation(**{**entry, "kinds": tuple(entry.get("kinds", ()))}) for entry in entries]


def _matches(line: str, pattern: str) -> bool:
    """Match like fnmatch, with ``*`` as the only special character: code contains brackets."""
    return fnmatchcase(line, pattern.replace("[", "[[]").replace("?", "[?]"))
