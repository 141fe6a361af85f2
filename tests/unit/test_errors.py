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


def test_errors_are_in_their_module_only():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, (errors.AiokvError, ResourceWarning))
    }
    assert {"AiokvError", "UsageError", "UnreleasedLeaseWarning"} < defined
    assert not defined & set(aiokv.__all__)
    assert {getattr(errors, name).__module__ for name in defined} == {"aiokv.errors"}
