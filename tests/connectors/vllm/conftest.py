"""Skips these tests where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("vllm") is None:
    served = ("failures", "loads", "random_serving", "resets", "serving", "settings")
    names = (*served, "compat", "prefills", "registration", "tensors")
    collect_ignore_glob = [f"test_{name}.py" for name in names]
else:
    with warnings.catch_warnings():  # of the libraries that vLLM imports
        warnings.simplefilter("ignore")
        import vllm.lora.request
        import vllm.v1.core.sched.async_scheduler  # noqa: F401
    from tests.connectors.vllm.serving import make_server  # noqa: F401


@pytest.fixture(autouse=True, scope="session")
def _folder_of_sockets() -> Iterator[None]:
    """Remove the sockets of vLLM, which keeps those of processes that were killed."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder, pytest.MonkeyPatch.context() as env:
        env.setenv("VLLM_RPC_BASE_PATH", folder)
        yield


@pytest.fixture(autouse=True)
def _no_offered_tensors() -> None:
    if importlib.util.find_spec("vllm") is None:
        return
    from aiokv.connectors.vllm import tensors_here

    tensors_here.clear()


@pytest.fixture(autouse=True)
def _reports_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("vllm") is not None:
        from aiokv.connectors.vllm import connector

        monkeypatch.setattr(connector, "REPORT_SECONDS", 0.0)
