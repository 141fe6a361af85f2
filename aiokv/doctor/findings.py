"""Results of checks."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "slow", "missing"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check.

    Attributes:
        name: what was checked.
        status: ``"ok"``; ``"slow"``: works, but slower than it could; ``"missing"``.
        found: what was found.
        advice: what to do; empty if nothing.
        required: True if aiokv cannot work while it is missing.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    required: bool = False

    def as_required(self) -> Finding:
        """Return the same result of something that is required."""
        return msgspec.structs.replace(self, required=True)

    @property
    def is_fatal(self) -> bool:
        """True if aiokv cannot work on this machine."""
        return self.required and self.status == "missing"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of all checks.

    Attributes:
        healthy: True if nothing that is required is missing.
        findings: the results, in the order of the checks.
    """

    healthy: bool
    findings: tuple[Finding, ...]


def ok(name: str, found: str) -> Finding:
    """Return the result of a check that found nothing to improve."""
    return Finding(name=name, status="ok", found=found)


def slow(name: str, found: str, advice: str, *, unless: bool = False) -> Finding:
    """Return the result of a check that found a cause of slowness, unless all is well."""
    return (
        ok(name, found) if unless else Finding(name=name, status="slow", found=found, advice=advice)
    )


def missing(
    name: str, found: str, advice: str, *, required: bool = False, unless: bool = False
) -> Finding:
    """Return the result of a check that found a requirement missing, unless all is well."""
    if unless:
        return ok(name, found)
    return Finding(name=name, status="missing", found=found, advice=advice, required=required)
