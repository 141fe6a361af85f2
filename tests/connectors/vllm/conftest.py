"""Skips these tests where vLLM is not installed."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "tests/connectors/vllm: not run, vLLM is not installed; make test-vllm installs it"
    return None


@pytest.fixture(autouse=True)
def _no_offered_tensors() -> None:
    from aiokv.connectors.vllm import tensors_here

    tensors_here.clear()
