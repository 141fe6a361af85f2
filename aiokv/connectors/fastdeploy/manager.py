"""CacheManager: the cache manager v1 of FastDeploy's scheduler, on aiokv."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.connectors.fastdeploy import statistics
from aiokv.connectors.fastdeploy.handovers import FINISHED
from aiokv.connectors.fastdeploy.host import CONTROL_SECONDS, EngineHost
from aiokv.connectors.fastdeploy.metadata import MatchResult, onload_metadata, step_metadata
from aiokv.connectors.fastdeploy.metrics import CacheMetrics
from aiokv.connectors.fastdeploy.peers import layer_ends, peers_of
from aiokv.connectors.fastdeploy.settings import (
    Sizes,
    layers_of,
    socket_of,
    writes_before_reading,
)
from aiokv.connectors.fastdeploy.stores import model_name, stores_of
from aiokv.errors import AiokvError, ConfigError, ControlTimeout, TransferError
from aiokv.ranks import RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from aiokv import Hit, Regions
    from aiokv.base.types import Tier
    from aiokv.connectors.fastdeploy.blocks import RequestBlocks
    from aiokv.connectors.fastdeploy.holding import Holding
    from aiokv.connectors.fastdeploy.metadata import CacheSwapMetadata
    from aiokv.connectors.fastdeploy.requests import Request
    from aiokv.devices import Device
    from aiokv.sync import EngineFuture, SyncEngine, SyncLayers, SyncWeightsUpdate

ONLOAD_SECONDS: Final = 10.0  # limit for blocks of host memory to arrive

SEND_SECONDS: Final = 60.0  # limit for FastDeploy to send the blocks of a prompt

TICKET_SECONDS: Final = 10.0  # limit for the workers to listen for a prefill server

FAILED_CODE: Final = 501  # FastDeploy's code for a prompt that has not arrived

log = Log(__name__)

TIERS: Final[tuple[Tier, ...]] = ("device", "host")


class BlockCount:
    """Number of free blocks, for ``len(manager.gpu_free_block_list)``; ids stay inside aiokv."""

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class CacheManager:
    """Replaces ``fastdeploy.cache_manager.v1.cache_manager.CacheManager``. Any thread.

    Args:
        config: the ``FDConfig`` of the resource manager, or any object with its fields.
        ranks: the worker processes, which own the tensors and enter a rank each; None for tensors
            of this process.
        regions: device tensors of this process; None with ranks, or without tensors.
        device: device of ``regions``.
        stores: stores below the host tier, as for ``CacheEngine``; None for those of
            ``--kvcache-storage-backend``. With ranks, their workers open them.
        step_event: without ranks, on a GPU: returns an event that was recorded just now behind all
            work that the runner has submitted. It runs in the engine's thread. Without it, the
            batch of one ``schedule()`` must have been computed when the next one begins.
        store_wait_seconds: the longest that a request waits for blocks of stores.
        waits_for_onloads: True to schedule a request when its blocks have arrived from host memory.
            The scheduler goes on meanwhile; if the onload fails, the model computes the request.
            False to schedule it at once: the workers wait for layers, and raise the error of an
            onload.
        shares_in_batch: True to share blocks with the later requests of the batch that computes
            them. Only for runners that write the KV of a layer before any request reads that
            layer. None for True with FastDeploy's append attention on CUDA. No effect without
            ranks, with ``verify`` and with the role "decode".
        prefill_timeout_seconds: with the role "decode", how long a request keeps its blocks before
            the first token of the prefill server arrives. It must exceed the longest time in which
            that server may still write them. None for FastDeploy's
            ``FD_DECODE_PREALLOC_BLOCK_TIMEOUT``, or 600 s.
        options: further fields of :class:`aiokv.CacheConfig`, such as ``model`` for stores.

    Attributes:
        has_peers: True if the workers exchange prompts with other servers.

    The engine opens with ``open``, or at the first verb that needs it, so that
    ``update_cache_config`` may come first. Numbers of blocks can be read before.

    Raises:
        ConfigError: a field of ``config`` is missing or out of range, the ``splitwise_role`` of
            its ``scheduler_config`` is unknown, or its ``kvcache_storage_backend`` cannot be used.
    """

    def __init__(
        self,
        config: Any,
        *,
        ranks: RankGroup | None = None,
        regions: Regions | None = None,
        device: Device | str | None = None,
        stores: Sequence[Any] | None = None,
        step_event: Callable[[], Any] | None = None,
        store_wait_seconds: float = 1.0,
        waits_for_onloads: bool = True,
        shares_in_batch: bool | None = None,
        prefill_timeout_seconds: float | None = None,
        **options: Any,
    ) -> None:
        sizes = Sizes.of(config)
        if prefill_timeout_seconds is None:
            prefill_timeout_seconds = float(os.environ.get("FD_DECODE_PREALLOC_BLOCK_TIMEOUT", 600))
        self._prefill_timeout_seconds = checks.seconds(
            "prefill_timeout_seconds", prefill_timeout_seconds
        )
        if shares_in_batch is None:
            shares_in_batch = writes_before_reading()
        can_share = ranks is not None and sizes.role != "decode"
        if shares_in_batch and can_share and options.get("verify", "off") == "off":
            sizes = replace(sizes, shares_in_batch=True)
        self.has_peers = ranks is not None and ranks.facts.capabilities.peers
        if self.has_peers:
            sizes = replace(sizes, layer_ends=layer_ends(sum(layers_of(config))))
        if stores is None:
            named = stores_of(config)
            if named and ranks is not None and not ranks.facts.capabilities.stores:
                backend = config.cache_config.kvcache_storage_backend
                raise ConfigError(
                    f"kvcache_storage_backend is {backend!r}, but the RankGroup has no stores",
                    hint="RankGroup(..., has_stores=True)",
                )
            stores = named if ranks is None else ()
        self._waits_for_onloads = waits_for_onloads
        self._store_wait_seconds = checks.seconds("store_wait_seconds", store_wait_seconds)
        if "model" not in options and (name := model_name(config)) is not None:
            options["model"] = name
        self.config = config
        self.cache_config = config.cache_config
        self.metrics = CacheMetrics()
        self._host = EngineHost(
            sizes,
            regions=regions,
            device=device,
            ranks=ranks,
            stores=stores,
            step_event=step_event,
            options=options,
        )
        self._lock = threading.Lock()
        self._layers: dict[int, SyncLayers] = {}  # layers of this process, by transfer
        self._sent_step = 0
        self._has_scheduled = False  # whether a request was scheduled since the last batch

    @classmethod
    def for_workers(cls, config: Any, num_workers: int, **options: Any) -> Self:
        """Return the manager of FastDeploy's worker processes: see ``CacheController.for_worker``.

        Args:
            config: the ``FDConfig`` of the resource manager.
            num_workers: the tensor parallel size.
            options: further arguments of the class.

        Raises:
            ConfigError: as for the class, or the workers are on several hosts.
        """
        if (hosts := int(getattr(config, "nnode", 1))) > 1:
            raise ConfigError(f"nnode is {hosts}; aiokv supports the workers of one host only")
        group = RankGroup(
            num_workers,
            path=socket_of(config),
            has_stores=bool(stores_of(config)),
            has_peers=peers_of(config) is not None,
        )
        return cls(config, ranks=group, **options)

    def open(self) -> None:
        """Open the engine: with ranks, wait until all workers have connected. Idempotent.

        Raises:
            RankLost: not all workers have connected in time; see :class:`RankTimeouts`.
            AiokvError: as for ``SyncEngine.open``.
        """
        self._host.open()

    def close(self) -> None:
        """Give all blocks back, and close the engine. Idempotent."""
        self._host.close()

    def is_initialized(self) -> bool:
        """Return True when the engine is open."""
        return self._host.is_open

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def engine(self) -> SyncEngine:
        """The engine, for everything else that aiokv offers. Opens it."""
        return self._host.blocks.engine

    @property
    def blocks(self) -> RequestBlocks:
        """Leases of the requests. Opens the engine."""
        return self._host.blocks

    @property
    def num_gpu_blocks(self) -> int:
        """Number of device blocks."""
        return self._host.sizes.device_blocks

    @property
    def num_cpu_blocks(self) -> int:
        """Number of host blocks."""
        return self._host.sizes.host_blocks

    @property
    def block_size(self) -> int:
        """Positions per block."""
        return self._host.sizes.block_tokens

    @property
    def enable_prefix_caching(self) -> bool:
        """True if requests share blocks."""
        return self._host.sizes.shares_blocks

    @property
    def num_free_device_blocks(self) -> int:
        """Number of device blocks that hold nothing. Does not cross."""
        if not self._host.is_open:
            return self.num_gpu_blocks
        return self._host.blocks.free_device_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Number of host blocks that hold nothing. Does not cross."""
        return (
            self.engine.cache_statistics().attention.host.free
            if self._host.is_open
            else self.num_cpu_blocks
        )

    @property
    def gpu_free_block_list(self) -> BlockCount:
        """Number of free device blocks, as an object that ``len`` takes."""
        return BlockCount(self.num_free_device_blocks)

    @property
    def available_gpu_resource(self) -> float:
        """Share of the device blocks that are free, 0 to 1."""
        return self.num_free_device_blocks / self.num_gpu_blocks

    def update_cache_config(self, cache_config: Any) -> bool:
        """Take over the number of device blocks, ``total_block_num``, after a profile run.

        Returns:
            False when blocks beyond the new number are in use; nothing changed then.

        Raises:
            UsageError: the registered tensors have fewer blocks.
        """
        self.cache_config = cache_config
        total = getattr(cache_config, "total_block_num", None)
        return True if total is None else self.resize_device_pool(int(total))

    def resize_device_pool(self, new_num_blocks: int) -> bool:
        """Change the number of device blocks; see ``update_cache_config``."""
        return self._host.resize(new_num_blocks)

    # --- the life of a request --------------------------------------------------------------------

    def match_prefix(self, request: Request, skip_storage: bool = True) -> None:
        """Look up a request, hold the cached blocks, and set ``request.match_result``.

        ``MatchResult.device_block_ids`` has the ids of all matched blocks. At least one token is
        left to compute. When too few device blocks are free for the blocks in host memory, only the
        blocks on the device count as matched.

        Blocks in host memory are on their way to the device when the call returns. With
        ``waits_for_onloads``, nothing is matched until they have arrived, and
        ``can_allocate_device_blocks`` says no: the scheduler gives the request back, and matches it
        again in a later ``schedule()``. ``request.async_process_futures`` gets a future, with which
        FastDeploy schedules other new requests meanwhile.

        Args:
            request: the request; prompt and generated tokens are looked up.
            skip_storage: False to begin to bring blocks of the stores to host memory, for a later
                match. This match does not wait for them.
        """
        if not self.enable_prefix_caching:
            return
        if not skip_storage:
            self.prefetch_storage(request)
        if self._waits_for_onloads:
            holding = self._match_arrived(request)
        else:
            holding = self._host.blocks.match(request)
            self._announce_onloads(request, holding)
            self._note_match(holding)
        size = self.block_size
        result = MatchResult(
            device_block_ids=holding.block_ids,
            matched_device_nums=holding.hit.device_tokens // size,
            matched_host_nums=holding.hit.host_tokens // size,
        )
        request._match_result = result  # type: ignore[attr-defined]

    def _match_arrived(self, request: Any) -> Holding:
        """Match a request whose onload has arrived; return an empty holding while it has not."""
        blocks = self._host.blocks
        holding, arrival = blocks.match_arrived(request)
        if holding is blocks.holding(request.request_id):
            self._note_match(holding)
            return holding
        self.note_scheduled()  # the onload begins when the workers have closed the step
        if arrival is not None and hasattr(request, "async_process_futures"):
            request.async_process_futures.append(arrival)
        return holding

    def match(self, request: Request) -> Holding:
        """Look up a request, hold the cached blocks, and wait for those in host memory.

        Only the blocks that were on the device count if the onload fails, takes over 10 s, or
        writes blocks that the present step has freed, which ends after ``schedule()``.
        """
        holding = self._host.blocks.match(request)
        if not self._has_arrived(holding):
            holding = self._host.blocks.match(request, onload=False)
        self._note_match(holding)
        return holding

    def _note_match(self, holding: Holding) -> None:
        with self._lock:
            self.metrics.note(holding.prefill_tokens, *holding.hit)

    def _has_arrived(self, holding: Holding) -> bool:
        """Wait for the onload of a request; return False if it has failed or cannot end in time."""
        lease = holding.lease
        if lease is None or not holding.hit.host_tokens:
            return True
        if lease.layers.after_step > self.announced_step:
            return False  # the workers close this step when they get the next batch
        try:
            lease.layers.wait_all(ONLOAD_SECONDS)
        except (TransferError, TimeoutError):
            return False
        return True

    def note_scheduled(self) -> None:
        """Note that the next batch uses, or gives back, blocks."""
        self._has_scheduled = True

    def _announce_onloads(self, request: Any, holding: Holding) -> None:
        """Tell the workers, through the request, which transfers its batch waits for."""
        if holding.lease is None or not holding.given:
            return
        layers = holding.lease.layers
        transfer_ids = layers.transfer_ids
        if not transfer_ids:
            return
        first = holding.hit.device_tokens // self.block_size
        request.cache_swap_metadata = [onload_metadata(transfer_ids, holding.block_ids[first:])]
        if not self._host.has_ranks:
            with self._lock:
                self._layers = {
                    transfer_id: view
                    for transfer_id, view in self._layers.items()
                    if not view.has_arrived  # the worker still has to learn of a failure
                }
                self._layers.update(dict.fromkeys(transfer_ids, layers))

    def can_allocate_device_blocks(self, num: int) -> bool:
        """Return True if ``allocate_device_blocks`` of ``num`` blocks succeeds now.

        Blocks that no request uses are evicted for it. Blocks that must be saved before do not
        count: the call begins to save them, for a later ``schedule()``.
        """
        return self._host.blocks.can_allocate(num)

    def allocate_device_blocks(self, request: Request, num_blocks: int) -> list[int]:
        """Take blocks for the next positions of a request.

        Returns:
            Their ids; empty, and nothing changed, without room, and for 0 or fewer blocks.

        Raises:
            WouldBlock: ``can_allocate_device_blocks`` has just promised the blocks, but other code
                that uses ``engine`` took them, and gave none back within 10 s. Nothing changed.
            LeaseError: the workers have freed their tensors since the request got blocks. Nothing
                changed.
            ClosedError: the manager is closed.
        """
        self.note_scheduled()
        return self._host.blocks.allocate(request, num_blocks)

    def request_finish(self, request: Request) -> None:
        """Give back all blocks of a request that has ended or was aborted or preempted. Idempotent.

        Full blocks whose KV is computed stay cached, those of generated tokens included. Without
        effect after ``close``.
        """
        blocks = self._host.opened_blocks
        if blocks is None:
            return
        holding = blocks.holding(request.request_id)
        if holding is not None and holding.is_scheduled:
            self.note_scheduled()
        else:
            request.cache_swap_metadata = []  # type: ignore[attr-defined]
        # FastDeploy finishes a request of a prefill server when its blocks have been sent. Blocks
        # of a request that is preempted, as by `/pause`, may be being sent.
        # Peers do not read blocks that were given back.
        is_preempted = _is_preempted(request)
        is_sent = self._host.sizes.role == "prefill" and is_preempted and not self.has_peers
        blocks.end(
            request.request_id,
            keep_seconds=SEND_SECONDS if is_sent else 0.0,
            is_preempted=is_preempted,
        )

    def cache_output_blocks(self, request: Request, block_size: int) -> None:
        """Do nothing: ``match_prefix`` shares the blocks of all generated tokens first."""

    def failed_requests(self) -> list[str]:
        """Return the ids of requests whose onloads have failed: preempt or abort them.

        The workers raise the error when they wait for a layer; nothing of these requests is shared.
        """
        blocks = self._host.opened_blocks
        return [] if blocks is None else blocks.failed_requests()

    def expired_requests(self) -> list[Request]:
        """Return the requests of a decode server whose KV has not arrived in time: drop them.

        Their blocks are still theirs: call ``request_finish``. Call this method under the lock of
        the scheduler, which ``add_prefilled_request`` holds too. Always empty with other roles.
        """
        blocks = self._host.opened_blocks
        if blocks is None or self._host.sizes.role != "decode":
            return []
        return blocks.handovers.late_requests(self._prefill_timeout_seconds)

    # --- prefill and decode servers with peers ----------------------------------------------------

    def begin_receive(self, request: Request) -> bytes | None:
        """Begin to receive the prompt of a request of a decode server, which has its blocks.

        Waits for at most 10 s until all workers listen. A receive that fails raises nothing: see
        ``has_received``.

        Returns:
            A ticket for ``begin_send`` of the prefill server; None without peers, or if the request
            cannot receive.
        """
        if not self.has_peers:
            return None
        received = self._host.blocks.handovers.receive(request, self._prefill_timeout_seconds)
        return None if received is None else received.ticket(TICKET_SECONDS)

    def begin_send(self, request_id: str, ticket: bytes | None) -> None:
        """Begin to send the prompt of a request of a prefill server, which has its blocks.

        Cached blocks move at once, the others while the workers compute them, layer by layer.

        Args:
            request_id: the request.
            ticket: of ``begin_receive`` of the decode server.
        """
        if self.has_peers:
            self._host.blocks.handovers.send(request_id, ticket)

    def finished_sends(self, request_id: str) -> list[tuple[str, str]]:
        """Return the outcome of a send, as ``EngineWorkerQueue.get_finished_req`` does.

        Returns:
            The request, and "finished" or the reason of a failure; empty while blocks move, and
            without peers.
        """
        if not self.has_peers:
            return []
        outcome = self._host.blocks.handovers.send_outcome(request_id)
        return [(request_id, outcome)] if outcome else []

    def has_received(self, output: Any) -> bool:
        """Return True when the blocks of a prefilled request have arrived, and were verified.

        Call it before ``add_prefilled_request``, which may follow only when it returns True.

        Args:
            output: FastDeploy's ``RequestOutput`` of the prefill server. If the blocks cannot
                arrive any more, its ``error_code`` becomes 501: FastDeploy then drops the request.
        """
        if not self.has_peers or output.error_code != 200:
            return True
        outcome = self._host.blocks.handovers.receive_outcome(output.request_id)
        if outcome not in ("", FINISHED):
            output.error_code = FAILED_CODE
            output.error_msg = f"the prompt has not arrived from the prefill server: {outcome}"
        return bool(outcome)

    # --- the end of schedule() --------------------------------------------------------------------

    @property
    def announced_step(self) -> int:
        """Last step that the workers close without another batch."""
        return self._sent_step if self._host.has_ranks else self._host.blocks.last_step

    def issue_pending_backup_to_batch_request(self) -> CacheSwapMetadata | None:
        """End one ``schedule()``; return what its batch has to tell the workers.

        Call it once per ``schedule()``, also when the batch has no requests. aiokv itself queues
        the backups; they begin when the workers have closed the step that is named here.

        Returns:
            Metadata for ``BatchRequest.append_evict_metadata``: send the batch even if it has no
            requests. None when the workers need not be told anything, and always without ranks.
        """
        blocks = self._host.opened_blocks
        if blocks is None or self._host.has_left:
            return None
        self.metrics.publish()
        step, marks = blocks.end_schedule(), blocks.layer_marks
        if not self._host.has_ranks or (step == self._sent_step and not marks):
            return None
        has_scheduled, self._has_scheduled = self._has_scheduled, False
        if not (has_scheduled or marks or blocks.has_copies):
            return None
        self._sent_step = step
        return step_metadata(step, marks)

    def check_and_add_pending_backup(self) -> None:
        """Do nothing: aiokv queues backups when blocks are committed, by the write policy."""

    # --- stores -----------------------------------------------------------------------------------

    def begin_fetch(self, request: Any) -> None:
        """Begin to bring the blocks of a new request from the stores to host memory.

        FastDeploy schedules the request when ``request.async_process_futures`` have ended, as it
        does after its preprocessing. Raises nothing: without the blocks, the model computes.
        """
        try:
            fetch = self.prefetch_storage(request)
        except AiokvError as error:
            log.warning("fastdeploy.not_fetched", request_id=request.request_id, reason=str(error))
            return
        if fetch is not None:
            request.async_process_futures.append(fetch)

    def prefetch_storage(self, request: Request) -> EngineFuture[Hit] | None:
        """Begin to bring the blocks of a request from the stores to host memory.

        Blocks that the model computes sooner are not fetched.

        Returns:
            A future of the cached prefix by tier, done after ``store_wait_seconds`` at the latest;
            None without stores, and for a request that shares no block.

        Raises:
            UsageError: the request has no tokens.
        """
        if not (self._host.has_stores and self.enable_prefix_caching) or self._host.has_left:
            return None
        return self._host.blocks.fetch(request, self._store_wait_seconds)

    def write_cache_to_storage(self, request: Request) -> None:
        """Do nothing: aiokv saves blocks to the stores by ``CacheConfig.store_policy``."""

    def write_cache_to_storage_decode(self, request: Request) -> None:
        """Do nothing: aiokv saves blocks to the stores by ``CacheConfig.store_policy``."""

    def update_cache_blocks(self, request: Request, block_size: int, num_computed: int) -> None:
        """Do nothing: blocks are shared when they have been computed or scheduled."""

    # --- other names ------------------------------------------------------------------------------

    def can_allocate_gpu_blocks(self, num_blocks: int) -> bool:
        """Return ``can_allocate_device_blocks(num_blocks)``."""
        return self.can_allocate_device_blocks(num_blocks)

    def allocate_gpu_blocks(self, request: Request, num_blocks: int) -> list[int]:
        """Return ``allocate_device_blocks(request, num_blocks)``."""
        return self.allocate_device_blocks(request, num_blocks)

    def recycle_gpu_blocks(self, gpu_block_ids: Any, req_id: str | None = None) -> None:
        """Do nothing: ``request_finish`` gives back all blocks that a request has allocated."""

    # --- control ----------------------------------------------------------------------------------

    def free_all_device_blocks(self) -> int:
        """Take the blocks of all requests back, and evict everything from the device.

        Returns:
            The number of blocks that were used.
        """
        blocks = self._host.blocks
        used = self.num_gpu_blocks - self.num_free_device_blocks
        blocks.end_all()
        blocks.engine.call(blocks.engine.cache.evict, self.num_gpu_blocks)
        return used

    def reset_cache(self) -> bool:
        """Take the blocks of all requests back, and drop all cached blocks of both tiers.

        FastDeploy does so before it sleeps and when the weights change, so blocks in stores are not
        found any more until a restart. Copies that have not begun are dropped, too; the call waits
        for the others.

        Returns:
            False when transfers did not end within 30 s; both tiers are empty nevertheless, but
            blocks in stores may still be found.
        """
        blocks = self._host.opened_blocks
        if blocks is None or self._host.has_left:
            return True  # nothing is cached
        blocks.end_all()
        engine = blocks.engine
        try:
            engine.call(engine.cache.reset, timeout=CONTROL_SECONDS)
            if self._host.has_stores:
                with engine.updating_weights(CONTROL_SECONDS):
                    pass
        except ControlTimeout:
            return False
        return True

    def end_requests(self) -> CacheSwapMetadata | None:
        """Take the blocks of all requests back, before ``sleep`` and ``updating_weights``.

        Returns:
            As ``issue_pending_backup_to_batch_request``: send it to the workers. The copies of
            blocks that they have computed end only after that.
        """
        blocks = self._host.opened_blocks
        if blocks is None:
            return None
        blocks.end_all()
        self.note_scheduled()
        return self.issue_pending_backup_to_batch_request()

    def sleep(self, tags: Iterable[Tier] = TIERS, timeout: float | None = CONTROL_SECONDS) -> None:
        """Free the memory of tiers; nothing is matched and allocated until ``wakeup``.

        Call ``end_requests`` first, send its batch, and schedule nothing afterwards. Workers whose
        device tier sleeps may drop their tensors with ``CacheController.free_gpu_cache``.

        Args:
            tags: ``"device"``, ``"host"``, or both.
            timeout: seconds to wait for requests, transfers and the workers' last step; None for no
                limit.

        Raises:
            ControlTimeout, UsageError: as for ``CacheEngine.sleep``.
        """
        engine = self.engine
        engine.call(engine.cache.sleep, tags, timeout=timeout)

    def wakeup(
        self,
        tags: Iterable[Tier] = TIERS,
        *,
        regions: Regions | None = None,
        timeout: float | None = CONTROL_SECONDS,
    ) -> None:
        """Allocate the memory of tiers again.

        The workers must have created their tensors with ``CacheController.initialize_kv_cache``.

        Args:
            tags: tiers to wake.
            regions: without ranks: the device tensors of this process.
            timeout: seconds to wait for the workers; None for no limit.

        Raises:
            LayoutError, ConfigError, ControlTimeout, UsageError: as for ``CacheEngine.wake_up``.
        """
        engine = self.engine
        engine.call(engine.cache.wake_up, tags, regions=regions, timeout=timeout)

    def updating_weights(
        self, timeout: float | None = CONTROL_SECONDS, *, version: str | None = None
    ) -> SyncWeightsUpdate:
        """Drop all cached blocks, and grant nothing inside the ``with`` block.

        Call ``end_requests`` first, and send its batch.

        Args:
            timeout: as for ``CacheEngine.updating_weights``; so is ``version``.
        """
        return self.engine.updating_weights(timeout, version=version)

    # --- for a worker in this process -------------------------------------------------------------

    def layers(self, transfer_ids: Sequence[int]) -> list[SyncLayers]:
        """Return the layers of onloads, for a ``CacheController`` in this process.

        Onloads that have arrived are left out.
        """
        with self._lock:
            found = [self._layers.get(transfer_id) for transfer_id in transfer_ids]
        return list(dict.fromkeys(layers for layers in found if layers is not None))

    # --- statistics -------------------------------------------------------------------------------

    def get_stats(self) -> dict[str, Any]:
        """Return counts of both tiers, of the index and of the transfers."""
        return statistics.stats(self._host.blocks)

    def get_memory_usage(self) -> dict[str, Any]:
        """Return total, used and free blocks of both tiers."""
        return statistics.memory_usage(self._host.blocks)

    def gauges(self) -> dict[str, float]:
        """Return values for ``main_process_metrics``, by the names of its gauges."""
        counts = self.engine.cache_statistics()
        return {
            **statistics.gauges(counts, self.num_free_device_blocks),
            **self.metrics.as_gauges(),
        }


def _is_preempted(request: Any) -> bool:
    return getattr(getattr(request, "status", None), "name", "") == "PREEMPTED"
