"""Memory that this process can still allocate."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# Folder below sys/fs/cgroup, and files with the limit and the use, of each version.
_CGROUPS: Final = {
    "0:": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can allocate without swapping.

    The least of ``MemAvailable`` and of what the limits of its control groups leave. File pages
    that were not used recently do not count as used.

    Args:
        root: folder whose ``proc`` and ``sys`` are read.
    """
    sizes = [_table(root / "proc/meminfo")["MemAvailable:"] << 10]
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        names = _CGROUPS["0:"] if number == "0" else _CGROUPS.get(controllers)
        if names is not None:
            sizes += _left(root / "sys/fs/cgroup" / names[0], path, names)
    return max(min(sizes), 0)


def _left(top: Path, path: str, names: tuple[str, str, str, str]) -> list[int]:
    """Return the bytes that the limits of a control group and of its parents leave."""
    _, limit, use, reclaimable = names
    group = top / path.strip("/")
    left = []
    for folder in (group, *group.parents):
        limits = _lines(folder / limit)
        if limits and limits[0].isdecimal():
            used = int(_lines(folder / use)[0]) - _table(folder / "memory.stat")[reclaimable]
            left.append(int(limits[0]) - used)
        if folder == top:
            break
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:  # another version of control groups, or none
        return []


def _table(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in _lines(path) if len(words := line.split()) > 1}
