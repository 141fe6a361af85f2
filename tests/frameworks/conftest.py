"""Tests that need the ``paddlepaddle`` package.

``make test-paddle`` installs the newest one, ``make test-paddle-2.6`` Paddle 2.6.2.
"""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def paddle():
    if find_spec("paddle") is None:
        pytest.skip("paddlepaddle is not installed; make test-paddle does it")
    from aiokv.frameworks.paddle import import_paddle

    return import_paddle()


@pytest.fixture(autouse=True)
def needs_kernels(request):
    """Skip formats of the demo's model for which Paddle 2.6 has no kernels on the CPU."""
    call = getattr(request.node, "callspec", None)
    if call is not None and call.params.get("kv_format") in ("int8", "fp8"):
        paddle = request.getfixturevalue("paddle")
        if not hasattr(paddle, "float8_e4m3fn"):
            pytest.skip(f"Paddle {paddle.__version__} cannot gather int8, and has no float8")
