"""Creation of a model's KV tensors, in the shapes of vLLM or FastDeploy, as regions.

``B`` is the number of blocks, ``T`` the tokens per block, ``H`` the KV heads of the rank, ``D`` the
elements per head. ``R`` is the elements per token of a latent, ``I`` those of an indexer's key.

| tensor | ``"vllm"`` | ``"fastdeploy"`` | dtype |
|---|---|---|---|
| ``k``, ``v`` | ``[B, T, H, D]`` | ``[B, H, T, D]`` | that of KV; uint8 for 8 bits |
| ``kv`` (``joined=True``) | ``[B, 2, T, H, D]`` | ``[B, 2, H, T, D]`` | likewise |
| ``k``, ``v`` of 4 bits | ``[B, T, H, D / 2]`` | ``[B, H, T, D / 2]`` | uint8 |
| ``k_scale``, ``k_zero_point``, likewise ``v`` | ``[B, T, H]`` | ``[B, H, T]`` | the model's |
| ``latent`` (MLA) | ``[B, T, R]`` | ``[B, 1, T, R]`` | that of KV |
| ``latent`` in ``fp8_ds_mla`` | ``[B, T, 656]`` for R = 512 + 64 | ``[B, 1, T, 656]`` | uint8 |
| ``index`` (DSA) | ``[B, T, 132]`` for I = 128 | ``[B, T, 132]`` | uint8 |

Tensors of recurrent state have one row per slot, in both shapes: ``conv`` ``[state_slots,
elements]`` in the dtype of the model, and ``recurrent`` ``[state_slots, elements]`` in the dtype of
the state. The model views the elements of a row in the shape of its kernels.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from aiokv.base import checks
from aiokv.errors import ConfigError
from aiokv.layout.regions import Regions
from aiokv.model.shape import ELEMENT_BYTES, KV_DTYPES, LayerShape, ModelShape, TensorShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    _Make = Callable[[tuple[int, ...], str], Any]

Convention = Literal["vllm", "fastdeploy"]
Library = Literal["numpy", "cupy", "torch", "paddle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """One tensor of one layer, without the axis of the blocks.

    Attributes:
        name: name of the region.
        layer: index of the layer.
        group: window group of the layer; None for full attention.
        shape: axes of a block, outermost first.
        axes: their names, as for ``Regions.add``.
        heads: (first head of the rank, heads of all ranks); None without an axis of heads.
        dtype: dtype of the memory, such as ``"bfloat16"`` or ``"uint8"``.
        element: name of the element type, such as ``"float8_e4m3fn"``.
    """

    name: str
    layer: int
    group: str | None
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    heads: tuple[int, int] | None
    dtype: str
    element: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensors:
    """Created tensors.

    Attributes:
        regions: all of them, for an engine or a rank.
        layers: tensors for the model, as a dictionary by name per layer. Layers with recurrent
            state follow all layers with KV, in the order of ``ModelShape.states``.
    """

    regions: Regions
    layers: list[dict[str, Any]]


def tensor_layouts(
    model: ModelShape | Sequence[LayerShape],
    *,
    block_tokens: int = 16,
    kv_dtype: str = "auto",
    model_dtype: str = "bfloat16",
    tensor_parallel: int = 1,
    rank: int = 0,
    convention: Convention = "vllm",
    joined: bool = False,
) -> list[TensorLayout]:
    """Return the tensors that a rank has, layer by layer, in the order of a block in host memory.

    Args:
        model: shape of a model, whose layers count in the order of ``ModelShape.layers``; or its
            layers in order, with those of a speculative (MTP) head behind them.
        block_tokens: token positions per block.
        kv_dtype: one of ``aiokv.model.shape.KV_DTYPES``.
        model_dtype: dtype of the model, for scales and where ``kv_dtype`` is ``"auto"``; ignored
            with a ``ModelShape``, which has one.
        tensor_parallel: number of ranks that divide the KV heads.
        rank: number of this rank among them.
        convention: order of the axes; see the module.
        joined: True for keys and values of a layer in one tensor, ``kv``.

    Raises:
        ConfigError: an argument is out of range, ``kv_dtype`` does not suit the model, the ranks
            cannot divide the heads, or keys and values of different sizes cannot be joined.
    """
    block_tokens = checks.integer("block_tokens", block_tokens, minimum=1, error=ConfigError)
    checks.integer("tensor_parallel", tensor_parallel, minimum=1, error=ConfigError)
    checks.integer("rank", rank, minimum=0, maximum=tensor_parallel - 1, error=ConfigError)
    checks.choice("convention", convention, ("vllm", "fastdeploy"), ConfigError)
    checks.flag("joined", joined, ConfigError)
    checks.choice("kv_dtype", kv_dtype, KV_DTYPES, ConfigError)
    if isinstance(model, ModelShape):
        layers = [layer for layer, count in model.layers for _ in range(count)]
        kv_dtype, model_dtype = model.resolved_kv_dtype(kv_dtype), model.dtype
    else:
        layers = list(checks.sequence("model", model))
        for number, layer in enumerate(layers):
            if not isinstance(layer, LayerShape):
                raise ConfigError(
                    f"model[{number}] is {checks.shown(layer)}; it must be a LayerShape"
                )
        kv_dtype = model_dtype if kv_dtype == "auto" else kv_dtype
    checks.choice("model_dtype", model_dtype, ELEMENT_BYTES, ConfigError)
    layouts = []
    for number, layer in enumerate(layers):
        tensors = layer.tensors(kv_dtype, tensor_parallel, model_dtype=model_dtype)
        window = layer.window_tokens
        layouts += [
            _layout(
                tensor,
                number,
                group=None if window is None else f"window_{window}",
                heads=(rank * layer.kv_heads // tensor_parallel, layer.kv_heads),
                block_tokens=block_tokens,
                tokens_first=convention == "vllm",
                with_kv=joined,
            )
            for tensor in (_joined(tensors) if joined else tensors)
        ]
    return layouts


def create_tensors(
    model: ModelShape | Sequence[LayerShape],
    num_blocks: int,
    *,
    window_blocks: Mapping[str, int] | None = None,
    state_slots: int | None = None,
    library: Library = "numpy",
    device: str | None = None,
    block_tokens: int = 16,
    kv_dtype: str = "auto",
    model_dtype: str = "bfloat16",
    tensor_parallel: int = 1,
    rank: int = 0,
    convention: Convention = "vllm",
    joined: bool = False,
) -> CacheTensors:
    """Create and register the KV and state tensors of one rank, filled with zeros.

    ::

        shape = ModelShape.from_config("org/model")
        created = create_tensors(shape, 4096, library="torch", device="cuda:0")
        engine = CacheEngine(config, created.regions, device="cuda:0")
        created.layers[0]["k"]  # [4096, 16, heads, dim]

    With the same arguments, ``ModelShape.bytes_per_block`` returns their bytes per block, and
    ``ModelShape.state_slot_bytes`` their bytes per state slot.

    Args:
        model: as for :func:`tensor_layouts`.
        num_blocks: blocks of each tensor, ``B``.
        window_blocks: blocks of the tensors of each window group, by its name in
            ``ModelShape.windows``; required for a model that has such layers.
        state_slots: number of rows of the tensors of recurrent state, as
            ``CacheConfig.state_slots``; required for a model with recurrent state. With 0, the
            caller creates these tensors and registers them with ``Regions.add_state``.
        library: creates the tensors. numpy, for the cpu device, and CuPy have no bfloat16: they get
            uint16 of the same size.
        device: such as ``"cuda:0"``; None for the CPU, or the current GPU with CuPy.
        block_tokens: as for :func:`tensor_layouts`.
        kv_dtype: as there.
        model_dtype: as there.
        tensor_parallel: as there.
        rank: as there.
        convention: as there.
        joined: as there.

    Raises:
        ConfigError: as :func:`tensor_layouts`; or the library is not installed or cannot create
            tensors on the device; or the blocks of a window group or ``state_slots`` are missing.
        Exception: the library has not enough memory.
    """
    layouts = tensor_layouts(
        model,
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
        model_dtype=model_dtype,
        tensor_parallel=tensor_parallel,
        rank=rank,
        convention=convention,
        joined=joined,
    )
    blocks: dict[str | None, int] = {None: num_blocks}
    blocks.update(_window_blocks(window_blocks))
    groups = list(dict.fromkeys(layout.group for layout in layouts))
    for group in blocks:
        if group is not None and group not in groups:
            raise ConfigError(f"window_blocks has {group!r}; the model has no such window group")
    for group in groups:
        if group not in blocks:
            raise ConfigError(
                f"the model has layers of the window group {group!r}, but window_blocks does not",
                hint=f"window_blocks={{{group!r}: ...}}, as CacheConfig.windows has them",
            )
        what = "num_blocks" if group is None else f"window_blocks[{group!r}]"
        checks.integer(what, blocks[group], minimum=1, error=ConfigError)
    states = _state_tensors(model, state_slots, tensor_parallel)
    if not layouts and not states:
        raise ConfigError("model has no layers for which tensors are created")
    checks.choice("library", library, _MAKERS, ConfigError)
    make = _checked(_MAKERS[library](device), library, device)
    num_kv_layers = 1 + max((layout.layer for layout in layouts), default=-1)
    num_layers = num_kv_layers + len(states)
    regions = Regions(num_layers=num_layers)
    layers: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    by_region: dict[tuple[str, tuple[int, int] | None], list[TensorLayout]] = defaultdict(list)
    for layout in layouts:
        by_region[layout.name, layout.heads].append(layout)
        layers[layout.layer][layout.name] = make(
            (blocks[layout.group], *layout.shape), layout.dtype
        )
    for same in by_region.values():
        _register(regions, same, layers, library)
    for layer, tensors in enumerate(states, num_kv_layers):
        layers[layer] = {
            name: make((state_slots or 0, elements), dtype)
            for name, (elements, dtype) in tensors.items()
        }
    _register_states(regions, layers, range(num_kv_layers, num_layers), library)
    return CacheTensors(regions=regions, layers=layers)


def _window_blocks(window_blocks: object) -> Mapping[str, int]:
    if window_blocks is None:
        return {}
    if not isinstance(window_blocks, Mapping):
        raise ConfigError(
            f"window_blocks is {checks.shown(window_blocks)}; it must be a dictionary of numbers "
            "of blocks by group"
        )
    return window_blocks


def _checked(make: _Make, library: str, device: str | None) -> _Make:
    """Let ``make`` raise ConfigError on a device where the library cannot create any tensor."""

    def checked(shape: tuple[int, ...], dtype: str) -> Any:
        try:
            return make(shape, dtype)
        except Exception:  # each library has its own exception classes
            try:
                make((1,), "uint8")
            except Exception as error:
                raise ConfigError(
                    f"device is {checks.shown(device)}; {library} creates no tensors there: {error}"
                ) from error
            raise  # for example, there is too little memory

    return checked


def _state_tensors(
    model: ModelShape | Sequence[LayerShape], state_slots: int | None, tensor_parallel: int
) -> list[dict[str, tuple[int, str]]]:
    """Return (elements per slot, dtype) of each state tensor, per layer with recurrent state."""
    states = model.states if isinstance(model, ModelShape) else ()
    if state_slots is not None:
        checks.integer("state_slots", state_slots, minimum=0, error=ConfigError)
    if not states and state_slots:
        raise ConfigError(f"state_slots is {state_slots}, but the model has no recurrent state")
    if states and state_slots is None:
        raise ConfigError(
            f"{sum(count for _, count in states)} layers of the model have recurrent state, and "
            "state_slots is None",
            hint="state_slots=CacheConfig.state_slots, or 0 to create their tensors yourself",
        )
    if not states or not state_slots or not isinstance(model, ModelShape):
        return []
    layers = []
    for state, count in states:
        tensors = state.tensors(model.dtype)
        for name, (elements, _) in tensors.items():
            if state.heads % tensor_parallel or elements % tensor_parallel:
                raise ConfigError(
                    f"tensor_parallel is {tensor_parallel}; it must divide the {state.heads} heads "
                    f"and the {elements} {name} elements of the recurrent state"
                )
        divided = {
            name: (elements // tensor_parallel, dtype)
            for name, (elements, dtype) in tensors.items()
        }
        layers += [divided] * count
    return layers


def _register_states(
    regions: Regions,
    layers: Sequence[Mapping[str, Any]],
    indices: Iterable[int],
    library: Library,
) -> None:
    """Register the state tensors of the layers with these indices."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for index in indices:
        for name in layers[index]:
            by_name[name].append(index)
    for name, found in by_name.items():
        tensors = _borrowed([layers[index][name] for index in found], library)
        regions.add_state(name, layers=tensors, layer_indices=found)


def _borrowed(tensors: list[Any], library: Library) -> list[Any]:
    """Return tensors that ``Regions`` accepts."""
    if library == "paddle":
        from aiokv.frameworks.paddle import TensorMemory

        return [TensorMemory(tensor) for tensor in tensors]
    return tensors


def _joined(tensors: tuple[TensorShape, ...]) -> list[TensorShape]:
    """Return the tensors with keys and values, and their scales, in one tensor each."""
    joined = []
    by_name = {tensor.name: tensor for tensor in tensors}
    for tensor in tensors:
        if tensor.heads is None:
            joined.append(tensor)
        elif tensor.name.startswith("k"):
            values = by_name.get(f"v{tensor.name[1:]}")
            if values is None or values[1:] != tensor[1:]:
                raise ConfigError(
                    f"joined is True, but a key has {tensor.length} elements per head and a value "
                    f"{0 if values is None else values.length}",
                    hint="create separate tensors",
                )
            joined.append(tensor._replace(name=f"kv{tensor.name[1:]}"))
    return joined


def _layout(
    tensor: TensorShape,
    layer: int,
    *,
    group: str | None,
    heads: tuple[int, int],
    block_tokens: int,
    tokens_first: bool,
    with_kv: bool,
) -> TensorLayout:
    """Return the axes of a tensor in the order of the convention."""
    axes = [("tokens", block_tokens)]
    if tensor.heads is not None:
        axes.insert(1 if tokens_first else 0, ("heads", tensor.heads))
        if with_kv:
            axes.insert(0, ("kv", 2))
    elif tensor.name == "latent" and not tokens_first:
        axes.insert(0, ("latent", 1))
    if not tensor.name.endswith(("_scale", "_zero_point")):
        axes.append(("dim", tensor.length))
    return TensorLayout(
        name=tensor.name if group is None else f"{group}.{tensor.name}",
        layer=layer,
        group=group,
        shape=tuple(length for _, length in axes),
        axes=tuple(name for name, _ in axes),
        heads=None if tensor.heads is None else heads,
        dtype=tensor.dtype,
        element=tensor.element,
    )


def _register(
    regions: Regions,
    layouts: Sequence[TensorLayout],
    layers: Sequence[Mapping[str, Any]],
    library: Library,
) -> None:
    """Register the tensors of one name and one number of heads."""
    first = layouts[0]
    tensors = _borrowed([layers[layout.layer][first.name] for layout in layouts], library)
    options: dict[str, Any] = {
        "layers": tensors,
        "layer_indices": [layout.layer for layout in layouts],
        "dtypes": [layout.element for layout in layouts],
        "axes": first.axes,
        "heads": first.heads,
    }
    # Layers with another number of heads form a region of their own.
    name = first.name
    if name in regions.names:
        name = f"{name}.{first.heads[1] if first.heads else 0}_heads"
    if first.group is None:
        regions.add(name, **options)
    else:
        regions.add_window(first.group, name, **options)


# --- libraries ------------------------------------------------------------------------------------

_NAMES: Final = {"bfloat16": "uint16"}  # names in numpy and CuPy


def _numpy(device: str | None) -> _Make:
    if device not in (None, "cpu"):
        raise ConfigError(f"device is {device!r}; numpy creates tensors on the CPU only")
    return lambda shape, dtype: np.zeros(shape, _NAMES.get(dtype, dtype))


def _cupy(device: str | None) -> _Make:
    cupy = _imported("cupy")
    kind, _, number = ("cuda" if device is None else device).partition(":")
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise ConfigError(f"device is {device!r}; CuPy creates tensors on 'cuda' or 'cuda:N'")

    def make(shape: tuple[int, ...], dtype: str) -> Any:
        with cupy.cuda.Device(int(number) if number else None):
            return cupy.zeros(shape, _NAMES.get(dtype, dtype))

    return make


def _torch(device: str | None) -> _Make:
    torch = _imported("torch")
    return lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def _paddle(device: str | None) -> _Make:
    paddle = _imported("paddle")
    place = ("cpu" if device is None else device).replace("cuda", "gpu")

    def make(shape: tuple[int, ...], dtype: str) -> Any:
        before = paddle.device.get_device()
        paddle.device.set_device(place)
        try:
            return paddle.zeros(list(shape), dtype=dtype)
        finally:
            paddle.device.set_device(before)

    return make


_MAKERS: Final[Mapping[str, Callable[[str | None], _Make]]] = {
    "numpy": _numpy,
    "cupy": _cupy,
    "torch": _torch,
    "paddle": _paddle,
}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"library is {name!r}, which is not installed: {error}") from error
