"""Apply ``fastdeploy.patch`` to FastDeploy's Python files.

Run it as ``python fastdeploy_patch.py FOLDER``. The folder has the package ``fastdeploy``: it is a
clone of FastDeploy, or the ``site-packages`` of an installation. All changes are made, or none.
``--check`` writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

PATCH = Path(__file__).with_name("fastdeploy.patch")


@dataclass
class Change:
    """Lines of one file to be replaced.

    Attributes:
        path: file, from the folder of the package on.
        line: number of the first line in the version of the patch.
        old: lines to be found.
        new: lines that replace them.
    """

    path: str
    line: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


def read_patch(text: str) -> list[Change]:
    """Return the changes of a patch in unified format."""
    changes: list[Change] = []
    path = ""
    for line in text.splitlines():
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif line.startswith("@@ -"):
            changes.append(Change(path, int(line.split()[1][1:].partition(",")[0])))
        elif changes and line[:1] in ("-", " ") and not line.startswith("---"):
            changes[-1].old.append(line[1:])
        if changes and line[:1] in ("+", " ") and not line.startswith("+++"):
            changes[-1].new.append(line[1:])
    return changes


def places(lines: list[str], wanted: list[str]) -> list[int]:
    """Return the indices at which lines stand in a file."""
    last = len(lines) - len(wanted)
    return [i for i in range(last + 1) if lines[i : i + len(wanted)] == wanted]


def apply(folder: Path, changes: list[Change], *, writes: bool) -> list[str]:
    """Apply changes to the files of a folder.

    Args:
        folder: folder that has the package ``fastdeploy``.
        changes: changes of the patch.
        writes: False to only check.

    Returns:
        A line per change that cannot be made; nothing is written then.
    """
    files: dict[str, list[str]] = {}
    problems: list[str] = []
    for number, change in enumerate(changes, 1):
        name = f"change {number} of {len(changes)}, {change.path}:{change.line}"
        path = folder / change.path
        if change.path not in files:
            if not path.is_file():
                problems.append(f"{name}: the file is missing")
                continue
            files[change.path] = path.read_text(encoding="utf-8").splitlines()
        lines = files[change.path]
        found = places(lines, change.old)
        if len(found) == 1:
            lines[found[0] : found[0] + len(change.old)] = change.new
            print(f"{name}: applies at line {found[0] + 1}")
        elif len(places(lines, change.new)) == 1:
            print(f"{name}: is there already")
        else:
            what = "are not in the file" if not found else f"are there {len(found)} times"
            wanted = "\n".join(f"    {line}" for line in change.old)
            problems.append(f"{name}: these lines {what}:\n{wanted}")
    if writes and not problems:
        for name, lines in files.items():
            (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return problems


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that has the package fastdeploy")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    changes = read_patch(PATCH.read_text(encoding="utf-8"))
    problems = apply(arguments.folder, changes, writes=not arguments.check)
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        print("Nothing was changed. Make these changes by hand.", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
