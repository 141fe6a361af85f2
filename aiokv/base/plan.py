"""Messages between scheduler and worker: plans of transfers, and reports of their ends.

Plain data (msgspec structs, no pickle), so that a worker can run in another process. Block ids are
little-endian int32 in ``bytes``: one object per plan, viewed as arrays without a copy on either
side.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

ID_DTYPE = np.dtype("<i4")
ZEROS: Final = -1  # source id of a target that is filled with zeros

Pool = Literal["device", "host", "state", "host_state", "window", "host_window", "store", "peer"]
Direction = Literal[
    "onload",
    "offload",
    "state",
    "state_onload",
    "state_offload",
    "clone",
    "fetch",
    "save",
    "window_onload",
    "window_offload",
    "state_fetch",
    "state_save",
    "window_fetch",
    "window_save",
    "receive",
    "send",
    "state_receive",
    "state_send",
    "window_receive",
    "window_send",
]
StorePool: TypeAlias = str  # "host", "host_state" or "host_window:" and the name of the group
Outcome = Literal["done", "failed", "cancelled"]

_NAMES: Final[dict[tuple[Pool, Pool], Direction]] = {
    ("host", "device"): "onload",
    ("device", "host"): "offload",
    ("device", "device"): "clone",
    ("state", "state"): "state",
    ("host_state", "state"): "state_onload",
    ("state", "host_state"): "state_offload",
    ("host_window", "window"): "window_onload",
    ("window", "host_window"): "window_offload",
    ("store", "host"): "fetch",
    ("host", "store"): "save",
    ("peer", "device"): "receive",
    ("device", "peer"): "send",
    ("peer", "state"): "state_receive",
    ("state", "peer"): "state_send",
    ("store", "host_state"): "state_fetch",
    ("host_state", "store"): "state_save",
    ("store", "host_window"): "window_fetch",
    ("host_window", "store"): "window_save",
    ("peer", "window"): "window_receive",
    ("window", "peer"): "window_send",
}


_ON_HOST: Final = ("host", "host_state", "host_window", "store", "peer")


class Route(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Source and target of the bytes of a transfer.

    Attributes:
        source: pool of the source ids: ``"device"`` and ``"host"`` have blocks, ``"state"`` has
            slots of recurrent state, on the device, and ``"host_state"`` has those in host
            memory. ``"window"`` and ``"host_window"`` have the blocks of the window group that the
            plan names, on the device and in host memory. ``"store"`` is all stores together: its
            blocks and snapshots have digests, and its ids are their indices in the plan.
            ``"peer"`` is the engine at the other end of a ticket: its ids are the indices of the
            blocks in the prompt, or 0 for the recurrent state.
        target: pool of the target ids.
    """

    source: Pool
    target: Pool

    @property
    def direction(self) -> Direction:
        """Name of the route in errors, reports and statistics."""
        return _NAMES[self.source, self.target]

    @property
    def is_onload(self) -> bool:
        """True when blocks or slots move from host memory to the device."""
        return self.source in _ON_HOST and self.target not in _ON_HOST

    @property
    def device_pool(self) -> Pool:
        """The pool on the device, of a route between the device and host memory."""
        return self.target if self.is_onload else self.source

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


ONLOAD: Final = Route("host", "device")
OFFLOAD: Final = Route("device", "host")
CLONE: Final = Route("device", "device")
STATE: Final = Route("state", "state")
STATE_ONLOAD: Final = Route("host_state", "state")
STATE_OFFLOAD: Final = Route("state", "host_state")
STATE_ROUTES: Final = frozenset((STATE, STATE_ONLOAD, STATE_OFFLOAD))
WINDOW_ONLOAD: Final = Route("host_window", "window")
WINDOW_OFFLOAD: Final = Route("window", "host_window")
WINDOW_ROUTES: Final = frozenset((WINDOW_ONLOAD, WINDOW_OFFLOAD))
FETCH: Final = Route("store", "host")
SAVE: Final = Route("host", "store")
RECEIVE: Final = Route("peer", "device")
SEND: Final = Route("device", "peer")
STATE_RECEIVE: Final = Route("peer", "state")
STATE_SEND: Final = Route("state", "peer")
WINDOW_RECEIVE: Final = Route("peer", "window")
WINDOW_SEND: Final = Route("window", "peer")
RECEIVE_ROUTES: Final = frozenset((RECEIVE, STATE_RECEIVE, WINDOW_RECEIVE))
SEND_ROUTES: Final = frozenset((SEND, STATE_SEND, WINDOW_SEND))
PEER_ROUTES: Final = RECEIVE_ROUTES | SEND_ROUTES
WINDOW_PEER_ROUTES: Final = frozenset((WINDOW_RECEIVE, WINDOW_SEND))  # plans may have no block
STATE_FETCH: Final = Route("store", "host_state")
STATE_SAVE: Final = Route("host_state", "store")
WINDOW_FETCH: Final = Route("store", "host_window")
WINDOW_SAVE: Final = Route("host_window", "store")
FETCH_ROUTES: Final = frozenset((FETCH, STATE_FETCH, WINDOW_FETCH))
SAVE_ROUTES: Final = frozenset((SAVE, STATE_SAVE, WINDOW_SAVE))


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
        route: the pools that the ids belong to.
        source_blocks: int32 ids as bytes, in path order; ``ZEROS`` fills a state slot with zeros.
        target_blocks: int32 ids as bytes, as many, distinct; within one pool none is a source.
        priority: see :class:`Priority`.
        after_step: the step whose work must be finished on the device before the first byte
            moves; 0 when there is nothing to wait for.
        digests: 32 bytes per block for routes from or to ``"store"``; empty for the others.
        peer: id of the ticket for routes from or to ``"peer"``, 16 bytes; empty for the others.
        group: name of the window group for routes from or to ``"window"`` and ``"host_window"``;
            empty for the others.
        first_range: first range of layers that ``SEND`` moves, as the worker numbers them.
        end_range: end of the ranges; 0 when each block moves as a whole.
        mark: of layers that are being computed, the point in the work behind which they are there
            on each device, at the latest when ``after_step`` is closed there; see
            ``Tickets.layers_done``. 0 for computed blocks.
    """

    transfer_id: int
    route: Route
    source_blocks: bytes
    target_blocks: bytes
    priority: int = Priority.DEMAND
    after_step: int = 0
    digests: bytes = b""
    peer: bytes = b""
    group: str = ""
    first_range: int = 0
    end_range: int = 0
    mark: int = 0

    @property
    def direction(self) -> Direction:
        """Name of the route."""
        return self.route.direction

    @property
    def store_pool(self) -> StorePool:
        """The pool of host memory of a plan from or to ``"store"``."""
        route = self.route
        return store_pool(route.target if route.source == "store" else route.source, self.group)

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


def store_pool(pool: str, group: str = "") -> StorePool:
    """Return the name of a pool of host memory; ``group`` is the window group, if it has one."""
    return f"{pool}:{group}" if group else pool


def id_bytes(ids: ArrayLike) -> bytes:
    """Return block ids as a plan holds them."""
    return np.asarray(ids, ID_DTYPE).tobytes()


def clone_plan(route: Route, source_ids: ArrayLike, target_ids: ArrayLike) -> TransferPlan:
    """Return the plan of a copy within one pool that ``Steps.clone`` takes."""
    return TransferPlan(
        transfer_id=0,
        route=route,
        source_blocks=id_bytes(source_ids),
        target_blocks=id_bytes(target_ids),
    )


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a transfer. Sent exactly once per plan, never from inside ``submit``.

    Attributes:
        transfer_id: the plan's.
        outcome: ``"done"``: every byte has been verified. ``"failed"``: blocks before
            ``first_bad_block`` have been verified, the others have not. ``"cancelled"``: no block
            has been copied.
        first_bad_block: index into the plan's blocks.
        reason: text of the first failure.
        results: of a save, one ``aiokv.stores.Result`` per block as a byte; empty for the others.
    """

    transfer_id: int
    outcome: Outcome
    first_bad_block: int = 0
    reason: str = ""
    results: bytes = b""
