"""SyncEngine: an engine for ordinary threads, whose event loop runs in another thread."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Self, final

from aiokv.base import checks
from aiokv.base.checks import Unique, arguments
from aiokv.engine import CacheEngine
from aiokv.errors import ClosedError
from aiokv.sync import on_loop
from aiokv.sync.loop import SharedLoop
from aiokv.sync.port import Port
from aiokv.sync.thread import LoopThread
from aiokv.sync.verbs import EngineVerbs

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from aiokv.base.statistics import CacheStatistics, Statistics
    from aiokv.config.cache_config import CacheConfig
    from aiokv.engine.batch import Batch
    from aiokv.errors import AiokvError
    from aiokv.layout.regions import Regions
    from aiokv.peers.options import Peers
    from aiokv.ranks.group import RankGroup
    from aiokv.stores.base import Store
    from aiokv.stores.use import StoreUse
    from aiokv.sync.calls import Calls
    from aiokv.sync.futures import EngineFuture
    from aiokv.sync.lease import SyncLease
    from aiokv.worker.device.base import Device


@final
@arguments()
class SyncEngine(EngineVerbs, Unique):
    """A :class:`aiokv.CacheEngine` for threads: it runs on an event loop in a thread of its own.

    ::

        with aiokv.sync.SyncEngine(config, regions, device="cuda") as engine:
            while requests:
                calls = engine.calls()  # one step of the scheduler: one crossing
                ...

    Any thread may call any method. A call *crosses* to the engine's loop. While the loop waits for
    events, the caller makes the call itself, and no thread is woken. Otherwise the loop makes it,
    and the caller blocks, without the GIL, until the answer has arrived. ``calls`` makes many calls
    in one crossing. Calls of several threads are made in the order in which they arrive. Calls that
    may wait return an :class:`EngineFuture`.

    Args:
        config: as for :class:`aiokv.CacheEngine`, and so are the others.
        regions: the device tensors.
        device: the device of the tensors.
        ranks: the processes that own the tensors.
        stores: stores below the host tier.
        peers: how the engine exchanges blocks with engines on other servers.
        loop_factory: returns the event loop of the engine. On loops of other types than the
            default, such as uvloop's, all calls are made in the engine's thread.

    After ``os.fork``, every method raises ``ClosedError`` in the child, except ``close``, which has
    no effect there. An engine that is still open when the main thread ends is closed then, without
    waiting for leases: let the main thread end last.

    When the engine's thread fails, calls and futures that wait get ``BrokenEngineError``, and so
    does every later call.

    Raises:
        ConfigError, UsageError: as for :class:`aiokv.CacheEngine`.
    """

    def __init__(
        self,
        config: CacheConfig,
        regions: Regions | None = None,
        device: Device | str | None = None,
        *,
        ranks: RankGroup | None = None,
        stores: Sequence[Store | StoreUse | str] = (),
        peers: Peers | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = SharedLoop,
    ) -> None:
        cache = CacheEngine(config, regions, device, ranks=ranks, stores=stores, peers=peers)
        self._cache = cache
        self._thread = LoopThread(_EngineService(cache), loop_factory)
        self._port = Port(self._thread, cache)

    # --- opening and closing ----------------------------------------------------------------------

    def open(self) -> None:
        """Start the thread and open the engine, as ``with`` does.

        Raises:
            UsageError: the engine was opened or closed before.
            AiokvError: the engine could not be opened, as ``async with CacheEngine``. The thread
                has ended.
            KeyboardInterrupt: the thread has ended, and the engine cannot be opened again.
        """
        self._thread.open()

    def close(self, drain_timeout: float | None = None) -> None:
        """Close the engine and end its thread; see ``CacheEngine.aclose``. Idempotent.

        From the call on, new work is refused with ``ClosedError``; leases can be committed and
        released until the engine is closed. Futures and calls that wait end with ``ClosedError``.

        Args:
            drain_timeout: seconds to wait for leases that are still held; None for
                ``CacheConfig.drain_timeout_seconds``. A call while the engine is closing only waits
                for the end.

        Raises:
            UsageError: ``drain_timeout`` is not a number; or the call is made in the engine's own
                thread. Nothing changed.
            KeyboardInterrupt: the engine goes on closing; call ``close`` again to wait for the end.
        """
        self._thread.close(drain_timeout)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an exception, no other code may release the leases: do not wait.
        self.close(0.0 if exc_type is not None else None)

    # --- calls ------------------------------------------------------------------------------------

    def calls(self) -> Calls:
        """Return an empty list of calls, which cross together."""
        return self._port.new_calls()

    def batch(self, leases: Iterable[SyncLease] = ()) -> Batch[SyncLease]:
        """Return a batch of leases, as :meth:`aiokv.CacheEngine.batch`. Does not cross.

        Change it in the thread that makes the calls, and not while they are made.

        Args:
            leases: its first rows, which are matched.

        Raises:
            UsageError: an element is not a ``SyncLease``, is not matched yet, or is listed twice.
            LeaseError: a lease is released, belongs to another engine, or could not be matched.
        """
        batch: Batch[SyncLease] = self._cache.batch().of_handles(on_loop.inner_of)
        for lease in checks.sequence("leases", leases):
            batch.add(lease)
        return batch

    # --- everything else --------------------------------------------------------------------------

    @property
    def cache(self) -> CacheEngine:
        """The engine, for ``call`` and ``submit``, and for its methods that any thread may call."""
        return self._cache

    @property
    def config(self) -> CacheConfig:
        """Sizes and policies of the cache."""
        return self._cache.config

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function on the engine's loop, and await its value if that can be awaited.

        ::

            engine.call(engine.cache.reset, timeout=5.0)
            pin = engine.call(engine.cache.pin, system_prompt)
            engine.call(pin.release)

        Args:
            function: a method of ``engine.cache``, or any other function or coroutine function.
            args: positional arguments of the function.
            kwargs: keyword arguments of the function.

        Returns:
            The value.

        Raises:
            Exception: the error of the function.
            ClosedError, BrokenEngineError: the engine is closed, or its thread has failed.
            KeyboardInterrupt: the coroutine was cancelled.
        """
        return self.submit(function, *args, **kwargs).wait()

    def submit(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> EngineFuture[Any]:
        """Do as ``call``, but do not wait for the value.

        Returns:
            A future of the value. ``cancel()`` cancels the coroutine.
        """

        async def run() -> Any:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value

        return self._port.begin(run)

    def statistics(self) -> Statistics:
        """See :meth:`aiokv.CacheEngine.statistics`. Does not cross."""
        return self._cache.statistics()

    def cache_statistics(self) -> CacheStatistics:
        """See :meth:`aiokv.CacheEngine.cache_statistics`. Does not cross."""
        return self._cache.cache_statistics()

    @property
    def free_device_blocks(self) -> int:
        """See :attr:`aiokv.CacheEngine.free_device_blocks`. Does not cross."""
        return self._cache.free_device_blocks

    @property
    def evictable_device_blocks(self) -> int:
        """See :attr:`aiokv.CacheEngine.evictable_device_blocks`. Does not cross."""
        return self._cache.evictable_device_blocks

    def __repr__(self) -> str:
        return repr(self._cache).replace("CacheEngine", "SyncEngine", 1)


class _EngineService:
    """An engine on the loop of a :class:`LoopThread`."""

    noun = "engine"
    facade = "SyncEngine"
    opening = "open"

    def __init__(self, cache: CacheEngine) -> None:
        self._cache = cache

    async def serve(self, opened: Future[None], closing: asyncio.Future[float | None]) -> None:
        try:
            await self._cache.__aenter__()
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        await self._cache.aclose(await closing)

    async def abort(self) -> None:
        await self._cache.aclose(0.0)

    def note_end(self) -> None:
        """Do nothing: threads wait in crossings and futures only."""

    def new_closed_error(self) -> AiokvError:
        return ClosedError("the engine is closed")
