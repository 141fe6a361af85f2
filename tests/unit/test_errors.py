"""Error classes: hints, base classes and exports."""

from __future__ import annotations

import pytest

import aiokv
from aiokv import errors


def test_hint_is_printed_with_the_message():
    error = aiokv.WouldBlock("no room", hint="preempt a lease")
    assert str(error) == "no room (hint: preempt a lease)"
    assert error.hint == "preempt a lease"
    assert str(aiokv.WouldBlock("no room")) == "no room"


@pytest.mark.parametrize(
    ("cls", "bases"),
    [
        (aiokv.ConfigError, (aiokv.UsageError, ValueError)),
        (aiokv.LayoutError, (aiokv.UsageError, ValueError)),
        (aiokv.LeaseError, (aiokv.UsageError,)),
        (aiokv.ClosedError, (aiokv.UsageError,)),
        (aiokv.WouldBlock, (aiokv.CapacityError,)),
        (aiokv.AllocateTimeout, (aiokv.CapacityError, TimeoutError)),
        (aiokv.ControlTimeout, (TimeoutError,)),
        (aiokv.RequestTooLarge, (aiokv.CapacityError,)),
        (aiokv.UnreleasedLeaseWarning, (ResourceWarning,)),
    ],
)
def test_each_error_has_its_documented_base_class(cls, bases):
    for base in bases:
        assert issubclass(cls, base)


def test_every_public_error_is_exported():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, (aiokv.AiokvError, ResourceWarning))
    }
    assert defined <= set(aiokv.__all__)
