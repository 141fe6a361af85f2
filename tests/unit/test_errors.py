"""Error classes: hints, base classes and exports."""

from __future__ import annotations

import pytest

import aiokv
from aiokv import errors


def test_hint_is_printed_with_the_message():
    error = aiokv.errors.WouldBlock("no room", hint="preempt a lease")
    assert str(error) == "no room (hint: preempt a lease)"
    assert error.hint == "preempt a lease"
    assert str(aiokv.errors.WouldBlock("no room")) == "no room"


@pytest.mark.parametrize(
    ("cls", "bases"),
    [
        (aiokv.errors.ConfigError, (aiokv.errors.UsageError, ValueError)),
        (aiokv.errors.LayoutError, (aiokv.errors.UsageError, ValueError)),
        (aiokv.errors.LeaseError, (aiokv.errors.UsageError,)),
        (aiokv.errors.ClosedError, (aiokv.errors.UsageError,)),
        (aiokv.errors.WouldBlock, (aiokv.errors.CapacityError,)),
        (aiokv.errors.AllocateTimeout, (aiokv.errors.CapacityError, TimeoutError)),
        (aiokv.errors.ControlTimeout, (TimeoutError,)),
        (aiokv.errors.RequestTooLarge, (aiokv.errors.CapacityError,)),
        (aiokv.errors.UnreleasedLeaseWarning, (ResourceWarning,)),
    ],
)
def test_each_error_has_its_documented_base_class(cls, bases):
    for base in bases:
        assert issubclass(cls, base)


def errors_below(cls: type[Exception]) -> set[type[Exception]]:
    """Return all classes that derive from an error class."""
    return {cls}.union(*map(errors_below, cls.__subclasses__()))


def test_all_errors_that_a_caller_sees_are_in_one_module():
    elsewhere = {
        cls.__name__
        for cls in errors_below(errors.AiokvError)
        if cls.__module__.startswith("aiokv.") and cls.__module__ != "aiokv.errors"
    }
    assert elsewhere <= {"ProtocolError"}  # ends a connection and is not raised to a caller
