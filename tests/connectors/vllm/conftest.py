"""Skips these tests where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():  # of the libraries that vLLM imports
        warnings.simplefilter("ignore")
        import vllm.lora.request
        import vllm.v1.core.sched.async_scheduler  # noqa: F401


def pytest_report_header() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "tests/connectors/vllm: not run, vLLM is not installed; make test-vllm installs it"
    return None


@pytest.fixture(autouse=True)
def _no_offered_tensors() -> None:
    from aiokv.connectors.vllm import tensors_here

    tensors_here.clear()
