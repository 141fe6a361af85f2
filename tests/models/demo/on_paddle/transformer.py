"""A decoder-only transformer in Paddle: RMSNorm, RoPE, SwiGLU; it computes in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.demo.transformer import CpuModel, rope_tables
from aiokv.frameworks.paddle import import_paddle
from tests.models.demo.images import image_embeddings
from tests.models.demo.on_paddle.attention import Rows
from tests.models.demo.on_paddle.products import padded_rows, rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.demo.batch import Batch
    from aiokv.demo.weights import Array, ModelConfig, Weights
    from tests.models.demo.on_paddle.attention import Attention
    from tests.models.demo.on_paddle.paged_cache import PaddleCache
    from tests.models.demo.on_paddle.products import Products

paddle = import_paddle()


class PaddleTransformer(CpuModel):
    """Forward passes over a paged cache, on the cpu.

    Stateless beside the weights; one thread at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: Attention,
        products: Products,
        *,
        max_context_tokens: int,
    ) -> None:
        self.config = config
        self._attention = attention
        self._products = products
        tables = rope_tables(config.rope_theta, attention.rotary_dim, max_context_tokens)
        self._cos, self._sin = map(paddle.to_tensor, tables)
        self._embedding = paddle.to_tensor(weights.embedding)
        self._layers = [
            {name: paddle.to_tensor(array) for name, array in layer.items()}
            for layer in weights.layers
        ]
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
        """See :meth:`aiokv.demo.transformer.NumpyTransformer.forward`."""
        x, rows, matmul = self._embed(batch), self._rows(batch), self._products.matmul
        for index, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(index)
            normed = self._norm(x, layer["attention_norm"])
            x = x + self._attention(index, layer, normed, rows, cache)
            gate_up = matmul(self._norm(x, layer["ffn_norm"]), layer["gate_up"])
            gate, up = paddle.chunk(gate_up, 2, axis=-1)
            x = x + matmul(paddle.nn.functional.silu(gate) * up, layer["down"])
        logits = matmul(self._norm(x, self._final_norm), self._unembedding)
        found: Array = logits[: rows.count].numpy()
        return found

    def _embed(self, batch: Batch) -> Any:
        """``[padded rows, hidden]``."""
        tokens = np.zeros(padded_rows(len(batch.tokens)), dtype=np.int64)
        tokens[: len(batch.tokens)] = batch.tokens
        x = paddle.nn.functional.embedding(paddle.to_tensor(tokens), self._embedding)
        for start, rows in image_embeddings(batch, self.config.hidden):
            x[start : start + len(rows)] = paddle.to_tensor(rows)
        return x

    def _rows(self, batch: Batch) -> Rows:
        positions = paddle.to_tensor(batch.positions)
        cos = paddle.gather(self._cos, positions).unsqueeze(1)
        sin = paddle.gather(self._sin, positions).unsqueeze(1)
        return Rows(batch.spans, cos, sin)

    def _norm(self, x: Any, weight: Any) -> Any:
        return rms_norm(x, weight, self.config.norm_epsilon)
