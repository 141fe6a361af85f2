"""Fixtures and checks of all tests: a bench closes the resources that it opens."""

from tests.conftest import *  # noqa: F403
