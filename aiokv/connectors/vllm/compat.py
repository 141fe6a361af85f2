"""Differences between the versions of vLLM, in one place.

Other modules of the connector import only what all served versions have. What some versions lack is
found here by its presence, not by the number of the version.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from aiokv.base.logs import Log
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

log = Log(__name__)

OLDEST: Final = (0, 22)
TESTED: Final = ("0.22.1", "0.27.1", "0.32.0")
"""Versions that ``make test-vllm VLLM=...`` runs."""


def check_version(version: str = vllm.__version__) -> None:
    """Log the version of vLLM, and whether the connector was tested with it.

    Raises:
        ConfigError: the version is older than OLDEST.
    """
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(number) for number in release[0].split(".")) if release else OLDEST
    if numbers < OLDEST and "dev" not in version:  # a build of a clone without tags is 0.1.dev1
        raise ConfigError(
            f"vLLM is {version}; AiokvConnector serves {OLDEST[0]}.{OLDEST[1]} and newer",
            hint=f"install vLLM {TESTED[-1]}",
        )
    is_tested = release is not None and release[0] in TESTED
    log.info("vllm.version", version=version, tested=is_tested)


def calculates_kv_scales(config: CacheConfig) -> bool:
    """Return True if each start computes other scales of KV; vLLM 0.28 removed this option."""
    return bool(getattr(config, "calculate_kv_scales", False))


def announces_sleep() -> bool:
    """Return True if vLLM resets its connector before it unmaps the KV cache, as since 0.33."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def is_non_causal(spec: KVCacheSpec) -> bool:
    """Return True for layers whose KV depends on later tokens; vLLM has them since 0.27."""
    return bool(getattr(spec, "non_causal", False))


def hit_sources(num_tokens: int, num_fetched: int, *, from_disk: bool) -> dict[Any, int]:
    """Return loaded tokens by vLLM's name of their source; vLLM has asked for it since 0.32.

    Args:
        num_tokens: tokens that a request loads.
        num_fetched: those of them that a store had.
        from_disk: True if all stores are on a file system.
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    store = CacheHitSource.DISK if from_disk else CacheHitSource.EXTERNAL_UNSPECIFIED
    counts = {CacheHitSource.HOST: num_tokens - num_fetched, store: num_fetched}
    return {source: count for source, count in counts.items() if count}
