"""Coverage: the check of strict mode that the model computes only in batches."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Final

from aiokv.base.callers import outer_caller
from aiokv.base.logs import Log
from aiokv.errors import UncoveredCommitWarning

if TYPE_CHECKING:
    import asyncio

    from aiokv.config.cache_config import CacheConfig
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.scheduler.reader import CacheReader

log = Log(__name__)

MAX_WARNINGS: Final = 100  # per engine: a server has a new owner for each request


class Coverage:
    """Reports positions that no batch of ``CacheEngine.computing`` covers.

    The index knows which positions these are: see ``Lease::uncovered_tokens``.

    Attributes:
        active: True in strict mode; each hook is behind this boolean.
    """

    def __init__(self, config: CacheConfig, read: CacheReader) -> None:
        self.active = False
        self._config = config
        self._read = read
        self._warned: set[str] = set()  # owners

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the loop of the engine, whose debug mode is the default of strict mode.

        A server that owns the device blocks protects them itself.
        """
        strict = loop.get_debug() if self._config.strict is None else self._config.strict
        self.active = strict and not self._config.external_device

    def check_commit(self, record: LeaseRecord, num_tokens: int) -> None:
        """Warn, once per owner, if the commit includes positions that no batch covers.

        Raises:
            UncoveredCommitWarning: the filters of ``warnings`` turn the warning into an error.
        """
        lease_id = record.live_id()
        uncovered = self._read.uncovered_tokens(lease_id, num_tokens)
        owner = self._read.owner(lease_id)
        if not uncovered or owner in self._warned or len(self._warned) == MAX_WARNINGS:
            return
        self._warned.add(owner)
        first = num_tokens - uncovered
        log.warning("lease.uncovered", lease_id=lease_id, owner=owner, first=first, end=num_tokens)
        warnings.warn(
            f"commit: no batch covers positions {first} to {num_tokens - 1} of lease {owner!r}: a "
            "client that leaves gives blocks to another request while the model still writes them "
            "(hint: compute inside `with engine.computing([lease])`)",
            UncoveredCommitWarning,
            stacklevel=outer_caller().stacklevel,
        )

    def note_release(self, lease_id: int) -> None:
        """Log the positions that the lease was granted and has not committed."""
        if not log.is_on(logging.DEBUG):
            return
        read = self._read
        num_tokens, computed = read.num_tokens(lease_id), read.computed_tokens(lease_id)
        if num_tokens > computed:
            log.debug(
                "lease.uncommitted",
                lease_id=lease_id,
                owner=read.owner(lease_id),
                first=computed,
                end=num_tokens,
                uncovered_tokens=read.uncovered_tokens(lease_id, num_tokens),
            )
