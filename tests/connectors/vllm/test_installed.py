"""The tests of this folder run with vLLM only."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: make test-vllm installs it and runs the tests of its connector",
)
def test_connector_was_tested_with_the_installed_version() -> None:
    import vllm

    from aiokv.connectors.vllm.compat import TESTED

    assert vllm.__version__.split("+")[0] in TESTED
