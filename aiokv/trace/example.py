"""The trace that comes with the package, for ``aiokv replay example``.

Generated: 60 interleaved conversations of up to eight turns behind four shared system prompts.
``python -m aiokv.trace.example`` writes the file again.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Final

import msgspec

from aiokv.trace.synthetic import generate_trace

EXAMPLE: Final = Path(__file__).with_name("example.jsonl.gz")


def example_lines() -> bytes:
    """Return the lines of the trace, as the generator makes them."""
    requests = generate_trace(
        1_500, live_conversations=60, turn_tokens=1_500, max_turns=8, system_prompts=4
    )
    encode = msgspec.json.Encoder().encode
    return b"".join(encode(request) + b"\n" for request in requests)


if __name__ == "__main__":
    EXAMPLE.write_bytes(gzip.compress(example_lines(), mtime=0))
