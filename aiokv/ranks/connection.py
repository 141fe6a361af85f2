"""Connection: one channel of the manager's socket, before and after its Hello."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.observe.logs import Log
from aiokv.ranks.channel import Channel, ChannelError, frame_of
from aiokv.ranks.messages import Hello, Refuse, decode_from_rank, encode

if TYPE_CHECKING:
    from aiokv.ranks.roster import Roster
    from aiokv.ranks.seats import Seat

log = Log(__name__)


class Connection:
    """A stranger until the roster has given it a seat; then what it says is that rank's word.

    Attributes:
        channel: refused strangers are told why, and garbage cuts it.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._seat: Seat | None = None
        self.channel = Channel(self._on_frame, self._on_closed)

    def _on_frame(self, frame: bytes) -> None:
        message = decode_from_rank(frame)
        if isinstance(message, Hello):
            self._on_hello(message)
        elif self._seat is None:
            raise ChannelError("the first message is not Hello")
        else:
            self._roster.on_message(self._seat, message)

    def _on_hello(self, hello: Hello) -> None:
        if self._seat is not None:
            raise ChannelError("a second Hello")
        try:
            self._seat = self._roster.admit(self.channel, hello)
        except ChannelError as error:
            log.warning("rank.refused", rank=hello.rank, reason=str(error))
            self._roster.on_refused(hello.rank, str(error))
            self.channel.send(frame_of(encode(Refuse(reason=str(error)))))
            self.channel.close()

    def _on_closed(self, reason: str) -> None:
        self._roster.on_closed(self.channel, self._seat, reason)
