"""PrefixCacheManager: the cache of FastDeploy's scheduler without cache manager v1, on aiokv."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from aiokv.connectors.fastdeploy.manager import CacheManager
from aiokv.connectors.fastdeploy.settings import Sizes, check_role
from aiokv.errors import WouldBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.connectors.fastdeploy.blocks import RequestBlocks
    from aiokv.connectors.fastdeploy.holding import Holding
    from aiokv.connectors.fastdeploy.manager import BlockCount
    from aiokv.connectors.fastdeploy.metadata import CacheSwapMetadata
    from aiokv.connectors.fastdeploy.metrics import CacheMetrics
    from aiokv.connectors.fastdeploy.requests import Request
    from aiokv.sync import SyncEngine


class PrefixCacheManager:
    """Replaces ``fastdeploy.cache_manager.prefix_cache_manager.PrefixCacheManager``. Any thread.

    The workers of this interface do not wait for layers: ``request_match_blocks`` returns when the
    blocks of host memory have arrived.

    Args:
        config: as for :class:`CacheManager`, and so are ``options``.
        tensor_parallel_size: for FastDeploy's code; ``ranks`` has the number of workers.
        splitwise_role: ``"mixed"``.
        local_data_parallel_id: for FastDeploy's code.
        options: ``ranks``, ``regions``, ``stores`` and the like.

    Attributes:
        cache: the :class:`CacheManager` behind it, for ``sleep`` and ``updating_weights``.

    Raises:
        ConfigError: as for :class:`CacheManager`, or another ``splitwise_role``.
    """

    def __init__(
        self,
        config: Any,
        tensor_parallel_size: int = 1,
        splitwise_role: str = "mixed",
        local_data_parallel_id: int = 0,
        **options: Any,
    ) -> None:
        check_role(splitwise_role, ("mixed",))
        self.tensor_parallel_size = tensor_parallel_size
        self.splitwise_role = splitwise_role
        self.local_data_parallel_id = local_data_parallel_id
        check_role(Sizes.of(config).role, ("mixed",))
        self.cache = CacheManager(config, **options)

    def close(self) -> None:
        """Give all blocks back, and close the engine. Idempotent."""
        self.cache.close()

    def launch_cache_manager(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Open the engine, in threads of this process; return no processes."""
        self.cache.open()
        return []

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def engine(self) -> SyncEngine:
        """The engine, for everything else that aiokv offers. Opens it."""
        return self.cache.engine

    @property
    def cache_config(self) -> Any:
        """FastDeploy's ``CacheConfig``, as given last."""
        return self.cache.cache_config

    @property
    def metrics(self) -> CacheMetrics:
        """Hit rates of requests."""
        return self.cache.metrics

    @property
    def num_gpu_blocks(self) -> int:
        """Number of device blocks."""
        return self.cache.num_gpu_blocks

    @property
    def num_cpu_blocks(self) -> int:
        """Number of host blocks."""
        return self.cache.num_cpu_blocks

    @property
    def gpu_free_block_list(self) -> BlockCount:
        """Number of free device blocks, as an object that ``len`` takes."""
        return self.cache.gpu_free_block_list

    @property
    def available_gpu_resource(self) -> float:
        """Share of the device blocks that are free, 0 to 1."""
        return self.cache.available_gpu_resource

    def update_cache_config(self, cache_config: Any) -> bool:
        """Take over ``total_block_num``; see ``CacheManager.update_cache_config``."""
        return self.cache.update_cache_config(cache_config)

    def get_required_block_num(self, input_token_num: int, block_size: int) -> int:
        """Return the number of blocks for this number of tokens."""
        return -(-input_token_num // block_size)

    # --- blocks by number -------------------------------------------------------------------------

    def can_allocate_gpu_blocks(self, num_blocks: int, try_free_gpu_blocks: bool = True) -> bool:
        """Return True if this number of blocks can be allocated now.

        Args:
            num_blocks: number of blocks.
            try_free_gpu_blocks: False to count only blocks that hold nothing.
        """
        if not try_free_gpu_blocks:
            return self.cache.num_free_device_blocks >= num_blocks
        return self.cache.can_allocate_device_blocks(num_blocks)

    def allocate_gpu_blocks(self, num_blocks: int, req_id: str | None = None) -> list[int]:
        """Take blocks for the next positions of a request.

        Args:
            num_blocks: number of blocks.
            req_id: the request; blocks of a request that was not matched are never shared.

        Raises:
            WouldBlock: without room. Nothing changed.
        """
        request_id = "" if req_id is None else req_id
        ids = self._blocks.allocate_unshared(request_id, num_blocks)
        if len(ids) < num_blocks:
            raise WouldBlock(
                f"request {request_id!r}: no room for {num_blocks} blocks",
                hint="ask can_allocate_gpu_blocks first",
            )
        self.cache.note_scheduled()
        return ids

    def recycle_gpu_blocks(
        self, gpu_block_ids: Sequence[int] | int, req_id: str | None = None
    ) -> None:
        """Give the last blocks of a request back, or all of them.

        Blocks that ``release_block_ids`` has given back already are left alone.

        Raises:
            UsageError: the ids are not the last blocks of the request. Nothing changed.
        """
        ids = [gpu_block_ids] if isinstance(gpu_block_ids, int) else list(gpu_block_ids)
        if not ids:
            return
        request_id = self._blocks.holder(ids[0]) if req_id is None else req_id
        if request_id is not None:
            self._blocks.give_back(request_id, ids)
            self.cache.note_scheduled()

    # --- requests ---------------------------------------------------------------------------------

    def request_match_blocks(
        self, task: Request, block_size: int, *args: Any
    ) -> tuple[list[int], int, dict[str, Any]]:
        """Look up a request, hold the cached blocks, and wait for those in host memory.

        Returns:
            Ids of all matched blocks in order, matched tokens, and FastDeploy's figures of the
            match. Only the blocks on the device count if the onload fails, takes over 10 s, or
            writes blocks that the present step has freed, which ends after ``schedule()``.
        """
        holding = self.cache.match(task)
        size = self.cache.block_size
        device = holding.hit.device_tokens // size
        task.num_cached_blocks = holding.given  # type: ignore[attr-defined]
        figures = {
            "gpu_match_token_num": holding.hit.device_tokens,
            "cpu_match_token_num": holding.hit.host_tokens,
            "storage_match_token_num": 0,
            "match_gpu_block_ids": holding.block_ids[:device],
            "gpu_recv_block_ids": holding.block_ids[device:],
            "match_storage_block_ids": [],
            "cpu_cache_prepare_time": _onload_seconds(holding),
            "storage_cache_prepare_time": 0,
        }
        return holding.block_ids, holding.hit.total, figures

    def request_block_ids(
        self, task: Request, block_size: int, dec_token_num: int, *args: Any
    ) -> tuple[list[int], list[int], dict[str, int]]:
        """Match a request, and take all its blocks and those of ``dec_token_num`` more tokens.

        Returns:
            Ids of the matched blocks, ids of the others, and the matched blocks by tier.

        Raises:
            WouldBlock: without room. The request holds nothing.
        """
        common, _, figures = self.request_match_blocks(task, block_size)
        num_tokens = len(task.prompt_token_ids) + dec_token_num
        missing = self.get_required_block_num(num_tokens, self.cache.block_size) - len(common)
        try:
            unique = self.allocate_gpu_blocks(missing, task.request_id)
        except WouldBlock:
            self.release_block_ids(task)
            raise
        hits = {
            "gpu_cache_blocks": len(figures["match_gpu_block_ids"]),
            "cpu_cache_blocks": len(figures["gpu_recv_block_ids"]),
        }
        return common, unique, hits

    def update_cache_blocks(self, task: Request, block_size: int, num_computed_tokens: int) -> None:
        """Note how far a request has been scheduled.

        Its blocks are shared when the next batch is scheduled; see
        ``issue_pending_backup_to_batch_request``.
        """
        task.num_cached_blocks = num_computed_tokens // self.cache.block_size  # type: ignore[attr-defined]

    def cache_output_blocks(self, task: Request, block_size: int) -> None:
        """Share the blocks of the tokens that have been generated so far."""
        self.cache.cache_output_blocks(task, block_size)

    def release_block_ids(self, task: Request) -> None:
        """Commit the computed positions of a request, and give back all its blocks. Idempotent."""
        self.cache.request_finish(task)

    def release_block_ids_async(self, task: Request) -> Future[None]:
        """Do as ``release_block_ids``, at once; return a future that is done."""
        future: Future[None] = Future()
        self.release_block_ids(task)
        future.set_result(None)
        return future

    def issue_pending_backup_to_batch_request(self) -> CacheSwapMetadata | None:
        """End one ``schedule()``; see ``CacheManager.issue_pending_backup_to_batch_request``."""
        return self.cache.issue_pending_backup_to_batch_request()

    def begin_fetch(self, request: Any) -> None:
        """See ``CacheManager.begin_fetch``."""
        self.cache.begin_fetch(request)

    def write_cache_to_storage(self, request: Request) -> None:
        """Do nothing: aiokv saves blocks to the stores by ``CacheConfig.store_policy``."""

    def write_cache_to_storage_decode(self, request: Request) -> None:
        """Do nothing: aiokv saves blocks to the stores by ``CacheConfig.store_policy``."""

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        """Take the blocks of all requests back, and drop all cached blocks of both tiers."""
        self.cache.reset_cache()

    # --- parts ------------------------------------------------------------------------------------

    @property
    def _blocks(self) -> RequestBlocks:
        return self.cache.blocks


def _onload_seconds(holding: Holding) -> float:
    if not holding.hit.host_tokens or holding.lease is None:
        return 0.0
    return holding.lease.usage.onload_seconds or 0.0
