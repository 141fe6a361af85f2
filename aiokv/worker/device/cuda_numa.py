"""Which memory is near a GPU, from sysfs: no subprocess, no library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

_SYSFS: Final = Path("/sys")


class Placement(NamedTuple):
    """Where the host arena should lie.

    Attributes:
        node: NUMA node of the GPU; -1 when the machine does not say, or has only one.
        strict: the node has room, so the arena may be bound to it; else it is only preferred,
            because a bound node that runs out kills the process.
    """

    node: int
    strict: bool


def placement(pci_address: str, num_bytes: int, sysfs: Path = _SYSFS) -> Placement:
    """Where ``num_bytes`` for the GPU at ``pci_address`` (``"0000:3b:00.0"``) should lie."""
    nodes = sorted(sysfs.glob("devices/system/node/node[0-9]*"))
    node = _read_int(sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node")
    if len(nodes) < 2 or node < 0:
        return Placement(-1, strict=False)
    return Placement(node, strict=_free_bytes(node, sysfs) >= num_bytes)


def _read_int(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _free_bytes(node: int, sysfs: Path) -> int:
    try:
        text = (sysfs / f"devices/system/node/node{node}/meminfo").read_text()
    except OSError:
        return 0
    found = re.search(r"MemFree:\s+(\d+) kB", text)
    return int(found[1]) << 10 if found else 0
