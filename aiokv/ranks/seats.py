"""Who may sit where, and for how long they may be silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokv.checks import arguments, seconds
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from aiokv.ranks.channel import Channel
    from aiokv.ranks.messages import Layout


@arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeouts:
    """How long the manager waits, in seconds.

    Attributes:
        start: for all ranks to come and to have their host memory.
        heartbeat: between two looks at who lives and who lags.
        silence: a rank that says nothing for so long is lost. Its loop must not be blocked as
            long: run the model in a thread.
        transfer: a rank may take so long for a transfer, and as long as ``min_bytes_per_second``
            allows for its bytes, from the last thing it has finished on.
        close: for ranks to finish what moves when the group closes.
    """

    start: float = 60.0
    heartbeat: float = 1.0
    silence: float = 30.0
    transfer: float = 30.0
    min_bytes_per_second: float = 100e6
    close: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            field = f"RankTimeouts.{name}"
            if seconds(field, getattr(self, name), error=ConfigError) <= 0:
                raise ConfigError(f"{field} is {getattr(self, name)}; not above 0")

    def allowed_seconds(self, num_bytes: int) -> float:
        """For a transfer of so many bytes."""
        return self.transfer + num_bytes / self.min_bytes_per_second


class Seat:
    """One rank's place.

    Attributes:
        channel: None while the rank is away.
        ready: it takes part in the current generation.
        heard_at: time of its last message.
        progress_at: time of its last report.
        finished_step: this step and all before it are over on the rank.
    """

    __slots__ = (
        "channel",
        "finished_step",
        "heard_at",
        "layout",
        "progress_at",
        "rank",
        "ready",
        "why_away",
    )

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.channel: Channel | None = None
        self.layout: Layout | None = None
        self.ready = False
        self.why_away = "it has not come"
        self.heard_at = 0.0
        self.progress_at = 0.0
        self.finished_step = 0
