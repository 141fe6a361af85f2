"""ModelShape: the bytes that a model stores per token, per block and per sequence.

The figures are those of one rank: with tensor parallelism, ranks divide the KV heads; all of them
have the latent of multi-head latent attention (MLA).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiokv.base import checks
from aiokv.errors import ConfigError
from aiokv.layout.host_block import payload_bytes, pitch_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

# Bytes per element of the dtypes of KV. "auto" is the dtype of the model.
ELEMENT_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
# The latent in fp8 with a float32 scale per 128 elements, the rotary part in bfloat16.
FP8_DS_MLA: Final = "fp8_ds_mla"
# Keys and values of 8 bits, with a scale per token and head in the dtype of the model.
BLOCK_WISE: Final = {"block_wise_fp8": "fp8", "block_wise_int8": "int8"}
# Keys and values of 4 bits, two per byte, with a scale and a zero point per token and head.
INT4_ZP: Final = "int4_zp"
KV_DTYPES: Final = ("auto", *ELEMENT_BYTES, *BLOCK_WISE, INT4_ZP, FP8_DS_MLA)

# Element types with a name of their own; elements of other types are bytes.
_ELEMENTS: Final = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}
_BYTES: Final = "uint8"

_SCALE_ELEMENTS: Final = 128
_SCALE_BYTES: Final = 4


class TensorShape(NamedTuple):
    """Elements and bytes that a tensor of a layer stores per token.

    Attributes:
        name: such as ``"k"``, ``"v"``, ``"k_scale"``, ``"latent"`` or ``"index"``.
        heads: heads of one rank; None for a tensor that is the same on all ranks.
        length: numbers of ``dtype`` per token and head.
        dtype: dtype of the memory; ``"uint8"`` for elements of 8 bits and fewer.
        element: name of the element type, such as ``"float8_e4m3fn"``.
    """

    name: str
    heads: int | None
    length: int
    dtype: str
    element: str

    @property
    def token_bytes(self) -> int:
        """Bytes per token on one rank."""
        item_bytes = 1 if self.dtype == _BYTES else ELEMENT_BYTES[self.dtype]
        return (1 if self.heads is None else self.heads) * self.length * item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """KV of one layer.

    Attributes:
        kv_heads: KV heads of all ranks together; 1 for a latent.
        key_elements: elements of a key per token and head; for a latent, those of its normalized
            part.
        value_elements: elements of a value per token and head; for a latent, those of the rotary
            key.
        is_latent: the layer has multi-head latent attention: one tensor, the same on all ranks.
        window_tokens: positions that one position attends to, itself included; None for all.
        index_elements: elements of the key of a sparse-attention indexer per token, in fp8 with
            scales, the same on all ranks; 0 for none.
    """

    kv_heads: int
    key_elements: int
    value_elements: int
    is_latent: bool = False
    window_tokens: int | None = None
    index_elements: int = 0

    def tensors(
        self, kv_dtype: str, tensor_parallel: int = 1, *, model_dtype: str = "bfloat16"
    ) -> tuple[TensorShape, ...]:
        """Return the shape per token of each tensor of a rank.

        Args:
            kv_dtype: one of ``KV_DTYPES`` but ``"auto"``.
            tensor_parallel: number of ranks that divide the KV heads.
            model_dtype: dtype of the model, in which scales and zero points are.

        Raises:
            ConfigError: ``kv_dtype`` does not suit the layer, or the ranks cannot divide the heads.
        """
        if self.is_latent:
            tensors = [self._latent(kv_dtype)]
        elif kv_dtype == FP8_DS_MLA:
            raise ConfigError(
                f"kv_dtype is {kv_dtype!r}, which only models with latent attention (MLA) have",
                hint="use 'fp8'",
            )
        else:
            heads = heads_per_rank(self.kv_heads, tensor_parallel)
            tensors = [
                tensor
                for name, elements in (("k", self.key_elements), ("v", self.value_elements))
                if elements
                for tensor in _quantized(name, heads, elements, kv_dtype, model_dtype)
            ]
        if self.index_elements:
            length = _scaled_fp8_bytes(self.index_elements)
            tensors.append(TensorShape("index", None, length, _BYTES, _BYTES))
        return tuple(tensors)

    def _latent(self, kv_dtype: str) -> TensorShape:
        if kv_dtype == FP8_DS_MLA:
            length = _scaled_fp8_bytes(self.key_elements) + 2 * self.value_elements
            return TensorShape("latent", None, length, _BYTES, _BYTES)
        if kv_dtype in BLOCK_WISE or kv_dtype == INT4_ZP:
            raise ConfigError(
                f"kv_dtype is {kv_dtype!r}, which models with latent attention (MLA) do not have",
                hint=f"use {FP8_DS_MLA!r}",
            )
        length = self.key_elements + self.value_elements
        return TensorShape("latent", None, length, *_stored(kv_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Recurrent state of one sequence in one layer.

    Attributes:
        conv_elements: elements of the state of the convolution.
        recurrent_elements: elements of the recurrent state.
        heads: heads that the ranks divide.
        recurrent_dtype: dtype of the recurrent state; ``"auto"`` for that of the model.
    """

    conv_elements: int
    recurrent_elements: int
    heads: int
    recurrent_dtype: str = "auto"

    def tensors(self, model_dtype: str) -> dict[str, tuple[int, str]]:
        """Return the elements of all ranks, and the dtype, of each tensor that has elements."""
        recurrent = model_dtype if self.recurrent_dtype == "auto" else self.recurrent_dtype
        tensors = {
            "conv": (self.conv_elements, model_dtype),
            "recurrent": (self.recurrent_elements, recurrent),
        }
        return {name: tensor for name, tensor in tensors.items() if tensor[0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """KV and recurrent state that a model stores, by layer.

    Attributes:
        name: ``model_type`` of the configuration.
        dtype: dtype of the model, such as ``"bfloat16"``.
        layers: KV of each layer that has some, with the number of layers that are equal.
        states: recurrent state of each layer that has some, with the number of equal layers.
        query_heads: query heads per layer.
        max_tokens: longest sequence of the model; None if the configuration does not say.
        kv_dtype: dtype of KV that the configuration specifies; None for that of the model.
        notes: assumptions that the configuration made necessary.
    """

    name: str
    dtype: str
    layers: tuple[tuple[LayerShape, int], ...]
    states: tuple[tuple[StateShape, int], ...] = ()
    query_heads: int = 0
    max_tokens: int | None = None
    kv_dtype: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> ModelShape:
        """Return the shape of a model with a Hugging Face configuration.

        Args:
            config: path of a ``config.json`` or of the folder that contains it, the name of a
                model in the local cache of Hugging Face (``"org/name"``), or the configuration as
                a mapping. Nothing is downloaded.

        Raises:
            ConfigError: there is no such file, it is not JSON, a field is missing or out of range,
                or the model stores something that this function does not know.
        """
        from aiokv.model.config import read_config, shape_of

        return shape_of(read_config(config))

    @classmethod
    def of_layers(cls, layers: Iterable[LayerShape], **fields: Any) -> ModelShape:
        """Return the shape of the layers of a model, one by one; ``fields`` are the other fields.

        Raises:
            ConfigError: as the constructor.
        """
        return cls(layers=tuple(Counter(layers).items()), **fields)

    @property
    def attention(self) -> str:
        """Kind of attention: ``"MHA"``, ``"GQA"``, ``"MQA"`` or ``"MLA"``."""
        if any(layer.is_latent for layer, _ in self.layers):
            return "MLA"
        heads = {layer.kv_heads for layer, _ in self.layers}
        if heads == {1}:
            return "MQA"
        return "MHA" if heads == {self.query_heads} else "GQA"

    @property
    def full_layers(self) -> int:
        """Layers whose attention covers all positions."""
        return sum(count for layer, count in self.layers if layer.window_tokens is None)

    @property
    def windows(self) -> dict[str, int]:
        """Positions of each sliding window, by name of its group; see ``CacheConfig.windows``."""
        sizes = sorted({layer.window_tokens for layer, _ in self.layers if layer.window_tokens})
        return {f"window_{tokens}": tokens for tokens in sizes}

    def window_layers(self, group: str) -> int:
        """Return the number of layers of a window group."""
        tokens = self.windows[group]
        return sum(count for layer, count in self.layers if layer.window_tokens == tokens)

    def bytes_per_token(
        self, *, kv_dtype: str = "auto", tensor_parallel: int = 1, group: str | None = None
    ) -> int:
        """Return the bytes of one token on one rank.

        Args:
            kv_dtype: one of ``KV_DTYPES``.
            tensor_parallel: number of ranks that divide the KV heads.
            group: a window group; None for the layers whose attention covers all positions.

        Raises:
            ConfigError: ``kv_dtype`` is unknown or does not suit the model, or the ranks cannot
                divide the heads.
        """
        return sum(piece.token_bytes for piece in self._pieces(kv_dtype, tensor_parallel, group))

    def bytes_per_block(
        self,
        block_tokens: int = 16,
        *,
        kv_dtype: str = "auto",
        tensor_parallel: int = 1,
        group: str | None = None,
    ) -> int:
        """Return the bytes of one block in device memory on one rank.

        Args:
            block_tokens: token positions per block.
            kv_dtype: as :meth:`bytes_per_token`.
            tensor_parallel: as :meth:`bytes_per_token`.
            group: as :meth:`bytes_per_token`.

        Raises:
            ConfigError: as :meth:`bytes_per_token`; or ``block_tokens`` is below 1.
        """
        block_tokens = checks.integer("block_tokens", block_tokens, minimum=1, error=ConfigError)
        return block_tokens * self.bytes_per_token(
            kv_dtype=kv_dtype, tensor_parallel=tensor_parallel, group=group
        )

    def host_bytes_per_block(
        self,
        block_tokens: int = 16,
        *,
        kv_dtype: str = "auto",
        tensor_parallel: int = 1,
        group: str | None = None,
        with_stores: bool = False,
    ) -> int:
        """Return the bytes of one block in host memory on one rank, alignment included.

        Args:
            block_tokens: token positions per block.
            kv_dtype: as :meth:`bytes_per_token`.
            tensor_parallel: as :meth:`bytes_per_token`.
            group: as :meth:`bytes_per_token`.
            with_stores: True if the engine has stores, whose objects have trailers.

        Raises:
            ConfigError: as :meth:`bytes_per_block`.
        """
        block_tokens = checks.integer("block_tokens", block_tokens, minimum=1, error=ConfigError)
        pieces = self._pieces(kv_dtype, tensor_parallel, group)
        size = payload_bytes(block_tokens * piece.token_bytes for piece in pieces)
        return pitch_bytes(size, with_stores=with_stores)

    def state_slot_bytes(self, *, tensor_parallel: int = 1) -> int:
        """Return the bytes of the recurrent state of one sequence on one rank; 0 for none.

        Raises:
            ConfigError: the ranks cannot divide the heads of the state.
        """
        return sum(self._state_pieces(tensor_parallel))

    def host_state_slot_bytes(self, *, tensor_parallel: int = 1, with_stores: bool = False) -> int:
        """Return the bytes of one slot of recurrent state in host memory on one rank.

        Args:
            tensor_parallel: as :meth:`state_slot_bytes`.
            with_stores: as :meth:`host_bytes_per_block`.

        Raises:
            ConfigError: as :meth:`state_slot_bytes`.
        """
        size = payload_bytes(self._state_pieces(tensor_parallel))
        return pitch_bytes(size, with_stores=with_stores)

    def resolved_kv_dtype(self, kv_dtype: str = "auto") -> str:
        """Return the dtype of KV that ``"auto"`` stands for; other dtypes are returned as they are.

        Raises:
            ConfigError: ``kv_dtype`` is unknown.
        """
        checks.choice("kv_dtype", kv_dtype, KV_DTYPES, ConfigError)
        return (self.kv_dtype or self.dtype) if kv_dtype == "auto" else kv_dtype

    def _state_pieces(self, tensor_parallel: int) -> list[int]:
        """Return the bytes of a slot on one rank of each tensor of each layer."""
        pieces = []
        for state, count in self.states:
            if state.heads % tensor_parallel:
                raise ConfigError(
                    f"tensor_parallel is {tensor_parallel}; it must divide the {state.heads} heads "
                    "of the recurrent state"
                )
            tensors = state.tensors(self.dtype).values()
            pieces += count * [
                -(-elements * ELEMENT_BYTES[dtype] // tensor_parallel)
                for elements, dtype in tensors
            ]
        return pieces

    def _pieces(self, kv_dtype: str, tensor_parallel: int, group: str | None) -> list[TensorShape]:
        """Return the tensors of the layers of a group."""
        checks.integer("tensor_parallel", tensor_parallel, minimum=1, error=ConfigError)
        kv_dtype = self.resolved_kv_dtype(kv_dtype)
        if group is not None:
            checks.choice("group", group, self.windows, ConfigError)
        window = None if group is None else self.windows[group]
        return [
            piece
            for layer, count in self.layers
            if layer.window_tokens == window
            for piece in layer.tensors(kv_dtype, tensor_parallel, model_dtype=self.dtype) * count
        ]


def heads_per_rank(kv_heads: int, tensor_parallel: int) -> int:
    """Return the KV heads that each rank has; with fewer heads than ranks, ranks share heads.

    Raises:
        ConfigError: neither number divides the other.
    """
    if kv_heads % tensor_parallel == 0:
        return kv_heads // tensor_parallel
    if tensor_parallel % kv_heads == 0:
        return 1
    raise ConfigError(
        f"tensor_parallel is {tensor_parallel} for {kv_heads} KV heads; one number must divide the "
        "other"
    )


def _stored(kv_dtype: str) -> tuple[str, str]:
    """Return the dtype of the memory and the element type of a KV dtype without scales."""
    element = _ELEMENTS.get(kv_dtype)
    return (kv_dtype, kv_dtype) if element is None else (_BYTES, element)


def _quantized(
    name: str, heads: int, elements: int, kv_dtype: str, model_dtype: str
) -> list[TensorShape]:
    """Return the tensor of keys or values, and those of its scales and zero points."""
    scale = TensorShape(f"{name}_scale", heads, 1, model_dtype, model_dtype)
    if kv_dtype == INT4_ZP:
        if elements % 2:
            raise ConfigError(
                f"kv_dtype is {kv_dtype!r}, which packs two elements into a byte; a head has "
                f"{elements} elements"
            )
        packed = TensorShape(name, heads, elements // 2, _BYTES, "int4x2")
        return [packed, scale, scale._replace(name=f"{name}_zero_point")]
    if kv_dtype in BLOCK_WISE:
        return [TensorShape(name, heads, elements, *_stored(BLOCK_WISE[kv_dtype])), scale]
    return [TensorShape(name, heads, elements, *_stored(kv_dtype))]


def _scaled_fp8_bytes(elements: int) -> int:
    return elements + -(-elements // _SCALE_ELEMENTS) * _SCALE_BYTES
