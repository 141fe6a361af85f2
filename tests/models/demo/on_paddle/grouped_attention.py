"""Grouped-query attention in Paddle: keys and values of a few heads are cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.frameworks.paddle import import_paddle
from tests.models.demo.on_paddle.attention import Attention
from tests.models.demo.on_paddle.paged_cache import PaddleCache, PagedTensors
from tests.models.demo.on_paddle.products import masked_softmax, pad, product, rms_norm, rotate

if TYPE_CHECKING:
    from tests.models.demo.on_paddle.attention import Rows

paddle = import_paddle()


class GroupedAttention(Attention):
    """Regions ``k`` and ``v``."""

    kind = "K and V"

    @property
    def rotary_dim(self) -> int:
        dim: int = self.config.head_dim
        return dim

    def new_cache(self, device_blocks: int, block_tokens: int) -> PaddleCache:
        config = self.config
        shape = (device_blocks, block_tokens, config.kv_heads, config.head_dim)
        return PaddleCache(
            {name: PagedTensors(config.layers, shape, self.kv_format) for name in ("k", "v")},
            block_tokens,
        )

    def __call__(
        self, layer: int, weights: dict[str, Any], x: Any, rows: Rows, cache: PaddleCache
    ) -> Any:
        """See :class:`Attention`."""
        config = self.config
        qkv = self.products.matmul(x, weights["qkv"])
        if config.qkv_bias:
            qkv = qkv + weights["qkv_bias"]
        heads = qkv.reshape([x.shape[0], -1, config.head_dim])[: rows.count]
        queries, keys, values = paddle.split(
            heads, [config.heads, config.kv_heads, config.kv_heads], axis=1
        )
        if config.qk_norm:
            queries = rms_norm(queries, weights["query_norm"], config.norm_epsilon)
            keys = rms_norm(keys, weights["key_norm"], config.norm_epsilon)
        cache.write(layer, rows.spans, k=rotate(keys, rows.cos, rows.sin), v=values)
        queries = rotate(queries, rows.cos, rows.sin) * config.score_scale
        mixed = paddle.concat(
            [
                attend(queries[part.start : part.stop], part.rows["k"], part.rows["v"], part.hidden)
                for part in cache.read(layer, rows.spans)
            ]
        )
        return self.products.matmul(pad(mixed.flatten(1)), weights["out"])


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
