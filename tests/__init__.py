"""Tests of aiokv; `tests/models/demo` also serves `aiokv demo` in a checkout."""
