"""Names of the transports of peers that can be used here."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

from aiokv.errors import ConfigError
from aiokv.peers.mooncake import import_engine
from aiokv.peers.nixl import import_bindings

if TYPE_CHECKING:
    from collections.abc import Callable

    from _pytest.mark import ParameterSet

    from aiokv.peers.options import TransportName

HINT: Final = "run `make services`"
HOST_TRANSPORTS: Final[tuple[TransportName, ...]] = ("tcp", "nixl", "mooncake")
IMPORTS: Final[dict[str, Callable[[], object]]] = {
    "nixl": import_bindings,
    "mooncake": import_engine,
}


@cache
def why_absent(transport: str) -> str:
    """Return why a transport cannot be used; empty when it can."""
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    try:
        IMPORTS.get(transport, lambda: None)()
    except ConfigError as error:
        return f"{error}; {HINT}"
    return ""


def transports(*names: TransportName) -> pytest.MarkDecorator:
    """Run a test with each of some transports, as argument ``transport``.

    By default all that move blocks between host memory.
    """
    return pytest.mark.parametrize(
        "transport",
        [over(name) for name in names or HOST_TRANSPORTS],
    )


def over(transport: TransportName, *values: object) -> ParameterSet:
    """Return a row of parameters that begins with a transport; skipped where that is absent."""
    why = why_absent(transport)
    return pytest.param(transport, *values, marks=pytest.mark.skipif(bool(why), reason=why))
