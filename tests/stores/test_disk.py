"""DiskStore: the promises of every store, and those of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.stores.disk import DiskStore
from tests.stores.conformance import Medium, StoreConformance

if TYPE_CHECKING:
    from pathlib import Path


class DiskMedium(Medium):
    """A directory of the test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def store(self) -> DiskStore:
        return DiskStore(self.path, bytes="64MiB", min_free_bytes=0)


class TestDisk(StoreConformance):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> DiskMedium:
        return DiskMedium(tmp_path / "kv")
