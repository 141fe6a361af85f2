"""Options: each is used, none comes from the environment, and none names a missing feature."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from aiokv import CacheConfig, WindowGroup
from aiokv.errors import ConfigError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "aiokv"
CACHE = ("engine", "scheduler", "worker", "stores", "ranks")


def attributes_read() -> set[str]:
    """Return the names of attributes that the code behind the options reads."""
    names = set()
    for folder in CACHE:
        for path in (PACKAGE / folder).rglob("*.py"):
            names |= {
                node.attr
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute)
            }
    return names


@pytest.mark.parametrize("options", [CacheConfig, WindowGroup])
def test_each_option_is_read_by_the_code_that_it_configures(options: type):
    """An option that no code reads would have no effect."""
    derived = {  # read through a property of CacheConfig
        "low_watermark_blocks": "watermark_blocks",
        "min_onload_tokens": "min_onload_blocks",
    }
    read = attributes_read()
    fields = [field.name for field in dataclasses.fields(options)]
    assert len(fields) > 3
    assert [name for name in fields if derived.get(name, name) not in read] == []


def test_no_option_of_the_cache_comes_from_the_environment():
    """Two engines of one process may differ in all of their options.

    Credentials of stores may come from the environment, and so may, on request, their list and the
    configuration (``CacheConfig.load``).
    """
    reads = ("environ", "getenv")
    native = [*(ROOT / "native/src").rglob("*.c*"), *(ROOT / "native/include").rglob("*.hpp")]
    python: list[Path] = []
    for folder in set(CACHE) - {"stores"}:
        python += (PACKAGE / folder).rglob("*.py")
    assert min(len(native), len(python)) > 20
    for path in (*native, *python):
        text = path.read_text()
        assert not [name for name in reads if name in text], path


def test_a_configuration_that_is_not_loaded_ignores_the_environment(monkeypatch):
    monkeypatch.setenv("AIOKV_BLOCK_TOKENS", "32")
    assert CacheConfig(device_blocks=8).block_tokens == 16


def test_missing_features_have_no_stub():
    """No code raises NotImplementedError in place of a transfer."""
    for path in PACKAGE.rglob("*.py"):
        assert "raise NotImplementedError" not in path.read_text(), path


@pytest.mark.parametrize("tier", ["storage", "mooncake", "rdma"])
def test_unsupported_tier_cannot_be_configured(tier: str):
    """Tiers are fields of the configuration, and there are two of them."""
    with pytest.raises((TypeError, ConfigError), match=f"{tier}_blocks"):
        CacheConfig(device_blocks=8, **{f"{tier}_blocks": 8})
