"""Connector for vLLM: host memory and stores as further tiers below vLLM's own KV cache.

::

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "AiokvConnector",
      "kv_connector_module_path": "aiokv.connectors.vllm",
      "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"host_gib": 32}}'

vLLM makes one :class:`AiokvConnector` in the scheduler's process and one in each worker's. Needs
vLLM 0.22.
"""

from aiokv.connectors.vllm.connector import AiokvConnector

__all__ = ["AiokvConnector"]
