"""Fixtures of the tests of stores."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.stores.conformance", "tests.stores.failures")
