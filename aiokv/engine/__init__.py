"""CacheEngine and its parts."""

from aiokv.engine.computing import ComputeBatch
from aiokv.engine.engine import CacheEngine

__all__ = ["CacheEngine", "ComputeBatch"]
