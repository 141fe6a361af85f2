"""A connector for tests of servers, whose copies fail while a file exists."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from aiokv.connectors.vllm import AiokvConnector, opening
from aiokv.sync import RankThread
from tests.harness.flaky import Faults, FlakyDevice

if TYPE_CHECKING:
    import torch

    from aiokv.layout.regions import Regions

PATH_VARIABLE: Final = "AIOKV_TEST_FAULTS"
"""Environment variable with the path of the file."""


class FaultyDevice(FlakyDevice):
    """A device whose copies of several blocks fail while the file exists."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))

    def copy(self, *args: Any) -> Any:
        """Start a copy, which fails from a random block on if the file exists."""
        is_faulty = Path(os.environ[PATH_VARIABLE]).exists()
        self.faults = Faults(random.Random(0), refuse_share=0.0, fail_share=float(is_faulty))
        return super().copy(*args)


class FaultyConnector(AiokvConnector):
    """The connector on a FaultyDevice."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the tensors of this worker."""

        def rank_thread(
            path: str, rank: int, regions: Regions, device: str, **options: Any
        ) -> RankThread:
            return RankThread(path, rank, regions, FaultyDevice(), **options)

        with patch.object(opening, "RankThread", rank_thread):
            super().register_kv_caches(kv_caches)
