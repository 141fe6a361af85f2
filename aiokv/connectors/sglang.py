"""SGLang's HiCache on aiokv's stores: ``--hicache-storage-backend dynamic``.

SGLang keeps the radix tree, the device pool and the host pool. Its threads call a storage backend
with the hashes of pages and their places in the host pool. See ``docs/guide/sglang.md``.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from aiokv.connectors.pages import PageStore
from aiokv.errors import ConfigError, UsageError
from aiokv.stores.options import parse_bytes
from aiokv.stores.urls import stores_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from aiokv.base.statistics import GuardStatistics
    from aiokv.connectors.pages import Page
    from aiokv.stores.use import StoreUse

OLDEST_RELEASE: Final = (0, 5, 20)  # earlier ones leave adapters and salts out of their hashes
FORMAT_VERSION: Final = 1  # increase when the meaning of the bytes of a page changes
# Variables that change the order of the bytes of a page. No object of SGLang tells a backend of
# them.
_LAYOUT_VARIABLES: Final = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT")
_HINT: Final = (
    'pass --hicache-storage-backend-extra-config with "aiokv": {"model": "NAME@REVISION", '
    '"stores": ["redis://host:6379"]}'
)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of ``"aiokv"`` in ``--hicache-storage-backend-extra-config``.

    Attributes:
        model: name and revision of the model.
        stores: URLs, in the order in which pages are taken from them; ``{rank}`` in a URL stands
            for the ranks of the process.
        weights_version: increased when the weights change under the same name.
        kv_cache_dtype: required where SGLang stores the KV cache as bytes, such as with FP8.
        staging_bytes: memory for the pages of a load, and as much for those of a save.
    """

    model: str
    stores: list[str]
    weights_version: str = ""
    kv_cache_dtype: str = ""
    staging_bytes: int | str = "256MiB"


class HiCacheAiokv(HiCacheStorage):  # type: ignore[misc]  # the checker does not follow SGLang
    """Pages of SGLang's host pool in aiokv's stores. Made by SGLang.

    Args:
        storage_config: model, ranks and extra configuration.
        options: ignored; SGLang passes an empty dict.

    Raises:
        ConfigError: the configuration is incomplete or wrong, or this release of SGLang is too old.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, options: object = None) -> None:
        self._release = _release()
        extra = storage_config.extra_config or {}
        try:
            self._settings = msgspec.convert(extra.get("aiokv"), Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"extra config, aiokv: {error}", hint=_HINT) from None
        if not self._settings.model or not self._settings.stores:
            raise ConfigError("extra config, aiokv: model or stores is empty", hint=_HINT)
        self._config = storage_config
        self._interface = "v1" if extra.get("interface_v1") else "flat"
        self._staging_bytes = parse_bytes(self._settings.staging_bytes)
        # Replicas of MLA have equal pages: the first rank saves them, and all ranks load them.
        self._ranks = {
            name: getattr(storage_config, name, 0)
            for name in ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size",
                         "dcp_rank", "dcp_size")
            if not (storage_config.is_mla_model and name.startswith("tp_"))
        }  # fmt: skip
        self._is_writer = not storage_config.is_mla_model or (
            storage_config.tp_rank == getattr(storage_config, "dcp_rank", 0)
        )
        self._pages: PageStore | None = None
        self._page_bytes = 0
        self._loads: deque[tuple[int, float]] = deque()  # pages and GiB/s of each call
        self._saves: deque[tuple[int, float]] = deque()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the stores for the pages of a host pool.

        Raises:
            ConfigError: the layout of the pool has no pages, its element type is unknown, or a
                store is wrong for this server.
            AiokvError: as ``StoreSet.open``.
        """
        super().register_mem_pool_host(mem_pool_host)
        parts = self._places(torch.zeros(mem_pool_host.page_size, dtype=torch.int64))[0]
        sizes = [num_bytes for _, num_bytes in parts]
        self.close()
        self._page_bytes = sum(sizes)
        self._pages = PageStore(
            self._stores_of_this_rank(),
            fingerprint=self._fingerprint(mem_pool_host, sizes),
            page_bytes=self._page_bytes,
            staging_bytes=self._staging_bytes,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take the pool of the KV pages, which ``register_mem_pool_host`` has opened.

        Raises:
            ConfigError: another pool. Its pages would be missing beside those of the KV pool.
        """
        if str(host_pool_name) != "kv":
            raise ConfigError(
                f"the host pool {str(host_pool_name)!r} cannot be stored; aiokv stores the pool "
                "'kv' only",
                hint="serve models with recurrent state, sliding windows, an indexer or a draft "
                "model without --hicache-storage-backend",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _stores_of_this_rank(self) -> list[StoreUse]:
        config, urls = self._config, self._settings.stores
        ranks = {"dp": "dp_rank", "pp": "pp_rank", "cp": "attn_cp_rank", "tp": "tp_rank"}
        rank = "-".join(f"{kind}{getattr(config, name, 0)}" for kind, name in ranks.items())
        stores = stores_from([url.replace("{rank}", rank) for url in urls])
        for url, use in zip(urls, stores, strict=True):
            if use.store.kind != "disk":
                continue
            if config.is_mla_model and config.tp_size > 1:
                raise ConfigError(
                    f"{use.store.url}: a disk store belongs to one rank, and tp_size is "
                    f"{config.tp_size}; with MLA, all ranks load what one rank saves",
                    hint="use a store that all ranks reach: directory:, redis:, mooncake: or s3:",
                )
            if config.tp_size * config.pp_size > 1 and "{rank}" not in url:
                raise ConfigError(
                    f"{use.store.url}: a disk store belongs to one rank, and there are "
                    f"{config.tp_size * config.pp_size} ranks",
                    hint="give each rank a path of its own: disk:/nvme/kv/{rank}?bytes=...",
                )
        return stores

    def _fingerprint(self, pool: Any, sizes: list[int]) -> bytes:
        dtype = str(pool.dtype)
        if dtype == "torch.uint8" and not self._settings.kv_cache_dtype:
            raise ConfigError(
                "extra config, aiokv: kv_cache_dtype is missing; the host pool has plain bytes, "
                "which FP8 formats share",
                hint='set "kv_cache_dtype" to the value of --kv-cache-dtype',
            )
        facts = {
            "format": FORMAT_VERSION,
            "sglang": self._release,
            "model": [self._settings.model, self._settings.weights_version],
            "served": self._config.model_name,
            "dtype": [dtype, self._settings.kv_cache_dtype],
            "ranks": self._ranks,
            "pool": [type(pool).__name__, pool.layout, pool.page_size, sizes],
            "layers": [getattr(pool, name, None) for name in ("start_layer", "end_layer")],
            "heads": [getattr(pool, name, None) for name in ("head_num", "head_dim", "v_head_dim")],
            "variables": [os.environ.get(name) for name in _LAYOUT_VARIABLES],
        }
        return hashlib.sha256(b"aiokv sglang " + msgspec.json.encode(facts)).digest()

    # --- pages in the host pool, which SGLang calls with interface_v1 -----------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Load pages to the host pool; False from the first page on that was not loaded."""
        began = time.perf_counter()
        loaded = self._opened().load(_digests("v1", keys), self._places(host_indices))
        self._note(self._loads, loaded, time.perf_counter() - began)
        return [i < loaded for i in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Save pages of the host pool; True for each page that a store has, and for replicas."""
        if not self._is_writer:
            return [True] * len(keys)
        began = time.perf_counter()
        saved = self._opened().save(_digests("v1", keys), self._places(host_indices))
        self._note(self._saves, sum(saved), time.perf_counter() - began)
        return saved

    def _places(self, host_indices: torch.Tensor) -> list[Page]:
        """Return the parts of each page.

        Raises:
            ConfigError: the layout of the host pool has no pages.
        """
        pool = self.mem_pool_host
        num_pages = len(host_indices) // pool.page_size
        if not num_pages:
            return []
        try:
            addresses, sizes = pool.get_page_buffer_meta(host_indices)
        except ValueError as error:
            raise ConfigError(
                f"the layout {pool.layout!r} of the host pool has no pages: {error}",
                hint="use --hicache-mem-layout page_first or page_first_direct",
            ) from error
        num_parts = len(addresses) // num_pages
        parts = list(zip(addresses, sizes, strict=True))
        return [parts[i : i + num_parts] for i in range(0, len(parts), num_parts)]

    # --- pages as tensors, which SGLang calls otherwise -------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Load a page to a tensor; None if it was not loaded."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        """Load pages to tensors; None from the first page on that was not loaded."""
        loaded = self._opened().load(_digests("flat", keys), _tensors(target_locations))
        return [*target_locations[:loaded], *[None] * (len(keys) - loaded)]

    def set(
        self, key: str, value: Any = None, target_location: object = None,
        target_sizes: object = None,
    ) -> bool:  # fmt: skip
        """Save the page in a tensor; True if a store has it, and for replicas."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:  # fmt: skip
        """Save the pages in tensors; True if stores have all, and for replicas."""
        if not self._is_writer:
            return True
        return all(self._opened().save(_digests("flat", keys), _tensors(values)))

    # --- both -------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return True when a store has a page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Return how many leading pages the stores have."""
        return self._opened().lookup(_digests(self._interface, keys))

    def clear(self) -> None:
        """Refuse: other servers may use the same stores.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "aiokv does not clear a store, because other servers may use it",
            hint="attach the backend again with another weights_version, or remove the files or "
            "keys of the store",
        )

    def get_stats(self) -> Any:
        """Return SGLang's metrics of the calls since the last one; None if they are off."""
        if not self._config.enable_storage_metrics:
            return None
        metrics = _storage_metrics()
        for calls, pages, bandwidth in (
            (self._loads, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._saves, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            while calls:
                num_pages, gib_per_second = calls.popleft()
                pages.append(num_pages)
                bandwidth.append(gib_per_second)
        return metrics

    def _note(self, calls: deque[tuple[int, float]], num_pages: int, seconds: float) -> None:
        if self._config.enable_storage_metrics and num_pages:
            calls.append((num_pages, num_pages * self._page_bytes / seconds / (1 << 30)))

    def statistics(self) -> list[GuardStatistics]:
        """Return the statistics of each store, in order."""
        return [] if self._pages is None else self._pages.statistics()

    def close(self) -> None:
        """End the operations in flight, and close the stores. Idempotent."""
        if self._pages is not None:
            self._pages.close()

    def _opened(self) -> PageStore:
        if self._pages is None:
            raise UsageError("the host pool is not registered; call register_mem_pool_host first")
        return self._pages


def _digests(interface: str, keys: Sequence[str]) -> bytes:
    """Return a digest per page. The interfaces order the bytes of a page differently."""
    prefix = f"{interface} "
    return b"".join(hashlib.sha256((prefix + key).encode()).digest() for key in keys)


def _tensors(tensors: Sequence[torch.Tensor]) -> list[Page]:
    """Return the place of each tensor.

    Raises:
        UsageError: a tensor is not contiguous, or not in host memory.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise UsageError(
                f"a page is a {tensor.device.type} tensor of shape {tuple(tensor.shape)}; it must "
                "be contiguous in host memory"
            )
    return [[(tensor.data_ptr(), tensor.nbytes)] for tensor in tensors]


def _storage_metrics() -> Any:
    try:
        from sglang.srt.observability.metrics_collector import StorageMetrics
    except ImportError:  # older releases
        from sglang.srt.metrics.collector import StorageMetrics
    return StorageMetrics()


def _release() -> str:
    """Return the version of SGLang.

    Raises:
        ConfigError: its hashes do not tell requests of different adapters or salts apart.
    """
    try:
        release = version("sglang")
    except PackageNotFoundError:  # a source tree
        return "unknown"
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    if found and (0, 0, 0) < tuple(map(int, found.groups())) < OLDEST_RELEASE:
        raise ConfigError(
            f"SGLang {release} hashes only the tokens of a page, so requests with different LoRA "
            "adapters or salts would load each other's pages; the oldest release is "
            + ".".join(map(str, OLDEST_RELEASE)),
            hint="pip install --upgrade sglang",
        )
    return release
