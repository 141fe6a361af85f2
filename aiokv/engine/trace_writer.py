"""TraceWriter: a thread that writes requests to files in the Mooncake trace format.

A line has the arrival, the lengths and one id per 512 prompt tokens; equal ids mean equal prompts
up to there. Ids count from 0 in the order in which the writer first sees a prefix. It recognizes a
prefix by a keyed hash, whose key is random per file and never written: the ids tell nothing about
the tokens, not even to a reader who guesses a prompt.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import msgspec

from aiokv.base.logs import Log
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

log = Log(__name__)

HASH_BLOCK_TOKENS: Final = 512
MAX_IDS: Final = 1 << 18  # ids per file; the writer needs about 200 bytes per id
MAX_QUEUED_TOKENS: Final = 1 << 24  # 64 MiB
RETRY_SECONDS: Final = 30.0  # after a failed write
FLUSH_SECONDS: Final = 1.0
_TOKEN_BYTES: Final = 4


class TraceEntry(NamedTuple):
    """A request.

    Attributes:
        arrived_at: ``time.monotonic()`` of its arrival.
        tokens: ``[N]`` int32 token ids of the prompt.
        output_tokens: number of tokens that it has generated.
        context: salt and adapter; prompts of different contexts have no equal ids.
        items: (content hash, offset, length) of each multimodal item, in order.
        label: label of its release; "" for none.
    """

    arrived_at: float
    tokens: NDArray[np.int32]
    output_tokens: int
    context: str
    items: Sequence[tuple[bytes, int, int]]
    label: str = ""


class RecordingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a recording, from its start on.

    Attributes:
        recorded_requests: requests that were written.
        dropped_requests: requests that were left out because the writer could not keep up.
        failed_requests: requests that could not be written, e.g. because the disk was full.
        files: files that were begun.
    """

    recorded_requests: int
    dropped_requests: int
    failed_requests: int
    files: int


class PrefixIds:
    """Ids of prefixes, by keyed hashes of their tokens."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._ids: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def of(self, entry: TraceEntry) -> list[int]:
        """Return the id of each 512 tokens of a prompt; the last one may have fewer."""
        data = entry.tokens.data.cast("B")
        step = HASH_BLOCK_TOKENS * _TOKEN_BYTES
        digest = self._hash(entry.context.encode())
        found = []
        for begin in range(0, len(data), step):
            items = _items_key(entry.items, begin // _TOKEN_BYTES)
            block = data[begin : begin + step]
            digest = self._hash(digest, struct.pack("<I", len(items)), items, block)
            found.append(self._ids.setdefault(digest, len(self._ids)))
        return found

    def _hash(self, *parts: bytes | memoryview) -> bytes:
        state = hashlib.blake2b(key=self._key, digest_size=16)
        for part in parts:
            state.update(part)
        return state.digest()


def _items_key(items: Sequence[tuple[bytes, int, int]], first: int) -> bytes:
    """Return bytes that tell the items of the 512 positions from ``first`` on apart."""
    key = b""
    for content_hash, offset, length in items:
        if offset < first + HASH_BLOCK_TOKENS and offset + length > first:
            key += struct.pack("<qqq", len(content_hash), offset - first, length) + content_hash
    return key


class TraceFile:
    """A trace file, which numbers its ids and times from 0.

    Args:
        path: file to make; compressed if its name ends in ``.gz``.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._raw = path.open("xb")
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._raw, fcntl.LOCK_EX | fcntl.LOCK_NB)  # see _refuse_unless_trace
        self._stat = os.fstat(self._raw.fileno())
        self._file: IO[bytes] | gzip.GzipFile = self._raw
        if path.suffix == ".gz":
            self._file = gzip.GzipFile(fileobj=self._raw, mode="wb")
        self._encode = msgspec.json.Encoder().encode
        self._ids = PrefixIds()
        self._began_at = time.monotonic()
        self._flushed_bytes = 0

    def write(self, entry: TraceEntry) -> None:
        """Write an entry as a line."""
        line: dict[str, int | str | list[int]] = {
            "timestamp": max(0, round((entry.arrived_at - self._began_at) * 1e3)),
            "input_length": len(entry.tokens),
            "output_length": entry.output_tokens,
            "hash_ids": self._ids.of(entry),
        }
        if entry.label:
            line["returns"] = entry.label
        self._file.write(self._encode(line) + b"\n")

    def flush(self) -> None:
        """Write the buffered entries.

        Raises:
            OSError: the file cannot be written, or was deleted.
        """
        self._file.flush()
        self._raw.flush()
        if os.fstat(self._raw.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was deleted")
        self._flushed_bytes = self._raw.tell()

    def is_full(self, max_bytes: int, max_ids: int) -> bool:
        """Return True if the file has reached its limit of bytes or ids."""
        return self._raw.tell() >= max_bytes or len(self._ids) >= max_ids

    def close(self) -> None:
        """Write the end of the file, and close it."""
        try:
            self._file.close()
        finally:
            self._raw.close()

    def abandon(self) -> None:
        """Close the file after a failure, without the lines that were not flushed."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            if os.path.samestat(os.stat(self._raw.name), self._stat):
                os.truncate(self._raw.name, self._flushed_bytes)


class TraceWriter:
    """Writes entries in a thread; a failed write loses entries, which are counted.

    The newest file is ``path``. Older ones have a number before the suffix, such as
    ``trace.000001.jsonl.gz``; a file that exists when the writer starts becomes one of them.

    Args:
        path: file to write; compressed if its name ends in ``.gz``.
        max_file_bytes: size at which the writer begins a new file.
        max_files: number of files to keep, the newest included.
        max_ids: number of ids at which the writer begins a new file.
    """

    def __init__(
        self, path: Path, *, max_file_bytes: int, max_files: int, max_ids: int = MAX_IDS
    ) -> None:
        self._path = path
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._max_ids = max_ids
        self._entries: deque[TraceEntry] = deque()
        self._changed = threading.Condition()  # guards the entries and the counts
        self._queued_tokens = 0
        self._closing = False
        self._recorded = 0
        self._dropped = 0
        self._failed = 0
        self._files = 0
        self._file: TraceFile | None = None  # used by the thread only, as are the next four
        self._unflushed = 0  # number of entries
        self._flush_at = 0.0
        self._retry_at = 0.0
        self._has_logged = False
        self._thread = threading.Thread(target=self._run, name="aiokv trace", daemon=True)

    def start(self) -> None:
        """Open the first file, and start the thread.

        Raises:
            UsageError: the writer was started before; the file cannot be written, is not a regular
                file, or is written by another recording. Nothing changed.
        """
        if self._thread.ident is not None:
            raise UsageError(
                "record_trace: this recording was entered before; it can be entered once",
                hint="call record_trace again",
            )
        try:
            _refuse_unless_trace(self._path)
            self._file = self._new_file()
        except OSError as error:
            raise UsageError(
                f"record_trace: cannot write {self._path}: {error.strerror or error}",
                hint="pass a path in an existing folder that this process may write to",
            ) from error
        self._thread.start()

    def put(self, entry: TraceEntry) -> None:
        """Queue an entry; drop it if the thread is too far behind."""
        with self._changed:
            if self._queued_tokens > MAX_QUEUED_TOKENS:
                self._dropped += 1
                return
            self._queued_tokens += len(entry.tokens)
            self._entries.append(entry)
            self._changed.notify()

    def close(self) -> None:
        """Write the queued entries and close the file. Blocks until both are done."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def statistics(self) -> RecordingStatistics:
        """Return the counts from the start on."""
        with self._changed:
            return RecordingStatistics(
                recorded_requests=self._recorded,
                dropped_requests=self._dropped,
                failed_requests=self._failed,
                files=self._files,
            )

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            self._write(entry)
            if self._unflushed and time.monotonic() >= self._flush_at:
                self._flush()
        self._flush()
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._give_up(error)

    def _next(self) -> TraceEntry | None:
        """Wait for an entry; return None when the writer closes. Flush the file meanwhile."""
        while True:
            with self._changed:
                if not self._entries and not self._closing:
                    self._changed.wait(FLUSH_SECONDS if self._unflushed else None)
                if self._entries:
                    entry = self._entries.popleft()
                    self._queued_tokens -= len(entry.tokens)
                    return entry
                if self._closing:
                    return None
            self._flush()

    def _flush(self) -> None:
        """Write the recorded entries, so that a kill of the process does not lose them."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)
        else:
            self._count_flushed()

    def _write(self, entry: TraceEntry) -> None:
        try:
            if self._file is None:
                if time.monotonic() < self._retry_at:
                    self._count_failed(1)
                    return
                self._file = self._new_file()
            if not self._unflushed:
                self._flush_at = time.monotonic() + FLUSH_SECONDS
            self._unflushed += 1
            self._file.write(entry)
            if self._file.is_full(self._max_file_bytes, self._max_ids):
                self._file.close()
                self._count_flushed()
                self._file = None
                self._file = self._new_file()
        except OSError as error:
            self._give_up(error)

    def _new_file(self) -> TraceFile:
        _retire(self._path, self._max_files - 1)
        file = TraceFile(self._path)
        with self._changed:
            self._files += 1
        return file

    def _give_up(self, error: OSError) -> None:
        """Go on without a file for some seconds; the entries that were not flushed are lost."""
        if self._file is not None:
            self._file.abandon()
            self._file = None
        self._count_failed(self._unflushed)
        self._unflushed = 0
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if not self._has_logged:
            self._has_logged = True
            log.error(
                "trace.write_failed",
                path=str(self._path),
                reason=error.strerror or str(error),
                retry_seconds=RETRY_SECONDS,
            )

    def _count_flushed(self) -> None:
        with self._changed:
            self._recorded += self._unflushed
        self._unflushed = 0

    def _count_failed(self, requests: int) -> None:
        with self._changed:
            self._failed += requests


def _refuse_unless_trace(path: Path) -> None:
    """Raise if ``path`` exists and may not be renamed.

    Raises:
        OSError: it is a folder, a device or a pipe, or another recording writes it.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        if path.is_symlink() or not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it exists and is not a regular file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another recording writes it") from None
        except OSError:
            return  # some file systems have no locks
    finally:
        os.close(file)


def _retire(path: Path, num_kept: int) -> None:
    """Give the file at ``path`` the next number, and delete older files but ``num_kept``."""
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    stem = path.name.removesuffix(suffix)
    pattern = re.compile(re.escape(stem) + r"\.(\d{6,})" + re.escape(suffix))
    numbers = sorted(
        int(match[1]) for other in path.parent.iterdir() if (match := pattern.fullmatch(other.name))
    )
    if path.exists():
        numbers.append(numbers[-1] + 1 if numbers else 1)
        path.rename(path.with_name(f"{stem}.{numbers[-1]:06}{suffix}"))
    for number in numbers[: max(0, len(numbers) - num_kept)]:
        path.with_name(f"{stem}.{number:06}{suffix}").unlink()
