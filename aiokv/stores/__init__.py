"""Stores: sets of blocks below the host tier, shared by restarts and by servers.

Each kind of store is imported when its name is first used; so is the package that it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.statistics import StoreStatistics
from aiokv.stores.base import Result, Store, StoreMemory, split_keys
from aiokv.stores.use import StoreUse

if TYPE_CHECKING:
    from aiokv.stores.directory import DirectoryStore
    from aiokv.stores.disk import DiskStore
    from aiokv.stores.host import HostStore
    from aiokv.stores.mooncake import MooncakeStore
    from aiokv.stores.redis import RedisStore
    from aiokv.stores.s3 import S3Store
    from aiokv.stores.urls import stores_from, stores_from_environment

__all__ = [
    "DirectoryStore",
    "DiskStore",
    "HostStore",
    "MooncakeStore",
    "RedisStore",
    "Result",
    "S3Store",
    "Store",
    "StoreMemory",
    "StoreStatistics",
    "StoreUse",
    "split_keys",
    "stores_from",
    "stores_from_environment",
]

_MODULES: Final = {
    "DirectoryStore": "aiokv.stores.directory",
    "DiskStore": "aiokv.stores.disk",
    "HostStore": "aiokv.stores.host",
    "MooncakeStore": "aiokv.stores.mooncake",
    "RedisStore": "aiokv.stores.redis",
    "S3Store": "aiokv.stores.s3",
    "stores_from": "aiokv.stores.urls",
    "stores_from_environment": "aiokv.stores.urls",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
