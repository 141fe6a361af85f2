"""Disk store: blocks in files of a local disk."""

from aiokv.stores.disk.store import DiskStore

__all__ = ["DiskStore"]
