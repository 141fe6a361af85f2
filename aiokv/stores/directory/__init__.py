"""DirectoryStore: one file per block in a folder that several machines may share."""

from aiokv.stores.directory.store import DirectoryStore

__all__ = ["DirectoryStore"]
