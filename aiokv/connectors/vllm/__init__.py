"""Connector for vLLM: host memory and stores as further tiers below vLLM's own KV cache.

::

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "AiokvConnector",
      "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"host_gib": 8}}'

vLLM makes one :class:`AiokvConnector` in the scheduler's process and one in each worker's. Needs
vLLM 0.22 or newer.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiokv.connectors.vllm.connector import AiokvConnector

__all__ = ["AiokvConnector", "register"]


def register() -> None:
    """Register AiokvConnector by its name; vLLM calls this in each of its processes.

    This is the entry point ``aiokv`` of the group ``vllm.general_plugins``. vLLM imports the
    connector only when its configuration names it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # registered before
        KVConnectorFactory.register_connector(
            "AiokvConnector", "aiokv.connectors.vllm.connector", "AiokvConnector"
        )


def __getattr__(name: str) -> Any:
    if name == "AiokvConnector":
        from aiokv.connectors.vllm.connector import AiokvConnector

        return AiokvConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
