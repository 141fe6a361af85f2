"""Connectors that write the times of their calls to a file, to find the delays of a load.

With ``python -m bench.vllm --record``, servers with a connector use these classes. The file has a
line of JSON per call: time, duration in milliseconds, name, and the requests of the call.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

RECORD_FILE = "BENCH_VLLM_RECORD"
"""Environment variable with the path of the file, to which lines are appended."""

_CONNECTORS = {
    "RecordedOffloading": ("OffloadingConnector", None),
    "RecordedAiokv": ("AiokvConnector", "aiokv.connectors.vllm"),
}


class _Record:
    """Lines of one process, which are written when vLLM asks for finished loads."""

    def __init__(self) -> None:
        self._file = open(os.environ[RECORD_FILE], "a", encoding="utf-8")  # noqa: SIM115 - kept
        self._lines: list[str] = []

    def note(self, name: str, began: float, **details: Any) -> None:
        now = time.perf_counter()
        line = {"at": round(began, 6), "ms": round(1e3 * (now - began), 3), "call": name}
        self._lines.append(json.dumps(line | details))

    def flush(self) -> None:
        self._file.write("".join(line + "\n" for line in self._lines))
        self._file.flush()
        self._lines.clear()


def _recorded(base: type) -> type:
    """Return a subclass of a connector that records the calls of both halves."""

    class Recorded(base):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            self._record = _Record()

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            began = time.perf_counter()
            found = super().get_num_new_matched_tokens(request, num_computed_tokens)
            self._record.note("match", began, request=request.request_id, found=found[0])
            return found

        def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
            began = time.perf_counter()
            super().update_state_after_alloc(request, blocks, tokens)
            self._record.note("allocate", began, request=request.request_id, loaded=tokens)

        def build_connector_meta(self, output: Any) -> Any:
            began = time.perf_counter()
            message = super().build_connector_meta(output)
            self._record.note("build", began, scheduled=dict(output.num_scheduled_tokens))
            return message

        def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            super().start_load_kv(*args, **kwargs)
            self._record.note("start_load", began)

        def get_finished(self, finished_req_ids: set[str]) -> Any:
            began = time.perf_counter()
            result = super().get_finished(finished_req_ids)
            self._record.note("get_finished", began, loaded=sorted(result[1] or ()))
            self._record.flush()
            return result

        def update_connector_output(self, connector_output: Any) -> None:
            began = time.perf_counter()
            super().update_connector_output(connector_output)
            self._record.note("update", began)
            self._record.flush()

        def request_finished(self, request: Any, block_ids: Any) -> Any:
            began = time.perf_counter()
            result = super().request_finished(request, block_ids)
            self._record.note("finished", began, request=request.request_id)
            return result

    return Recorded


def __getattr__(name: str) -> type:
    if name not in _CONNECTORS:
        raise AttributeError(name)
    connector, module = _CONNECTORS[name]
    if module is None:
        base = KVConnectorFactory.get_connector_class_by_name(connector)
    else:
        import importlib

        base = getattr(importlib.import_module(module), connector)
    recorded = _recorded(base)
    recorded.__name__ = name
    globals()[name] = recorded
    return recorded
