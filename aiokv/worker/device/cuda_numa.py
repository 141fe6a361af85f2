"""NUMA placement of host memory near a GPU, read from sysfs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

_SYSFS: Final = Path("/sys")


class Placement(NamedTuple):
    """NUMA placement of the host arena.

    Attributes:
        node: NUMA node of the GPU; -1 when it is unknown, or the machine has one node.
        strict: the node has enough free memory, so the arena may be bound to it. Otherwise the node
            is only preferred: the kernel kills a process whose bound node runs out of memory.
    """

    node: int
    strict: bool


def placement(pci_address: str, num_bytes: int, sysfs: Path = _SYSFS) -> Placement:
    """Return the placement of ``num_bytes`` for the GPU at ``pci_address`` (``"0000:3b:00.0"``)."""
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
