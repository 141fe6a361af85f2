"""Grouped-query attention in Paddle: keys and values of a few heads are cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.demo.on_paddle.paged_cache import PaddleCache, PagedTensors
from aiokv.demo.on_paddle.products import masked_softmax, pad, product, rms_norm, rotate
from aiokv.frameworks.paddle import import_paddle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.demo.grouped import GroupedConfig, GroupedLayerWeights
    from aiokv.demo.model import Array
    from aiokv.demo.on_paddle.attention import Rows
    from aiokv.demo.on_paddle.kv_format import KVFormat
    from aiokv.demo.on_paddle.products import Products

paddle = import_paddle()


class GroupedAttention:
    """See :class:`aiokv.demo.on_paddle.attention.Attention`. Regions ``k`` and ``v``."""

    def __init__(
        self,
        config: GroupedConfig,
        layers: Sequence[GroupedLayerWeights],
        products: Products,
        kv_format: KVFormat,
    ) -> None:
        self._config = config
        self._layers = [_LayerTensors(weights) for weights in layers]
        self._products = products
        self._kv_format = kv_format

    @property
    def cached(self) -> str:
        return f"K and V as {self._kv_format.name}"

    def new_cache(self, device_blocks: int, block_tokens: int) -> PaddleCache:
        config = self._config
        shape = (device_blocks, block_tokens, config.kv_heads, config.head_dim)
        return PaddleCache(
            {name: PagedTensors(config.layers, shape, self._kv_format) for name in ("k", "v")},
            block_tokens,
        )

    def __call__(self, layer: int, x: Any, rows: Rows, cache: PaddleCache) -> Any:
        weights, config = self._layers[layer], self._config
        qkv = self._products.matmul(x, weights.qkv)
        if weights.qkv_bias is not None:
            qkv = qkv + weights.qkv_bias
        heads = qkv.reshape([x.shape[0], -1, config.head_dim])[: rows.count]
        queries, keys, values = paddle.split(
            heads, [config.heads, config.kv_heads, config.kv_heads], axis=1
        )
        if weights.query_norm is not None:
            queries = rms_norm(queries, weights.query_norm, config.norm_epsilon)
            keys = rms_norm(keys, weights.key_norm, config.norm_epsilon)
        cache.write(layer, rows.spans, k=rotate(keys, rows.cos, rows.sin), v=values)
        queries = rotate(queries, rows.cos, rows.sin) * config.score_scale
        mixed = paddle.concat(
            [
                attend(queries[part.start : part.stop], part.rows["k"], part.rows["v"], part.hidden)
                for part in cache.read(layer, rows.spans)
            ]
        )
        return self._products.matmul(pad(mixed.flatten(1)), weights.out)


class _LayerTensors:
    """One layer's projections as Paddle tensors."""

    def __init__(self, weights: GroupedLayerWeights) -> None:
        self.qkv = paddle.to_tensor(weights.qkv)
        self.out = paddle.to_tensor(weights.out)
        self.qkv_bias = _optional(weights.qkv_bias)
        self.query_norm = _optional(weights.query_norm)
        self.key_norm = _optional(weights.key_norm)


def attend(queries: Any, keys: Any, values: Any, hidden: Any) -> Any:
    """Attention of consecutive positions over one context.

    Args:
        queries: ``[rows, heads, head_dim]``, scaled.
        keys: ``[tokens, kv_heads, head_dim]``.
        values: as keys.
        hidden: bool ``[rows, tokens]``: what a row does not attend to.

    Returns:
        ``[rows, heads, head_dim]``. Each row is one product, whose shape and alignment depend on
        the length of the context only.
    """
    rows, heads, head_dim = queries.shape
    _, kv_heads, _ = keys.shape
    grouped = queries.reshape([rows, kv_heads, heads // kv_heads, head_dim])
    keys, values = keys.transpose([1, 2, 0]), values.transpose([1, 0, 2])
    scores = paddle.stack([product(row, keys) for row in grouped.unbind(0)])
    weights = masked_softmax(scores, hidden.unsqueeze([1, 2]))
    mixed = paddle.stack([product(row, values) for row in weights.unbind(0)])
    return mixed.reshape([rows, heads, head_dim])


def _optional(weight: Array | None) -> Any:
    return None if weight is None else paddle.to_tensor(weight)
