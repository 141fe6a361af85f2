"""Sizing: the blocks and conversations of a model that fit in memory of a given size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.base import checks
from aiokv.base.units import format_bytes
from aiokv.config.cache_config import CacheConfig, WindowGroup
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.model.shape import ModelShape

# State slots per conversation on the device: its own, and one snapshot for later hits.
SLOTS_PER_CONVERSATION: Final = 2

_LARGEST: Final = 2**60
_SMALLEST_GPU_BYTES: Final = 10_000  # a smaller number was probably meant in GiB


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the servers, and how it is used.

    Attributes:
        gpu_bytes: memory of one GPU.
        gpu_share: share of it that weights and KV may take; the rest is for activations.
        weight_bytes: bytes of the weights of all ranks together.
        host_bytes: host memory for KV of all ranks together; 0 for no host tier.
        tensor_parallel: ranks, each with one GPU.
        kv_dtype: one of ``aiokv.model.shape.KV_DTYPES``.
        block_tokens: token positions per block.
        conversation_tokens: tokens of one conversation.
        step_tokens: maximum number of tokens that one step computes of a sequence; only models
            with sliding windows need blocks for it.
        with_stores: True if the engine has stores, whose host blocks are larger.
    """

    gpu_bytes: int
    gpu_share: float = 0.9
    weight_bytes: int = 0
    host_bytes: int = 0
    tensor_parallel: int = 1
    kv_dtype: str = "auto"
    block_tokens: int = 16
    conversation_tokens: int = 8192
    step_tokens: int = 2048
    with_stores: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of one GPU that are left for KV.

        Raises:
            ConfigError: the weights leave nothing.
        """
        usable = int(self.gpu_bytes * self.gpu_share)
        weights = -(-self.weight_bytes // self.tensor_parallel)
        if usable <= weights:
            raise ConfigError(
                f"gpu_bytes is {self.gpu_bytes}: the weights take {format_bytes(weights)} of each "
                f"GPU, but weights and KV together may take {format_bytes(usable)}, "
                f"{self.gpu_share:.0%} of it",
                hint=_hint(
                    self, "use more ranks (tensor parallelism), larger GPUs, or smaller weights"
                ),
            )
        return usable - weights


class WindowSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of one window group; bytes per rank.

    Attributes:
        name: name of the group in ``CacheConfig.windows``.
        window_tokens: positions that one position attends to.
        layers: layers of the group.
        token_bytes: bytes per token.
        block_bytes: bytes per block.
        conversation_blocks: device blocks that one conversation has at most.
        device_blocks: capacity of the device tier.
        host_blocks: capacity of the host tier.
    """

    name: str
    window_tokens: int
    layers: int
    token_bytes: int
    block_bytes: int
    conversation_blocks: int
    device_blocks: int
    host_blocks: int


class CacheSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Capacities of a cache; bytes and blocks per rank.

    Attributes:
        model: ``model_type`` of the model.
        attention: ``"MHA"``, ``"GQA"``, ``"MQA"`` or ``"MLA"``.
        kv_dtype: dtype of KV.
        layers: layers whose attention covers all positions.
        token_bytes: bytes per token of these layers.
        block_bytes: bytes per block of these layers.
        host_block_bytes: bytes per block in host memory, alignment included.
        state_slot_bytes: bytes of the recurrent state of one sequence.
        kv_bytes: GPU memory for KV.
        conversation_bytes: GPU memory that one conversation takes.
        device_blocks: capacity of the device tier.
        host_blocks: capacity of the host tier.
        state_slots: slots of recurrent state on the device.
        host_state_slots: slots of recurrent state in host memory.
        device_conversations: conversations whose KV fits in GPU memory.
        host_conversations: conversations whose KV fits in host memory.
        windows: the window groups.
        memory: the memory that the sizes were computed for.
        notes: assumptions about the model.
    """

    model: str
    attention: str
    kv_dtype: str
    layers: int
    token_bytes: int
    block_bytes: int
    host_block_bytes: int
    state_slot_bytes: int
    kv_bytes: int
    conversation_bytes: int
    device_blocks: int
    host_blocks: int
    state_slots: int
    host_state_slots: int
    device_conversations: int
    host_conversations: int
    windows: tuple[WindowSizes, ...]
    memory: Memory
    notes: tuple[str, ...]

    def check(self) -> None:
        """Raise if no cache can have these capacities.

        Raises:
            ConfigError: a capacity is larger than a cache can have.
        """
        CacheConfig(**self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``CacheConfig`` that differ from their defaults."""
        settings: dict[str, Any] = {
            "block_tokens": self.memory.block_tokens,
            "device_blocks": self.device_blocks,
        }
        optional = {
            "host_blocks": self.host_blocks,
            "state_slots": self.state_slots,
            "host_state_slots": self.host_state_slots,
        }
        settings |= {name: value for name, value in optional.items() if value}
        if self.windows:
            settings["windows"] = {
                group.name: WindowGroup(
                    window_tokens=group.window_tokens,
                    device_blocks=group.device_blocks,
                    step_tokens=self.memory.step_tokens,
                    host_blocks=group.host_blocks,
                )
                for group in self.windows
            }
        return settings


def cache_sizes(shape: ModelShape, memory: Memory) -> CacheSizes:
    """Return the capacities of a cache that fills the memory.

    With sliding windows or recurrent state, memory is divided so that all pools have room for the
    same number of conversations; what is left becomes blocks of full attention.

    Args:
        shape: of the model.
        memory: of the servers.

    Raises:
        ConfigError: the memory is too small for one conversation's window or state and one block,
            or the ranks or the dtype do not suit the model.
    """
    _check(memory)
    blocks = _blocks(memory.conversation_tokens, memory.block_tokens)
    tier_bytes = memory.kv_bytes, memory.host_bytes // memory.tensor_parallel
    device = _Tier(shape, memory, is_host=False)
    host = _Tier(shape, memory, is_host=True)
    device_conversations = device.conversations(tier_bytes[0], blocks)
    host_conversations = host.conversations(tier_bytes[1], blocks)
    device_served = max(device_conversations, 1)
    device_blocks = device.blocks_beside(tier_bytes[0], device_served)
    if device_blocks < 1:
        needed = device.block_bytes + device.side_bytes(1)
        raise ConfigError(
            f"gpu_bytes is {memory.gpu_bytes}: {format_bytes(tier_bytes[0])} of GPU memory are "
            "left for KV; one block, with the windows and the state of one conversation, takes "
            f"{format_bytes(needed)}",
            hint=_hint(
                memory, "use more GPU memory, more ranks, a smaller kv_dtype or fewer step_tokens"
            ),
        )
    host_blocks = max(host.blocks_beside(tier_bytes[1], host_conversations), 0)
    state_bytes = shape.state_slot_bytes(tensor_parallel=memory.tensor_parallel)
    windows = tuple(
        WindowSizes(
            name=name,
            window_tokens=tokens,
            layers=shape.window_layers(name),
            token_bytes=device.token_bytes(name),
            block_bytes=device.window_block_bytes[name],
            conversation_blocks=device.window_blocks[name],
            device_blocks=device.group_blocks(name, device_served),
            host_blocks=host.group_blocks(name, host_conversations) if host_blocks else 0,
        )
        for name, tokens in shape.windows.items()
    )
    return CacheSizes(
        model=shape.name,
        attention=shape.attention,
        kv_dtype=shape.resolved_kv_dtype(memory.kv_dtype),
        layers=shape.full_layers,
        token_bytes=device.token_bytes(None),
        block_bytes=device.block_bytes,
        host_block_bytes=host.block_bytes,
        state_slot_bytes=state_bytes,
        kv_bytes=tier_bytes[0],
        conversation_bytes=device.conversation_bytes(blocks),
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        state_slots=SLOTS_PER_CONVERSATION * device_served if state_bytes else 0,
        host_state_slots=host_conversations if state_bytes and host_blocks else 0,
        device_conversations=device_conversations,
        host_conversations=host_conversations,
        windows=windows,
        memory=memory,
        notes=shape.notes,
    )


class _Tier:
    """Bytes that blocks and conversations take in one tier of one rank.

    Args:
        shape: of the model.
        memory: of the servers.
        is_host: True for host memory, False for the device.
    """

    def __init__(self, shape: ModelShape, memory: Memory, *, is_host: bool) -> None:
        self._shape = shape
        self._memory = memory
        self._is_host = is_host
        self._per_rank: dict[str, Any] = {
            "kv_dtype": memory.kv_dtype,
            "tensor_parallel": memory.tensor_parallel,
        }
        self.block_bytes = self._block_bytes(None)
        self.window_block_bytes = {name: self._block_bytes(name) for name in shape.windows}
        # The device has the blocks of the window and of one step; the host has those of the window.
        step = 1 if is_host else memory.step_tokens
        longest = _blocks(memory.conversation_tokens, memory.block_tokens)
        self._least = {  # per group: the engine refuses fewer device blocks
            name: _blocks(tokens - 1 + step, memory.block_tokens) + 1
            for name, tokens in shape.windows.items()
        }
        self.window_blocks = {name: min(blocks, longest) for name, blocks in self._least.items()}
        self._state_bytes = self._state_slot_bytes() * (1 if is_host else SLOTS_PER_CONVERSATION)

    def token_bytes(self, group: str | None) -> int:
        return self._shape.bytes_per_token(**self._per_rank, group=group)

    def group_blocks(self, group: str, conversations: int) -> int:
        """Return the blocks of a window group that has room for ``conversations``."""
        blocks = self.window_blocks[group] * conversations
        return blocks if self._is_host else max(blocks, self._least[group])

    def side_bytes(self, conversations: int) -> int:
        """Return the bytes of the windows and the state of ``conversations``."""
        return self._state_bytes * conversations + sum(
            self.group_blocks(name, conversations) * block_bytes
            for name, block_bytes in self.window_block_bytes.items()
        )

    def conversation_bytes(self, blocks: int) -> int:
        """Return the bytes of one of many conversations, its windows and state included."""
        sizes = self.window_block_bytes.items()
        windows = sum(self.window_blocks[name] * block_bytes for name, block_bytes in sizes)
        return blocks * self.block_bytes + windows + self._state_bytes

    def conversations(self, total_bytes: int, blocks: int) -> int:
        """Return the conversations that fit in ``total_bytes``."""
        count = total_bytes // self.conversation_bytes(blocks)
        # The engine's minimum of window blocks can exceed the need of a few conversations.
        while count and self.blocks_beside(total_bytes, count) < count * blocks:
            count -= 1
        return count

    def blocks_beside(self, total_bytes: int, conversations: int) -> int:
        """Return the blocks that fit beside the windows and the state of ``conversations``."""
        return (total_bytes - self.side_bytes(conversations)) // self.block_bytes

    def _block_bytes(self, group: str | None) -> int:
        memory = self._memory
        if not self._is_host:
            return self._shape.bytes_per_block(memory.block_tokens, **self._per_rank, group=group)
        return self._shape.host_bytes_per_block(
            memory.block_tokens, **self._per_rank, group=group, with_stores=memory.with_stores
        )

    def _state_slot_bytes(self) -> int:
        memory = self._memory
        ranks = memory.tensor_parallel
        if not self._is_host or not self._shape.states:
            return self._shape.state_slot_bytes(tensor_parallel=ranks)
        return self._shape.host_state_slot_bytes(
            tensor_parallel=ranks, with_stores=memory.with_stores
        )


def weight_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights in the folder of a model; None if there are none.

    Without weight files, the size that ``model.safetensors.index.json`` names.
    """
    files = [path.stat().st_size for path in folder.glob("*.safetensors")]
    if files:
        return sum(files)
    index = folder / "model.safetensors.index.json"
    try:
        size = msgspec.json.decode(index.read_bytes())["metadata"]["total_size"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def _check(memory: Memory) -> None:
    least = {"host_bytes": 0, "weight_bytes": 0}
    for name in (
        "gpu_bytes",
        "weight_bytes",
        "host_bytes",
        "tensor_parallel",
        "block_tokens",
        "conversation_tokens",
        "step_tokens",
    ):
        checks.integer(
            name,
            getattr(memory, name),
            minimum=least.get(name, 1),
            maximum=_LARGEST,
            error=ConfigError,
        )
    if not 0 < memory.gpu_share <= 1:
        raise ConfigError(f"gpu_share is {memory.gpu_share}; it must be above 0 and at most 1")


def _hint(memory: Memory, advice: str) -> str:
    """Return the advice; that of a unit where the size of the GPU has none."""
    if memory.gpu_bytes >= _SMALLEST_GPU_BYTES:
        return advice
    return f"give gpu_bytes (--gpu-memory) in bytes or with a unit, such as {memory.gpu_bytes}GiB"


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
