"""Pages of SGLang's HiCache between its host pool and a storage backend, in GB/s.

``.venv-sglang/bin/python -m bench.sglang_storage``, after ``make test-sglang``. SGLang's controller
saves and loads the pages of a prompt by its own functions, with a host pool of the shape of Llama 3
8B (64 tokens and 8 MiB per page, ``page_first``), and these backends:

* ``file``: SGLang's own, a file per page;
* ``aiokv_directory``, ``aiokv_disk``: ``HiCacheAiokv`` on a directory store and on a disk store.

Per round, each backend saves the pages to an empty folder (``save_gbps``; of the three, only the
disk store does not leave the bytes in the page cache), and loads them back to other places of the
pool: ``load_gbps`` after the page cache was dropped, ``cached_load_gbps`` directly afterwards.
Loaded bytes are compared. Numbers are medians of the rounds; ``ratio_to_file`` is the median of
the ratios within each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from sglang.srt.managers.cache_controller import (
    HiCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from aiokv.errors import InternalError
from bench import harness

LAYERS, HEADS, DIM = 32, 8, 128
PAGE_TOKENS = 64
STORES = {
    "aiokv_directory": "directory:{}?deadline=60",
    "aiokv_disk": "disk:{}?bytes=2GiB&deadline=60",
}
BACKENDS = ("file", *STORES)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sglang_storage", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--pages", type=int, default=24, help="of the prompt; default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    args = parser.parse_args()
    pool = _host_pool(args.pages)
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in BACKENDS}
    for number in range(args.rounds + 1):
        for name in BACKENDS:
            with tempfile.TemporaryDirectory(prefix="bench-sglang-", dir=args.folder) as folder:
                figures = _round(pool, name, folder, args.pages)
            if number:  # the first round warms up
                for metric, value in figures.items():
                    samples[name][metric].append(value)
    results = {name: _medians(samples[name], samples["file"]) for name in BACKENDS}
    run = harness.Run(machine=harness.machine(), benches={"sglang_storage": results})
    harness.save_each(run, run.benches)
    for metric, value in harness.flatten(results).items():
        print(f"{metric:40} {value:8.2f}")
    return 0


def _host_pool(pages: int) -> Any:
    """Return a host pool without a GPU, for the pages to save and as many places to load them."""
    tokens = 2 * pages * PAGE_TOKENS
    k, v = (
        tuple(torch.zeros(PAGE_TOKENS, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))
        for _ in "kv"
    )
    pointers = [torch.tensor([t.data_ptr() for t in one], dtype=torch.uint64) for one in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
        ),
        page_size=PAGE_TOKENS,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(4 << 30):
        pool = MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE_TOKENS,
            "page_first",
            pin_memory=False,
            device_capacity_tokens=tokens,
            start_layer=0,
            end_layer=LAYERS,
            host_token_capacity=tokens,
        )
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    return pool


def _round(pool: Any, name: str, folder: str, pages: int) -> dict[str, float]:
    backend, controller = _attach(pool, name, folder)
    tokens = list(range(pages * PAGE_TOKENS + 1))
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)[:pages]
    saved, loaded = torch.arange(2 * pages * PAGE_TOKENS).chunk(2)
    num_bytes = pages * pool.get_data_page(0).numel() * pool.dtype.itemsize
    try:
        backup = StorageOperation(saved, tokens, hash_value=hashes)
        began = time.perf_counter()
        controller._page_backup(backup)
        save = num_bytes / (time.perf_counter() - began) / 1e9
        _drop_page_cache(folder)
        loads = []
        for _ in range(2):
            for page in range(pages, 2 * pages):
                pool.get_data_page(page * PAGE_TOKENS).zero_()
            prefetch = PrefetchOperation("request", tokens)
            prefetch.hash_value, prefetch.host_indices = hashes, loaded
            began = time.perf_counter()
            controller._page_transfer(prefetch)
            loads.append(num_bytes / (time.perf_counter() - began) / 1e9)
            _compare(pool, pages)
    finally:
        if name in STORES:
            backend.close()
    return {"save_gbps": save, "load_gbps": loads[0], "cached_load_gbps": loads[1]}


def _attach(pool: Any, name: str, folder: str) -> tuple[Any, Any]:
    """Return a backend, and SGLang's controller with it, as ``--hicache-storage-backend`` does."""
    extra: dict[str, Any] = {"file_storage_path": folder}
    if name in STORES:
        extra = {
            "backend_name": "aiokv",
            "module_path": "aiokv.connectors.sglang",
            "class_name": "HiCacheAiokv",
            "interface_v1": 1,
            "aiokv": {"model": "llama@1", "stores": [STORES[name].format(folder)]},
        }
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="llama",
        extra_config=extra,
    )
    controller: Any = object.__new__(HiCacheController)
    if name in STORES:
        backend: Any = StorageBackendFactory.create_backend("dynamic", config, pool)
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy
    else:
        backend = StorageBackendFactory.create_backend(name, config, pool)
        controller.page_get_func = controller._generic_page_get
        controller.page_set_func = controller._generic_page_set
    backend.register_mem_pool_host(pool)
    if name in STORES:
        backend.register_mem_host_pool_v2(pool, "kv")
        backend.on_host_pools_registered()
    controller.storage_backend = backend
    controller.storage_host_pool = pool
    controller.page_size = PAGE_TOKENS
    controller.prefetch_sync_queue = Queue()
    return backend, controller


def _compare(pool: Any, pages: int) -> None:
    for page in range(pages):
        saved, loaded = (pool.get_data_page(i * PAGE_TOKENS) for i in (page, pages + page))
        if not torch.equal(saved.view(torch.int16), loaded.view(torch.int16)):
            raise InternalError(f"page {page} was not loaded with the bytes that were saved")


def _drop_page_cache(folder: str) -> None:
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _medians(
    samples: dict[str, list[float]], baseline: dict[str, list[float]]
) -> dict[str, float | dict[str, float]]:
    found: dict[str, Any] = {}
    for metric, values in samples.items():
        found[metric] = statistics.median(values)
        ratios = [value / other for value, other in zip(values, baseline[metric], strict=True)]
        found[metric.replace("gbps", "ratio_to_file")] = statistics.median(ratios)
    return found


if __name__ == "__main__":
    sys.exit(main())
