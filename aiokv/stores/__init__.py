"""Stores: sets of blocks below the host tier, shared by restarts and by servers."""

from aiokv.stores.base import Result, Store, StoreMemory, StoreStatistics

__all__ = ["Result", "Store", "StoreMemory", "StoreStatistics"]
