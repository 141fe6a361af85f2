"""FastDeploy's own tests of its resource manager, with the connector in place of its cache manager.

Runs where ``FASTDEPLOY_TREE`` names a tree of FastDeploy's source, and Paddle is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.connectors.fastdeploy_source import TREE

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parents[2]
# Tests that use no internals of the cache manager. FastDeploy's own cache manager v1 fails two:
# they assert calls of the old interface.
MODULE = "tests/v1/test_resource_manager_v1.py"
# Tests of the files that the patch changes for prefill and decode servers, and of their engine.
EXCHANGE = (
    "tests/splitwise/test_splitwise_connector.py",
    "tests/output/test_token_processor.py",
    "tests/engine/test_common_engine.py",
)
OWN_FAILURES = {
    "v1": {"test_free_blocks_with_extend_tables", "test_get_prefix_cached_blocks_with_revert"},
    "v0": set(),
}
# The old interface of the connector refuses the roles of prefill and decode servers.
OF_ROLES = {
    "v1": set(),
    "v0": {
        "test_decode_role_prefill_task_logs_decode_bootstrap_batch",
        "test_preallocate_resource_in_p_and_d",
        "test_prefilled_request_flow_and_resource_check",
    },
}


def failures(
    folder: Path, manager: str, interface: str, modules: Sequence[str] = (MODULE,)
) -> set[str]:
    """Return the names of the failed tests; print the counts."""
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "tests.connectors.fastdeploy_own_tests", TREE, str(folder), manager,
         interface, *modules],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=300, check=False,
    )  # fmt: skip
    outcomes = json.loads(result.stdout.strip().rpartition("\n")[2])
    assert len(outcomes) > 30
    failed = {
        name.rpartition("::")[2]
        for name, outcome in outcomes.items()
        if outcome not in ("passed", "skipped")
    }
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    print(f"{manager}, {interface}: {passed} passed, failed: {sorted(failed)}")
    return failed


@pytest.mark.parametrize("interface", ["v1", "v0"])
def test_own_tests_that_fail_fail_without_the_connector_or_are_of_refused_roles(
    tmp_path, interface
):
    own = failures(tmp_path / "own", "own", interface)
    assert own == OWN_FAILURES[interface]
    assert failures(tmp_path / "aiokv", "aiokv", interface) == own | OF_ROLES[interface]


def test_own_tests_of_the_exchange_between_servers_pass_without_cache_manager_v1(tmp_path):
    """The one that fails does so without the patch, too."""
    assert failures(tmp_path / "own", "own", "v0", EXCHANGE) == {
        "test_control_sleep_defaults_tags_and_dispatches_cache_transfer"
    }
