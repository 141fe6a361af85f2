"""Protocols of devices, streams and events, and options of CUDA devices."""

from aiokv.worker.device.base import Device, Event, Stream
from aiokv.worker.device.cpu import CpuEvent, CpuStream
from aiokv.worker.device.cuda import CudaOptions

__all__ = [
    "CpuEvent",
    "CpuStream",
    "CudaOptions",
    "Device",
    "Event",
    "Stream",
]
