"""Cache tensors of FastDeploy's attention backends, as regions of aiokv."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiokv import Regions
from aiokv.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMES: Final = {
    "key": "key_caches",
    "value": "value_caches",
    "key_scale": "key_cache_scales",
    "value_scale": "value_cache_scales",
    "indexer": "indexer_caches",
}


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
        from aiokv.frameworks.paddle import add_region

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
