"""A decoder-only transformer on a GPU: RMSNorm, RoPE, GQA, SwiGLU in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.demo.batch import slots
from aiokv.demo.transformer import rope_tables
from aiokv.errors import ConfigError
from aiokv.worker.device.cuda import CudaDevice
from tests.models.demo.on_cupy.kernels import (
    MAX_CONTEXT_TOKENS,
    THREADS,
    Kernels,
    blocks_for,
    import_cupy,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.demo.batch import Batch, Span
    from aiokv.demo.weights import Array, GroupedConfig, Weights


class CupyCache:
    """Per-layer K and V ``[device_blocks, block_tokens, kv_heads, head_dim]`` on the GPU."""

    def __init__(self, cupy: Any, stream: Any, layers: int, shape: tuple[int, ...]) -> None:
        self._cupy = cupy
        self._stream = stream
        self.keys = [cupy.zeros(shape, np.float32) for _ in range(layers)]
        self.values = [cupy.zeros(shape, np.float32) for _ in range(layers)]
        cupy.cuda.get_current_stream().synchronize()  # zeroed there, used in `stream`
        self.block_tokens = shape[1]

    def regions(self) -> aiokv.Regions:
        regions = aiokv.Regions(num_layers=len(self.keys))
        regions.add("k", layers=self.keys)
        regions.add("v", layers=self.values)
        return regions

    def corrupt(self, block: int) -> None:
        """Negate one block's keys and values in every layer, in the order of the compute stream."""
        with self._stream:
            for array in (*self.keys, *self.values):
                self._cupy.negative(array[block], out=array[block])

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy the bytes of whole blocks, ``[blocks, block_bytes]``."""
        with self._stream:
            ids = self._cupy.asarray(blocks)
            arrays = (*self.keys, *self.values)
            parts = [array[ids].reshape(len(blocks), -1) for array in arrays]
            found: NDArray[np.float32] = self._cupy.concatenate(parts, axis=1).get(
                stream=self._stream
            )
        return found.view(np.uint8)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A batch on the GPU.

    Attributes:
        positions: int32 ``[rows]``.
        slots: int64 ``[rows]``: where a row's keys go, counted in tokens of the cache.
        tables: int32 ``[rows, blocks]``: the block table of each row's sequence.
        context_tokens: the longest that a row attends to.
    """

    rows: int
    positions: Any
    slots: Any
    tables: Any
    context_tokens: int


class CupyTransformer:
    """Forward passes over a paged cache, in a stream of its own.

    Stateless beside the weights; one thread at a time.

    Raises:
        ConfigError: there is no GPU or no CuPy, aiokv was built without CUDA, or the context is
            too long for these kernels.
    """

    def __init__(
        self,
        config: GroupedConfig,
        weights: Weights,
        *,
        max_context_tokens: int,
    ) -> None:
        if max_context_tokens > MAX_CONTEXT_TOKENS:
            raise ConfigError(
                f"the demo's attention kernel takes {MAX_CONTEXT_TOKENS} tokens, not "
                f"{max_context_tokens}"
            )
        self._cupy = import_cupy()
        self.new_device()  # raise now, not after the start of a run
        self.config = config
        self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self._kernels = Kernels(self._cupy)
        upload = self._cupy.asarray
        tables = rope_tables(config.rope_theta, config.head_dim, max_context_tokens)
        self._cos, self._sin = map(upload, tables)
        self._embedding = upload(weights.embedding, order="C")
        self._layers = [
            {name: upload(array, order="C") for name, array in layer.items()}
            for layer in weights.layers
        ]
        self._final_norm = upload(weights.final_norm)
        self._unembedding = upload(weights.unembedding, order="C")
        self._cupy.cuda.get_current_stream().synchronize()  # uploaded there, used in `stream`

    @property
    def description(self) -> str:
        properties = self._cupy.cuda.runtime.getDeviceProperties(0)
        name = properties["name"].decode()
        return f"CuPy {self._cupy.__version__} on {name}: {self.config}, float32, a thread a number"

    def new_cache(self, device_blocks: int, block_tokens: int) -> CupyCache:
        config = self.config
        shape = (device_blocks, block_tokens, config.kv_heads, config.head_dim)
        return CupyCache(self._cupy, self.stream, config.layers, shape)

    def new_device(self) -> CudaDevice:
        return CudaDevice()

    def forward(
        self, batch: Batch, cache: CupyCache, before_layer: Callable[[int], None] | None = None
    ) -> Array:
        """See :meth:`aiokv.demo.transformer.NumpyTransformer.forward`."""
        with self.stream:
            inputs = self._upload(batch, cache.block_tokens)
            x = self._embedding[self._cupy.asarray(batch.tokens)]
            for index, layer in enumerate(self._layers):
                if before_layer is not None:
                    before_layer(index)
                self._layer(x, index, layer, inputs, cache)
            logits = self._product(self._norm(x, self._final_norm), self._unembedding)
            found: Array = logits.get(stream=self.stream)
        return found

    def _upload(self, batch: Batch, block_tokens: int) -> _Inputs:
        blocks, offsets = slots(batch.spans, block_tokens)
        upload = self._cupy.asarray
        return _Inputs(
            rows=len(batch.tokens),
            positions=upload(batch.positions),
            slots=upload(blocks * block_tokens + offsets),
            tables=upload(_row_tables(batch.spans)),
            context_tokens=int(batch.positions.max()) + 1,
        )

    def _layer(
        self, x: Any, index: int, layer: dict[str, Any], inputs: _Inputs, cache: CupyCache
    ) -> None:
        """Compute one layer and add the result to ``x`` in place."""
        qkv = self._product(
            self._norm(x, layer["attention_norm"]), layer["qkv"], bias=layer.get("qkv_bias")
        )
        mixed = self._attention(qkv, index, layer, inputs, cache)
        self._product(mixed, layer["out"], add_to=x)
        gate_up = self._product(self._norm(x, layer["ffn_norm"]), layer["gate_up"])
        ffn = gate_up.shape[1] // 2
        gated = self._cupy.empty((inputs.rows, ffn), np.float32)
        grid = (blocks_for(ffn), inputs.rows)
        self._kernels.swiglu(grid, (THREADS,), (gate_up, gated, np.int32(ffn)))
        self._product(gated, layer["down"], add_to=x)

    def _attention(
        self, qkv: Any, index: int, layer: dict[str, Any], inputs: _Inputs, cache: CupyCache
    ) -> Any:
        config, rows = self.config, inputs.rows
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        stride = np.int32(config.qkv)
        if config.qk_norm:
            self._norm_heads(qkv, layer["query_norm"], 0, heads)
            self._norm_heads(qkv, layer["key_norm"], heads, kv_heads)
        self._kernels.rotate(
            (heads + kv_heads, rows),
            (THREADS,),
            (qkv, self._cos, self._sin, inputs.positions, stride, np.int32(head_dim)),
        )
        keys, values = cache.keys[index], cache.values[index]
        sizes = (stride, np.int32(heads * head_dim), np.int32(kv_heads * head_dim))
        self._kernels.store((rows,), (THREADS,), (qkv, inputs.slots, keys, values, *sizes))
        mixed = self._cupy.empty((rows, heads * head_dim), np.float32)
        counts = (inputs.tables.shape[1], cache.block_tokens, heads, kv_heads, head_dim)
        self._kernels.attend(
            (heads, rows),
            (THREADS,),
            (
                *(qkv, keys, values, inputs.tables, inputs.positions, mixed, stride),
                *map(np.int32, counts),
                np.float32(config.score_scale),
            ),
            shared_mem=4 * inputs.context_tokens,
        )
        return mixed

    def _norm(self, x: Any, weight: Any) -> Any:
        rows, size = x.shape
        out = self._cupy.empty_like(x)
        self._launch_norm(x, weight, out, rows, (size, 1, size, 0))
        return out

    def _norm_heads(self, qkv: Any, weight: Any, first_head: int, heads: int) -> None:
        """Norm some heads of every row in place."""
        size = self.config.head_dim
        layout = (size, heads, qkv.shape[1], first_head * size)
        self._launch_norm(qkv, weight, qkv, qkv.shape[0] * heads, layout)

    def _launch_norm(
        self, x: Any, weight: Any, out: Any, vectors: int, layout: tuple[int, int, int, int]
    ) -> None:
        epsilon = np.float32(self.config.norm_epsilon)
        arguments = (x, weight, out, *map(np.int32, layout), epsilon)
        self._kernels.rms_norm((vectors,), (THREADS,), arguments)

    def _product(self, x: Any, weight: Any, *, bias: Any = None, add_to: Any = None) -> Any:
        (rows, k), n = x.shape, weight.shape[1]
        out = self._cupy.empty((rows, n), np.float32) if add_to is None else add_to
        bias_at = np.uint64(0) if bias is None else bias
        sizes = (np.int32(k), np.int32(n), np.bool_(add_to is not None))
        self._kernels.product((blocks_for(n), rows), (THREADS,), (x, weight, bias_at, out, *sizes))
        return out


def _row_tables(spans: list[Span]) -> NDArray[np.int32]:
    """Return each row's block table, ``[rows, blocks]``, padded with zeros that are not read."""
    blocks = max(len(span.block_table) for span in spans)
    tables = np.zeros((spans[-1].stop, blocks), np.int32)
    for span in spans:
        tables[span.start : span.stop, : len(span.block_table)] = span.block_table
    return tables
