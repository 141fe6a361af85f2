"""Which frameworks the demo knows; each is imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.demo.grouped import GroupedConfig
from aiokv.demo.latent import LatentConfig
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from aiokv.demo.model import Model, ModelConfig
    from aiokv.demo.on_paddle.attention import Attention
    from aiokv.demo.on_paddle.kv_format import KVFormat
    from aiokv.demo.on_paddle.products import Products
    from aiokv.demo.weights import Weights


def load_model(
    framework: str,
    config: ModelConfig,
    weights: Weights[Any],
    *,
    max_context_tokens: int,
    kv_format: str = "float32",
    device: str = "cpu",
) -> Model[Any]:
    """A model in one of the frameworks ``numpy`` and ``paddle``.

    Args:
        config: its kind says which attention; numpy knows grouped-query attention only.
        device: ``cpu``, or ``cuda`` for the numpy model in CuPy.
        kv_format: how keys and values are stored; numpy knows ``float32`` only.

    Raises:
        UsageError: the framework is not installed, or does not know the attention, the format or
            the device.
        ConfigError: there is no GPU.
    """
    if framework == "paddle" and device == "cuda":
        raise UsageError(
            "the Paddle model computes on the cpu only", hint="leave --framework away for a GPU"
        )
    if framework == "paddle":
        return _load_paddle(config, weights, max_context_tokens, kv_format)
    if not isinstance(config, GroupedConfig):
        raise UsageError(
            "the numpy model knows grouped-query attention only", hint="--framework paddle"
        )
    if kv_format != "float32":
        raise UsageError(
            f"the numpy model stores keys and values as float32, not {kv_format}",
            hint="--framework paddle",
        )
    if device == "cuda":
        from aiokv.demo.on_cupy.transformer import CupyTransformer

        return CupyTransformer(config, weights, max_context_tokens=max_context_tokens)
    from aiokv.demo.on_numpy.transformer import NumpyTransformer

    return NumpyTransformer(config, weights, max_context_tokens=max_context_tokens)


def _load_paddle(
    config: ModelConfig, weights: Weights[Any], max_context_tokens: int, kv_format: str
) -> Model[Any]:
    from aiokv.demo.on_paddle.kv_format import FORMATS
    from aiokv.demo.on_paddle.products import Products, compute_on_one_cpu_thread
    from aiokv.demo.on_paddle.transformer import PaddleTransformer

    compute_on_one_cpu_thread()
    products = Products(weights.matrix_shapes())
    attention = _paddle_attention(config, weights, products, FORMATS[kv_format])
    return PaddleTransformer(
        config, weights, attention, products, max_context_tokens=max_context_tokens
    )


def _paddle_attention(
    config: ModelConfig, weights: Weights[Any], products: Products, kv_format: KVFormat
) -> Attention:
    from aiokv.demo.on_paddle.grouped_attention import GroupedAttention
    from aiokv.demo.on_paddle.latent_attention import LatentAttention

    if isinstance(config, LatentConfig):
        return LatentAttention(config, weights.layers, products, kv_format)
    if isinstance(config, GroupedConfig):
        return GroupedAttention(config, weights.layers, products, kv_format)
    raise UsageError(f"the Paddle model knows no attention for {config}")
