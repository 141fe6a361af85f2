"""Multi-head latent attention in Paddle: one latent and one key a token are cached for all heads.

It is computed in the absorbed form: a head's queries are projected into the latents' space, and
what it mixes there is projected up to its values, so that a context is read as it is cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.demo.on_paddle.paged_cache import PaddleCache, PagedTensors
from aiokv.demo.on_paddle.products import masked_softmax, pad, product, rms_norm, rotate
from aiokv.frameworks.paddle import import_paddle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.demo.latent import LatentConfig, LatentLayerWeights
    from aiokv.demo.on_paddle.attention import Rows
    from aiokv.demo.on_paddle.kv_format import KVFormat
    from aiokv.demo.on_paddle.products import Products

paddle = import_paddle()


class LatentAttention:
    """See :class:`aiokv.demo.on_paddle.attention.Attention`. One region, ``latent``; no values.

    Where the format has scales, they are a region ``latent_scale``, a number a token.
    """

    def __init__(
        self,
        config: LatentConfig,
        layers: Sequence[LatentLayerWeights],
        products: Products,
        kv_format: KVFormat,
    ) -> None:
        self._config = config
        self._layers = [_LayerTensors(weights) for weights in layers]
        self._products = products
        self._kv_format = kv_format

    @property
    def cached(self) -> str:
        return f"latents as {self._kv_format.name}"

    def new_cache(self, device_blocks: int, block_tokens: int) -> PaddleCache:
        shape = (device_blocks, block_tokens, 1, self._config.cached_dim)
        tensors = PagedTensors(self._config.layers, shape, self._kv_format)
        return PaddleCache({"latent": tensors}, block_tokens)

    def __call__(self, layer: int, x: Any, rows: Rows, cache: PaddleCache) -> Any:
        weights, config = self._layers[layer], self._config
        cache.write(layer, rows.spans, latent=self._compress(weights, x, rows))
        queries = self._queries(weights, x, rows)
        mixed = paddle.concat(
            [
                attend(
                    queries[part.start : part.stop],
                    part.rows["latent"].squeeze(1),
                    part.hidden,
                    values=config.kv_lora_rank,
                )
                for part in cache.read(layer, rows.spans)
            ]
        )
        heads = self._products.matmul_heads(pad(mixed), weights.value_up)
        return self._products.matmul(heads.flatten(1), weights.out)

    def _compress(self, weights: _LayerTensors, x: Any, rows: Rows) -> Any:
        """What is cached of the rows, ``[rows, 1, cached_dim]``."""
        config = self._config
        compressed = self._products.matmul(x, weights.compress)
        latent, key = paddle.split(
            compressed, [config.kv_lora_rank, config.qk_rope_head_dim], axis=-1
        )
        latent = rms_norm(latent, weights.latent_norm, config.norm_epsilon)[: rows.count]
        key = rotate(key[: rows.count].unsqueeze(1), rows.cos, rows.sin)
        return paddle.concat([latent.unsqueeze(1), key], axis=-1)

    def _queries(self, weights: _LayerTensors, x: Any, rows: Rows) -> Any:
        """Scaled queries of what is cached, ``[rows, heads, cached_dim]``."""
        config = self._config
        heads = self._products.matmul(x, weights.query)
        heads = heads.reshape([x.shape[0], config.heads, config.query_dim])
        plain, turned = paddle.split(
            heads, [config.qk_nope_head_dim, config.qk_rope_head_dim], axis=-1
        )
        absorbed = self._products.matmul_heads(plain, weights.key_up)[: rows.count]
        turned = rotate(turned[: rows.count], rows.cos, rows.sin)
        return paddle.concat([absorbed, turned], axis=-1) * config.score_scale


class _LayerTensors:
    """One layer's projections as Paddle tensors."""

    def __init__(self, weights: LatentLayerWeights) -> None:
        self.query = paddle.to_tensor(weights.query)
        self.compress = paddle.to_tensor(weights.compress)
        self.latent_norm = paddle.to_tensor(weights.latent_norm)
        self.key_up = paddle.to_tensor(weights.key_up)
        self.value_up = paddle.to_tensor(weights.value_up)
        self.out = paddle.to_tensor(weights.out)


def attend(queries: Any, cached: Any, hidden: Any, *, values: int) -> Any:
    """Attention of consecutive positions over one context, in the latents' space.

    Args:
        queries: ``[rows, heads, cached_dim]``, scaled.
        cached: ``[tokens, cached_dim]``.
        hidden: bool ``[rows, tokens]``: what a row does not attend to.
        values: how many numbers of what is cached are mixed: the latent's.

    Returns:
        ``[rows, heads, values]``, each row by products of its own: Paddle would fold a batch that
        shares its right side into one product, whose shape depends on the rows.
    """
    keys, latents = cached.t().contiguous(), cached[:, :values].contiguous()
    scores = paddle.stack([product(row, keys) for row in queries.unbind(0)])
    weights = masked_softmax(scores, hidden.unsqueeze(1))
    return paddle.stack([product(row, latents) for row in weights.unbind(0)])
