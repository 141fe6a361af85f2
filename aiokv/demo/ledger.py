"""Results of a run, small enough to keep: tokens, and digests of logits and of cached blocks.

Two questions are kept apart. Logits of two runs tell whether the outputs are equal. The bytes of
cached blocks tell why they are not: a block that a request read either holds the bytes that were
computed for its prefix, or the cache served wrong bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

DIGEST_BYTES = 8


def digest_rows(rows: NDArray[Any]) -> list[bytes]:
    """One digest per row; equal digests mean equal bits (by accident once in 2**64)."""
    return [digest(row.tobytes()) for row in rows]


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of a run from the first one.

    Attributes:
        rows_compared: logits rows (request and position) that both runs computed.
        rows_different: those whose bits differ, recomputed twins within one run included.
        tokens_compared: generated tokens.
        tokens_different: those that differ or are missing.
        first_difference: request and position of the first difference, or ``""``.
        blocks_read: cached blocks whose bytes were checked when a request read them.
        blocks_wrong: those whose bytes were never computed for that prefix in this run.
        first_wrong_block: request and block of the first of them, or ``""``.
    """

    rows_compared: int
    rows_different: int
    tokens_compared: int
    tokens_different: int
    first_difference: str
    blocks_read: int
    blocks_wrong: int
    first_wrong_block: str

    @property
    def equal(self) -> bool:
        return not (self.rows_different or self.tokens_different or self.blocks_wrong)


class ReadBlock(NamedTuple):
    """A block that a request read: its index in the prompt, and digests of its prefix and bytes."""

    request: str
    block: int
    prefix: bytes
    digest: bytes

    def __str__(self) -> str:
        return f"{self.request}, block {self.block}"


@dataclass(slots=True)
class Ledger:
    """Digests of logits by request and position, generated tokens by request, cached blocks.

    Attributes:
        rows_not_finite: computed rows of logits that hold NaN or infinity.
        computed_blocks: by prefix, digests of the bytes that were computed for its last block. A
            prefix that is computed again in another batch may get other bytes.
        wrong_blocks: blocks that held other bytes when they were read.
    """

    rows: dict[tuple[str, int], bytes] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    repeated_rows: int = 0
    unequal_copies: list[tuple[str, int]] = field(default_factory=list)
    rows_not_finite: int = 0
    computed_blocks: dict[bytes, set[bytes]] = field(default_factory=dict)
    blocks_read: int = 0
    wrong_blocks: list[ReadBlock] = field(default_factory=list)

    def record_rows(self, request: str, first_position: int, digests: Iterable[bytes]) -> None:
        """Note rows; one computed again (after a preemption) must repeat its first bits."""
        for position, digest in enumerate(digests, start=first_position):
            key = (request, position)
            self.repeated_rows += key in self.rows
            if self.rows.setdefault(key, digest) != digest:
                self.unequal_copies.append(key)

    def record_tokens(self, request: str, tokens: list[int]) -> None:
        self.tokens[request] = tokens

    def record_computed_block(self, prefix: bytes, digest: bytes) -> None:
        """Note the bytes of a block right after its last position was computed."""
        self.computed_blocks.setdefault(prefix, set()).add(digest)

    def check_read_block(self, request: str, block: int, prefix: bytes, digest: bytes) -> None:
        """Compare a block that a request read with the block computed for its prefix."""
        self.blocks_read += 1
        if digest not in self.computed_blocks.get(prefix, ()):
            self.wrong_blocks.append(ReadBlock(request, block, prefix, digest))

    def add(self, other: Ledger) -> None:
        """Add the rows and blocks of another server. This one may have read blocks of it."""
        for (request, position), row in other.rows.items():
            self.record_rows(request, position, [row])
        self.unequal_copies += other.unequal_copies
        self.rows_not_finite += other.rows_not_finite
        self.blocks_read += other.blocks_read
        self.wrong_blocks += other.wrong_blocks
        for prefix, digests in other.computed_blocks.items():
            self.computed_blocks.setdefault(prefix, set()).update(digests)
        self.wrong_blocks = [
            read
            for read in self.wrong_blocks
            if read.digest not in self.computed_blocks.get(read.prefix, ())
        ]

    def compare(self, reference: Ledger) -> Comparison:
        """Check this run's rows and tokens against ``reference``'s.

        A row that only one run computed (the other read it from the cache) shows in the rows
        that follow; the row of every generated token is in both or counts as different.
        """
        common = [key for key in self.rows if key in reference.rows]
        wrong = [key for key in common if self.rows[key] != reference.rows[key]]
        wrong += self.unequal_copies
        compared = different = 0
        for request, expected in reference.tokens.items():
            found = self.tokens.get(request, [])
            compared += len(expected)
            different += abs(len(expected) - len(found))
            different += sum(a != b for a, b in zip(expected, found, strict=False))
        request, position = min(wrong, default=("", 0))
        return Comparison(
            rows_compared=len(common),
            rows_different=len(wrong),
            tokens_compared=compared,
            tokens_different=different,
            first_difference=f"{request}, position {position}" if wrong else "",
            blocks_read=self.blocks_read,
            blocks_wrong=len(self.wrong_blocks),
            first_wrong_block=str(self.wrong_blocks[0]) if self.wrong_blocks else "",
        )
