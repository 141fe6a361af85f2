"""Turn the GPU tests' JUnit file into a result that can be committed: counts, and every test."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench import gpu, harness


def main(junit: str, folder: str) -> int:
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    tests = {}
    for case in suite.iter("testcase"):
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname')}::{case.get('name')}"
        tests[name] = {
            "outcome": bad[0] if bad else "passed",
            "seconds": float(case.get("time", 0)),
        }
    counts: dict[str, int] = {}
    for test in tests.values():
        counts[str(test["outcome"])] = counts.get(str(test["outcome"]), 0) + 1
    run = harness.Run(machine=gpu.machine(), benches={"gpu_tests": {"counts": counts} | tests})
    harness.save(run, Path(folder) / f"gpu-tests-{gpu.gpu_name()}.json")
    print(f"GPU tests: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
