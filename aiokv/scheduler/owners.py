"""Owners: names of leases, for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.types import lease_name
from aiokv.scheduler.sharded import Sharded

if TYPE_CHECKING:
    from aiokv.errors import AiokvError


class Owners(Sharded[str]):
    """Owners of all existing leases, by lease id; empty for a lease without one."""

    __slots__ = ()

    def name(self, lease_id: int) -> str:
        """Return the name of a lease for messages."""
        return lease_name(self.get(lease_id) or "", lease_id)

    def add_to(self, error: AiokvError) -> None:
        """Set ``error.owner`` to the name of the lease ``error.lease_id``."""
        if error.lease_id:
            error.owner = self.name(error.lease_id)
