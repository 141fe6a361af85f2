"""Which transports of peers can be used here."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Final, get_args

import pytest

from aiokv.errors import ConfigError
from aiokv.peers.mooncake import import_engine
from aiokv.peers.nixl import import_bindings
from aiokv.peers.options import TransportName

if TYPE_CHECKING:
    from collections.abc import Callable

HINT: Final = "run `make services`"
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
    """Run a test with each of some transports, all by default, as argument ``transport``."""
    return pytest.mark.parametrize(
        "transport",
        [
            pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why))
            for name in names or get_args(TransportName)
            for why in [why_absent(name)]
        ],
    )
