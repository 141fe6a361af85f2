"""Storage formats of the demo's cache: unchanged, narrower, or quantised with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from aiokv.frameworks.paddle import import_paddle

paddle = import_paddle()


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A number format of the cache.

    Attributes:
        stored: Paddle dtype of the cache tensors.
        largest: what a head's largest number is scaled to; None for no scales.
    """

    name: str
    stored: str
    largest: float | None = None

    def encode(self, rows: Any) -> tuple[Any, Any | None]:
        """Encode rows ``[rows, heads, dim]``; return them with their scales ``[rows, heads]``."""
        if self.largest is None:
            return rows.cast(self.stored), None
        scales = paddle.clip(rows.abs().max(-1), min=_SMALLEST_SCALE) / self.largest
        scaled = rows / scales.unsqueeze(-1)
        return self._narrow(scaled), scales

    def _narrow(self, scaled: Any) -> Any:
        if self.name == "fp8":  # kept as its bits: Paddle cannot scatter float8 on the cpu
            return scaled.cast("float8_e4m3fn").view("uint8")
        return scaled.round().cast(self.stored)

    def decode(self, stored: Any, scales: Any | None) -> Any:
        """Decode the result of :meth:`encode` to float32."""
        if self.name == "fp8":
            stored = stored.view("float8_e4m3fn")
        widened = stored.cast("float32")
        return widened if scales is None else widened * scales.unsqueeze(-1)


_SMALLEST_SCALE: Final = 1e-12  # of a head that is all zeros

FORMATS: Final = {
    fmt.name: fmt
    for fmt in (
        KVFormat("float32", "float32"),
        KVFormat("bfloat16", "bfloat16"),
        KVFormat("int8", "int8", largest=127.0),
        KVFormat("fp8", "uint8", largest=448.0),
    )
}
