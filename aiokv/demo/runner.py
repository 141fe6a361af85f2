"""The model runner: one thread that computes steps while the event loop goes on serving."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Self

import numpy as np

from aiokv.demo.ledger import digest_rows
from aiokv.demo.model import CacheT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from aiokv.demo.model import Batch, Model
    from aiokv.worker.device.base import Event
    from aiokv.worker.views import LayerView


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step.

    Attributes:
        next_tokens: for each span, the greedy token after its last row.
        digests: one per row of logits.
        rows_not_finite: rows of logits that hold NaN or infinity.
        block_digests: for each array of blocks to read back, one per block, after the pass.
        compute_seconds: the whole pass.
        layer_wait_seconds: of it, blocked until a layer had arrived.
    """

    next_tokens: list[int]
    digests: list[bytes]
    rows_not_finite: int
    block_digests: list[list[bytes]]
    compute_seconds: float
    layer_wait_seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    batch: Batch
    arriving: Sequence[LayerView]
    read_back: Sequence[NDArray[np.int32]]
    done: Future[StepOutput]


class ModelRunner(Generic[CacheT]):
    """Runs forward passes in order on a thread of its own."""

    def __init__(self, model: Model[CacheT], cache: CacheT) -> None:
        self._model = model
        self._cache = cache
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="demo-runner")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the step that runs and join the thread."""
        self._jobs.put(None)
        self._thread.join()

    def submit(
        self,
        batch: Batch,
        arriving: Sequence[LayerView] = (),
        read_back: Sequence[NDArray[np.int32]] = (),
    ) -> Future[StepOutput]:
        """Queue one step; layer ``i`` starts when ``arriving`` views have their layer ``i``.

        The future cannot be cancelled: it is done when the thread has left the step, so a compute
        batch of the engine can end with it. It raises TransferError if a layer did not arrive;
        nothing that the step wrote is to be used then.

        Args:
            batch: the rows to compute.
            arriving: views of layers that may still be on their way.
            read_back: device blocks whose bytes are to be digested after the pass, int32 each.
        """
        done: Future[StepOutput] = Future()
        done.set_running_or_notify_cancel()
        self._jobs.put(_Job(batch, arriving, read_back, done))
        return done

    async def run(
        self,
        batch: Batch,
        arriving: Sequence[LayerView] = (),
        read_back: Sequence[NDArray[np.int32]] = (),
    ) -> StepOutput:
        """Compute one step and wait for it; see :meth:`submit`.

        Raises:
            TransferError: a layer did not arrive; nothing the step wrote is to be used.

        Cancellation: the step runs to its end unseen; leaving the runner's context waits for it.
        """
        return await asyncio.wrap_future(self.submit(batch, arriving, read_back))

    def record(self) -> Event | None:
        """An event behind the steps computed so far; None when they have finished."""
        return self._model.stream.record()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                output = self._compute(job)
            except Exception as error:
                job.done.set_exception(error)
            else:
                job.done.set_result(output)

    def _compute(self, job: _Job) -> StepOutput:
        waited = 0.0

        def before_layer(layer: int) -> None:
            nonlocal waited
            start = time.perf_counter()
            for view in job.arriving:
                view.gpu_wait(layer, self._model.stream)
            waited += time.perf_counter() - start

        start = time.perf_counter()
        wait = before_layer if job.arriving else None
        logits = self._model.forward(job.batch, self._cache, wait)
        for view in job.arriving:
            view.raise_for_error()
        computed = time.perf_counter()
        last_rows = logits[[span.stop - 1 for span in job.batch.spans]]
        return StepOutput(
            next_tokens=np.argmax(last_rows, axis=1).tolist(),
            digests=digest_rows(logits),
            rows_not_finite=int(np.count_nonzero(~np.isfinite(logits).all(axis=1))),
            block_digests=self._digest_blocks(job.read_back),
            compute_seconds=computed - start,
            layer_wait_seconds=waited,
        )

    def _digest_blocks(self, read_back: Sequence[NDArray[np.int32]]) -> list[list[bytes]]:
        if not any(map(len, read_back)):
            return [[] for _ in read_back]
        digests = iter(digest_rows(self._cache.read_blocks(np.concatenate(read_back))))
        return [list(itertools.islice(digests, len(blocks))) for blocks in read_back]
