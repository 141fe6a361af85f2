"""What a run computed, small enough to keep: tokens, and a digest of every row of logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

DIGEST_BYTES = 8


def digest_rows(logits: NDArray[np.float32]) -> list[bytes]:
    """One digest a row; equal digests mean equal bits (by accident once in 2**64)."""
    return [blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest() for row in logits]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a run differs from the first one.

    Attributes:
        rows_compared: logits rows (request and position) that both runs computed.
        rows_different: those whose bits differ, recomputed twins within one run included.
        tokens_compared: generated tokens.
        tokens_different: those that differ or are missing.
        first_difference: request and position of the first difference, or ``""``.
    """

    rows_compared: int
    rows_different: int
    tokens_compared: int
    tokens_different: int
    first_difference: str

    @property
    def equal(self) -> bool:
        return self.rows_different == 0 and self.tokens_different == 0


@dataclass(slots=True)
class Ledger:
    """Digests of logits by request and position, and generated tokens by request."""

    rows: dict[tuple[str, int], bytes] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    repeated_rows: int = 0
    unequal_twins: list[tuple[str, int]] = field(default_factory=list)

    def record_rows(self, request: str, first_position: int, digests: Iterable[bytes]) -> None:
        """Note rows; one computed again (after a preemption) must repeat its first bits."""
        for position, digest in enumerate(digests, start=first_position):
            key = (request, position)
            self.repeated_rows += key in self.rows
            if self.rows.setdefault(key, digest) != digest:
                self.unequal_twins.append(key)

    def record_tokens(self, request: str, tokens: list[int]) -> None:
        self.tokens[request] = tokens

    def compare(self, reference: Ledger) -> Comparison:
        """Check this run's rows and tokens against ``reference``'s.

        A row that only one run computed (the other read it from the cache) shows in the rows
        that follow; the row of every generated token is in both or counts as different.
        """
        common = [key for key in self.rows if key in reference.rows]
        wrong = [key for key in common if self.rows[key] != reference.rows[key]]
        wrong += self.unequal_twins
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
        )
