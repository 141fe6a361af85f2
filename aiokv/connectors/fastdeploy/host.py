"""EngineHost: opens the engine of a scheduler when its sizes are known."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.logs import join_log
from aiokv.connectors.fastdeploy.blocks import RequestBlocks
from aiokv.errors import ClosedError, ControlTimeout
from aiokv.sync import SyncEngine

CONTROL_SECONDS: Final = 30.0  # limit for transfers and workers to react

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv import Regions
    from aiokv.connectors.fastdeploy.settings import Sizes
    from aiokv.devices import Device
    from aiokv.ranks import RankGroup


class EngineHost:
    """The engine of one scheduler, opened at its first use. Any thread.

    FastDeploy makes its cache manager before the workers exist, and tells it the number of device
    blocks after a profile run.

    Args:
        sizes: sizes from FastDeploy's configuration.
        regions: device tensors of this process; None with ranks.
        device: device of the tensors.
        ranks: the worker processes that own the tensors; None for tensors of this process.
        stores: stores below the host tier, as for ``CacheEngine``.
        step_event: as for :class:`RequestBlocks`.
        options: fields of ``CacheConfig`` that replace those of ``sizes``.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        regions: Regions | None,
        device: Device | str | None,
        ranks: RankGroup | None,
        stores: Sequence[Any],
        step_event: Callable[[], Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        join_log("fastdeploy")
        self.sizes = sizes
        self.has_ranks = ranks is not None
        self.has_stores = bool(stores) or (ranks is not None and ranks.facts.capabilities.stores)
        self._regions, self._device, self._ranks, self._stores = regions, device, ranks, stores
        self._step_event = step_event
        self._options = options
        self._lock = threading.Lock()
        self._blocks: RequestBlocks | None = None
        self._is_closed = False
        sizes.cache_config(**options)  # raises errors of the options now

    @property
    def is_open(self) -> bool:
        """True from the first use of ``blocks`` until ``close``."""
        return self._blocks is not None

    @property
    def opened_blocks(self) -> RequestBlocks | None:
        """Leases of the requests; None before the engine is open, and after ``close``."""
        return self._blocks

    @property
    def blocks(self) -> RequestBlocks:
        """Leases of the requests; opens the engine, once, and waits for workers that have left.

        Raises:
            RankLost: workers have left, and not all have come back in time.
        """
        blocks = self._blocks
        if blocks is None:
            return self.open()
        if self.has_left:
            self._bring_back(blocks)
        return blocks

    @property
    def has_left(self) -> bool:
        """True after a worker has freed its tensors, until all workers have new ones."""
        failure = None if self._ranks is None else self._ranks.failure
        return failure is not None and failure.has_left

    def _bring_back(self, blocks: RequestBlocks) -> None:
        """Wait until all workers have new tensors. Nothing is cached then.

        Blocks of stores are not found any more: FastDeploy frees tensors for new weights, too.
        """
        with self._lock:
            if self.has_left:
                blocks.lose_all()
                engine = blocks.engine
                engine.call(engine.cache.restart_ranks)
                blocks.close_step()  # for these workers, all earlier steps are closed
                if self.has_stores:
                    with engine.updating_weights(CONTROL_SECONDS):
                        pass

    def open(self) -> RequestBlocks:
        """Open the engine, unless it is open.

        Raises:
            AiokvError: the engine could not be opened, as ``SyncEngine.open``.
            ClosedError: ``close`` was called.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the cache manager is closed")
            if self._blocks is None:
                config = self.sizes.cache_config(**self._options)
                engine = SyncEngine(
                    config, self._regions, self._device, ranks=self._ranks, stores=self._stores
                )
                engine.open()
                self._blocks = RequestBlocks(engine, self.sizes, self._step_event)
            return self._blocks

    def resize(self, device_blocks: int) -> bool:
        """Change the number of device blocks.

        Returns:
            False, and nothing changed, when blocks beyond the new number are in use.

        Raises:
            UsageError: the tensors have fewer blocks.
        """
        if self._blocks is not None and device_blocks != self.sizes.device_blocks:
            engine = self._blocks.engine
            try:
                engine.call(engine.cache.resize, device_blocks, timeout=0.0)
            except ControlTimeout:
                return False
            self._blocks.note_resize(self.sizes.with_device_blocks(device_blocks))
        self.sizes = self.sizes.with_device_blocks(device_blocks)
        return True

    def close(self) -> None:
        """Give all blocks back, and close the engine. Idempotent."""
        with self._lock:
            self._is_closed = True
            blocks, self._blocks = self._blocks, None
            if blocks is not None:
                blocks.close()
                blocks.engine.close(0.0)
