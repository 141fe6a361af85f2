"""The example with vLLM, as real servers on the CPU: a restart with a disk, and Redis."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.connectors.vllm.served import can_serve, write_model
from tests.examples.files import EXAMPLES, header_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not can_serve(), reason="a vLLM that runs on the CPU is not installed: make test-vllm"
    ),
]
PATH = EXAMPLES / "vllm_stores.py"
OPTIONS = [
    "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
    "--max-num-seqs", "8", "--block-size", "32", "--num-gpu-blocks-override", "80",
]  # fmt: skip
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(params=["disk", "redis"])
def store(request, tmp_path):
    if request.param == "disk":
        yield f"disk:{tmp_path}/{{dp}}-{{rank}}?bytes=256MiB"
        return
    servers = pytest.importorskip("tests.stores.servers_redis")
    if servers.PROGRAM is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with servers.running_server(tmp_path) as server:
        yield server.url


def test_a_second_server_finds_the_blocks_of_the_first_one(store: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, PATH, model, store, *OPTIONS],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    printed = [line for line in done.stdout.splitlines() if line.startswith("server ")]
    assert printed == header_of(PATH).output.splitlines(), done.stdout[-8000:] + done.stderr[-4000:]
