"""The public Mooncake trace format, one JSON object per line, possibly compressed with gzip.

``{"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}``: arrival
in milliseconds, number of input and output tokens, and one id per 512 prompt tokens (the last id
may cover fewer). Equal ids mean equal tokens, so the ids determine what a prefix cache can reuse.
``"returns"`` is an addition of aiokv: the label of the request's release (see ``Lease.release``).
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import msgspec
import numpy as np

from aiokv.base.checks import MAX_LABEL_CHARACTERS
from aiokv.base.logs import Log
from aiokv.engine.trace_writer import HASH_BLOCK_TOKENS as HASH_BLOCK_TOKENS
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

log = Log(__name__)

STDIN: Final = "-"
# The trace that comes with the package; tests/harness/synthetic_trace.py generates it.
EXAMPLE: Final = Path(__file__).with_name("example.jsonl.gz")
# id * 512 + offset must stay an int32, so that two ids never share a token.
MAX_HASH_ID = 2**31 // HASH_BLOCK_TOKENS - 1

_GZIP_MAGIC: Final = b"\x1f\x8b"
_OFFSETS = np.arange(HASH_BLOCK_TOKENS, dtype=np.int32)


class TraceError(UsageError, ValueError):
    """A trace cannot be read.

    Attributes:
        path: path of the trace file.
        line: 1-based number of the malformed line; 0 when the error concerns the whole file.
    """

    def __init__(self, path: str | os.PathLike[str], line: int, reason: str) -> None:
        place = f"{os.fspath(path)}:{line}" if line else os.fspath(path)
        super().__init__(f"{place}: {reason}")
        self.path = os.fspath(path)
        self.line = line


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request of a trace; ``len(hash_ids) == ceil(input_tokens / 512)``."""

    timestamp_ms: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(name="timestamp")
    input_tokens: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(name="input_length")
    output_tokens: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="output_length")
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_HASH_ID)]]
    returns: Annotated[str, msgspec.Meta(max_length=MAX_LABEL_CHARACTERS)] = ""


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """Read a trace, or its first ``limit`` requests, in order of arrival.

    Blank lines are skipped. A compressed trace whose end is missing, because its writer was killed,
    is read up to its last whole line.

    Args:
        path: path of the file; ``"-"`` for standard input. The content tells if it is compressed.
        limit: number of lines to read; None for all.

    Raises:
        TraceError: see :func:`stream_trace`.
    """
    return sorted(stream_trace(path, limit), key=attrgetter("timestamp_ms"))


def stream_trace(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, or its first ``limit``, in the order of the file.

    Args:
        path: see :func:`read_trace`.
        limit: number of lines to read; None for all.

    Raises:
        TraceError: the file cannot be read, has no request, or one of the lines read is malformed.
    """
    try:
        if os.fspath(path) == STDIN:
            yield from _read(path, sys.stdin.buffer, limit)
        else:
            with Path(path).open("rb") as file:
                yield from _read(path, file, limit)
    except OSError as error:  # also for a file that is not valid gzip
        raise TraceError(path, 0, error.strerror or str(error)) from error
    except zlib.error as error:
        raise TraceError(path, 0, f"the compressed data is damaged: {error}") from error


def _read(
    path: str | os.PathLike[str], file: BinaryIO, limit: int | None
) -> Iterator[TraceRequest]:
    source = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    is_compressed = source.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
    lines = _unpacked(path, source) if is_compressed else source
    return _decode_lines(path, lines, limit)


def _unpacked(
    path: str | os.PathLike[str], file: BinaryIO | io.BufferedReader[Any]
) -> Iterator[bytes]:
    """Yield the lines of a compressed file; if its end is missing, its whole lines."""
    with gzip.GzipFile(fileobj=file) as unpacked:
        while True:
            try:
                line = unpacked.readline()
            except EOFError:
                log.warning("trace.end_missing", path=os.fspath(path))
                return
            if not line:
                return
            yield line


def _decode_lines(
    path: str | os.PathLike[str], lines: Iterable[bytes], limit: int | None
) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(TraceRequest).decode
    count = 0
    for number, line in enumerate(lines, start=1):
        if count == limit:
            return
        if line.isspace():
            continue
        try:
            request = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(path, number, str(error)) from error
        expected = -(-request.input_tokens // HASH_BLOCK_TOKENS)
        if len(request.hash_ids) != expected:
            raise TraceError(
                path,
                number,
                f"input_length {request.input_tokens} needs {expected} hash_ids of "
                f"{HASH_BLOCK_TOKENS} tokens, got {len(request.hash_ids)}",
            )
        count += 1
        yield request
    if not count:
        raise TraceError(path, 0, "the trace holds no request")


def expand_tokens(request: TraceRequest) -> NDArray[np.int32]:
    """Return the token ids of the prompt: ``512*h ... 512*h+511`` for each hash id ``h``.

    Returns:
        int32 ``[input_tokens]``.
    """
    first = np.array(request.hash_ids, dtype=np.int32) * np.int32(HASH_BLOCK_TOKENS)
    tokens: NDArray[np.int32] = np.add.outer(first, _OFFSETS).reshape(-1)
    return tokens[: request.input_tokens]
