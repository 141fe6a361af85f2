"""Stores of FastDeploy's ``--kvcache-storage-backend``, and the name of the model in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def stores_of(config: Any) -> tuple[str, ...]:
    """Return the URLs of the stores that FastDeploy's configuration asks for.

    ``mooncake`` and ``file`` read the variables of the environment that FastDeploy reads for them.

    Args:
        config: the ``FDConfig``, or any object with its fields.

    Raises:
        ConfigError: aiokv has no such store, or a setting of it is missing.
    """
    backend = getattr(config.cache_config, "kvcache_storage_backend", None)
    if backend is None:
        return ()
    if backend == "file":
        folder = os.environ.get("FILE_BACKEND_STORAGE_DIR", "/tmp/fastdeploy")
        return (f"directory:{folder}",)
    if backend == "mooncake":
        return (_mooncake_url(),)
    raise ConfigError(
        f"kvcache_storage_backend is {backend!r}, which aiokv cannot read; it must be 'mooncake', "
        "'file' or None",
        hint="leave --kvcache-storage-backend out, and pass stores= with the URLs of stores",
    )


def _mooncake_url() -> str:
    """Return the URL of the Mooncake cluster that FastDeploy's settings name."""
    settings = _mooncake_settings()
    master = settings.get("master_server_addr")
    if not master:
        raise ConfigError(
            "kvcache_storage_backend is 'mooncake', but its master is not known",
            hint="set MOONCAKE_MASTER_SERVER_ADDR=host:port, or MOONCAKE_CONFIG_PATH",
        )
    options = {
        "protocol": settings.get("protocol") or "rdma",
        "devices": settings.get("rdma_devices"),
        "hostname": settings.get("local_hostname"),
        "metadata_server": settings.get("metadata_server"),
        "segment_bytes": settings.get("global_segment_size"),
    }
    given = {name: value for name, value in options.items() if value}
    return f"mooncake://{master}?{urlencode(given)}"


def _mooncake_settings() -> Mapping[str, Any]:
    path = os.environ.get("MOONCAKE_CONFIG_PATH")
    if path is None:
        prefix = "MOONCAKE_"
        return {
            name.removeprefix(prefix).lower(): value
            for name, value in os.environ.items()
            if name.startswith(prefix)
        }
    try:
        settings: Mapping[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"MOONCAKE_CONFIG_PATH is {path!r}, which cannot be read: {error}"
        ) from error
    return settings


def model_name(config: Any) -> str | None:
    """Return a name of the model that differs where the KV of equal prompts differs.

    Returns:
        None if the configuration does not name the model.
    """
    model = getattr(config, "model_config", None)
    if not getattr(model, "model", None):
        return None
    names = ("model", "revision", "version", "dtype", "quantization", "rope_theta", "rope_scaling")
    facts = {name: getattr(model, name, None) for name in names}
    facts["cache"] = getattr(getattr(config, "quant_config", None), "kv_cache_quant_type", None)
    return json.dumps(facts, sort_keys=True, default=str)
