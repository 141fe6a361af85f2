"""Fixtures of the tests of peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.peers.engines import Side

if TYPE_CHECKING:
    from aiokv.peers.options import TransportName
    from aiokv.peers.wire import Connection


@pytest.fixture
def transport() -> TransportName:
    """Transport of tests that no mark runs over others.

    Most of them count passes of the loop, or end at their own instants, which fits tcp only.
    """
    return "tcp"


@pytest.fixture
def sides_use_transport(transport: TransportName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engines of the test exchange blocks over the argument ``transport``."""
    monkeypatch.setattr(Side, "default_transport", transport)


@pytest.fixture
def accepted() -> list[Connection]:
    """Connections that a listener has accepted, see ``wires.listening``."""
    return []
