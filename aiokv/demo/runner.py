"""The model runner: one thread computes steps while the event loop serves requests."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np

from aiokv.demo.ledger import digest_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from aiokv.demo.batch import Batch
    from aiokv.demo.transformer import NumpyCache, NumpyTransformer
    from aiokv.worker.device.base import Event
    from aiokv.worker.views import LayerView

    OnLayers: TypeAlias = Callable[[int, Event | None], object]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step.

    Attributes:
        next_tokens: for each span, the greedy token after its last row.
        digests: one per row of logits.
        rows_not_finite: rows of logits that hold NaN or infinity.
        block_digests: for each array of blocks to read back, one per block, after the pass.
        compute_seconds: duration of the pass.
        layer_wait_seconds: part of ``compute_seconds`` that was spent waiting for layers to arrive.
    """

    next_tokens: list[int]
    digests: list[bytes]
    rows_not_finite: int
    block_digests: list[list[bytes]]
    compute_seconds: float
    layer_wait_seconds: float


class ModelRunner:
    """Runs forward passes in order on a thread of its own."""

    def __init__(self, model: NumpyTransformer, cache: NumpyCache) -> None:
        self._model = model
        self._cache = cache
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="demo-runner")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Finish the step that runs and join the thread."""
        self._thread.shutdown()

    def submit(
        self,
        batch: Batch,
        arriving: Sequence[LayerView] = (),
        read_back: Sequence[NDArray[np.int32]] = (),
        on_layers: OnLayers | None = None,
    ) -> Future[StepOutput]:
        """Queue one step; layer ``i`` starts when ``arriving`` views have their layer ``i``.

        The future is done when the thread has left the step, so a compute batch of the engine can
        end with it. It raises TransferError if a layer did not arrive; the results of the step
        must not be used then.

        Args:
            batch: the rows to compute.
            arriving: views of layers that may still be on their way.
            read_back: device blocks whose bytes are to be digested after the pass, int32 each.
            on_layers: called in the thread, before each further layer, with the number of layers
                that are computed and an event after them; None when they are computed already.
        """
        return self._thread.submit(self._compute, batch, arriving, read_back, on_layers)

    def record(self) -> Event | None:
        """Return an event after the steps computed so far; None when they have ended."""
        event: Event | None = self._model.stream.record()
        return event

    def _compute(
        self,
        batch: Batch,
        arriving: Sequence[LayerView],
        read_back: Sequence[NDArray[np.int32]],
        on_layers: OnLayers | None,
    ) -> StepOutput:
        waited = 0.0

        def before_layer(layer: int) -> None:
            nonlocal waited
            if on_layers is not None and layer > 0:
                on_layers(layer, self._model.stream.record())
            start = time.perf_counter()
            for view in arriving:
                view.gpu_wait(layer, self._model.stream)
            waited += time.perf_counter() - start

        start = time.perf_counter()
        is_told = bool(arriving) or on_layers is not None
        logits = self._model.forward(batch, self._cache, before_layer if is_told else None)
        for view in arriving:
            view.raise_for_error()
        computed = time.perf_counter()
        last_rows = logits[[span.stop - 1 for span in batch.spans]]
        return StepOutput(
            next_tokens=np.argmax(last_rows, axis=1).tolist(),
            digests=digest_rows(logits),
            rows_not_finite=int(np.count_nonzero(~np.isfinite(logits).all(axis=1))),
            block_digests=self._digest_blocks(read_back),
            compute_seconds=computed - start,
            layer_wait_seconds=waited,
        )

    def _digest_blocks(self, read_back: Sequence[NDArray[np.int32]]) -> list[list[bytes]]:
        if not any(map(len, read_back)):
            return [[] for _ in read_back]
        digests = iter(digest_rows(self._cache.read_blocks(np.concatenate(read_back))))
        return [list(itertools.islice(digests, len(blocks))) for blocks in read_back]
