"""The tests of this folder run with vLLM only."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: make test-vllm installs it and runs the tests of its connector",
)
def test_vllm_has_the_version_that_the_connector_serves() -> None:
    import vllm

    assert vllm.__version__.startswith("0.22.")
