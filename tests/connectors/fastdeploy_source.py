"""The tree of FastDeploy's source that tests run.

A test module that imports this one is skipped unless ``FASTDEPLOY_TREE`` names a tree, and Paddle
is installed.
"""

from __future__ import annotations

import os
from itertools import count
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

TREE = os.environ.get("FASTDEPLOY_TREE", "")
if not TREE:
    pytest.skip("FASTDEPLOY_TREE names no tree of FastDeploy", allow_module_level=True)
pytest.importorskip("paddle")

from tests.connectors.fastdeploy_tree import import_tree  # noqa: E402

PORTS = count(20_000 + os.getpid() % 20_000)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the changed tree be imported in this process."""
    resource_tracker.ensure_running()  # of FastDeploy's shared memory, for the whole process
    import_tree(Path(TREE), tmp_path_factory.mktemp("tree"))
