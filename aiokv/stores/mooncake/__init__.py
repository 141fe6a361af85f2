"""MooncakeStore: blocks in the memory of a Mooncake Store cluster."""

from aiokv.stores.mooncake.store import MooncakeStore

__all__ = ["MooncakeStore"]
