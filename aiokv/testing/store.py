"""ScriptedStore: a store in memory whose script fails, delays or corrupts operations.

store = ScriptedStore()
store.fail("load", call=0)                        # raises StoreError
store.delay("lookup", seconds=1.0)                # each lookup, by the loop's clock
late = store.hold("save", call=2)                 # until late.open(), also when it is cancelled
store.corrupt("load", call=1, block=3)            # the bytes of that block are wrong
store.answer("load", call=4, results=[0, 0])      # too few results
async with CacheEngine(config, regions, stores=[store]) as engine:
    ...
assert store.calls["load"] == 5

Calls are numbered from 0 per operation; ``call=None`` is every call. Rules may be added at any
time. A load that is cancelled writes garbage before it ends. ``store.objects`` is the content of
the store; a second store made with ``ScriptedStore(objects=store.objects)`` finds the same, as
after a restart.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from aiokv.base.statistics import StoreStatistics
from aiokv.errors import StoreError, UsageError
from aiokv.stores.base import KEY_BYTES, Result, Store, split_keys
from aiokv.testing.rules import Delay, Gate, Hold, Rule, Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray

    from aiokv.stores.base import StoreMemory

Operation = Literal["open", "lookup", "load", "save", "remove", "aclose"]
_FLIPPED: Final = 0xFF
_GARBAGE: Final = 0xEE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure(Rule):
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corruption(Rule):
    block: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer(Rule):
    results: Sequence[int]


class ScriptedStore(Store):
    """A store in memory that executes a script.

    Args:
        name: part of ``url``.
        capacity_blocks: objects that it takes; further ones are refused. None for no limit.
        max_concurrent: see :class:`aiokv.stores.Store`.
        max_lookup_keys: likewise.
        keeps_objects: True if a save of a key that is stored writes nothing, and is ``PRESENT``.
        objects: objects by key, shared with another store; None for a new, empty dictionary.

    Attributes:
        objects: bytes of each object, by key.
        calls: number of calls per operation.
        keys: keys of the lookups, loads and saves, one ``(operation, keys)`` per call.
        opened: number of times that the store was opened.
        is_open: ``open`` was called, and ``aclose`` was not called since.
        in_use: host blocks that calls in flight may access.
        parts: stores that ``for_group`` has returned, by group; each has a script of its own.
    """

    kind = "scripted"

    def __init__(
        self,
        name: str = "memory",
        *,
        capacity_blocks: int | None = None,
        max_concurrent: int = 4,
        max_lookup_keys: int = 0,
        keeps_objects: bool = False,
        objects: dict[bytes, bytes] | None = None,
    ) -> None:
        self.url = f"scripted:{name}"
        self.max_concurrent = max_concurrent
        self.max_lookup_keys = max_lookup_keys
        self.objects: dict[bytes, bytes] = {} if objects is None else objects
        self.calls: Counter[str] = Counter()
        self.keys: list[tuple[str, list[bytes]]] = []
        self.opened = 0
        self.is_open = False
        self.in_use: Counter[int] = Counter()
        self.parts: dict[str, ScriptedStore] = {}
        self._name = name
        self._capacity_blocks = capacity_blocks
        self._keeps_objects = keeps_objects
        self._memory: StoreMemory | None = None
        self._script = Script()

    # --- the script -------------------------------------------------------------------------

    def fail(
        self, operation: Operation, call: int | None = None, error: Exception | None = None
    ) -> None:
        """Raise ``error``, a ``StoreError`` by default."""
        error = error or StoreError(f"{operation} failed by the script")
        self._script.add(_Failure(operation=operation, call=call, error=error))

    def delay(self, operation: Operation, call: int | None = None, *, seconds: float) -> None:
        """Delay the call by ``seconds`` of the loop's clock; a cancellation ends the delay."""
        self._script.add(Delay(operation=operation, call=call, seconds=seconds))

    def hold(self, operation: Operation, call: int | None = None) -> Gate:
        """Hold the call until the gate is opened, also when it is cancelled meanwhile."""
        gate = Gate()
        self._script.add(Hold(operation=operation, call=call, gate=gate))
        return gate

    def corrupt(
        self, operation: Operation, call: int | None = None, *, block: int | None = None
    ) -> None:
        """Flip a byte of each object of a load or a save, or of the object with index ``block``."""
        self._script.add(_Corruption(operation=operation, call=call, block=block))

    def answer(
        self, operation: Operation, call: int | None = None, *, results: Sequence[int]
    ) -> None:
        """Return these results, whatever the call has done."""
        self._script.add(_Answer(operation=operation, call=call, results=results))

    def end_script(self) -> None:
        """Remove all rules, and open all gates."""
        self._script.end()

    # --- the store --------------------------------------------------------------------------

    def for_group(self, group: str) -> ScriptedStore:
        """Return a store of the same objects, with a script of its own; see ``Store.for_group``."""
        self.parts[group] = ScriptedStore(
            f"{self._name}/{group}",
            max_concurrent=self.max_concurrent,
            max_lookup_keys=self.max_lookup_keys,
            keeps_objects=self._keeps_objects,
            objects=self.objects,
        )
        return self.parts[group]

    async def open(self, memory: StoreMemory) -> None:
        """See ``Store.open``."""
        if self.is_open:
            raise UsageError(f"{self.url} is open already")
        await self._play("open")
        self._memory = memory
        self.is_open = True
        self.opened += 1

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """See ``Store.lookup``."""
        number = await self._play("lookup", keys)
        found = [key in self.objects for key in split_keys(keys)]
        return np.array(self._answered("lookup", number, found), np.bool_)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """See ``Store.load``."""
        with _InUse(self.in_use, blocks):
            try:
                number = await self._play("load", keys)
            except asyncio.CancelledError:
                self._write_garbage(blocks)
                raise
            results = [
                self._load(number, i, key, block)
                for i, (key, block) in enumerate(zip(split_keys(keys), blocks, strict=True))
            ]
        return np.array(self._answered("load", number, results), np.uint8)

    def _write_garbage(self, blocks: NDArray[np.int32]) -> None:
        """Write garbage into the blocks of a cancelled load, to which they belong until it ends."""
        if self._memory is not None:
            for block in blocks.tolist():
                target = self._memory.object(block)
                target[:] = bytes([_GARBAGE]) * len(target)

    def _load(self, number: int, index: int, key: bytes, block: int) -> Result:
        if key not in self.objects:
            return Result.MISSING
        data = self._corrupted("load", number, index, self.objects[key])
        self._opened_memory().object(block)[: len(data)] = data
        return Result.DONE

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """See ``Store.save``."""
        with _InUse(self.in_use, blocks):
            number = await self._play("save", keys)
            results = [
                self._save(number, i, key, block)
                for i, (key, block) in enumerate(zip(split_keys(keys), blocks, strict=True))
            ]
        return np.array(self._answered("save", number, results), np.uint8)

    def _save(self, number: int, index: int, key: bytes, block: int) -> Result:
        if self._keeps_objects and key in self.objects:
            return Result.PRESENT
        limit = self._capacity_blocks
        if limit is not None and len(self.objects) >= limit and key not in self.objects:
            return Result.REFUSED
        data = bytes(self._opened_memory().object(block))
        self.objects[key] = self._corrupted("save", number, index, data)
        return Result.DONE

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """See ``Store.remove``."""
        number = await self._play("remove", keys)
        for key in split_keys(keys):
            self.objects.pop(key, None)
        results = [Result.DONE] * (len(keys) // KEY_BYTES)
        return np.array(self._answered("remove", number, results), np.uint8)

    async def stored_keys(self, label: bytes = b"") -> AsyncIterator[bytes]:
        """See ``Store.stored_keys``."""
        yield b"".join(key for key in self.objects if key.endswith(label))

    def statistics(self) -> StoreStatistics:
        """See ``Store.statistics``."""
        return StoreStatistics(
            blocks=len(self.objects), used_bytes=sum(map(len, self.objects.values()))
        )

    async def aclose(self) -> None:
        """See ``Store.aclose``."""
        await self._play("aclose")
        self.is_open = False
        self._memory = None

    # --- following the script ---------------------------------------------------------------

    async def _play(self, operation: Operation, keys: bytes = b"") -> int:
        """Count a call and follow the rules for it; return its number."""
        number = self.calls[operation]
        self.calls[operation] += 1
        if keys:
            self.keys.append((operation, split_keys(keys)))
        for delay in self._script.matching(Delay, operation, number):
            await asyncio.sleep(delay.seconds)
        for hold in self._script.matching(Hold, operation, number):
            await _opened(hold.gate)
        for failure in self._script.matching(_Failure, operation, number):
            # Otherwise the traceback would grow with each operation.
            raise failure.error.with_traceback(None)
        return number

    def _answered(self, operation: Operation, number: int, results: Sequence[int]) -> Sequence[int]:
        for rule in self._script.matching(_Answer, operation, number):
            return rule.results
        return results

    def _corrupted(self, operation: Operation, number: int, index: int, data: bytes) -> bytes:
        for rule in self._script.matching(_Corruption, operation, number):
            if rule.block in (None, index) and data:
                return bytes([data[0] ^ _FLIPPED]) + data[1:]
        return data

    def _opened_memory(self) -> StoreMemory:
        if self._memory is None:
            raise UsageError(f"{self.url} is not open")
        return self._memory


async def _opened(gate: Gate) -> None:
    """Wait for the gate; raise a cancellation after it was opened, or when the loop ends."""
    cancelled: asyncio.CancelledError | None = None
    while not gate.opened:
        try:
            await gate.wait()
        except asyncio.CancelledError as error:
            if all(task.cancelling() for task in asyncio.all_tasks()):
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled


class _InUse:
    """Context in which a call may access host blocks."""

    def __init__(self, in_use: Counter[int], blocks: NDArray[np.int32]) -> None:
        self._in_use = in_use
        self._blocks = blocks.tolist()

    def __enter__(self) -> None:
        self._in_use.update(self._blocks)

    def __exit__(self, *exc: object) -> None:
        self._in_use.subtract(self._blocks)
