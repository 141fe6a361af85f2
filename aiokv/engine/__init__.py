"""CacheEngine and its parts: each joins scheduler and worker for one kind of event."""

from aiokv.engine.computing import ComputeBatch
from aiokv.engine.engine import CacheEngine

__all__ = ["CacheEngine", "ComputeBatch"]
