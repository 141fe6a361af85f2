"""Connection: one channel of the manager's socket, before and after its Hello."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiokv.base.logs import Log
from aiokv.ranks.channel import MAX_FRAME_BYTES, Channel, ChannelError, frame_of
from aiokv.ranks.messages import Hello, Refuse, decode_from_rank, decode_hello, encode

if TYPE_CHECKING:
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.rank_state import RankState

log = Log(__name__)

MAX_HELLO_BYTES: Final = 1024


class Connection:
    """A peer: unauthenticated until the membership has assigned it to a rank.

    Before that only a short Hello is read, which has to arrive within ``hello_seconds``.

    Args:
        membership: assigns ranks, and gets the messages of peers that have one.
        hello_seconds: time limit for the Hello.

    Attributes:
        channel: the connection. A refused peer gets the reason, and nothing more is read from it;
            malformed data cuts the channel.
    """

    def __init__(self, membership: Membership, hello_seconds: float) -> None:
        self._membership = membership
        self._state: RankState | None = None
        self.channel = Channel(self._on_frame, self._on_closed, MAX_HELLO_BYTES)
        # In two halves: between the halves, a loop that was blocked reads the socket.
        self._deadline = asyncio.get_running_loop().call_later(
            hello_seconds / 2, self._on_half_time, hello_seconds
        )

    def _on_half_time(self, hello_seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().call_later(
            hello_seconds / 2, self._on_deadline, hello_seconds
        )

    def _on_deadline(self, hello_seconds: float) -> None:
        self.channel.cut(f"it sent no Hello within {hello_seconds} s")

    def _on_frame(self, frame: bytes) -> None:
        if self._state is None:
            self._on_hello(decode_hello(frame))
            return
        message = decode_from_rank(frame)
        if isinstance(message, Hello):
            raise ChannelError("the rank sent a second Hello")
        self._membership.on_message(self._state, message)

    def _on_hello(self, hello: Hello) -> None:
        try:
            self._state = self._membership.admit(self.channel, hello)
        except ChannelError as error:
            log.warning("rank.refused", rank=hello.rank, reason=str(error))
            self._membership.on_refused(hello.rank, str(error))
            self.channel.send(frame_of(encode(Refuse(reason=str(error)))))
            self.channel.close()
        else:
            self._deadline.cancel()
            self.channel.max_frame_bytes = MAX_FRAME_BYTES

    def _on_closed(self, reason: str) -> None:
        self._deadline.cancel()
        self._membership.on_closed(self.channel, self._state, reason)
