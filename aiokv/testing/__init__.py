"""Helpers for tests of code that uses aiokv: devices and a clock that the test controls.

``ScriptedDevice`` fails, delays or reorders the copies that a script names. ``ManualDevice`` lets
the test complete every copy. ``clocked_loop`` creates loops whose time the test advances.
``ScriptedStore`` is a store in memory that follows a script, too. ``record`` writes the transitions
of an engine's scheduler, and ``replay_transitions`` runs them again and compares every result.
"""

from aiokv.testing.clock import Clock, clocked_loop, running_clock
from aiokv.testing.loops import run_until_idle, spin
from aiokv.testing.manual import ManualCopy, ManualDevice, ManualEvent
from aiokv.testing.rules import Gate
from aiokv.testing.scripted import End, ScriptedDevice
from aiokv.testing.store import ScriptedStore
from aiokv.testing.transitions import (
    Mismatch,
    Recording,
    Transition,
    TransitionLog,
    record,
    replay_transitions,
)

__all__ = [
    "Clock",
    "End",
    "Gate",
    "ManualCopy",
    "ManualDevice",
    "ManualEvent",
    "Mismatch",
    "Recording",
    "ScriptedDevice",
    "ScriptedStore",
    "Transition",
    "TransitionLog",
    "clocked_loop",
    "record",
    "replay_transitions",
    "run_until_idle",
    "running_clock",
    "spin",
]
