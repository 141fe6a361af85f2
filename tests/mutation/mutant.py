"""One change of one place in one file, as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace ``source[start:end]`` by ``replacement``.

    Attributes:
        path: of the file, relative to the root of the repository.
        kind: of change, such as ``"comparison"``.
        start: byte offset.
        end: byte offset, behind the last byte that is replaced.
    """

    path: str
    kind: str
    start: int
    end: int
    replacement: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement + source[self.end :]

    def line(self, source: bytes) -> int:
        return source.count(b"\n", 0, self.start) + 1

    def shown(self, source: bytes) -> tuple[str, str]:
        """Return the first changed line, before and after, without indentation."""
        index = self.line(source) - 1
        before = source.splitlines()[index].decode().strip()
        after = self.apply(source).splitlines()[index].decode().strip()
        return before, after
