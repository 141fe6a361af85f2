"""Sizes: the part of FastDeploy's configuration that the connector reads."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from aiokv import CacheConfig
from aiokv.base import checks
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

ROLES: Final = ("mixed", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes and rules of FastDeploy's cache, read by the names of its fields.

    Attributes:
        role: ``scheduler_config.splitwise_role``: "mixed", "prefill" or "decode".
        block_tokens: ``cache_config.block_size``.
        device_blocks: ``cache_config.total_block_num``.
        host_blocks: ``cache_config.num_cpu_blocks``.
        write_policy: ``cache_config.write_policy`` and ``write_through_threshold``, as
            :class:`aiokv.CacheConfig` names them.
        shares_blocks: ``cache_config.enable_prefix_caching``.
        shares_outputs: ``cache_config.enable_output_caching``.
        decode_blocks: ``cache_config.enc_dec_block_num``: blocks that a decoding request gets at a
            time.
        decode_slots: positions that a decoding request has left when the next blocks are taken
            ahead for it.
        look_schedules: number of batches after which all decoding requests are looked at, to take
            blocks ahead for them and to commit generated tokens.
        batch_tokens: ``scheduler_config.max_num_batched_tokens``.
        tail_tokens: positions at the end of the generated tokens that are not computed for sure:
            the last one, and those of draft tokens.
        leave_tokens: positions at the end of a prompt that are computed even if cached.
        splits_items: not ``cache_config.disable_chunked_mm_input``: a match may end inside an
            image, whose other positions the model computes.
        shares_in_batch: True to share blocks with the later requests of the batch that computes
            them.
        layer_ends: numbers of layers after which a prefill server sends those before, while the
            workers compute the others; empty without peers.
    """

    block_tokens: int
    device_blocks: int
    host_blocks: int = 0
    write_policy: str = "nth_use:2"
    shares_blocks: bool = True
    shares_outputs: bool = True
    decode_blocks: int = 0
    decode_slots: int = 0
    look_schedules: int = 1
    batch_tokens: int = 0
    tail_tokens: int = 1
    leave_tokens: int = 1
    splits_items: bool = False
    shares_in_batch: bool = False
    role: str = "mixed"
    layer_ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read an ``FDConfig``, or any object with the same fields.

        Raises:
            ConfigError: a required field is missing, or the role of the server is unknown.
        """
        scheduler = getattr(config, "scheduler_config", None)
        role = str(_field(scheduler, "splitwise_role", "mixed"))
        check_role(role, ROLES)
        try:
            cache = config.cache_config
            block_tokens = _integer(cache.block_size, "block_size")
            device_blocks = _integer(cache.total_block_num, "total_block_num")
            host_blocks = _integer(cache.num_cpu_blocks, "num_cpu_blocks")
            shares_blocks = bool(cache.enable_prefix_caching)
        except AttributeError as error:
            raise ConfigError(
                f"the configuration of FastDeploy lacks a field: {error}",
                hint="pass the FDConfig that the resource manager gets",
            ) from error
        drafts = _draft_tokens(getattr(config, "speculative_config", None))
        slots = _count(cache, "prealloc_dec_block_slot_num_threshold", 0)
        return cls(
            role=role,
            block_tokens=block_tokens,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            write_policy=_write_policy(cache),
            shares_blocks=shares_blocks,
            shares_outputs=bool(_field(cache, "enable_output_caching", True)),
            decode_blocks=_count(cache, "enc_dec_block_num", 0),
            decode_slots=slots + max(block_tokens // 4, 1 + drafts),
            look_schedules=max(block_tokens // 8 // (1 + drafts), 1),
            batch_tokens=_count(scheduler, "max_num_batched_tokens", 0),
            tail_tokens=1 + drafts,
            leave_tokens=1 + drafts,
            splits_items=not _field(cache, "disable_chunked_mm_input", True),
        )

    def with_device_blocks(self, device_blocks: int) -> Self:
        """Return the same sizes with another number of device blocks."""
        return replace(self, device_blocks=device_blocks)

    def step_blocks(self, num_requests: int) -> int:
        """Return the most blocks that one step of this number of requests takes, at least 1."""
        prefill = -(-self.batch_tokens // self.block_tokens)
        blocks = prefill + num_requests * (1 + self.decode_blocks)
        return max(min(blocks, self.device_blocks), 1)

    def room_blocks(self, num_requests: int) -> int:
        """Return the number of blocks to count room for: those of a step of these requests.

        Without host memory, it takes no time to count more: FastDeploy also asks for the blocks
        that it reserves for running requests.
        """
        return self.step_blocks(num_requests) if self.host_blocks else self.device_blocks

    def cache_config(self, **options: Any) -> CacheConfig:
        """Return the configuration of the engine.

        Args:
            options: fields of :class:`aiokv.CacheConfig`; they replace those of FastDeploy.

        Raises:
            ConfigError: as :class:`aiokv.CacheConfig`.
        """
        fields: dict[str, Any] = {
            "block_tokens": self.block_tokens,
            "device_blocks": self.device_blocks,
            "host_blocks": self.host_blocks,
            "write_policy": self.write_policy,
            "leave_tokens": self.leave_tokens,
            "item_hits": "partial" if self.splits_items else "whole",
            "drain_timeout_seconds": 0.0,
            "strict": False,  # FastDeploy returns blocks after the step that computes them
        }
        return CacheConfig(**{**fields, **options})


def socket_of(config: Any) -> Path:
    """Return the socket between the manager and the workers of one FastDeploy engine.

    It is in a directory of this user, which is created. Its name has the port of the engine's queue
    for workers, which no other engine of this host has.

    Raises:
        ConfigError: the configuration has no such port, or the directory belongs to another user.
    """
    port = getattr(getattr(config, "parallel_config", None), "local_engine_worker_queue_port", None)
    if port is None:
        raise ConfigError(
            "the configuration of FastDeploy lacks parallel_config.local_engine_worker_queue_port",
            hint="pass the FDConfig, or path= and ranks= with a socket of your own",
        )
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(parent) / f"aiokv-fastdeploy-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if (owner := folder.stat().st_uid) != os.getuid():
        raise ConfigError(f"{folder} belongs to user {owner}; set XDG_RUNTIME_DIR to another path")
    return folder / f"{port}.sock"


def writes_before_reading() -> bool:
    """Return True if a batch writes the KV of a layer before any of its requests reads that layer.

    FastDeploy's append attention on CUDA does so. Its flash attention reads the cached prefixes
    first. With ``USE_TBO=1``, a batch has two parts with an order of their own. The order of other
    attention backends is not known.
    """
    platforms: Any = sys.modules.get("fastdeploy.platforms")
    return (
        platforms is not None
        and bool(platforms.current_platform.is_cuda())
        and os.environ.get("FD_ATTENTION_BACKEND", "APPEND_ATTN") == "APPEND_ATTN"
        and computes_in_order()
    )


def computes_in_order() -> bool:
    """Return True if a batch computes each layer for all its requests before the next layer.

    With ``USE_TBO=1``, a batch has two parts, whose layers are computed in turn.
    """
    return os.environ.get("USE_TBO", "0") != "1"


def layers_of(config: Any) -> tuple[int, int]:
    """Return the numbers of layers of the model, and of draft layers.

    Raises:
        ConfigError: the configuration does not name them.
    """
    try:
        layers = int(config.model_config.num_hidden_layers)
    except AttributeError as error:
        raise ConfigError(
            f"the configuration of FastDeploy lacks a field: {error}",
            hint="pass the FDConfig of the worker",
        ) from error
    drafts = getattr(getattr(config, "speculative_config", None), "num_extra_cache_layer", 0)
    return layers, int(drafts or 0)


def _write_policy(cache: object) -> str:
    policy = str(_field(cache, "write_policy", "write_through_selective"))
    threshold = _count(cache, "write_through_threshold", 2)
    return f"nth_use:{threshold}" if policy == "write_through_selective" else policy


def check_role(role: str, roles: Sequence[str]) -> None:
    """Check that a server has one of these roles.

    Raises:
        ConfigError: it has another role.
    """
    if role not in roles:
        raise ConfigError(f"splitwise_role is {role!r}; it must be one of {', '.join(roles)}")


def _field(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _count(config: Any, name: str, default: int) -> int:
    """Return a field that is an integer of at least 0, or ``default`` if it is missing or None."""
    return _integer(_field(config, name, default), name, minimum=0)


def _integer(value: Any, name: str, minimum: int = -checks.MAX_INT64) -> int:
    """Return an integer of FastDeploy's configuration, which may be a text or a float.

    Raises:
        ConfigError: not an integer of at least ``minimum``.
    """
    with suppress(TypeError, ValueError, OverflowError):
        value = int(value) if isinstance(value, str) or value == int(value) else value
    return checks.integer(name, value, minimum=minimum, error=ConfigError)


def _draft_tokens(config: Any) -> int:
    """Return the number of draft tokens per step; 0 without speculative decoding."""
    if getattr(config, "method", None) is None:
        return 0
    return _count(config, "num_speculative_tokens", 0)
