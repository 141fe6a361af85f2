"""Mutate the code, one place at a time, and report mutants that no test detects: ``make mutate``.

A sample of the mutants of ``aiokv/{scheduler,engine,worker,ranks,sync,stores,peers,events}``,
``aiokv/connectors`` and ``native/src/{index,store,digest,io}`` is built and
tested in copies of the repository. The connectors of vLLM and SGLang are mutated where these are
installed: ``.venv-vllm-0.32.0/bin/python -m tests.mutation --only connectors/vllm``. A mutant is

- killed: a test fails, or crashes;
- timeout: a test does not end;
- explained: it survives, and ``explained.toml`` states why no test must detect it;
- survived: it survives all tests. Mend a test, or explain it;
- invalid: it does not build, and counts for nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import queue
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutation import explanations
from tests.mutation.scratch import Scratch
from tests.mutation.selection import (
    EVERYTHING,
    TOO_SLOW,
    likely_tests,
    native_mutants_of,
    native_tests,
    python_mutants_of,
)

if TYPE_CHECKING:
    from tests.mutation.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"python": python_mutants_of, "native": native_mutants_of}
STATUSES = ("killed", "timeout", "explained", "survived", "invalid")


@dataclass(frozen=True, slots=True)
class Verdict:
    path: str
    line: int
    kind: str
    before: str
    after: str
    status: str
    by: str  # the test that failed, or the explanation
    seconds: float


class Judge:
    """Worker that tries one mutant after another in a scratch copy."""

    def __init__(self, scratches: list[Scratch], timeout_seconds: float, quick: bool) -> None:
        self._free: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
        for scratch in scratches:
            self._free.put(scratch)
        self._timeout_seconds = timeout_seconds
        self._quick = quick
        self._explained = explanations.load(Path(__file__).parent)

    def verdict(self, mutant: Mutant) -> Verdict:
        scratch = self._free.get()
        started = time.perf_counter()
        source = scratch.source(mutant)  # the repository may be edited meanwhile
        before, after = mutant.shown(source)
        scratch.write(mutant, mutant.apply(source))
        try:
            status, by = self._try(scratch, mutant)
        finally:
            scratch.write(mutant, source)
            self._free.put(scratch)
        if status == "survived":
            for each in self._explained:
                if each.explains(mutant.path, mutant.kind, before, after):
                    status, by = "explained", each.reason
        seconds = round(time.perf_counter() - started, 1)
        line = mutant.line(source)
        return Verdict(mutant.path, line, mutant.kind, before, after, status, by, seconds)

    def _try(self, scratch: Scratch, mutant: Mutant) -> tuple[str, str]:
        if mutant.path.startswith("native/"):
            names = native_tests(mutant.path)
            built = scratch.build_tests(names)
            if not built.passed:
                return "invalid", built.said
            result = scratch.native_tests(names, self._timeout_seconds)
            if not result.passed:
                return "timeout" if result.timed_out else "killed", f"native: {result.said}"
            built = scratch.build()
            if not built.passed:
                return "invalid", built.said
        stages = [[f"tests/{path}" for path in likely_tests(mutant.path)]]
        if not self._quick:
            stages.append(everything())
        for paths in stages:
            result = scratch.pytest(paths, self._timeout_seconds * len(stages[0]))
            if not result.passed:
                return "timeout" if result.timed_out else "killed", result.said
        return "survived", ""


def everything() -> list[str]:
    ignored = [f"--ignore=tests/{path}" for path in TOO_SLOW]
    return [*(f"tests/{path}" for path in EVERYTHING), *ignored]


def main() -> int:
    args = _parse()
    found = {
        family: [mutant for mutant in find(ROOT) if args.only in mutant.path]
        for family, find in FAMILIES.items()
    }
    if args.again:
        sampled = _survivors(args.again, [mutant for each in found.values() for mutant in each])
    else:
        rng = random.Random(args.seed)
        sizes = {family: min(getattr(args, family), len(each)) for family, each in found.items()}
        sampled = [
            mutant for name, size in sizes.items() for mutant in rng.sample(found[name], size)
        ]
    native = any(mutant.path.startswith("native/") for mutant in sampled)
    with _folder(args.scratch) as folder:
        scratches = [Scratch(ROOT, Path(folder) / str(job)) for job in range(args.jobs)]
        for scratch in scratches:
            scratch.prepare(native=native)
        if not args.unchecked:
            clean = scratches[0].pytest(everything(), 1800)
            clean.raise_unless_passed("the tests fail without any mutant")
        verdicts = _judge_all(Judge(scratches, args.timeout, args.quick), sampled, args.jobs)
    report = {
        "seed": args.seed,
        "mutants": {family: len(each) for family, each in found.items()},
        "sampled": len(sampled),
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    _print_table(verdicts)
    print(f"report: {args.report}")
    return 1 if any(verdict.status == "survived" for verdict in verdicts) else 0


def _folder(kept: Path | None) -> contextlib.AbstractContextManager[str]:
    if kept is None:
        return tempfile.TemporaryDirectory(prefix="aiokv-mutate-")
    return contextlib.nullcontext(str(kept.resolve()))


def _survivors(report: Path, found: list[Mutant]) -> list[Mutant]:
    """Return the mutants of an earlier report whose line still exists."""
    verdicts = json.loads(report.read_text())["verdicts"]
    wanted = {
        (each["path"], each["kind"], each["before"], each["after"])
        for each in verdicts
        if each["status"] in ("survived", "explained")
    }
    sources = {path: (ROOT / path).read_bytes() for path in {mutant.path for mutant in found}}
    return [m for m in found if (m.path, m.kind, *m.shown(sources[m.path])) in wanted]


def _judge_all(judge: Judge, sampled: list[Mutant], jobs: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(judge.verdict, mutant) for mutant in sampled]):
            each = done.result()
            verdicts.append(each)
            place = f"{each.path}:{each.line}"
            print(f"{len(verdicts)}/{len(sampled)} {each.status} {place} {each.kind}", flush=True)
            if each.status == "survived":
                print(f"    - {each.before}\n    + {each.after}", flush=True)
    return sorted(verdicts, key=lambda each: (each.path, each.line, each.after))


def _print_table(verdicts: list[Verdict]) -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in verdicts:
        counts[each.path][each.status] += 1
        counts["all"][each.status] += 1
    print(f"{'':44}" + "".join(f"{status:>10}" for status in STATUSES))
    for path, of in counts.items():
        print(f"{path:44}" + "".join(f"{of[status]:10}" for status in STATUSES))
    total = counts["all"]
    valid = total.total() - total["invalid"]
    noticed = total["killed"] + total["timeout"]
    if valid:
        share = (noticed + total["explained"]) / valid
        print(f"{noticed} of {valid} detected, {total['explained']} explained: {share:.1%}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutate ARGS=...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", type=int, default=60, metavar="N", help="sample size (60)")
    parser.add_argument("--native", type=int, default=40, metavar="N", help="sample size (40)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (1)")
    parser.add_argument("--only", default="", metavar="PART", help="files with PART in their path")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="FILE",
        help="only mutants that survived in this earlier report",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (1)")
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="S", help="seconds per test file (60)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run only the tests that are likely to fail"
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="do not run all tests without a mutant first"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="keep the copies there, so that the next run has less to build",
    )
    parser.add_argument(
        "--report", type=Path, default=ROOT / "build" / "mutation.json", metavar="FILE"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
