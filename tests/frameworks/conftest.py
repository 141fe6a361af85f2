"""Tests that need the ``paddlepaddle`` package; ``make test-paddle`` installs it."""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def paddle():
    if find_spec("paddle") is None:
        pytest.skip("paddlepaddle is not installed; make test-paddle does it")
    from aiokv.frameworks.paddle import import_paddle

    return import_paddle()
