"""Memory that a process can still allocate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.base.memory import available_bytes

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_memory_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 2048 kB\n"})
    assert available_bytes(tmp_path) == 2 * MIB
    assert available_bytes() > 0


@pytest.mark.parametrize("group", ["/", "/a/b"])
def test_limit_of_the_control_group_or_of_a_parent(tmp_path: Path, group: str) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 1000000 kB\n",
            "proc/self/cgroup": f"0::{group}\n",
            "sys/fs/cgroup/memory.max": f"{64 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {20 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
        },
    )
    assert available_bytes(tmp_path) == 24 * MIB


def test_limit_of_a_control_group_of_the_first_version(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 1000000 kB\n",
            "proc/self/cgroup": "5:cpu,cpuacct:/c\n4:memory:/c\n",
            "sys/fs/cgroup/memory/c/memory.limit_in_bytes": f"{8 * MIB}\n",
            "sys/fs/cgroup/memory/c/memory.usage_in_bytes": f"{9 * MIB}\n",
            "sys/fs/cgroup/memory/c/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert available_bytes(tmp_path) == 0
