"""Results of the split demo, and their table: one column per server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from aiokv.base.units import format_seconds
from aiokv.demo.ledger import Comparison  # noqa: TC001  (msgspec)
from aiokv.demo.report import (
    COMPARISONS,
    Percentiles,
    RunResult,
    ServingStatistics,
    format_pair,
    format_share,
    print_columns,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from aiokv.demo.serving import Server
    from aiokv.statistics import PeerStatistics

ServerName = Literal["prefill", "decode"]


class SentBlocks(msgspec.Struct):
    """Blocks of prompts that a prefill server has sent.

    Attributes:
        tokens: positions that the decode server has acknowledged.
        blocks: blocks that it has acknowledged; some layers of a block are a part of it.
        early_blocks: those of them that it had acknowledged before the last position of their
            prompt was computed.
    """

    tokens: int = 0
    blocks: float = 0.0
    early_blocks: float = 0.0


class ServerResult(ServingStatistics, kw_only=True):
    """One server of the split run.

    Attributes:
        sent_bytes: size of blocks that the other server has acknowledged.
        received_bytes: size of blocks that were verified.
        sent_tokens: see :class:`SentBlocks`, likewise the fields behind it.
    """

    rows_not_finite: int
    sent_bytes: int
    received_bytes: int
    sent_tokens: int
    sent_blocks: float
    sent_early_blocks: float

    @classmethod
    def of(cls, server: Server, statistics: PeerStatistics, sent: SentBlocks) -> ServerResult:
        """Return the result of a server that has ended."""
        return cls(
            **msgspec.structs.asdict(server.statistics),
            rows_not_finite=server.ledger.rows_not_finite,
            sent_bytes=sum(rank.sent.sent_bytes for rank in statistics.ranks),
            received_bytes=sum(rank.received.received_bytes for rank in statistics.ranks),
            sent_tokens=sent.tokens,
            sent_blocks=sent.blocks,
            sent_early_blocks=sent.early_blocks,
        )


class Killed(msgspec.Struct, kw_only=True):
    """A process that was killed in the middle.

    Attributes:
        name: name of the process.
        request: request whose blocks were arriving.
        arrived_tokens: tokens of the request whose blocks had arrived.
        answered_requests: requests that were answered before.
        sent_again: requests that users sent again, to another decode process.
    """

    name: ServerName
    request: str
    arrived_tokens: int
    answered_requests: int
    sent_again: int = 0

    def describe(self, result: SplitResult) -> str:
        """Return a sentence about the kill and its effect on users."""
        when = (
            f"the {self.name} process was killed after {self.answered_requests:,} answered "
            f"requests, when the first {self.arrived_tokens:,} tokens of {self.request} had "
            "arrived: "
        )
        if self.name == "prefill":
            # Each request also computes its last position.
            missing = result.decode.computed_tokens - result.decode.requests
            return when + (
                f"the decode process computed {missing:,} prompt tokens that had not arrived, and "
                "no request failed"
            )
        reused = 0 if result.prefill is None else result.prefill.reused_tokens.device
        return when + (
            f"{self.sent_again:,} requests were sent again, to a new decode process; the prefill "
            f"process kept its cache, and reused {reused:,} prompt tokens"
        )


class SplitResult(msgspec.Struct, frozen=True, kw_only=True):
    """One server, and two servers with the same requests; the names are the keys of ``--json``.

    Attributes:
        prefill: None if the process was killed.
        decode: of the decode process that was not killed.
        first_token_ms: time from a user's request to its first output token, of either server.
        first_decoded_ms: time to the first output token of the decode server.
        seconds: duration of the split run.
    """

    tokens_equal: bool
    logits_equal: bool
    blocks_equal: bool
    workload: str
    model: str
    transport: str
    one_server: RunResult
    prefill: ServerResult | None
    decode: ServerResult
    killed: Killed | None
    first_token_ms: Percentiles
    first_decoded_ms: Percentiles
    seconds: float
    compared: Comparison


_Server = RunResult | ServerResult


def print_split_table(console: Console, result: SplitResult) -> None:
    """Print all measures of one server, of the split run, and of its two servers."""
    killed = result.killed.name if result.killed is not None else ""
    prefill = "prefill, killed" if killed == "prefill" else "prefill"
    decode = "decode, restarted" if killed == "decode" else "decode"
    servers = (result.one_server, None, result.prefill, result.decode)
    rows = [
        (title, *("-" if server is None else cell(server) for server in servers))
        for title, cell in _OF_SERVERS
    ]
    labels = ["one server", "split", prefill, decode]
    print_columns(console, result, labels, rows + _rows_of_runs(result))


_OF_SERVERS: tuple[tuple[str, Callable[[_Server], str]], ...] = (
    ("prompt tokens", lambda server: f"{server.prompt_tokens:,}"),
    ("  computed", lambda server: format_share(server.computed_tokens, server)),
    ("  reused, device", lambda server: format_share(server.reused_tokens.device, server)),
    ("  received", lambda server: format_share(server.received_tokens, server)),
    ("generated tokens", lambda server: f"{server.generated_tokens:,}"),
)


def _rows_of_runs(result: SplitResult) -> list[tuple[str, ...]]:
    one, prefill, decode, compared = (
        result.one_server,
        result.prefill,
        result.decode,
        result.compared,
    )
    early = sent = received = "-"
    if decode.received_bytes:
        received = _megabytes(decode.received_bytes)
    if prefill is not None and prefill.sent_blocks:
        sent = _megabytes(prefill.sent_bytes)
        early = f"{prefill.sent_early_blocks / prefill.sent_blocks:.0%}"
    first_token = format_pair(one.ttft_ms, 1e-3)
    return [
        ("time to first token, p50 / p99", first_token, format_pair(result.first_token_ms, 1e-3)),
        ("  to first decoded token", first_token, format_pair(result.first_decoded_ms, 1e-3)),
        (f"bytes moved, {result.transport}", "-", "-", sent, received),
        ("  before the prefill ended", "-", "-", early),
        ("run time", format_seconds(one.seconds), format_seconds(result.seconds)),
        *((title, "reference", cell(compared)) for title, cell in COMPARISONS),
    ]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
