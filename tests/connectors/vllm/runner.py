"""A model runner that keeps real bytes, and calls the connector in the order of vLLM's runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from aiokv.connectors.vllm import compat
from tests.connectors.vllm.model import LAYERS, VOCABULARY, first_seen, next_kv, next_token

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput

    from aiokv.connectors.vllm import AiokvConnector

LAYER_NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


def layer_names(group: int) -> list[str]:
    """Return the names of the layers of a group."""
    if group == 0:
        return list(LAYER_NAMES)
    return [f"model.layers.{group * LAYERS + layer}.mixer" for layer in range(LAYERS)]


def index_name(name: str) -> str:
    """Return the name of the layer that has the index keys of a layer of sparse attention."""
    return name.replace(".attn", ".indexer.k_cache")


LAYOUTS = ("flash", "flash_heads_first", "infer", "latent", "indexed", "kernel_blocks")
SHARED_LAYOUTS = ("infer", "kernel_blocks")  # layers of all kinds of groups can share a tensor
HEADS, DIM = 2, 2
INDEX_DIM = 3  # of index keys, so that their pages are smaller


def make_kv_cache(layout: str, num_blocks: int, block_tokens: int) -> torch.Tensor:
    """Return a tensor of one layer as a backend of vLLM would make it; 8 values per position."""
    if layout == "flash":
        return torch.zeros((2, num_blocks, block_tokens, HEADS, DIM), dtype=torch.int32)
    if layout == "flash_heads_first":
        cache = torch.zeros((2, num_blocks, HEADS, block_tokens, DIM), dtype=torch.int32)
        return cache.permute(0, 1, 3, 2, 4)
    if layout == "infer":
        return torch.zeros((num_blocks, 2, block_tokens, HEADS, DIM), dtype=torch.int32)
    if layout in ("latent", "indexed"):
        return torch.zeros((num_blocks, block_tokens, 2 * HEADS * DIM), dtype=torch.int32)
    assert layout == "kernel_blocks"  # two blocks of the kernel per block of the scheduler
    return torch.zeros((num_blocks * 2, 2, block_tokens // 2, HEADS, DIM), dtype=torch.int32)


class LayerCache:
    """KV of one layer; every value of a position is written, and verified when it is read."""

    def __init__(self, layout: str, num_blocks: int, block_tokens: int) -> None:
        self.tensor = make_kv_cache(layout, num_blocks, block_tokens)
        self._block_tokens = block_tokens
        view = self.tensor
        if layout.startswith("flash"):
            view = view.permute(1, 2, 0, 3, 4)  # blocks, tokens, kv, heads, dim
        elif layout in ("infer", "kernel_blocks"):
            view = view.permute(0, 2, 1, 3, 4)
        self._views: list[NDArray[np.int32]] = [view.numpy()]
        self._tokens_per_row = view.shape[1]
        self._index: torch.Tensor | None = None
        if layout == "indexed":
            self._index = torch.zeros((num_blocks, block_tokens, INDEX_DIM), dtype=torch.int32)
            self._views.append(self._index.numpy())

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of the layer of this name, and of its index keys."""
        index = {} if self._index is None else {index_name(name): self._index}
        return index | {name: self.tensor}

    def _rows(self, table: list[int], positions: NDArray[np.int64]) -> Any:
        slots = np.asarray(table)[positions // self._block_tokens] * self._block_tokens
        slots = slots + positions % self._block_tokens
        return slots // self._tokens_per_row, slots % self._tokens_per_row

    def write(self, table: list[int], position: int, value: int, rank: int) -> None:
        row, token = self._rows(table, np.array([position]))
        first = value ^ (rank << 20)
        for view in self._views:
            target = view[row[0], token[0]]
            target[...] = first + np.arange(target.size).reshape(target.shape)
            first += target.size

    def read(self, table: list[int], first: int, end: int, rank: int) -> NDArray[np.int64]:
        """Return the KV of positions; values that do not belong together become noise."""
        row, token = self._rows(table, np.arange(first, end))
        values = [view[row, token].reshape(end - first, -1) for view in self._views]
        return _verified(np.concatenate(values, axis=1), rank)

    def zero(self, block: int) -> None:
        """Set all bytes of a block to 0, as vLLM does with new blocks."""
        rows = self._block_tokens // self._tokens_per_row
        for view in self._views:
            view[block * rows : (block + 1) * rows] = 0


class StateCache:
    """Recurrent state of one layer in the memory of a LayerCache: one value per block.

    The state behind a position is in the block of this position.
    """

    def __init__(self, cache: LayerCache, num_blocks: int, block_tokens: int) -> None:
        pages = cache.tensor.view(num_blocks, -1)
        self._rows: NDArray[np.int32] = pages.numpy()
        self._block_tokens = block_tokens
        size = pages.shape[1]
        # As vLLM gives it to connectors: tensors that follow each other in the page.
        self._tensors = [
            torch.as_strided(pages, (num_blocks, 3), (size, 1), 0),
            torch.as_strided(pages, (num_blocks, size - 3), (size, 1), 3),
        ]

    def tensors(self, name: str) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of the layer of this name."""
        return {name: self._tensors}

    def write(self, table: list[int], position: int, value: int, rank: int) -> None:
        row = self._rows[table[position // self._block_tokens]]
        row[:] = (value ^ (rank << 20)) + np.arange(row.size)

    def read(self, table: list[int], first: int, end: int, rank: int) -> NDArray[np.int64]:
        """Return the state behind position ``end - 1``."""
        assert first == end - 1
        return _verified(self._rows[[table[first // self._block_tokens]]], rank)


def _verified(rows: NDArray[np.int32], rank: int) -> NDArray[np.int64]:
    values = rows.astype(np.int64)
    values = (values - np.arange(values.shape[1])) ^ (rank << 20)
    same = (values == values[:, :1]).all(axis=1)
    return np.where(same, values[:, 0], values.sum(axis=1) + 12_345)


@dataclass
class RunningRequest:
    """A request as the worker knows it."""

    tokens: list[int]
    tables: list[list[int]]  # by group
    adapter: int
    num_prompt: int


@dataclass
class Launched:
    """A step whose connector calls were made and whose compute is to come."""

    output: SchedulerOutput
    kv_output: KVConnectorOutput
    work: list[tuple[str, RunningRequest, int, int, list[list[int]], list[int]]] = field(
        default_factory=list
    )
    result: ModelRunnerOutput | None = None


class Runner:
    """One worker.

    Args:
        rank: number of the worker.
        layout: name of LAYOUTS.
        rng: chooses the drafts.
        num_drafts: drafts per step for speculative decoding.
        kinds: kinds of the groups, whose layers share tensors.
    """

    def __init__(
        self,
        rank: int,
        layout: str,
        num_blocks: int,
        block_tokens: int,
        rng: random.Random,
        num_drafts: int = 0,
        kinds: Sequence[str] = ("full",),
    ) -> None:
        self.rank = rank
        self._kinds = tuple(kinds)
        self.caches = [LayerCache(layout, num_blocks, block_tokens) for _ in range(LAYERS)]
        self._states = {
            group: [StateCache(cache, num_blocks, block_tokens) for cache in self.caches]
            for group, kind in enumerate(self._kinds)
            if kind == "state"
        }
        self.main_layers = layer_names(0)
        self.kv_caches = {
            name: tensor
            for group, caches in enumerate(self._groups)
            for layer, cache in zip(layer_names(group), caches, strict=True)
            for name, tensor in cache.tensors(layer).items()
        }
        self.requests: dict[str, RunningRequest] = {}
        self.graph_mode = CUDAGraphMode.NONE
        self.drafts: dict[str, list[int]] = {}
        self.draft_layers = 0  # the last ones, which the draft model computes
        self._rng = rng
        self._num_drafts = num_drafts
        self.connector: AiokvConnector | None = None

    @property
    def _groups(self) -> list[list[Any]]:
        """Caches of the layers by group."""
        return [self._states.get(group, self.caches) for group in range(len(self._kinds))]

    def launch(self, output: SchedulerOutput) -> Launched:
        """Make the connector's calls of a step, and compute it if loads belong to the step."""
        self._update(output)
        kv_output = KVConnectorOutput()
        launched = Launched(output, kv_output)
        connector = self.connector
        if connector is not None:
            message = output.kv_connector_metadata
            connector.handle_preemptions(message)
            connector.bind_connector_metadata(message)
            connector.start_load_kv(
                SimpleNamespace(
                    attn_metadata={} if output.total_num_scheduled_tokens else None,
                    cudagraph_runtime_mode=self.graph_mode,
                    ubatch_slices=None,
                )
            )
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            first = self._computed[request_id]
            launched.work.append(
                (request_id, request, first, count, [*map(list, request.tables)], list(drafts))
            )
        if connector is not None:
            if output.total_num_scheduled_tokens:
                if self.graph_mode != CUDAGraphMode.FULL:
                    self._call_layers(connector, LAYER_NAMES[: LAYERS - self.draft_layers])
                if not self.draft_layers:
                    connector.wait_for_save()
            if compat.CAN_FAIL_REQUESTS:
                results = connector.get_transfer_results(output.finished_req_ids)
                kv_output.finished_recving = results.finished_recving
                kv_output.failed_recving = results.failed_recving
            else:
                finished = connector.get_finished(output.finished_req_ids)
                kv_output.finished_sending, kv_output.finished_recving = finished
            kv_output.invalid_block_ids = connector.get_block_ids_with_load_errors()
            kv_output.kv_connector_stats = connector.get_kv_connector_stats()
            kv_output.kv_connector_worker_meta = connector.build_connector_worker_meta()
            if output.total_num_scheduled_tokens and self.draft_layers:
                self._call_layers(connector, LAYER_NAMES[LAYERS - self.draft_layers :])
                connector.wait_for_save()
            connector.clear_connector_metadata()
        return launched

    def _call_layers(self, connector: AiokvConnector, names: list[str]) -> None:
        for name in names:
            if name not in self.kv_caches:
                continue  # of another stage
            connector.wait_for_layer_load(name)
            connector.save_kv_layer(name, self.kv_caches[name], None)

    def _update(self, output: SchedulerOutput) -> None:
        for block in output.new_block_ids_to_zero or ():
            for cache in self.caches:
                cache.zero(block)
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        self._computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            adapter = 0 if new.lora_request is None else new.lora_request.lora_int_id
            self.requests[new.req_id] = RunningRequest(
                list(new.prompt_token_ids or []),
                [list(table) for table in new.block_ids],
                adapter,
                len(new.prompt_token_ids or []),
            )
            self._computed[new.req_id] = new.num_computed_tokens
        running = output.scheduled_cached_reqs
        for i, request_id in enumerate(running.req_ids):
            request = self.requests[request_id]
            blocks = running.new_block_ids[i]
            if request_id in running.resumed_req_ids:
                request.tables = [list(table) for table in blocks]
                request.tokens = list(running.all_token_ids[request_id])
            else:
                # vLLM drops the token of a step whose load has failed.
                del request.tokens[request.num_prompt + running.num_output_tokens[i] :]
                for table, added in zip(request.tables, blocks or (), strict=False):
                    table += added
            self._computed[request_id] = running.num_computed_tokens[i]

    def compute(self, launched: Launched) -> ModelRunnerOutput:
        """Compute a step, once: write the KV of its positions, and sample."""
        if launched.result is not None:
            return launched.result
        sampled = []
        self.drafts = {}
        for request_id, request, first, count, tables, drafts in launched.work:
            sampled.append(self._compute_one(request_id, request, first, count, tables, drafts))
        ids = [work[0] for work in launched.work]
        launched.result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=launched.kv_output if self.connector is not None else None,
        )
        return launched.result

    def _compute_one(
        self,
        request_id: str,
        request: RunningRequest,
        first: int,
        count: int,
        tables: list[list[int]],
        drafts: list[int],
    ) -> list[int]:
        inputs = [*request.tokens[: first + count - len(drafts)], *drafts]
        assert len(inputs) == first + count, (len(inputs), first, count)
        for group, (caches, table) in enumerate(zip(self._groups, tables, strict=True)):
            for layer, cache in enumerate(caches, group * LAYERS):
                value = int(cache.read(table, first - 1, first, self.rank)[0]) if first else 0
                for position in range(first, first + count):
                    value = next_kv(value, inputs[position], layer, request.adapter)
                    # A state is written where the step ends, and nowhere else.
                    if self._kinds[group] != "state" or position == first + count - 1:
                        cache.write(table, position, value, self.rank)
        if first + count - len(drafts) < len(request.tokens):
            return []  # a chunk of the prompt
        new: list[int] = []
        for verified in range(len(drafts) + 1):
            end = first + count - len(drafts) + verified
            seen = [
                np.stack(
                    [cache.read(table, first_seen(kind, end), end, self.rank) for cache in caches]
                )
                for kind, caches, table in zip(self._kinds, self._groups, tables, strict=True)
            ]
            new.append(next_token(seen))
            if verified < len(drafts) and drafts[verified] != new[-1]:
                break
        request.tokens += new
        if self._num_drafts:
            self.drafts[request_id] = self._draft(request)
        return new

    def _draft(self, request: RunningRequest) -> list[int]:
        """Return drafts, of which some are right."""
        from tests.connectors.vllm.model import generate

        right = generate(request.tokens, request.adapter, self._num_drafts, self._kinds)
        return [
            token if self._rng.random() < 0.6 else self._rng.randrange(VOCABULARY)
            for token in right
        ]
