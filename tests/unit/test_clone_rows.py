"""clone_rows: nothing to copy needs neither tensors nor a stream."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from aiokv.errors import UsageError
from aiokv.worker.blocks import clone_rows

NONE, ONE = np.empty(0, np.int32), np.array([1], np.int32)
ON_GPU = SimpleNamespace(device="cuda:0")


def test_nothing_to_copy_needs_no_stream():
    clone_rows([ON_GPU], NONE, NONE)
    clone_rows([], ONE, ONE)


def test_copy_on_a_gpu_needs_a_stream():
    with pytest.raises(UsageError, match="stream is None"):
        clone_rows([ON_GPU], ONE, ONE)
