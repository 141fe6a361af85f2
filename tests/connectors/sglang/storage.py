"""The storage backend of the guide, with a record of the pages that it has saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from aiokv.connectors.sglang import HiCacheAiokv

VARIABLE = "AIOKV_TEST_SAVED"  # environment variable with the path of the record


class RecordedAiokv(HiCacheAiokv):
    """Backend that writes a byte to a file per page that a store has saved."""

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: object = None) -> Any:
        """Save pages, and record them."""
        saved = super().batch_set_v1(keys, host_indices, extra_info)
        with Path(os.environ[VARIABLE]).open("ab") as record:
            record.write(b"." * sum(saved))
        return saved
