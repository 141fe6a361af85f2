"""Store: a set of blocks below the host tier, found by key.

A store moves *objects* between its medium and blocks of the host arena. An object is the payload
of one host block, followed by a trailer of ``TRAILER_BYTES`` with the length, the key and a
checksum of the payload. The :class:`~aiokv.stores.store_set.StoreSet` writes the trailer before a
save, and the :class:`~aiokv.stores.guard.StoreGuard` verifies it after a load: a store need not
look into an object.

A store may drop any block at any time. It must never return bytes that were saved for another key.
"""

from __future__ import annotations

import errno
import mmap
import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from aiokv.base.groups import ATTENTION, STATE
from aiokv.errors import StoreError
from aiokv.layout.host_block import TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from numpy.typing import NDArray

    from aiokv.base.statistics import StoreStatistics

KEY_BYTES: Final = 32


class Result(IntEnum):
    """Result of one key of ``load``, ``save`` or ``remove``.

    Attributes:
        DONE: the object was loaded, stored or removed.
        MISSING: the store does not have the key. Not an error.
        WRONG: the object was found, but its length, key or checksum is wrong.
        REFUSED: the store has no room for the object, or does not admit it.
        FAILED: an I/O error, or the operation did not finish in time.
        PRESENT: ``save`` only: the store already had the object, and has written nothing.
    """

    DONE = 0
    MISSING = 1
    WRONG = 2
    REFUSED = 3
    FAILED = 4
    PRESENT = 5


def medium_name(group: str) -> str:
    """Return the name of a group in keys and files of stores.

    The names are those of the pools of host memory in the first releases: what they have stored is
    found.
    """
    if group == ATTENTION:
        return "host"
    return "host_state" if group == STATE else f"host_window:{group}"


class StoreMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of a group, as stores see it. Block ``i`` begins at
    ``address + i * pitch_bytes``; a slot of recurrent state is a block of its group.

    Attributes:
        address: address of block 0, a multiple of ``STORE_ALIGNMENT_BYTES``.
        num_blocks: number of blocks.
        pitch_bytes: distance between blocks, a multiple of ``STORE_ALIGNMENT_BYTES``; a store may
            read and overwrite all of it.
        payload_bytes: bytes of a block that the device tier copies.
        view: all blocks as one writable buffer.
        group: name of the group.
        quota_share: part of the limit of the store that the objects of the group may take, above 0;
            the shares of all groups add up to 1.
    """

    address: int
    num_blocks: int
    pitch_bytes: int
    payload_bytes: int
    view: memoryview
    group: str = ATTENTION
    quota_share: float = 1.0

    @classmethod
    def allocate(
        cls, num_blocks: int, payload_bytes: int, pitch_bytes: int, quota_share: float = 1.0
    ) -> StoreMemory:
        """Return new memory, which is freed with its last view."""
        view = memoryview(mmap.mmap(-1, num_blocks * pitch_bytes))
        return cls(
            address=np.frombuffer(view, np.uint8).ctypes.data,
            num_blocks=num_blocks,
            pitch_bytes=pitch_bytes,
            payload_bytes=payload_bytes,
            view=view,
            quota_share=quota_share,
        )

    @property
    def object_bytes(self) -> int:
        """Bytes of an object, payload and trailer; at most ``pitch_bytes``."""
        return self.payload_bytes + TRAILER_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.pitch_bytes

    def object(self, block: int) -> memoryview:
        """Return the bytes of the object of a block, not copied."""
        begin = block * self.pitch_bytes
        return self.view[begin : begin + self.object_bytes]


class SharedFilter(msgspec.Struct, frozen=True):
    """A filter of all keys of a store, in memory that processes of this user may map.

    Attributes:
        path: file of the memory.
        offset: first byte of the filter there, a multiple of the page size.
        num_bytes: length of the filter; see ``_native.may_have_any``.
        identity: device and inode of the memory: the path may name another file later, or in
            another container.
    """

    path: str
    offset: int
    num_bytes: int
    identity: tuple[int, int]

    def map(self) -> NDArray[np.uint8]:
        """Return the filter, mapped for reads.

        Raises:
            OSError: the memory has been freed, or this process must not read it.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != self.identity:
                raise FileNotFoundError(errno.ENOENT, "is another file now", self.path)
            view = mmap.mmap(descriptor, self.num_bytes, prot=mmap.PROT_READ, offset=self.offset)
        finally:
            os.close(descriptor)
        return np.frombuffer(view, np.uint8)


class StoreFilters(msgspec.Struct, frozen=True):
    """Filters from which a process knows that no store that is read has a block.

    Attributes:
        fingerprint: of the keys; see ``derive_keys``.
        filters: one per store that is read.
        covers_all: True if all stores are read.
    """

    fingerprint: bytes
    filters: list[SharedFilter]
    covers_all: bool


class Store(Protocol):
    """Blocks by key. Used on one event loop, by one guard. Subclasses inherit ``probe`` and
    ``quarantine``, which suit a store whose lookups reach its medium, ``for_group``, ``purge``,
    ``may_have_any``, ``shared_filter``, ``stored_keys``, which it replaces to support purges,
    ``follow_keys``, and the limits of a lookup.

    Keys are ``bytes`` of ``N * KEY_BYTES``: N keys, one behind the other, distinct. Results are
    arrays with one entry per key. All operations between ``open`` and ``aclose`` run concurrently;
    the guard limits their number. They raise ``StoreError`` when the whole batch failed, such as
    for a lost connection; the guard then counts each key as ``FAILED``.

    Blocks given to ``load`` and ``save`` belong to the call until its coroutine ends, also when it
    raises or is cancelled: a cancelled call ends as soon as the store no longer accesses them.

    Attributes:
        kind: ``"host"``, ``"disk"``, ``"mooncake"``, ``"redis"``, ``"s3"``, ``"directory"``.
        url: address without secrets, for messages and statistics.
        max_concurrent: operations that the guard runs at a time.
        max_lookup_keys: keys of one call of ``lookup``, for a store that needs a request per key:
            the number of requests that it sends at a time. A lookup of more keys has several calls,
            which find the end of a prefix by bisection; see :mod:`aiokv.stores.search`. 0 for a
            store whose calls take any number of keys.
        lookup_deadline_seconds: default of ``StoreUse.lookup_deadline_seconds``.
        finds_prefixes: True if ``lookup_prefix`` costs less than lookups of the keys: the blocks of
            a prompt are then looked up by it, after the other stores were asked.
        remember_missing_seconds: default of ``StoreUse.remember_missing_seconds``; 0 for a store
            that answers lookups from the memory of this process.
        follows_keys: True if the store has ``follow_keys``.
        verifies_loads: True if ``load`` compares length, key and checksum of the bytes in each
            block by ``_native.copy_objects``, ``verify_blocks`` or an ``ObjectWriter``, and returns
            ``WRONG`` where they differ: the guard then does not read the blocks again.
        state_folder: folder of the medium that only this process writes to; a write budget keeps
            its state there. None if there is no such folder.
    """

    kind: str
    url: str
    max_concurrent: int
    max_lookup_keys: int = 0
    lookup_deadline_seconds: float = 0.25
    finds_prefixes: bool = False
    remember_missing_seconds: float = 0.0
    follows_keys: bool = False
    verifies_loads: bool = False
    state_folder: Path | None = None

    def for_group(self, group: str) -> Store | None:
        """Return an unopened store for the objects of another group, which have another size, on
        the same medium; None if the store takes blocks of full attention only.

        Called before ``open``, once per group besides ``"attention"``. Both stores are open at
        the same time, and no key is in both. ``StoreMemory.quota_share`` divides a limit of bytes.

        The default returns None: snapshots of recurrent state are not saved to the store then.
        """
        return None

    async def open(self, memory: StoreMemory) -> None:
        """Connect or recover, and register the memory. Called before all other methods.

        Called again after ``aclose``, with other memory, when the host tier has been asleep.

        A server that cannot be reached is not an error: the store connects when it is used next.
        Existing data of another layout is neither used nor an error.

        Raises:
            ConfigError: the arguments of the store are wrong, a package is missing (the message
                names it), or another process uses the path. The engine does not start. Nothing is
                left behind.
            StoreError: the medium or the server fails. The guard treats every exception that is no
                ``AiokvError`` in the same way. It calls ``open`` again later, unless the store is
                required. Nothing is left behind.

        Cancellation: nothing is left behind.
        """

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether the store has it, ``[N]`` bool."""

    def may_have_any(self, keys: bytes) -> bool:
        """Return False if the store is known to have none of the keys; must neither do I/O nor
        raise. The default returns True."""
        return True

    def shared_filter(self) -> SharedFilter | None:
        """Return where other processes may read which keys the store has; None while it has no
        such memory. Must not do I/O. The default returns None."""
        return None

    async def lookup_prefix(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each of consecutive blocks of a prompt whether the store has it, ``[N]`` bool.

        Keys behind the first one that is missing may count as missing. The default looks up each.
        """
        return await self.lookup(keys)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Read object ``i`` into host block ``blocks[i]``; return ``[N]`` uint8 ``Result``.

        The bytes of a block whose result is not ``DONE`` are undefined.
        """

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Store the object in host block ``blocks[i]``; return ``[N]`` uint8 ``Result``.

        After ``DONE`` and ``PRESENT`` the object is found with the same bytes, or not at all (I10).
        """

    async def save_chains(
        self, keys: bytes, blocks: NDArray[np.int32], follows: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Store objects as ``save`` does, and may store consecutive blocks together.

        Args:
            keys: one per block.
            blocks: host blocks.
            follows: ``[N]``, True where the block is the next one of a prompt behind the block
                before it in the batch.
        """
        return await self.save(keys, blocks)

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove objects; return ``[N]`` uint8 ``Result``. Keys that are missing are ``DONE``.

        A store whose medium may be damaged in places has a method ``quarantine``, too, with the
        same arguments: it removes objects that were ``WRONG``, and does not use their places again.
        """

    async def quarantine(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove objects whose bytes were wrong, and use the places of the medium that they had no
        more; return ``[N]`` uint8 ``Result`` as ``remove`` does.

        The default removes the objects: a server chooses the places itself.
        """
        return await self.remove(keys)

    def stored_keys(self, label: bytes = b"") -> AsyncIterator[bytes]:
        """Yield the keys of stored objects of all groups, in batches. Keys that are saved or
        removed meanwhile may be missing.

        The default raises: a medium that cannot list its objects defines ``purge`` instead.

        Args:
            label: only keys that end with these bytes.

        Raises:
            StoreError: the medium cannot list its objects, or cannot be reached.
        """
        raise StoreError(f"{self.url} cannot list its objects")

    def follow_keys(self) -> AsyncGenerator[bytes | None]:
        """Yield the keys of all stored objects of all groups, in batches; then None; and then the
        keys that any process saves, soon after each save, until the generator is closed.

        Keys that are removed, and keys that are not stored, may be yielded, too. When a later save
        may have been missed, the generator must raise within 5 s.

        The default raises: see ``follows_keys``.

        Raises:
            StoreError: the medium cannot be reached, or does not report saves.
        """
        raise StoreError(f"{self.url} does not report saves")

    async def purge(self, label: bytes) -> int:
        """Remove all objects of all groups whose keys end with ``label``; return their number.

        Objects that are saved meanwhile may stay.

        Objects that an interrupted call has removed stay removed; the next call removes the rest.

        Args:
            label: see ``aiokv.stores.labels``; not empty.

        Raises:
            StoreError: an object could not be removed.
        """
        removed = 0
        async for keys in self.stored_keys(label):
            results = await self.remove(keys)
            if failed := int((results != Result.DONE).sum()):
                raise StoreError(f"{self.url}: {failed} of {len(results)} objects were not removed")
            removed += len(results)
        return removed

    async def probe(self) -> None:
        """Do the cheapest operation that fails or hangs when a load would.

        The default looks up one key.

        Raises:
            StoreError: the medium cannot be read.
        """
        await self.lookup(bytes(KEY_BYTES))

    def statistics(self) -> StoreStatistics:
        """Return counters; does not suspend, and does no I/O."""

    async def aclose(self) -> None:
        """End operations in flight and close. Idempotent; may be called after a failed ``open``.

        The memory is not accessed afterwards.
        """


def split_keys(keys: bytes) -> list[bytes]:
    """Return the single keys of a batch."""
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def selected(keys: bytes, which: NDArray[np.bool_] | NDArray[np.integer[Any]]) -> bytes:
    """Return some keys of a batch: those of a mask, or of indices."""
    return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)[which].tobytes()
