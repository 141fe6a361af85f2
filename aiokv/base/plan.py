"""Messages between scheduler and worker: plans of transfers, and reports of their ends.

Plain data (msgspec structs, no pickle), so that a worker can run in another process. Block ids are
little-endian int32 in ``bytes``: one object per plan, viewed as arrays without a copy on either
side.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from aiokv.base.groups import ATTENTION, RETENTIONS, Retention, retention_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

ID_DTYPE = np.dtype("<i4")
ZEROS: Final = -1  # source id of a target that is filled with zeros

AnyTier = Literal["device", "host", "store", "peer"]
RouteName = Literal["onload", "offload", "clone", "fetch", "save", "receive", "send"]
Outcome = Literal["done", "failed", "cancelled"]


_NAMES: Final[dict[tuple[AnyTier, AnyTier], RouteName]] = {
    ("host", "device"): "onload",
    ("device", "host"): "offload",
    ("device", "device"): "clone",
    ("store", "host"): "fetch",
    ("host", "store"): "save",
    ("peer", "device"): "receive",
    ("device", "peer"): "send",
}


class Route(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Source and target of the bytes of a transfer.

    Attributes:
        source: tier of the source ids. ``"store"`` is all stores together: its blocks have digests,
            and its ids are their indices in the plan. ``"peer"`` is the engine at the other end of
            a ticket: its ids are the indices of the blocks in the prompt, or 0 for recurrent state.
        target: tier of the target ids.
    """

    source: AnyTier
    target: AnyTier

    @property
    def name(self) -> RouteName:
        """Name of the route in reports and statistics."""
        return _NAMES[self.source, self.target]

    @property
    def is_onload(self) -> bool:
        """True if blocks move to the device from host memory or from landing slots of peers."""
        return self.target == "device" and self.source != "device"

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


ONLOAD: Final = Route("host", "device")
OFFLOAD: Final = Route("device", "host")
CLONE: Final = Route("device", "device")
FETCH: Final = Route("store", "host")
SAVE: Final = Route("host", "store")
RECEIVE: Final = Route("peer", "device")
SEND: Final = Route("device", "peer")
STORE_ROUTES: Final = frozenset((FETCH, SAVE))
PEER_ROUTES: Final = frozenset((RECEIVE, SEND))


class Pool(NamedTuple):
    """The blocks of a group in one tier.

    Attributes:
        group: name of the group, or of a range of layers (:func:`aiokv.base.groups.layers_group`).
        tier: ``"peer"`` are the slots through which blocks move from and to peers.
    """

    group: str
    tier: AnyTier


GroupRoute: TypeAlias = tuple[Retention, Route]
"""A route of the groups of one retention: what a device or a worker can move."""


STATE_CLONE: Final[GroupRoute] = ("last", CLONE)


def group_routes(
    *routes: Route, retentions: Iterable[Retention] = RETENTIONS
) -> frozenset[GroupRoute]:
    """Return the routes of the groups of each retention."""
    return frozenset((retention, route) for retention in retentions for route in routes)


class Priority(IntEnum):
    """Order in which waiting transfers of one route are submitted; lower goes first."""

    DEMAND = 0
    JOINED = 1
    PREFETCH = 2
    BACKUP = 3


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Copy block ``source_blocks[i]`` to ``target_blocks[i]``, in all layers of all its regions.

    Attributes:
        transfer_id: chosen by the scheduler, unique for the lifetime of the engine; 0 for a copy
            that the worker finishes within the call, without a report (``Steps.clone``).
        route: tiers of the source ids and the target ids.
        group: name of the group of blocks; see :mod:`aiokv.base.groups`.
        source_blocks: int32 ids as bytes, in path order. In a clone of recurrent state, ``ZEROS``
            fills the target slot with zeros.
        target_blocks: int32 ids as bytes, as many, distinct; in a clone, none is a source.
        priority: see :class:`Priority`.
        after_step: the step whose work must be finished on the device before the first byte
            moves; 0 when there is nothing to wait for.
        digests: 32 bytes per block for routes from or to ``"store"``; empty for the others.
        follows: for saves, one byte per block: 1 if it is the next block of the prompt behind the
            block before it in the plan; empty for other routes.
        peer: id of the ticket for routes from or to ``"peer"``, 16 bytes; empty for the others.
        first_range: first range of layers that ``SEND`` moves, as the worker numbers them.
        end_range: end of the ranges; 0 when each block moves as a whole.
        mark: point in the open step after which the layers that the plan sends are computed; 0
            when they are computed already. Each device records it when it closes ``after_step``,
            or before; see ``Tickets.layers_done``.
    """

    transfer_id: int
    route: Route
    source_blocks: bytes
    target_blocks: bytes
    group: str = ATTENTION
    priority: int = Priority.DEMAND
    after_step: int = 0
    digests: bytes = b""
    follows: bytes = b""
    peer: bytes = b""
    first_range: int = 0
    end_range: int = 0
    mark: int = 0

    @property
    def group_route(self) -> GroupRoute:
        """Retention of the group, and the route."""
        return retention_of(self.group), self.route

    @property
    def direction(self) -> str:
        """Name of the route and the group in errors; see :func:`direction`."""
        return direction(self.route, self.group)

    @property
    def num_blocks(self) -> int:
        """Number of blocks (or slots) that move."""
        return len(self.target_blocks) // ID_DTYPE.itemsize

    @property
    def source_ids(self) -> NDArray[np.int32]:
        """``[N]`` int32, read-only view of ``source_blocks``."""
        return np.frombuffer(self.source_blocks, dtype=ID_DTYPE)

    @property
    def target_ids(self) -> NDArray[np.int32]:
        """``[N]`` int32, read-only view of ``target_blocks``."""
        return np.frombuffer(self.target_blocks, dtype=ID_DTYPE)


def direction(route: Route, group: str) -> str:
    """Return the name of a route and a group: ``"onload"``, or of another group ``"state onload"``.

    The blocks of full attention are those that most transfers move.
    """
    return route.name if group == ATTENTION else f"{group} {route.name}"


def id_bytes(ids: ArrayLike) -> bytes:
    """Return block ids as a plan holds them."""
    return np.asarray(ids, ID_DTYPE).tobytes()


def clone_plan(group: str, source_ids: ArrayLike, target_ids: ArrayLike) -> TransferPlan:
    """Return the plan of a copy within the device that ``Steps.clone`` takes."""
    return TransferPlan(
        transfer_id=0,
        route=CLONE,
        group=group,
        source_blocks=id_bytes(source_ids),
        target_blocks=id_bytes(target_ids),
    )


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a transfer. Sent exactly once per plan, never from inside ``submit``.

    Attributes:
        transfer_id: id of the plan.
        outcome: ``"done"``: every byte has been verified. ``"failed"``: blocks before
            ``first_bad_block`` have been verified, the others have not. ``"cancelled"``: no block
            has been copied.
        first_bad_block: index into the plan's blocks.
        reason: text of the first failure.
        results: for a save, one ``aiokv.stores.Result`` per block, as a byte; else empty.
    """

    transfer_id: int
    outcome: Outcome
    first_bad_block: int = 0
    reason: str = ""
    results: bytes = b""
