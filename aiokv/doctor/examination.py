"""All checks of a machine, in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiokv.doctor import software, system
from aiokv.doctor.findings import Finding, Report
from aiokv.doctor.gpu import check_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.doctor.machine import Machine


def examine(
    machine: Machine,
    *,
    measure: bool = True,
    require_gpu: bool = False,
    announce: Callable[[Finding], None] = lambda finding: None,
) -> Report:
    """Run all checks.

    Args:
        machine: what to look at.
        measure: False to skip the copies to and from the GPUs, which take seconds.
        require_gpu: a GPU, and all that it needs, is required.
        announce: called with each result as it is found.
    """
    findings = []
    for check in (*_SYSTEM, *_SOFTWARE):
        findings += _announced(check(machine), announce, require=False)
    for check in (
        software.check_cuda_build,
        software.check_cupy,
        partial(check_gpus, measure=measure),
    ):
        findings += _announced(check(machine), announce, require=require_gpu)
    healthy = not any(finding.is_fatal for finding in findings)
    return Report(healthy=healthy, findings=tuple(findings))


def _announced(
    found: Iterable[Finding], announce: Callable[[Finding], None], *, require: bool
) -> list[Finding]:
    findings = []
    for finding in found:
        if require and finding.status == "missing":
            finding = finding.as_required()
        announce(finding)
        findings.append(finding)
    return findings


_SYSTEM = (
    system.check_kernel,
    system.check_processor,
    system.check_memory,
    system.check_huge_pages,
    system.check_locked_memory,
    system.check_open_files,
    system.check_numa,
    system.check_clock,
)
_SOFTWARE = (
    software.check_python,
    software.check_build,
    software.check_uvloop,
    software.check_eventfd,
    software.check_io_uring,
    software.check_extras,
)
