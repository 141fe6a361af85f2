"""Run test modules of a FastDeploy tree over its own cache manager, or over the connector.

``python -m tests.connectors.fastdeploy_own_tests TREE FOLDER MANAGER INTERFACE MODULE...`` prints
the outcome of each test. MANAGER is "own" or "aiokv"; INTERFACE is "v1" or "v0", without cache
manager v1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from aiokv.connectors.fastdeploy import CacheManager, PrefixCacheManager
from tests.connectors.fastdeploy_tree import import_tree

VARIABLES = (
    *("FD_USE_NEW_TOKEN_RATIO_RESERVE", "ENABLE_V1_KVCACHE_MANAGER"),
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
)


class Outcomes:
    """Plugin of pytest that notes the outcome of each test: "passed", or the error."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found[report.nodeid] = str(report.longrepr).strip().rpartition("\n")[2]
        elif report.when == "call":
            self.found.setdefault(report.nodeid, report.outcome)


def substitute(is_own: bool, interface: str) -> None:
    """Let the resource manager create this cache manager, without workers."""
    if interface == "v1":

        def create(config: Any, *_: Any) -> Any:
            if not is_own:
                return CacheManager(config)
            from fastdeploy.cache_manager.v1.cache_manager import CacheManager as Own

            for name in ("begin_fetch", "cache_output_blocks", "expired_requests"):
                if not hasattr(Own, name):
                    setattr(Own, name, lambda *_: ())
            return Own(config)

        CacheManager.for_workers = create
    elif not is_own:
        from fastdeploy.cache_manager import prefix_cache_manager

        prefix_cache_manager.PrefixCacheManager = PrefixCacheManager


def main(tree: str, folder: str, manager: str, interface: str, *modules: str) -> None:
    import_tree(Path(tree), Path(folder))
    for name in VARIABLES:
        del os.environ[name]
    os.environ["ENABLE_V1_KVCACHE_MANAGER"] = "1" if interface == "v1" else "0"
    substitute(manager == "own", interface)
    outcomes = Outcomes()
    paths = [str(Path(tree) / module) for module in modules]
    pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={tree}", *paths], plugins=[outcomes])
    sys.stdout.write("\n" + json.dumps(outcomes.found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
