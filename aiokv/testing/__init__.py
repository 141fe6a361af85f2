"""Helpers for tests of code that uses aiokv: devices whose copies the test completes."""

from aiokv.testing.loops import run_until_idle, spin
from aiokv.testing.manual import ManualCopy, ManualDevice, ManualEvent

__all__ = ["ManualCopy", "ManualDevice", "ManualEvent", "run_until_idle", "spin"]
