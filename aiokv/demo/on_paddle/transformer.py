"""A decoder-only transformer in Paddle: RMSNorm, RoPE, GQA, SwiGLU; it computes in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv.demo.on_cpu import CpuModel
from aiokv.demo.on_paddle.paged_cache import PaddleCache
from aiokv.demo.row_tiles import largest_alike_tile
from aiokv.frameworks.paddle import import_paddle

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.demo.model import Array, Batch, ModelConfig
    from aiokv.demo.on_paddle.kv_format import KVFormat
    from aiokv.demo.paging import Span
    from aiokv.demo.weights import LayerWeights, Weights

paddle = import_paddle()

# Elementwise kernels treat what does not fill a vector register apart: rows are padded to this.
PADDING_ROWS: Final = 16
TILE_CANDIDATES: Final = (16, 8, 4, 2, 1)


class PaddleTransformer(CpuModel):
    """Forward passes over a paged cache, on the cpu.

    Stateless beside the weights; one thread at a time. Sets Paddle to one thread for the whole
    process: products this small gain nothing from more, and the event loop wants the other cores.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv_format: KVFormat,
        *,
        max_context_tokens: int,
    ) -> None:
        paddle.set_device("cpu")
        paddle.base.core.set_num_threads(1)
        self.config = config
        self._kv_format = kv_format
        cos, sin = config.rope_tables(max_context_tokens)
        self._cos, self._sin = paddle.to_tensor(cos), paddle.to_tensor(sin)
        self._embedding = paddle.to_tensor(weights.embedding)
        self._layers = [_LayerTensors(layer) for layer in weights.layers]
        self._final_norm = paddle.to_tensor(weights.final_norm)
        self._unembedding = paddle.to_tensor(weights.unembedding)
        self._tile = largest_alike_tile(
            weights.matrix_shapes(), _product, candidates=TILE_CANDIDATES
        )

    @property
    def description(self) -> str:
        return (
            f"Paddle {paddle.__version__}: {self.config}, float32, K and V as "
            f"{self._kv_format.name}, products in tiles of {self._tile} rows"
        )

    def new_cache(self, device_blocks: int, block_tokens: int) -> PaddleCache:
        config = self.config
        return PaddleCache(
            layers=config.layers,
            shape=(device_blocks, block_tokens, config.kv_heads, config.head_dim),
            kv_format=self._kv_format,
        )

    def forward(
        self, batch: Batch, cache: PaddleCache, before_layer: Callable[[int], None] | None = None
    ) -> Array:
        """See :class:`aiokv.demo.model.Model`."""
        rows = len(batch.tokens)
        padded = -(-rows // PADDING_ROWS) * PADDING_ROWS
        tokens = np.zeros(padded, dtype=np.int64)
        tokens[:rows] = batch.tokens
        x = paddle.nn.functional.embedding(paddle.to_tensor(tokens), self._embedding)
        for part in batch.images:
            embeddings = part.embeddings(self.config.hidden)
            x[part.start : part.stop] = paddle.to_tensor(embeddings)
        positions = paddle.to_tensor(batch.positions)
        cos = paddle.gather(self._cos, positions).unsqueeze(1)
        sin = paddle.gather(self._sin, positions).unsqueeze(1)
        for index, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(index)
            qkv = self._matmul(self._norm(x, layer.attention_norm), layer.qkv)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            mixed = self._attention(index, layer, batch.spans, qkv, cos, sin, cache)
            x = x + self._matmul(mixed, layer.out)
            gate_up = self._matmul(self._norm(x, layer.ffn_norm), layer.gate_up)
            gate, up = paddle.chunk(gate_up, 2, axis=-1)
            x = x + self._matmul(paddle.nn.functional.silu(gate) * up, layer.down)
        logits = self._matmul(self._norm(x, self._final_norm), self._unembedding)
        found: Array = logits[:rows].numpy()
        return found

    def _attention(
        self,
        index: int,
        layer: _LayerTensors,
        spans: list[Span],
        qkv: Any,
        cos: Any,
        sin: Any,
        cache: PaddleCache,
    ) -> Any:
        config, rows, padded = self.config, cos.shape[0], qkv.shape[0]
        heads = qkv.reshape([padded, -1, config.head_dim])[:rows]
        queries, keys, values = paddle.split(
            heads, [config.heads, config.kv_heads, config.kv_heads], axis=1
        )
        if layer.query_norm is not None:
            queries = self._norm(queries, layer.query_norm)
            keys = self._norm(keys, layer.key_norm)
        cache.write(index, spans, rotate(keys, cos, sin), values)
        scaled = rotate(queries, cos, sin) * config.score_scale
        mixed = cache.attend(index, spans, scaled).reshape([rows, -1])
        padding = paddle.zeros([padded - rows, mixed.shape[1]])
        return paddle.concat([mixed, padding])

    def _norm(self, x: Any, weight: Any) -> Any:
        mean_square = (x * x).mean(-1, keepdim=True)
        return x / paddle.sqrt(mean_square + self.config.norm_epsilon) * weight

    def _matmul(self, x: Any, weight: Any) -> Any:
        """``[rows, k] @ [k, n]`` as products of one shape, whose rows are treated alike."""
        tiles = [
            paddle.matmul(x[row : row + self._tile], weight)
            for row in range(0, x.shape[0], self._tile)
        ]
        return paddle.concat(tiles)


class _LayerTensors:
    """One layer's weights as Paddle tensors."""

    def __init__(self, weights: LayerWeights) -> None:
        self.attention_norm = paddle.to_tensor(weights.attention_norm)
        self.qkv = paddle.to_tensor(weights.qkv)
        self.out = paddle.to_tensor(weights.out)
        self.ffn_norm = paddle.to_tensor(weights.ffn_norm)
        self.gate_up = paddle.to_tensor(weights.gate_up)
        self.down = paddle.to_tensor(weights.down)
        self.qkv_bias = _optional(weights.qkv_bias)
        self.query_norm = _optional(weights.query_norm)
        self.key_norm = _optional(weights.key_norm)


def rotate(heads: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of ``[rows, heads, head_dim]`` by tables ``[rows, 1, head_dim / 2]``."""
    first, second = paddle.chunk(heads, 2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _optional(weight: Array | None) -> Any:
    return None if weight is None else paddle.to_tensor(weight)


def _product(x: Array, weight: Array) -> Array:
    found: Array = paddle.matmul(paddle.to_tensor(x), paddle.to_tensor(weight)).numpy()
    return found
