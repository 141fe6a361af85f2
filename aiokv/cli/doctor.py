"""``aiokv doctor [--json]``: checks of the requirements of aiokv, and of causes of slowness."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from aiokv.cli.arguments import add_json

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from aiokv.doctor.findings import Finding, Report

EXIT_GOOD: Final = 0
EXIT_MISSING: Final = 1

EPILOG = """\
Each line starts with ok, slow (works, but slower than it could) or missing, and says what to do.
GPUs are required only with --gpu. The copies to and from each GPU take about a second;
--no-measure skips them.

exit status: 0 nothing required is missing, 1 something required is missing, 2 bad usage
"""

_STYLES: Final = {"ok": "green", "slow": "yellow", "missing": "red"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``doctor`` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine: GPU, PCIe link, limits, kernel, build",
        description="Check what aiokv needs on this machine, and what makes aiokv slow.",
        epilog=EPILOG,
    )
    parser.add_argument("--gpu", action="store_true", help="require a GPU and its software")
    parser.add_argument(
        "--no-measure", dest="measure", action="store_false", help="do not measure copies"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print each result as it is found, or all as JSON.

    Returns:
        The exit status.

    Raises:
        UsageError: the output file cannot be written.
    """
    from aiokv.cli.files import check_writable, print_json
    from aiokv.doctor.examination import examine
    from aiokv.doctor.machine import Machine

    check_writable(args.json)
    if args.json is not None:
        report = examine(Machine(), measure=args.measure, require_gpu=args.gpu)
        print_json(args.json, report)
    else:
        from rich.console import Console

        console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        report = examine(
            Machine(),
            measure=args.measure,
            require_gpu=args.gpu,
            announce=lambda finding: _print(console, finding),
        )
        console.print(_summary(report), markup=False)
    return EXIT_GOOD if report.healthy else EXIT_MISSING


def _print(console: Console, finding: Finding) -> None:
    from rich.text import Text

    line = Text(f"{finding.status:<8}", style=_STYLES[finding.status])
    line.append(f"{finding.name}: {finding.found}", style="default")
    console.print(line)
    if finding.advice:
        console.print(Text(f"        -> {finding.advice}"))


def _summary(report: Report) -> str:
    fatal = [finding.name for finding in report.findings if finding.is_fatal]
    if fatal:
        return f"required and missing: {', '.join(fatal)}"
    slow, missing = (
        sum(finding.status == status for finding in report.findings)
        for status in ("slow", "missing")
    )
    return f"aiokv works here; slow: {slow}, missing but not required: {missing}"
