"""The connector by its name alone, in each process of vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.plugins import load_general_plugins

import aiokv.connectors.vllm
from aiokv.connectors.vllm.statistics import ConnectorStatistics


def connector_of(config: dict[str, Any]) -> Any:
    load_general_plugins()
    return KVConnectorFactory.get_connector_class(KVTransferConfig(kv_role="kv_both", **config))


@pytest.mark.parametrize("more", [{}, {"kv_connector_module_path": "aiokv.connectors.vllm"}])
def test_name_of_the_connector_is_enough(more: dict[str, Any]) -> None:
    found = connector_of({"kv_connector": "AiokvConnector", **more})
    assert found is aiokv.connectors.vllm.AiokvConnector


def test_processes_may_register_twice() -> None:
    aiokv.connectors.vllm.register()
    aiokv.connectors.vllm.register()


def test_frontend_reads_the_statistics_of_a_part_of_a_multi_connector() -> None:
    load_general_plugins()
    sent = MultiConnector.build_kv_connector_stats()
    sent["AiokvConnector"] = ConnectorStatistics({"saved_blocks": 1})
    to_dict = getattr(sent, "to_dict", None)  # since 0.24; vLLM sent the fields of dataclasses
    data = to_dict() if to_dict else {"AiokvConnector": {"data": {"saved_blocks": 1}}}
    received = MultiConnector.build_kv_connector_stats(data=data)
    assert received["AiokvConnector"].data == {"saved_blocks": 1}
