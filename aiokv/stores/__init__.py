"""Stores: sets of blocks below the host tier, shared by restarts and by servers."""

from aiokv.stores.base import Result, Store, StoreMemory, StoreStatistics
from aiokv.stores.use import StoreUse

__all__ = ["Result", "Store", "StoreMemory", "StoreStatistics", "StoreUse"]
