"""Which frameworks the demo knows; each is imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from aiokv.demo.model import Model, ModelConfig
    from aiokv.demo.weights import Weights


def load_model(
    framework: str,
    config: ModelConfig,
    weights: Weights,
    *,
    max_context_tokens: int,
    kv_format: str = "float32",
    device: str = "cpu",
) -> Model[Any]:
    """A model in one of the frameworks ``numpy`` and ``paddle``.

    Args:
        device: ``cpu``, or ``cuda`` for the numpy model in CuPy.
        kv_format: how keys and values are stored; numpy knows ``float32`` only.

    Raises:
        UsageError: the framework is not installed, or does not know the format or the device.
        ConfigError: there is no GPU.
    """
    if framework == "paddle" and device == "cuda":
        raise UsageError(
            "the Paddle model computes on the cpu only", hint="leave --framework away for a GPU"
        )
    if framework == "paddle":
        return _load_paddle(config, weights, max_context_tokens, kv_format)
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
    config: ModelConfig, weights: Weights, max_context_tokens: int, kv_format: str
) -> Model[Any]:
    from aiokv.demo.on_paddle.kv_format import FORMATS
    from aiokv.demo.on_paddle.transformer import PaddleTransformer

    return PaddleTransformer(
        config, weights, FORMATS[kv_format], max_context_tokens=max_context_tokens
    )
