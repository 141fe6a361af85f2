"""Tests of aiokv; `python -m tests.models.demo` is the demo with more models."""
