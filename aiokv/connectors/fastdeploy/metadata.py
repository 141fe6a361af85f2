"""Value objects that FastDeploy's scheduler fills in and its workers read.

They have the names and fields of FastDeploy's own classes, so that either kind works on either
side. In ``hash_values``, which FastDeploy merges and never reads, a scheduler tells the workers
what to wait for: ``"onload:17"`` is transfer 17, ``"step:4"`` is step 4, and ``"layers:9:ab01"``
the mark 0xab01, for the time when 9 layers are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ONLOAD: Final = "onload:"
_STEP: Final = "step:"
_LAYERS: Final = "layers:"


class CacheLevel(Enum):
    """Tier of a block."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass
class CacheSwapMetadata:
    """Transfers that a batch waits for, or the step that it closes.

    Attributes:
        src_block_ids: always empty: the ids of host blocks stay inside aiokv.
        dst_block_ids: device blocks that the transfers write.
        src_type: tier that the blocks come from.
        dst_type: tier that the blocks go to.
        hash_values: names of transfers and of steps, for ``CacheController.submit_swap_tasks``.
        success: True when the transfers have been checked, by the worker.
    """

    src_block_ids: list[int] = field(default_factory=list)
    dst_block_ids: list[int] = field(default_factory=list)
    src_type: CacheLevel | None = None
    dst_type: CacheLevel | None = None
    hash_values: list[str] = field(default_factory=list)
    success: bool = False

    @property
    def mapping(self) -> dict[int, int]:
        """Source ids with their destination ids; empty before success."""
        return dict(
            zip(self.src_block_ids, self.dst_block_ids, strict=False) if self.success else ()
        )


def onload_metadata(transfer_ids: Iterable[int], block_ids: list[int]) -> CacheSwapMetadata:
    """Return metadata of onloads in flight that a request waits for.

    Args:
        transfer_ids: ids of the onloads.
        block_ids: device blocks that they write.
    """
    return CacheSwapMetadata(
        dst_block_ids=block_ids,
        src_type=CacheLevel.HOST,
        dst_type=CacheLevel.DEVICE,
        hash_values=[f"{_ONLOAD}{transfer_id}" for transfer_id in transfer_ids],
    )


def step_metadata(step: int, layer_marks: Iterable[tuple[int, bytes]] = ()) -> CacheSwapMetadata:
    """Return metadata of the step that the workers close before they compute a batch.

    Args:
        step: number of the step.
        layer_marks: numbers of layers, and the marks for when the batch has computed them.
    """
    return CacheSwapMetadata(
        src_type=CacheLevel.DEVICE,
        dst_type=CacheLevel.HOST,
        hash_values=[
            f"{_STEP}{step}",
            *(f"{_LAYERS}{layers}:{mark.hex()}" for layers, mark in layer_marks),
        ],
    )


def transfer_ids_of(metadata: Any) -> list[int]:
    """Return the transfers in metadata, each once. Also accepts FastDeploy's own class."""
    return list(dict.fromkeys(_numbers(metadata, _ONLOAD)))


def step_of(metadata: Any) -> int:
    """Return the last step that metadata names; 0 for none."""
    return max(_numbers(metadata, _STEP), default=0)


def layer_marks_of(metadata: Any) -> list[tuple[int, bytes]]:
    """Return numbers of layers, and the marks for when the batch has computed them."""
    named = (name.split(":") for name in _names(metadata, _LAYERS))
    return [(int(layers), bytes.fromhex(mark)) for layers, mark in named]


def _numbers(metadata: Any, prefix: str) -> Iterator[int]:
    return map(int, _names(metadata, prefix))


def _names(metadata: Any, prefix: str) -> Iterator[str]:
    for name in metadata.hash_values if metadata is not None else ():
        if isinstance(name, str) and name.startswith(prefix):
            yield name.removeprefix(prefix)


@dataclass
class MatchResult:
    """Cached prefix of a request, as ``match_prefix`` has found and granted it.

    Attributes:
        device_block_ids: ids of all matched blocks in order: those on the device, then those that
            are on their way from host memory.
        matched_device_nums: matched blocks that were on the device.
        matched_host_nums: matched blocks that come from host memory.
        matched_storage_nums: always 0: blocks of stores come through host memory.
    """

    device_block_ids: list[int] = field(default_factory=list)
    matched_device_nums: int = 0
    matched_host_nums: int = 0
    matched_storage_nums: int = 0

    @property
    def total_matched_blocks(self) -> int:
        """Number of matched blocks of all tiers."""
        return self.matched_device_nums + self.matched_host_nums + self.matched_storage_nums


class BatchRequest:
    """Requests that the workers compute together, with the transfers that they wait for.

    It behaves as FastDeploy's class of the same name, and can be pickled: the state of a request in
    the cache is not part of the request.

    Attributes:
        requests: requests and scheduled tasks, in order.
        cache_swap_metadata: transfers to the device, merged; None without any.
        cache_evict_metadata: step to close, merged; None without one.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.cache_swap_metadata: CacheSwapMetadata | None = None
        self.cache_evict_metadata: CacheSwapMetadata | None = None

    @property
    def has_pending_work(self) -> bool:
        """True if the workers have to see the batch, even without requests."""
        return bool(self.requests or self.cache_swap_metadata or self.cache_evict_metadata)

    def add_request(self, request: Any) -> None:
        """Append a request or task, and take its metadata over."""
        if getattr(request, "cache_swap_metadata", None):
            self.append_swap_metadata(request.cache_swap_metadata)
            request.cache_swap_metadata = []
        if getattr(request, "cache_evict_metadata", None):
            self.append_evict_metadata(request.cache_evict_metadata)
            request.cache_evict_metadata = []
        self.requests.append(request)

    def append_swap_metadata(self, metadata: Iterable[Any]) -> None:
        """Merge metadata of transfers to the device, in order."""
        for one in metadata:
            self.cache_swap_metadata = _merged(self.cache_swap_metadata, one)

    def append_evict_metadata(self, metadata: Iterable[Any]) -> None:
        """Merge metadata of steps, in order."""
        for one in metadata:
            self.cache_evict_metadata = _merged(self.cache_evict_metadata, one)

    def append(self, batch: BatchRequest) -> None:
        """Append another batch."""
        self.requests += batch.requests
        if batch.cache_swap_metadata is not None:
            self.append_swap_metadata([batch.cache_swap_metadata])
        if batch.cache_evict_metadata is not None:
            self.append_evict_metadata([batch.cache_evict_metadata])

    def extend(self, batches: Iterable[BatchRequest]) -> None:
        """Append other batches, in order."""
        for batch in batches:
            self.append(batch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.requests)

    def __getitem__(self, index: int) -> Any:
        return self.requests[index]

    def __len__(self) -> int:
        return len(self.requests)


def _merged(first: CacheSwapMetadata | None, second: Any) -> CacheSwapMetadata:
    before = first or CacheSwapMetadata()
    return CacheSwapMetadata(
        src_block_ids=before.src_block_ids + list(second.src_block_ids),
        dst_block_ids=before.dst_block_ids + list(second.dst_block_ids),
        src_type=before.src_type or second.src_type,
        dst_type=before.dst_type or second.dst_type,
        hash_values=before.hash_values + list(second.hash_values),
    )
