"""HostCache: the engine of the scheduler half, and its state after a failure."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from aiokv.base.logs import Log
from aiokv.errors import AiokvError, BrokenEngineError, ClosedError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.distributed.kv_events import KVCacheEvent

    from aiokv.base.statistics import CacheStatistics, Statistics
    from aiokv.connectors.vllm.blocks import Idle
    from aiokv.connectors.vllm.events import EventCollector
    from aiokv.connectors.vllm.tensors_here import Tensors
    from aiokv.sync import Answer, Calls, SyncEngine, SyncLayers, SyncLease
    from aiokv.worker.device.base import Event

log = Log(__name__)


class Watched:
    """Transfers of a lease after a call, which may not be made yet.

    Args:
        lease: the lease, which may be released.
        answer: answer of the call.
    """

    __slots__ = ("_answer", "_lease")

    def __init__(self, lease: SyncLease, answer: Answer[Any]) -> None:
        self._lease = lease
        self._answer = answer

    def done(self) -> bool:
        """Return True if the call was made, and no transfer uses the blocks of the lease."""
        return self._answer.done and self._lease.is_idle

    def result(self, timeout: float) -> None:
        """Block the calling thread until ``done``; raise ``TimeoutError`` if that takes longer."""
        self._lease.idle().result(timeout)


class HostCache:
    """An engine in external mode, whose errors do not end the server.

    An error of one request makes that request uncached. When the engine itself fails, nothing is
    matched and saved any more, and the server goes on without it.

    Args:
        engine: an open engine.
        tensors: the tensors of a worker in this process, which waits for loads with the engine's
            own counters; None with ranks.
        events: collects KV events; None for none.

    Attributes:
        closes_steps_on_ranks: True if ranks close steps by their numbers, so that no number may be
            left out.
    """

    def __init__(
        self,
        engine: SyncEngine,
        tensors: Tensors | None = None,
        events: EventCollector | None = None,
    ) -> None:
        self._engine = engine
        self._tensors = tensors
        self.closes_steps_on_ranks = tensors is None
        self._events = events
        self._held: Calls | None = None  # calls that have to be made before `_posted`
        self._posted: Calls | None = None  # the last calls that nobody has waited for
        self._failure: BaseException | None = None
        self._num_errors = 0

    @property
    def engine(self) -> SyncEngine:
        """The engine."""
        return self._engine

    @property
    def host_blocks(self) -> int:
        """Capacity of host memory in blocks."""
        return self._engine.config.host_blocks

    @property
    def is_usable(self) -> bool:
        """False after the engine has failed."""
        return self._failure is None

    @property
    def num_errors(self) -> int:
        """Number of calls that have failed."""
        return self._num_errors

    def take_event(self, step: int) -> Event | None:
        """Return the event after the work of a step of a worker in this process."""
        return None if self._tensors is None else self._tensors.take_event(step)

    def wait_computed(self, step: int) -> None:
        """Block the calling thread until a worker in this process has computed a step."""
        if self._tensors is not None:
            self._tensors.wait_computed(step)

    def calls(self) -> Calls:
        """Return an empty list of calls."""
        return self._engine.calls()

    def run(self, calls: Calls) -> list[Answer[Any]]:
        """Make calls, and return their answers, which have the errors."""
        return calls.run(raise_errors=False)

    def hold(self, calls: Calls) -> None:
        """Let ``send_held`` post these calls."""
        self.send_held()
        if len(calls):  # waiting for no calls would not wait for those that were posted before
            self._held = calls

    def send_held(self) -> None:
        """Let the engine make the calls that are held while the caller goes on."""
        if self._held is not None:
            calls, self._held = self._held, None
            self.post(calls)

    def post(self, calls: Calls) -> None:
        """Let the engine make calls, behind those that are held, while the caller goes on."""
        self.send_held()
        calls.post()
        self._posted = calls

    def wait_posted(self) -> None:
        """Block the calling thread until the engine has made all calls that were held or posted."""
        if self._held is not None:
            self._posted, self._held = self._held, None
        if self._posted is not None:
            self.run(self._posted)  # the engine makes calls in the order in which they were posted
            self._posted = None

    def succeeded(self, answers: Iterable[Answer[Any]], what: str) -> bool:
        """Return True if no answer has an error; log the first one.

        Args:
            answers: answers of the calls, after they were run.
            what: subject of the message.
        """
        error = next((answer.error for answer in answers if answer.error is not None), None)
        if error is None:
            return True
        self._num_errors += 1
        if not isinstance(error, AiokvError):
            raise error
        if isinstance(error, BrokenEngineError | ClosedError | DeviceError):
            self.give_up(error)
        else:
            log.warning("vllm.call_failed", what=what, error=str(error))
        return False

    def give_up(self, error: BaseException) -> None:
        """Match and save nothing any more."""
        if self._failure is None:
            self._failure = error
            log.error("vllm.cache_failed", error=str(error))

    def release_and_watch(self, lease: SyncLease, label: str = "") -> Watched:
        """Release a lease, and do not wait for the answer.

        Args:
            lease: the lease.
            label: see ``SyncLease.release``.

        Returns:
            What is done when no transfer uses its blocks.
        """
        calls = self.calls()
        watched = Watched(lease, calls.release(lease, returns=label))
        self.post(calls)
        return watched

    def wait_idle(self, idle: Idle, timeout: float) -> None:
        """Block the calling thread until the transfers of a released lease have ended.

        After a failure of the engine, it does not wait: no copy that is being read is matched then,
        and vLLM reuses no block that a load writes to before the workers have reported its end.

        Raises:
            TimeoutError: they have not ended in time. Going on would write to blocks in use.
        """
        with contextlib.suppress(AiokvError):
            idle.result(timeout)

    def note_load(self, layers: SyncLayers) -> None:
        """Let a worker in this process wait for a load."""
        if self._tensors is not None:
            self._tensors.note_load(layers)

    def cache_statistics(self) -> CacheStatistics:
        """Return the statistics of leases and pools."""
        return self._engine.cache_statistics()

    def statistics(self) -> Statistics:
        """Return all statistics of the engine."""
        return self._engine.statistics()

    def load_rate(self) -> float:
        """Return the measured speed of loads in bytes per second; 0.0 before the first load."""
        return self._engine.statistics().worker.attention.onload.bytes_per_second

    def take_events(self) -> list[KVCacheEvent]:
        """Return the changes of the blocks in host memory since the last call."""
        return [] if self._events is None else self._events.take()

    def reset(self, timeout: float) -> bool:
        """Forget all blocks, including those in stores. Return False if transfers did not end."""
        try:
            with self._engine.updating_weights(timeout):
                pass  # all blocks are dropped, and blocks in stores get other keys
        except AiokvError as error:
            log.warning("vllm.reset_failed", error=str(error))
            return False
        return True

    def close(self) -> None:
        """Close the engine; transfers end first."""
        if self._events is not None:
            self._events.close()
        self._engine.close(0.0)
