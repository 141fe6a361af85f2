"""Devices by name: ``"cpu"``, ``"cuda"``, ``"cuda:1"``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from aiokv.errors import ConfigError
from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    from aiokv.worker.device.base import Device

_ACCEPTED: Final = "'cpu', 'cuda' (the current GPU), 'cuda:N', or a CpuDevice or CudaDevice"
_MEMBERS: Final = ("attach", "copy", "routes", "detach", "close")


def named_device(device: Device | str | None) -> Device:
    """Return the device of that name, the given device object, or the cpu device for None.

    Raises:
        ConfigError: no device has the name, it cannot be used here, or the object is not a device.
    """
    if device is None or device == "cpu":
        return CpuDevice()
    if not isinstance(device, str):
        if isinstance(device, type) or not all(hasattr(device, name) for name in _MEMBERS):
            raise ConfigError(f"device is {device!r}; it must be {_ACCEPTED}")
        return device
    match = re.fullmatch(r"cuda(?::(\d{1,9}))?", device, re.ASCII)
    if match is None:
        raise ConfigError(f"device is {device!r}; it must be {_ACCEPTED}")
    from aiokv.worker.device.cuda import CudaDevice

    return CudaDevice(None if match[1] is None else int(match[1]))
