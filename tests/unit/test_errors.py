"""Error classes: hints and base classes."""

from __future__ import annotations

import pytest

from aiokv import errors


def test_hint_is_printed_with_the_message():
    error = errors.WouldBlock("no room", hint="preempt a lease")
    assert str(error) == "no room (hint: preempt a lease)"
    assert error.hint == "preempt a lease"
    assert str(errors.WouldBlock("no room")) == "no room"


@pytest.mark.parametrize(
    ("cls", "bases"),
    [
        (errors.ConfigError, (errors.UsageError, ValueError)),
        (errors.LayoutError, (errors.UsageError, ValueError)),
        (errors.LeaseError, (errors.UsageError,)),
        (errors.ClosedError, (errors.UsageError,)),
        (errors.WouldBlock, (errors.CapacityError,)),
        (errors.AllocateTimeout, (errors.CapacityError, TimeoutError)),
        (errors.ControlTimeout, (TimeoutError,)),
        (errors.RequestTooLarge, (errors.CapacityError,)),
        (errors.UnreleasedLeaseWarning, (ResourceWarning,)),
    ],
)
def test_each_error_has_its_documented_base_class(cls, bases):
    for base in bases:
        assert issubclass(cls, base)
