"""HostPool: a host pool of SGLang, whose pages are objects in stores.

A page of KV heads is one object per few heads. A tensor-parallel rank has some of these objects,
and their bytes do not depend on the number of ranks. Each other page is one object.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch

from aiokv.base.groups import ATTENTION
from aiokv.errors import ConfigError, UsageError
from aiokv.stores.labels import digest_of, fingerprint_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

KV: Final = "kv"
# Variables that change the order of the bytes of a page. No object of SGLang tells a backend of
# them.
LAYOUT_VARIABLES: Final = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT")
DEFAULT_TP_LCM: Final = 8  # servers with these sizes, and their divisors, share pages
_MHA: Final = "MHATokenToKVPoolHost"
_DIVISIBLE: Final = (_MHA, "AsymmetricMHATokenToKVPoolHost")  # K and V, and nothing beside them
_RANKS: Final = ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")
_SHAPES: Final = (
    "layout", "page_size", "start_layer", "end_layer", "layer_num", "head_dim", "v_head_dim",
    "dtype", "conv_dtype", "temporal_dtype", "conv_state_shapes", "temporal_state_shape",
    "storage_format_tag",
)  # fmt: skip


class HostPool:
    """Pages of a host pool.

    Args:
        name: SGLang's name of the pool.
        pool: the pool.
        config: ranks.
        identity: facts that all pools share, such as the model.
        is_shared: other ranks can read the objects of this one.
        is_first: no other pool with bytes is registered.

    Attributes:
        group: group of the objects in the stores.
        num_objects: objects per page of this rank; 0 for a pool of indices without bytes.
        num_rows: rows of each part of a page; a row has bytes of each object.
        part_bytes: size of each part of a page of this rank.
        page_bytes: their sum.
        num_bytes: size of the pool.
        fingerprint: 32 bytes.

    Raises:
        ConfigError: the pool has no pages in this layout, or its ranks cannot store them.
    """

    def __init__(
        self, name: str, pool: Any, config: HiCacheStorageConfig, identity: Mapping[str, Any],
        *, is_shared: bool, is_first: bool,
    ) -> None:  # fmt: skip
        self.group = ATTENTION if is_first else name
        self._name = name
        self._pool = pool
        sizes = self._buffers(torch.arange(pool.page_size))[1]
        classes = [kind.__name__ for kind in type(pool).__mro__]
        if config.is_mla_model and config.tp_size > 1 and name != KV and _MHA in classes:
            raise ConfigError(
                f"the host pool {name!r} has other KV heads in each of the {config.tp_size} ranks, "
                "and SGLang saves the pages of the first one only, as for the MLA model beside it",
                hint="serve with --tp-size 1, or without the draft model",
            )
        heads = [0, 0]  # of the model, and per object
        ranks = [getattr(config, rank, 0) for rank in _RANKS]
        self.num_objects = min(1, len(sizes))
        self._first_object = 0
        self.num_rows = 1
        if (
            is_shared
            and classes[0] in _DIVISIBLE
            and config.attn_cp_size == 1  # else, several ranks have the same heads
            and not any(os.environ.get(variable) for variable in LAYOUT_VARIABLES)
        ):
            heads = _divide(pool.head_num, config)
            self.num_objects = pool.head_num // heads[1]
            self._first_object = config.tp_rank * self.num_objects
            if pool.layout != "page_head":  # the heads of a token are adjacent
                self.num_rows = pool.page_size
                self.num_rows *= 1 if pool.layout == "layer_first" else pool.layer_num
        elif not config.is_mla_model or name == "mamba":  # with MLA, ranks have equal pages
            ranks += [config.tp_rank, config.tp_size]
        self.part_bytes = tuple(sizes)
        self.page_bytes = sum(sizes)
        object_bytes = self.page_bytes // max(1, self.num_objects)
        self.num_bytes = self.page_bytes * (pool.size // pool.page_size)
        facts = {
            **identity,
            "pool": [name, classes[0], sizes if not heads[0] else [len(sizes), object_bytes]],
            "shapes": [str(getattr(pool, shape, None)) for shape in _SHAPES],
            "heads": heads,
            "ranks": ranks,
            "variables": [os.environ.get(variable) for variable in LAYOUT_VARIABLES],
        }
        text = b"aiokv sglang " + msgspec.json.encode(facts)
        self.fingerprint = fingerprint_of(text, *identity["model"])

    def digests(self, keys: Sequence[str]) -> bytes:
        """Return a digest per object of the pages with these keys."""
        numbers = range(self._first_object, self._first_object + self.num_objects)
        return b"".join(digest_of(f"{number} {key}".encode()) for key in keys for number in numbers)

    def addresses(self, num_pages: int, host_indices: torch.Tensor) -> NDArray[np.int64]:
        """Return the address of each part of pages, ``[pages, parts]``.

        Args:
            num_pages: number of pages.
            host_indices: places of their tokens in the pool.

        Raises:
            UsageError: the places are those of another number of pages, or SGLang returned parts
                of other sizes than before.
        """
        if len(host_indices) != num_pages * self._pool.page_size:
            raise UsageError(
                f"host pool {self._name!r}: {len(host_indices)} host indices for {num_pages} "
                f"pages; a page has {self._pool.page_size}"
            )
        addresses, sizes = self._buffers(host_indices) if num_pages else ([], [])
        if tuple(sizes) != self.part_bytes * num_pages:
            raise UsageError(
                f"host pool {self._name!r}: {num_pages} pages have parts of {sizes} bytes; the "
                f"parts of each page must have {list(self.part_bytes)}"
            )
        return np.array(addresses, np.int64).reshape(num_pages, len(self.part_bytes))

    def _buffers(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        try:
            return self._pool.get_page_buffer_meta(host_indices) or ([], [])
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"the layout {self._pool.layout!r} of the host pool {self._name!r} has no pages: "
                f"{error}",
                hint="use --hicache-mem-layout page_first or page_first_direct",
            ) from error


def _divide(local_heads: int, config: HiCacheStorageConfig) -> list[int]:
    """Return the number of KV heads of the model, and per object."""
    heads = local_heads * config.tp_size
    per_object = heads // math.gcd(heads, config.tp_lcm_size or DEFAULT_TP_LCM)
    return [heads, local_heads if local_heads % per_object else per_object]
