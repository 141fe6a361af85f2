"""A decoder-only transformer in Paddle: RMSNorm, RoPE, SwiGLU; it computes in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.demo.on_cpu import CpuModel
from aiokv.demo.on_paddle.attention import Rows
from aiokv.demo.on_paddle.products import padded_rows, rms_norm
from aiokv.frameworks.paddle import import_paddle

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.demo.model import Array, Batch, ModelConfig
    from aiokv.demo.on_paddle.attention import Attention
    from aiokv.demo.on_paddle.paged_cache import PaddleCache
    from aiokv.demo.on_paddle.products import Products
    from aiokv.demo.weights import LayerWeights, Weights

paddle = import_paddle()


class PaddleTransformer(CpuModel):
    """Forward passes over a paged cache, on the cpu.

    Stateless beside the weights; one thread at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights[LayerWeights],
        attention: Attention,
        products: Products,
        *,
        max_context_tokens: int,
    ) -> None:
        self.config = config
        self._attention = attention
        self._products = products
        cos, sin = config.rope_tables(max_context_tokens)
        self._cos, self._sin = paddle.to_tensor(cos), paddle.to_tensor(sin)
        self._embedding = paddle.to_tensor(weights.embedding)
        self._layers = [_LayerTensors(layer) for layer in weights.layers]
        self._final_norm = paddle.to_tensor(weights.final_norm)
        self._unembedding = paddle.to_tensor(weights.unembedding)

    @property
    def description(self) -> str:
        return (
            f"Paddle {paddle.__version__}: {self.config}, float32, {self._attention.cached}, "
            f"products in tiles of {self._products.tile} rows"
        )

    def new_cache(self, device_blocks: int, block_tokens: int) -> PaddleCache:
        return self._attention.new_cache(device_blocks, block_tokens)

    def forward(
        self, batch: Batch, cache: PaddleCache, before_layer: Callable[[int], None] | None = None
    ) -> Array:
        """See :class:`aiokv.demo.model.Model`."""
        x, rows, matmul = self._embed(batch), self._rows(batch), self._products.matmul
        for index, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(index)
            x = x + self._attention(index, self._norm(x, layer.attention_norm), rows, cache)
            gate_up = matmul(self._norm(x, layer.ffn_norm), layer.gate_up)
            gate, up = paddle.chunk(gate_up, 2, axis=-1)
            x = x + matmul(paddle.nn.functional.silu(gate) * up, layer.down)
        logits = matmul(self._norm(x, self._final_norm), self._unembedding)
        found: Array = logits[: rows.count].numpy()
        return found

    def _embed(self, batch: Batch) -> Any:
        """``[padded rows, hidden]``."""
        tokens = np.zeros(padded_rows(len(batch.tokens)), dtype=np.int64)
        tokens[: len(batch.tokens)] = batch.tokens
        x = paddle.nn.functional.embedding(paddle.to_tensor(tokens), self._embedding)
        for part in batch.images:
            embeddings = part.embeddings(self.config.hidden)
            x[part.start : part.stop] = paddle.to_tensor(embeddings)
        return x

    def _rows(self, batch: Batch) -> Rows:
        positions = paddle.to_tensor(batch.positions)
        cos = paddle.gather(self._cos, positions).unsqueeze(1)
        sin = paddle.gather(self._sin, positions).unsqueeze(1)
        return Rows(batch.spans, cos, sin)

    def _norm(self, x: Any, weight: Any) -> Any:
        return rms_norm(x, weight, self.config.norm_epsilon)


class _LayerTensors:
    """One layer's weights as Paddle tensors, without its attention's."""

    def __init__(self, weights: LayerWeights) -> None:
        self.attention_norm = paddle.to_tensor(weights.attention_norm)
        self.ffn_norm = paddle.to_tensor(weights.ffn_norm)
        self.gate_up = paddle.to_tensor(weights.gate_up)
        self.down = paddle.to_tensor(weights.down)
