"""The fixtures and checks of all tests: what a bench opens, it closes."""

from tests.conftest import *  # noqa: F403
