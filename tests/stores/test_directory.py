"""DirectoryStore: conformance, and failures of its file system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.stores import DirectoryStore
from tests.stores.conformance import Medium, StoreConformance

if TYPE_CHECKING:
    from pathlib import Path


class DirectoryMedium(Medium):
    def __init__(self, path: Path) -> None:
        self.path = path

    def store(self) -> DirectoryStore:
        return DirectoryStore(self.path)


@pytest.fixture
def medium(tmp_path: Path) -> DirectoryMedium:
    return DirectoryMedium(tmp_path / "kv")


class TestConformance(StoreConformance):
    pass
