"""``aiokv demo --store``: a process reuses what an earlier process has saved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from aiokv.cli import main
from tests.harness.patience import STORE_OPTIONS
from tests.integration.test_demo import SMALL
from tests.stores import mooncake_cluster
from tests.stores.mooncake_cluster import MooncakeCluster
from tests.stores.servers import HINT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    Demo = Callable[..., tuple[int, dict[str, Any]]]


MOONCAKE_ABSENT = mooncake_cluster.why_absent()  # here, because its library stays loaded


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    """Return a function that runs the command and returns its status and ``--json``."""

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "demo.json"
        status = main(["demo", *SMALL, "--json", str(path), *flags])
        return status, json.loads(path.read_text())

    return run


def check_reuse(status: int, found: dict[str, Any]) -> None:
    """The second process computed less than the first: the rest came from the store."""
    assert status == 0
    assert found["logits_equal"]
    assert found["blocks_equal"]
    no_cache, first, second = found["runs"]
    assert no_cache["fetch"]["bytes"] == 0
    assert first["save"]["bytes"] > 0
    assert second["fetch"]["bytes"] > 0
    assert second["reused_tokens"]["store"] > 0
    assert second["computed_tokens"] < first["computed_tokens"] // 2
    assert second["compared"]["blocks_read"] > 0


def test_disk_outlives_the_process(demo: Demo, tmp_path: Path) -> None:
    url = f"disk:{tmp_path / 'kv'}?{STORE_OPTIONS}"
    status, found = demo("--store", url)
    check_reuse(status, found)
    assert found["runs"][1]["reused_tokens"]["store"] == 0
    _, again = demo("--store", url)  # its first process finds what the earlier command has saved
    assert again["blocks_equal"]
    assert again["runs"][1]["reused_tokens"]["store"] > 0


def test_another_model_reuses_nothing(demo: Demo, tmp_path: Path) -> None:
    url = f"directory:{tmp_path / 'kv'}?{STORE_OPTIONS}"
    assert demo("--store", url)[1]["runs"][1]["reused_tokens"]["store"] == 0
    status, found = demo("--store", url, "--layers", "1")
    assert status == 0
    assert found["runs"][1]["reused_tokens"]["store"] == 0


def test_redis_is_shared_by_processes(demo: Demo, tmp_path: Path) -> None:
    pytest.importorskip("redis", reason=f"redis-py is not installed; {HINT}")
    from tests.stores import servers_redis

    if servers_redis.PROGRAM is None:
        pytest.skip(f"neither valkey-server nor redis-server is installed; {HINT}")
    with servers_redis.running_server(tmp_path) as server:
        check_reuse(*demo("--store", f"{server.url}?{STORE_OPTIONS}"))


def test_mooncake_is_shared_by_processes(demo: Demo, tmp_path: Path) -> None:
    if MOONCAKE_ABSENT:
        pytest.skip(MOONCAKE_ABSENT)
    cluster = MooncakeCluster(tmp_path)
    try:
        cluster.start()
        check_reuse(*demo("--store", f"mooncake://{cluster.address}?{STORE_OPTIONS}"))
    finally:
        cluster.kill()


def test_wrong_url_is_refused_before_the_first_run(capsys):
    assert main(["demo", "--store", "disk:"]) == 2
    printed = capsys.readouterr()
    assert "'disk:' has no path" in printed.err
    assert "requests" not in printed.out + printed.err


def test_store_that_cannot_be_opened_ends_the_demo(capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", *SMALL, "--store", f"disk:{tmp_path / 'file'}"]) != 0
    assert "cannot be opened" in capsys.readouterr().err
