"""Methods of ``Calls``, ``SyncLease`` and ``SyncEngine`` that are made from the table of verbs.

``verbs.pyi`` has their types; ``make stubs`` writes it.
"""

from __future__ import annotations

from aiokv.sync.making import add_methods
from aiokv.sync.table import VERBS


class RecordedVerbs:
    """Methods of ``Calls``: each records a call and returns its answer."""

    __slots__ = ()


class LeaseVerbs:
    """Methods of ``SyncLease``: each crosses to the engine's thread."""

    __slots__ = ()


class EngineVerbs:
    """Methods of ``SyncEngine``: each crosses to the engine's thread."""

    __slots__ = ()


add_methods(VERBS, RecordedVerbs, LeaseVerbs, EngineVerbs)
