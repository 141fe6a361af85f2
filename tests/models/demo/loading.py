"""Models of the demo by framework; each framework is imported only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.demo.weights import GroupedConfig
from aiokv.errors import UsageError
from tests.models.demo.images import ImageTransformer

if TYPE_CHECKING:
    from aiokv.demo.weights import ModelConfig, Weights


def load_model(
    framework: str,
    config: ModelConfig,
    weights: Weights,
    *,
    max_context_tokens: int,
    kv_format: str = "float32",
    device: str = "cpu",
) -> Any:
    """Return a model in one of the frameworks ``numpy`` and ``paddle``.

    Args:
        framework: ``numpy`` or ``paddle``.
        config: its class selects the attention; numpy has grouped-query attention only.
        weights: of the model.
        max_context_tokens: positions of the longest sequence.
        kv_format: how keys and values are stored; numpy has ``float32`` only.
        device: ``cpu``, or ``cuda`` for the numpy model in CuPy.

    Raises:
        UsageError: the framework is not installed, or does not know the attention, the format or
            the device.
        ConfigError: there is no GPU.
    """
    if framework == "paddle" and device == "cuda":
        raise UsageError(
            "the Paddle model computes on the cpu only", hint="leave out --framework for a GPU"
        )
    if framework == "paddle":
        return _load_paddle(config, weights, max_context_tokens, kv_format)
    if not isinstance(config, GroupedConfig):
        raise UsageError(
            "the numpy model has grouped-query attention only", hint="--framework paddle"
        )
    if kv_format != "float32":
        raise UsageError(
            f"the numpy model stores keys and values as float32, not {kv_format}",
            hint="--framework paddle",
        )
    if device == "cuda":
        from tests.models.demo.on_cupy.transformer import CupyTransformer

        return CupyTransformer(config, weights, max_context_tokens=max_context_tokens)
    return ImageTransformer(config, weights, max_context_tokens=max_context_tokens)


def _load_paddle(
    config: ModelConfig, weights: Weights, max_context_tokens: int, kv_format: str
) -> Any:
    from tests.models.demo.latent import LatentConfig
    from tests.models.demo.on_paddle.grouped_attention import GroupedAttention
    from tests.models.demo.on_paddle.kv_format import FORMATS
    from tests.models.demo.on_paddle.latent_attention import LatentAttention
    from tests.models.demo.on_paddle.products import Products, compute_on_one_cpu_thread
    from tests.models.demo.on_paddle.transformer import PaddleTransformer

    compute_on_one_cpu_thread()
    products = Products(weights)
    kind = LatentAttention if isinstance(config, LatentConfig) else GroupedAttention
    attention = kind(config, products, FORMATS[kv_format])
    return PaddleTransformer(
        config, weights, attention, products, max_context_tokens=max_context_tokens
    )
