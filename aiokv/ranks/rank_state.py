"""State of each rank of a group, and time limits."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Final, cast

from aiokv.base.checks import arguments
from aiokv.base.statistics import GroupTransferStatistics
from aiokv.errors import ConfigError
from aiokv.worker.lanes import IDLE as IDLE_WORKER
from aiokv.worker.poller import IDLE as IDLE_POLLER

if TYPE_CHECKING:
    from aiokv.base.statistics import GuardStatistics, RankPeerStatistics
    from aiokv.peers.ticket import Endpoint
    from aiokv.ranks.messages import Layout, RankConnection, RankCounts
    from aiokv.stores.base import StoreFilters

MAX_RANKS: Final = 1024  # per group


def check_positive(name: str, value: object) -> None:
    """Check that ``value`` is a finite number above 0.

    Raises:
        ConfigError: ``value`` is not a finite number above 0.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < cast("float", value) < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a finite number above 0")


@arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeouts:
    """Time limits of the manager, in seconds.

    Attributes:
        start: for all ranks to connect and to allocate their host memory.
        hello: for a connection to name its rank; later it is cut.
        heartbeat: between two checks for unresponsive and slow ranks.
        silence: a rank that sends nothing for this time, in whole heartbeats and at least two, is
            lost; likewise one that reads nothing while messages wait for it. Its loop must not be
            blocked for so long: run the model in a thread.
        transfer: for a transfer on a rank, in addition to its bytes at ``min_bytes_per_second``;
            counted from the last progress of the rank.
        min_bytes_per_second: bandwidth that a rank is expected to reach at least.
        lookup: for all ranks to look up blocks in their stores; later the blocks count as missing.
            Longer than the ``lookup_deadline_seconds`` of all stores together.
        close: for ranks to finish moving transfers when the group closes.

    Raises:
        ConfigError: a value is not a finite number above 0.
    """

    start: float = 60.0
    hello: float = 10.0
    heartbeat: float = 1.0
    silence: float = 30.0
    transfer: float = 30.0
    min_bytes_per_second: float = 100e6
    lookup: float = 2.0
    close: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_positive(f"RankTimeouts.{name}", getattr(self, name))

    def allowed_seconds(self, num_bytes: int) -> float:
        """Return the time limit for a transfer of ``num_bytes``."""
        return self.transfer + num_bytes / self.min_bytes_per_second


class RankState:
    """The manager's state of one rank.

    Attributes:
        rank: its number.
        connection: its connection; None while it is not connected.
        layout: layout of its tensors; None before the first connection.
        ready: the rank takes part in the current generation.
        absence_reason: why the rank is not connected.
        has_left: True if its process has closed it.
        heard_at: time of its last message.
        progress_at: time of its last report.
        finished_step: this step and all before it have finished on the rank.
        stores: statistics of each store, from its last answer to a heartbeat; empty while the rank
            is not connected.
        peers: likewise, its use of peers.
        poller: statistics of its event poller, from its last answer to a heartbeat.
        worker: statistics of its transfers, from the same answer.
        queue_seconds: time that its transfers have waited, by group and route, over all its
            processes so far.
        filters: what tells which blocks its stores do not have, from the same answer.
        endpoints: where it listens for senders; empty while it is not ready.
        peer_layout: layout of its blocks, for peers; empty without peers.
        layer_ends: end of each range of layers in which it sends blocks; empty without ranges.
        ticket_key: key of tickets; empty without peers.
        unpinned_bytes: host memory that its device had not page-locked at its last answer.
    """

    __slots__ = (
        "absence_reason",
        "connection",
        "endpoints",
        "filters",
        "finished_step",
        "has_left",
        "heard_at",
        "layer_ends",
        "layout",
        "peer_layout",
        "peers",
        "poller",
        "progress_at",
        "queue_seconds",
        "rank",
        "ready",
        "stores",
        "ticket_key",
        "unpinned_bytes",
        "worker",
    )

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection: RankConnection | None = None
        self.layout: Layout | None = None
        self.ready = False
        self.absence_reason = "it has not connected"
        self.has_left = False
        self.heard_at = 0.0
        self.unpinned_bytes = 0
        self.progress_at = 0.0
        self.finished_step = 0
        self.stores: list[GuardStatistics] = []
        self.peers: list[RankPeerStatistics] = []
        self.poller = IDLE_POLLER
        self.worker = IDLE_WORKER
        self.queue_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.filters: StoreFilters | None = None
        self.endpoints: list[Endpoint] = []
        self.peer_layout = b""
        self.layer_ends: list[int] = []
        self.ticket_key = b""

    def note_statistics(self, counts: RankCounts) -> None:
        """Take the statistics of an answer to a heartbeat. Those of a new process begin at 0."""
        for group, transfers in counts.worker.groups.items():
            earlier = self.worker.groups.get(group, GroupTransferStatistics())
            for name, route in transfers.routes.items():
                seconds, known = route.queue_seconds, earlier.routes[name].queue_seconds
                self.queue_seconds[group, name] += seconds - known if seconds >= known else seconds
        self.worker, self.poller = counts.worker, counts.poller
        self.stores, self.peers = counts.stores, counts.peers
        self.unpinned_bytes, self.filters = counts.unpinned_bytes, counts.filters
