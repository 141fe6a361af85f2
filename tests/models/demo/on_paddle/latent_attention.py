"""Multi-head latent attention in Paddle: one latent and one key a token are cached for all heads.

It is computed in the absorbed form: a head's queries are projected into the latents' space, and
what it mixes there is projected up to its values, so that a context is read as it is cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.frameworks.paddle import import_paddle
from tests.models.demo.on_paddle.attention import Attention
from tests.models.demo.on_paddle.paged_cache import PaddleCache, PagedTensors
from tests.models.demo.on_paddle.products import masked_softmax, pad, product, rms_norm, rotate

if TYPE_CHECKING:
    from tests.models.demo.on_paddle.attention import Rows

paddle = import_paddle()


class LatentAttention(Attention):
    """One region, ``latent``, and no values.

    Where the format has scales, they are a region ``latent_scale``, one number per token.
    """

    kind = "latents"

    @property
    def rotary_dim(self) -> int:
        dim: int = self.config.qk_rope_head_dim
        return dim

    def new_cache(self, device_blocks: int, block_tokens: int) -> PaddleCache:
        shape = (device_blocks, block_tokens, 1, self.config.cached_dim)
        tensors = PagedTensors(self.config.layers, shape, self.kv_format)
        return PaddleCache({"latent": tensors}, block_tokens)

    def __call__(
        self, layer: int, weights: dict[str, Any], x: Any, rows: Rows, cache: PaddleCache
    ) -> Any:
        """See :class:`Attention`."""
        config = self.config
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
        heads = self.products.matmul_heads(pad(mixed), weights["value_up"])
        return self.products.matmul(heads.flatten(1), weights["out"])

    def _compress(self, weights: dict[str, Any], x: Any, rows: Rows) -> Any:
        """Return the cached values of the rows, ``[rows, 1, cached_dim]``."""
        config = self.config
        compressed = self.products.matmul(x, weights["compress"])
        latent, key = paddle.split(
            compressed, [config.kv_lora_rank, config.qk_rope_head_dim], axis=-1
        )
        latent = rms_norm(latent, weights["latent_norm"], config.norm_epsilon)[: rows.count]
        key = rotate(key[: rows.count].unsqueeze(1), rows.cos, rows.sin)
        return paddle.concat([latent.unsqueeze(1), key], axis=-1)

    def _queries(self, weights: dict[str, Any], x: Any, rows: Rows) -> Any:
        """Return the scaled queries in the cached space, ``[rows, heads, cached_dim]``."""
        config = self.config
        heads = self.products.matmul(x, weights["query"])
        heads = heads.reshape([x.shape[0], config.heads, config.query_dim])
        plain, turned = paddle.split(
            heads, [config.qk_nope_head_dim, config.qk_rope_head_dim], axis=-1
        )
        absorbed = self.products.matmul_heads(plain, weights["key_up"])[: rows.count]
        turned = rotate(turned[: rows.count], rows.cos, rows.sin)
        return paddle.concat([absorbed, turned], axis=-1) * config.score_scale


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
