"""Time limits of the tests, which no test reaches on a machine that is slow or busy."""

from __future__ import annotations

from typing import Final

STORE_OPTIONS: Final = "deadline=60&lookup_deadline=60"  # of the URL of a store
PROGRAM_SECONDS: Final = 300.0  # for a program that a test runs
