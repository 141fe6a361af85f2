"""Cache tensors of FastDeploy's attention backends, as regions of aiokv."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiokv import Regions
from aiokv.errors import ConfigError, LayoutError
from aiokv.frameworks.paddle import add_region, import_paddle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SCALED: Final = "block_wise_fp8"  # the type of quantised caches that have tensors of scales
_NAMES: Final = {
    "key": "key_caches",
    "value": "value_caches",
    "key_scale": "key_cache_scales",
    "value_scale": "value_cache_scales",
    "indexer": "indexer_caches",
}


def create_caches(
    attn_backend: Any, num_blocks: int, dtype: Any, quantization: str | None
) -> dict[str, Any]:
    """Create the cache tensors of one layer, with zeros in them.

    Args:
        attn_backend: attention backend of FastDeploy. Its ``create_kv_cache`` creates the tensors;
            if it has none, they get the shapes of its ``get_kv_cache_shape``: of keys, of values
            (empty for MLA), and of the indexer (DSA only).
        num_blocks: number of blocks.
        dtype: dtype of caches that are not quantised; the others are bytes, as are those of DSA.
        quantization: type of the quantisation; None without it.

    Returns:
        Tensors by role, in the order in which FastDeploy's models expect them.
    """
    create = getattr(attn_backend, "create_kv_cache", None)
    if create is not None:
        created: dict[str, Any] = create(
            max_num_blocks=num_blocks, cache_dtype=dtype, kv_cache_quant_type=quantization
        )
        return created
    key, value, *indexer = attn_backend.get_kv_cache_shape(
        max_num_blocks=num_blocks, kv_cache_quant_type=quantization
    )
    shapes = {"key": key, "value": value, "indexer": indexer[0] if indexer else ()}
    paddle = import_paddle()
    element = dtype if quantization is None and not indexer else "uint8"
    caches = {
        role: paddle.full(shape=shape, fill_value=0, dtype=element)
        for role, shape in shapes.items()
        if shape
    }
    if quantization == _SCALED:
        scale = paddle.get_default_dtype()
        for role in [role for role in ("key", "value") if role in caches]:
            shape = shapes[role][:3]
            caches[f"{role}_scale"] = paddle.full(shape=shape, fill_value=0, dtype=scale)
    return caches


def regions_of(layers: Sequence[Mapping[str, Any]]) -> Regions:
    """Register the cache tensors of all layers, those of draft models behind the others.

    Args:
        layers: per layer, its tensors by role, such as ``"key"`` and ``"value"``, as
            ``create_kv_cache`` of an attention backend returns them. A layer may lack a role; a
            tensor that is None is left out (MLA has no value cache). The first axis is the block;
            tensors of draft layers may have more blocks than those of the first layer, and aiokv
            leaves these alone.

    Raises:
        LayoutError: there is no tensor, or their shapes do not fit.
    """
    roles = list(dict.fromkeys(role for layer in layers for role in layer))
    regions = Regions(num_layers=len(layers))
    for role in roles:
        indices = [i for i, layer in enumerate(layers) if layer.get(role) is not None]
        tensors = [layers[i][role] for i in indices]
        if tensors:
            _add(regions, role, tensors, indices)
    if regions.num_blocks is None:
        raise LayoutError("FastDeploy's attention backend has returned no cache tensors")
    return regions


def _add(regions: Regions, role: str, tensors: list[Any], indices: list[int]) -> None:
    if all(type(tensor).__module__.partition(".")[0] == "paddle" for tensor in tensors):
        add_region(regions, role, tensors, layer_indices=indices, more_blocks=True)
    else:
        regions.add(role, layers=tensors, layer_indices=indices, more_blocks=True)


def cache_name(role: str, layer: int, rank: int, device_id: int) -> str:
    """Return the name that FastDeploy gives a cache tensor.

    Raises:
        ConfigError: the role is unknown.
    """
    if role not in _NAMES:
        raise ConfigError(f"cache role is {role!r}; it must be one of {', '.join(_NAMES)}")
    return f"{_NAMES[role]}_{layer}_rank{rank}.device{device_id}"
