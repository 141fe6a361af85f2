"""The bench of SGLang's storage backends loads what it has saved, and finds what it has not.

``make test-sglang`` installs SGLang.
"""

from __future__ import annotations

import warnings

import pytest

from aiokv.errors import InternalError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang", reason="SGLang is not installed; run `make test-sglang`")
    bench = pytest.importorskip("bench.sglang_storage", exc_type=ImportError)


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(bench, "LAYERS", 2)
    return bench._host_pool(2)


@pytest.mark.parametrize("name", bench.BACKENDS)
def test_each_backend_saves_and_loads_the_pages(pool, name, tmp_path):
    figures = bench._round(pool, name, str(tmp_path), 2)
    assert sorted(figures) == ["cached_load_gbps", "load_gbps", "save_gbps"]
    assert all(value > 0 for value in figures.values())


def test_pages_that_were_not_loaded_are_found(pool):
    with pytest.raises(InternalError, match="page 0"):
        bench._compare(pool, 2)
