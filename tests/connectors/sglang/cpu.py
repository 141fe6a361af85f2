"""SGLang's server on a machine without a GPU.

Tokenizer manager, scheduler, radix tree, HiCache and its storage threads are those of SGLang. The
parts that need a GPU are replaced in the process of the scheduler: streams and events, the
registration of host memory, and the kernels that copy pages between the device pool and the host
pool. The weights are random, and large enough that an output depends on each token of its prompt.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
import types
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.model_loader import loader

if TYPE_CHECKING:
    from collections.abc import Callable


class SerialEvent(torch.cpu.Event):
    """An event whose work has ended before it is recorded."""

    def elapsed_time(self, end: SerialEvent) -> float:
        """Return the time between two events in milliseconds."""
        return 0.0


class SerialStream(torch.cpu.Stream):
    """A stream whose work is done by the thread that submits it."""

    def synchronize(self) -> None:
        """Return at once, because no work is in flight."""


DEVICE_MODULE = types.SimpleNamespace(
    __name__="serial",
    Event=lambda enable_timing=False: SerialEvent(),
    Stream=SerialStream,
    current_stream=torch.cpu.current_stream,
    stream=torch.cpu.stream,
    synchronize=torch.cpu.synchronize,
)


def rows_at(pointer: int, num_rows: int, row_bytes: int) -> np.ndarray:
    """Return the rows of a layer of the device pool, which is in host memory here."""
    memory = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(pointer)
    return np.frombuffer(memory, np.uint8).reshape(num_rows, row_bytes)


def as_rows(tensor: torch.Tensor, row_bytes: int) -> np.ndarray:
    """Return the bytes of a contiguous tensor as rows."""
    return tensor.view(torch.uint8).reshape(-1, row_bytes).numpy()


def save_page_first(
    *, src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, src_indices: Any,
    dst_indices: Any, item_size: int, dst_layout_dim: int, num_layers: int,
) -> None:  # fmt: skip
    """Copy tokens of all layers to a host pool in which the layers of a token are adjacent."""
    source, destination = src_indices.numpy(), dst_indices.numpy()
    num_rows = int(source.max()) + 1
    for layers, pool in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        host = as_rows(pool, item_size)
        for layer, pointer in enumerate(layers.tolist()):
            host[destination * num_layers + layer] = rows_at(pointer, num_rows, item_size)[source]
    assert dst_layout_dim == item_size * num_layers


def load_page_first(
    *, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    layer_id: int, item_size: int, src_layout_dim: int,
) -> None:  # fmt: skip
    """Copy tokens of a layer from a host pool in which the layers of a token are adjacent."""
    source, destination = src_indices.numpy(), dst_indices.numpy()
    num_layers = src_layout_dim // item_size
    for pool, layer in ((src_k, dst_k), (src_v, dst_v)):
        host = as_rows(pool, item_size)
        as_rows(layer, item_size)[destination] = host[source * num_layers + layer_id]


def save_layer_first(
    *, src_k_layers: Any, dst_k_layers: Any, src_v_layers: Any, dst_v_layers: Any,
    src_indices: Any, dst_indices: Any, item_size: int, num_layers: int,
) -> None:  # fmt: skip
    """Copy tokens of all layers to a host pool in which the tokens of a layer are adjacent."""
    source, destination = src_indices.numpy(), dst_indices.numpy()
    pairs = [*zip(src_k_layers.tolist(), dst_k_layers.tolist(), strict=True)]
    pairs += zip(src_v_layers.tolist(), dst_v_layers.tolist(), strict=True)
    assert len(pairs) == 2 * num_layers
    for device, host in pairs:
        loaded = rows_at(device, int(source.max()) + 1, item_size)
        rows_at(host, int(destination.max()) + 1, item_size)[destination] = loaded[source]


def load_layer_first(
    *, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    item_size: int,
) -> None:  # fmt: skip
    """Copy tokens of a layer from a host pool in which the tokens of a layer are adjacent."""
    for host, device in ((src_k, dst_k), (src_v, dst_v)):
        as_rows(device, item_size)[dst_indices.numpy()] = as_rows(host, item_size)[
            src_indices.numpy()
        ]


def read_windows_at_their_places(backend: Any) -> None:
    """Make SGLang's PyTorch attention read layers with windows from the pool of the windows.

    It writes their K and V at the places in this pool, and reads them at those of full attention.
    """
    for name in ("forward_extend", "forward_decode"):
        forward = getattr(backend, name)

        def read(
            self: Any, q: Any, k: Any, v: Any, layer: Any, *arguments: Any,
            forward: Any = forward, **options: Any,
        ) -> Any:  # fmt: skip
            table = self.req_to_token_pool
            if self.use_sliding_window_kv_pool and (layer.sliding_window_size or -1) > -1:
                places = self.token_to_kv_pool.translate_loc_from_full_to_swa(table.req_to_token)
                self.req_to_token_pool = types.SimpleNamespace(req_to_token=places)
            try:
                return forward(self, q, k, v, layer, *arguments, **options)
            finally:
                self.req_to_token_pool = table

        setattr(backend, name, read)


def fill_weights(model: torch.nn.Module) -> None:
    """Fill the weights of a model, the same in each process."""
    for name, parameter in model.state_dict().items():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        bound = math.sqrt(3 / (1 if "embed" in name else parameter.shape[-1]))
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.uniform_(-bound, bound, generator=generator)


def replace_what_needs_a_gpu() -> None:
    """Replace it in this process, which becomes the scheduler."""
    for module in ("mem_cache.l2_transfer", "managers.cache_controller"):
        vars(importlib.import_module(f"sglang.srt.{module}"))["device_module"] = DEVICE_MODULE
    for module in ("common", "base", "mha"):
        names = vars(importlib.import_module(f"sglang.srt.mem_cache.pool_host.{module}"))
        names["_cuda_host_register"] = names["_cuda_host_unregister"] = lambda *_: None
    mha = vars(importlib.import_module("sglang.srt.mem_cache.pool_host.mha"))
    mha["transfer_kv_all_layer_lf_pf"] = save_page_first
    mha["transfer_kv_per_layer_pf_lf"] = load_page_first
    mha["transfer_kv_all_layer"] = save_layer_first
    mha["transfer_kv_per_layer"] = load_layer_first
    native = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    read_windows_at_their_places(native.TorchNativeAttnBackend)
    # SGLang accepts few backends for models with windows; this one needs a CPU with AMX.
    backends = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    backends.ATTENTION_BACKENDS["intel_amx"] = backends.ATTENTION_BACKENDS["torch_native"]
    # SGLang imports the name on CPUs without AMX kernels, and calls its own PyTorch code instead.
    operations = types.ModuleType("vllm._custom_ops")
    vars(operations)["rotary_embedding"] = None
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm._custom_ops"] = operations


def run_scheduler_on_the_cpu(*arguments: Any, **options: Any) -> Any:
    """Run the scheduler in this process."""
    replace_what_needs_a_gpu()
    vars(loader)["initialize_dummy_weights"] = fill_weights
    return run_scheduler_process(*arguments, **options)


class CpuEngine(Engine):
    """SGLang's engine with its scheduler on the CPU."""

    run_scheduler_process_func: Callable[..., Any] = staticmethod(run_scheduler_on_the_cpu)
