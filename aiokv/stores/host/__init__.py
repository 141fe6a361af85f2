"""Host store: blocks in memory that the engines of one host share."""

from aiokv.stores.host.store import HostStore

__all__ = ["HostStore"]
