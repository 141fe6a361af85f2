"""The storage backend of the guide, with a record of the pages that it has saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from aiokv.connectors.sglang import HiCacheAiokv

VARIABLE = "AIOKV_TEST_SAVED"  # environment variable with the path of the record


def wrong_file(record: Path) -> Path:
    """Return the path of the file that makes loaded pages wrong."""
    return record.with_suffix(".wrong")


class RecordedAiokv(HiCacheAiokv):
    """Backend that writes a byte to a file per page that a store has saved.

    While a second file exists, it clears the first page that it loads to each side pool.
    """

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: object = None) -> Any:
        """Save pages, and record them."""
        saved = super().batch_set_v1(keys, host_indices, extra_info)
        with Path(os.environ[VARIABLE]).open("ab") as record:
            record.write(b"." * sum(saved))
        return saved

    def batch_get_v2(self, transfers: list[Any], extra_info: object = None) -> Any:
        """Load pages of side pools."""
        loaded = super().batch_get_v2(transfers, extra_info)
        if wrong_file(Path(os.environ[VARIABLE])).exists():
            for each in transfers:
                pool, place = self.registered_pools[each.name], int(each.host_indices[0])
                pool.set_from_flat_data_page(place, pool.get_data_page(place) * 0)
        return loaded
