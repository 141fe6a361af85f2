"""SGLang's HiCache on aiokv's stores: ``--hicache-storage-backend dynamic``.

SGLang keeps the radix tree, the device pool and the host pool. Its threads call a storage backend
with the hashes of pages and their places in the host pool. See ``docs/guide/sglang.md``.
"""

from __future__ import annotations

import re
import time
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from aiokv.connectors.pages import PageGroup, PageStore
from aiokv.connectors.sglang_pools import KV, HostPool
from aiokv.errors import ConfigError, UsageError
from aiokv.stores.options import parse_bytes
from aiokv.stores.urls import stores_from

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolTransfer

    from aiokv.base.statistics import GuardStatistics
    from aiokv.stores.use import StoreUse

OLDEST_RELEASE: Final = (0, 5, 20)  # earlier ones leave adapters and salts out of their hashes
FORMAT_VERSION: Final = 2  # increase when the meaning of the bytes of a page changes
_HINT: Final = (
    'pass --hicache-storage-backend-extra-config with "interface_v1": 1, "aiokv": '
    '{"model": "NAME@REVISION", "stores": ["redis://host:6379"]}'
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
    """Pages of SGLang's host pools in aiokv's stores. Made by SGLang.

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
        if not extra.get("interface_v1"):
            raise ConfigError('extra config: "interface_v1" is not set', hint=_HINT)
        if not self._settings.model or not self._settings.stores:
            raise ConfigError("extra config, aiokv: model or stores is empty", hint=_HINT)
        self._config = storage_config
        self._staging_bytes = parse_bytes(self._settings.staging_bytes)
        # Replicas of MLA have equal pages: the first rank saves them, and all ranks load them.
        self._is_writer = not storage_config.is_mla_model or (
            storage_config.tp_rank == getattr(storage_config, "dcp_rank", 0)
        )
        self._host_pools: dict[str, HostPool] = {}
        self._pages: PageStore | None = None
        self._loads: deque[tuple[int, float]] = deque()  # pages and GiB/s of each call
        self._saves: deque[tuple[int, float]] = deque()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the KV pages.

        Raises:
            ConfigError: the layout of the pool has no pages, or its element type is unknown.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take a pool beside that of the KV pages: of windows, states, an indexer or a draft model.

        Raises:
            ConfigError: as ``register_mem_pool_host``; or SGLang saves its pages in one rank, and
                they differ between the ranks.
            AiokvError: a pool that is registered later than the others: as ``StorePools.open``.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._register(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Open the stores for the pages of all pools.

        Raises:
            AiokvError: as ``StorePools.open``.
        """
        self.close()
        pools = [pool for pool in self._host_pools.values() if pool.num_objects]
        num_bytes = sum(pool.num_bytes for pool in pools)
        groups = {
            pool.group: PageGroup(
                fingerprint=pool.fingerprint,
                part_bytes=pool.part_bytes,
                objects=pool.num_objects,
                rows=pool.num_rows,
                share=pool.num_bytes / num_bytes,
            )
            for pool in pools
        }
        self._pages = PageStore(
            self._stores_of_this_rank(), groups, staging_bytes=self._staging_bytes
        )

    def _register(self, name: str, pool: Any) -> None:
        kv_cache_dtype = self._settings.kv_cache_dtype
        if str(pool.dtype) == "torch.uint8" and not kv_cache_dtype:
            raise ConfigError(
                f"extra config, aiokv: kv_cache_dtype is missing; the host pool {name!r} has plain "
                "bytes, which FP8 formats share",
                hint='set "kv_cache_dtype" to the value of --kv-cache-dtype',
            )
        identity = {
            "format": FORMAT_VERSION,
            "sglang": self._release,
            "model": [self._settings.model, self._settings.weights_version],
            "kv_cache_dtype": kv_cache_dtype,
        }
        stores = self._stores_of_this_rank()
        is_shared = any(use.store.kind != "disk" for use in stores)
        others = [other for other in self._host_pools.values() if other.num_objects]
        self._host_pools[name] = HostPool(
            name, pool, self._config, identity, is_shared=is_shared, is_first=not others
        )
        if self._pages is not None or not hasattr(HiCacheStorage, "on_host_pools_registered"):
            self.on_host_pools_registered()

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

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Load pages to the host pool; False from the first page on that was not loaded."""
        began = time.perf_counter()
        loaded = self._load(KV, keys, host_indices)
        self._note(self._loads, sum(loaded), time.perf_counter() - began)
        return loaded

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Save pages of the host pool; True for each page that a store has, and for replicas."""
        if not self._is_writer:
            return [True] * len(keys)
        began = time.perf_counter()
        saved = self._save(KV, keys, host_indices)
        self._note(self._saves, sum(saved), time.perf_counter() - began)
        return saved

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: object = None
    ) -> dict[str, list[bool]]:
        """Load pages to several host pools; see ``batch_get_v1``."""
        return {
            pool.name: self._load(pool.name, pool.keys, pool.host_indices) for pool in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: object = None
    ) -> dict[str, list[bool]]:
        """Save pages of several host pools; True for each page that a store has."""
        return {
            pool.name: self._save(pool.name, pool.keys, pool.host_indices) for pool in transfers
        }

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None,
        extra_info: object = None,
    ) -> Any:  # fmt: skip
        """Return how many leading pages the stores have in all pools.

        A pool of windows or states needs the last pages of a prefix only, as many as its transfer
        has keys. So not every shorter prefix can be loaded: the result lists those that can.

        Raises:
            UsageError: the hit policy of a pool is unknown.
        """
        num_pages = self.batch_exists(keys)
        hits = {KV: num_pages}
        ends = np.arange(1, num_pages + 1)
        usable = np.ones(num_pages, np.bool_)
        for each in (pool_transfers or []) if num_pages else []:
            if each.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                raise UsageError(f"host pool {each.name!r}: unknown hit policy {each.hit_policy!r}")
            width = num_pages
            if each.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                width = max(1, len(each.keys or ()))
            pages, pool = self._opened(each.name)
            found = pages.find(pool.digests(keys[:num_pages]), pool.group)
            missing = np.append(0, np.cumsum(~found))  # before each page
            complete = missing[ends] == missing[np.maximum(ends - width, 0)]
            if complete.any():
                hits[each.name] = int(ends[complete].max())
            usable &= complete
        prefixes = ends[usable].tolist()
        return PoolTransferResult(max(prefixes, default=0), hits, prefixes)

    def _load(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        pages, pool = self._opened(name)
        addresses = pool.addresses(len(keys), host_indices)
        loaded = len(keys)
        if pool.num_objects:
            loaded = pages.load(pool.digests(keys), addresses, pool.group)
        return [i < loaded for i in range(len(keys))]

    def _save(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        pages, pool = self._opened(name)
        addresses = pool.addresses(len(keys), host_indices)
        if not pool.num_objects:
            return [True] * len(keys)
        return pages.save(pool.digests(keys), addresses, pool.group)

    def batch_get(self, *arguments: object, **options: object) -> NoReturn:
        """Refuse pages as tensors, which SGLang passes without ``interface_v1`` only.

        Raises:
            UsageError: always.
        """
        raise UsageError('aiokv takes pages in host pools only; set "interface_v1": 1')

    get = set = batch_set = batch_get

    def exists(self, key: str) -> bool:
        """Return True when a store has a page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Return how many leading pages the stores have."""
        pages, pool = self._opened()
        if not pool.num_objects:
            return len(keys)
        return pages.lookup(pool.digests(keys))

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
            num_bytes = num_pages * self._host_pools[KV].page_bytes
            calls.append((num_pages, num_bytes / seconds / (1 << 30)))

    def statistics(self) -> list[GuardStatistics]:
        """Return the statistics of each store, in order."""
        return [] if self._pages is None else self._pages.statistics()

    def close(self) -> None:
        """End the operations in flight, and close the stores. Idempotent."""
        if self._pages is not None:
            self._pages.close()

    def _opened(self, name: str = KV) -> tuple[PageStore, HostPool]:
        if self._pages is None or name not in self._host_pools:
            raise UsageError(
                f"the host pool {str(name)!r} is not registered",
                hint="call register_mem_pool_host, register_mem_host_pool_v2 and "
                "on_host_pools_registered first",
            )
        return self._pages, self._host_pools[name]


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
