"""Configuration of a cache; checked once, never changed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from aiokv.base import checks
from aiokv.base.groups import ATTENTION, RETENTIONS, STATE, Retention, is_reserved
from aiokv.config.save_policy import SaveMoment, SavePolicy
from aiokv.errors import ConfigError
from aiokv.layout.host_block import pitch_bytes

if TYPE_CHECKING:
    from aiokv.layout.regions import Regions

Verify = Literal["off", "checksum"]
ItemHits = Literal["whole", "partial"]
WRITE_POLICIES: Final[tuple[SaveMoment, ...]] = ("none", "write_through", "nth_use", "write_back")
EvictionPolicy = Literal["lru", "adaptive"]  # the rows of native/src/index/eviction_policies.cpp
EVICTION_POLICIES: Final[tuple[EvictionPolicy, ...]] = get_args(EvictionPolicy)
DEFAULT_EVICTION_POLICY: Final[EvictionPolicy] = "adaptive"
AdmissionOrder = Literal["arrival", "cached_first"]
ADMISSION_ORDERS: Final[tuple[AdmissionOrder, ...]] = get_args(AdmissionOrder)
STORE_POLICIES: Final[tuple[SaveMoment, ...]] = ("write_through", "nth_use", "write_back")
MAX_SHARES: Final = 4_095  # salts in CacheConfig.salt_shares
_RENAMED_POLICIES = {"s3fifo": "adaptive"}
_NOT_WITH_EXTERNAL_DEVICE: Final[
    tuple[tuple[str, object, str], ...]
] = (  # (field, value that leaves it unset, reason)
    ("state_slots", 0, "the server has the recurrent state, and names no slots of it"),
    ("host_state_slots", 0, "the server has the recurrent state, and names no slots of it"),
    ("reserve_blocks", 0, "the server decides which requests get device blocks"),
    ("salt_quota_blocks", None, "the server decides which requests get device blocks"),
    ("low_watermark_blocks", None, "the server evicts device blocks"),
    ("admission", "arrival", "the server decides which requests get device blocks"),
    ("max_running_leases", None, "the server decides which requests get device blocks"),
)


@checks.arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGroup:
    """Layers whose attention covers the last positions only; they have their own block ids.

    With ``CacheConfig.external_device``, a group of the server's blocks with any retention.

    Attributes:
        window_tokens: positions that one position attends to, itself included. Required for
            ``retention="window"``; the other values need none.
        device_blocks: blocks of this group's tensors. A lease has at most the blocks of a sink, a
            window and a step at a time, however long it is; the rest keeps windows for later hits.
        step_tokens: the most that one step computes of a lease, such as a chunk of the prompt; None
            to give a lease the blocks of all its positions at once, as far as there are any.
        sink_tokens: positions at the beginning of a prompt that every position attends to besides
            its window (the attention sink of StreamingLLM; 0 for none). Their blocks, rounded up to
            whole ones, stay with the lease, and a prefix is hit only while they are cached.
        host_blocks: blocks of this group that host memory holds, besides those of
            ``CacheConfig.host_blocks``; 0 for none. They are saved by
            ``CacheConfig.write_policy``, as far as the group has device blocks that no lease has
            set aside, and a prefix can be hit where its sink and its window are on the device or in
            host memory. ``"write_back"`` saves the blocks that are evicted next, and does not wait
            for a save. The tensors of the group are registered with :meth:`Regions.add_window`.
        retention: blocks that a hit needs: those in the ``"window"`` at its end; with
            ``CacheConfig.external_device`` also ``"all"`` blocks of its prefix, or the ``"last"``
            one, which has the recurrent state at its end.

    With ``CacheConfig.external_device``, the ids of all groups are those of one pool of the server:
    ``device_blocks`` is at most that of the configuration, ``host_blocks`` must not be 0, and
    ``step_tokens`` must be None.

    Raises:
        ConfigError: a value is out of range. The engine, which knows ``block_tokens``, raises it
            when ``device_blocks`` cannot hold a sink, a window and a step of one lease.
    """

    window_tokens: int = 0
    device_blocks: int
    step_tokens: int | None = None
    sink_tokens: int = 0
    host_blocks: int = 0
    retention: Retention = "window"

    def __post_init__(self) -> None:
        checks.choice("retention", self.retention, RETENTIONS, ConfigError)
        if self.retention == "window":
            _require_int("window_tokens", self.window_tokens, 1)
        elif self.window_tokens or self.sink_tokens:
            name = "window_tokens" if self.window_tokens else "sink_tokens"
            raise ConfigError(
                f"{name} is {getattr(self, name)}, and retention is {self.retention!r}, which has "
                "no window",
                hint=f"set {name}=0, or retention='window'",
            )
        _require_int("device_blocks", self.device_blocks, 1)
        if self.step_tokens is not None:
            _require_int("step_tokens", self.step_tokens, 1)
        _require_int("sink_tokens", self.sink_tokens, 0)
        _require_int("host_blocks", self.host_blocks, 0)

    @property
    def retained_tokens(self) -> int:
        """Number of positions before a block boundary whose blocks a hit needs there."""
        retained = {"all": 2**31 - 2, "last": 1}
        return retained.get(self.retention, self.window_tokens - 1)


@checks.arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes and rules of one cache.

    Attributes:
        block_tokens: token positions per block.
        device_blocks: capacity of the device tier.
        host_blocks: capacity of the host tier; 0 for none.
        write_policy: when to copy blocks to host memory, while it has free blocks.
            ``"write_through"``: when they are committed; ``"nth_use:N"``, such as ``"nth_use:2"``:
            at their N-th use, of which computing them is the first; ``"write_back"``: shortly
            before their eviction; ``"none"``: never. A full host tier keeps what the device does
            not have: then all policies copy blocks shortly before their eviction, and a grant waits
            for these copies. ``extend`` and ``fork`` evict unsaved blocks rather than fail, except
            with ``"write_back"``.
        low_watermark_blocks: device blocks that are kept free or saved ahead of eviction; None
            for a thirty-second of ``device_blocks``, at most 8,192.
        eviction_policy: which blocks are evicted first. ``"adaptive"``: like ``"lru"``, or by
            scores, learned from how often prompts of each kind of use and age return. A
            simulation of both orders sees each prompt; the order changes when the simulation of
            the other one has hit significantly more. ``"lru"``: the least recently used, exactly.
        min_onload_tokens: a shorter host hit is computed again rather than copied.
        item_hits: where a hit may end. ``"whole"``: before or after a multimodal item, never inside
            it, because the model encodes an item as a whole. ``"partial"``: also inside an item,
            for models that encode the item again and compute its remaining positions. A
            recomputation after a failed onload begins by the same rule; ``truncate`` never cuts an
            item.
        leave_tokens: positions at the end of a prompt that are computed even if cached, at least
            1 for the logits; EAGLE and MTP heads need more.
        reserve_blocks: device blocks that ``allocate`` leaves for ``extend``.
        miss_history_blocks: evicted blocks that the engine remembers to explain misses
            (``Lease.missed``); 0 for no explanation. Each takes its token ids, 4 bytes per token,
            and at most 70 bytes more; all together 32 KiB more.
        drain_timeout_seconds: how long closing waits for leases that are still held; may be
            ``math.inf``.
        verify: ``"checksum"`` compares each onloaded block with the committed one, for finding
            bugs; it reads every byte.
        strict: True to warn with :class:`UncoveredCommitWarning` when a lease commits positions
            that no batch of ``engine.computing`` covers (once per owner), and to log at debug the
            positions that are released uncommitted. None for the debug mode of asyncio, which
            ``python -X dev`` and ``PYTHONASYNCIODEBUG=1`` set. It has no effect with
            ``external_device``.
        state_slots: rows of the recurrent state's tensors (:meth:`Regions.add_state`), for leases
            and snapshots; 0 for models without recurrent state.
        sentinel_state_slot: True if the state tensors have one more row than ``state_slots``: the
            row with the number ``state_slots``, for the padded rows of a CUDA graph. No lease or
            snapshot gets this row, and no transfer reads or writes it.
        host_state_slots: snapshots of recurrent state that host memory holds besides
            ``host_blocks``; 0 for none. They are saved by ``write_policy``, and a prefix can be hit
            at them after their device slots were used for something else. ``"write_back"`` saves
            the snapshots that are evicted next, and does not wait for a save.
        windows: groups of sliding-window layers, by name; see ``lease.window_table``.
        salt_quota_blocks: device blocks that the leases of one salt may hold at a time; a shared
            block counts for each lease. None for no limit. ``extend`` may exceed the limit.
        salt_shares: by salt, part of the cached blocks of each tier that is kept for it, above 0;
            the sum is at most 1. Up to its share, cached blocks of the salt are evicted
            for other salts only when no other block can be evicted. Other salts use what the salt
            does not need, and beyond its share it competes with them.
        admission: order in which waiting requests of equal priority are granted. ``"arrival"``: the
            first that came. ``"cached_first"``: the largest share of the prompt that is cached, in
            steps of a tenth; among equal shares the fewest tokens to compute, in powers of two;
            then the first that came. What waiting requests will hit counts as used shortly before
            each grant, so that other blocks are evicted for the grant.
        max_overtake_seconds: with ``"cached_first"``: a request that has waited so long goes before
            all later requests of its priority; may be ``math.inf``.
        max_running_leases: leases that hold device blocks at a time, without pins and prefetches,
            such as the largest batch of the server; further requests wait in the order of
            ``admission``. None for no limit. ``fork`` may exceed it.
        model: name of the model, such as its path and revision; part of the key of each block in a
            store. Required with stores: two models with equal names and layouts would share blocks.
        weights_version: version of the model's weights; part of the key, too. Each value of
            ``engine.updating_weights(version=...)`` replaces it.
        store_policy: when to save blocks of host memory to the stores. ``"write_through"``: as soon
            as they are in host memory; ``"nth_use:N"``: at their N-th use, as for ``write_policy``;
            ``"write_back"``: shortly before their eviction from host memory.
        store_queue_blocks: blocks that may wait for a save; further blocks are not saved, and
            counted in ``dropped_saves`` of the statistics.
        external_device: True if a server owns the device blocks, and names them with
            ``lease.assign``: the engine keeps host memory and the stores only. ``device_blocks`` is
            then the number of blocks of the server's tensors, whose ids are 0 to
            ``device_blocks - 1``. Each further group of the server's blocks is one of ``windows``.
        prefill_tokens_per_second: speed at which the model computes a prompt. The engine
            fetches blocks from a store only if the prompt is then ready sooner than by computing
            them. None to measure the speed.

    Raises:
        ConfigError: a value is out of range.
    """

    device_blocks: int
    block_tokens: int = 16
    host_blocks: int = 0
    write_policy: str = "write_through"
    low_watermark_blocks: int | None = None
    eviction_policy: EvictionPolicy = DEFAULT_EVICTION_POLICY
    min_onload_tokens: int = 0
    item_hits: ItemHits = "whole"
    leave_tokens: int = 1
    reserve_blocks: int = 0
    miss_history_blocks: int = 0
    drain_timeout_seconds: float = 30.0
    verify: Verify = "off"
    strict: bool | None = None
    state_slots: int = 0
    host_state_slots: int = 0
    sentinel_state_slot: bool = False
    windows: Mapping[str, WindowGroup] = field(default_factory=dict, hash=False)
    salt_quota_blocks: int | None = None
    salt_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    admission: AdmissionOrder = "arrival"
    max_overtake_seconds: float = 600.0
    max_running_leases: int | None = None
    model: str = ""
    weights_version: str = ""
    store_policy: str = "write_through"
    store_queue_blocks: int = 4_096
    prefill_tokens_per_second: float | None = None
    external_device: bool = False

    def __post_init__(self) -> None:
        _require_int("device_blocks", self.device_blocks, 1)
        _require_int("block_tokens", self.block_tokens, 1)
        _require_int("host_blocks", self.host_blocks, 0)
        _require_int("state_slots", self.state_slots, 0)
        _require_int("host_state_slots", self.host_state_slots, 0)
        _require_int("leave_tokens", self.leave_tokens, 1)
        _require_int("reserve_blocks", self.reserve_blocks, 0)
        _require_int("miss_history_blocks", self.miss_history_blocks, 0)
        _require_int("min_onload_tokens", self.min_onload_tokens, 0)
        if self.low_watermark_blocks is not None:
            _require_int("low_watermark_blocks", self.low_watermark_blocks, 0)
        if self.reserve_blocks >= self.device_blocks:
            raise ConfigError(
                f"reserve_blocks ({self.reserve_blocks}) must be below "
                f"device_blocks ({self.device_blocks})"
            )
        if self.strict is not None:
            checks.flag("strict", self.strict, ConfigError)
        checks.flag("sentinel_state_slot", self.sentinel_state_slot, ConfigError)
        if self.sentinel_state_slot and not self.state_slots:
            raise ConfigError(
                "sentinel_state_slot is True, but state_slots is 0: without recurrent state there "
                "are no rows to pad",
                hint="set state_slots, or sentinel_state_slot=False",
            )
        if self.host_state_slots and not (self.state_slots and self.host_blocks):
            missing = "host_blocks" if self.state_slots else "state_slots"
            raise ConfigError(
                f"host_state_slots is {self.host_state_slots}, but {missing} is 0; a snapshot in "
                "host memory needs a state slot on the device, and belongs to a block",
                hint=f"set {missing}, or host_state_slots=0",
            )
        SavePolicy.parse("write_policy", self.write_policy, WRITE_POLICIES)
        checks.choice("verify", self.verify, get_args(Verify), ConfigError)
        checks.choice("item_hits", self.item_hits, get_args(ItemHits), ConfigError)
        if (new_name := _RENAMED_POLICIES.get(str(self.eviction_policy))) is not None:
            raise ConfigError(
                f"eviction_policy is {self.eviction_policy!r}, which is unknown",
                hint=f"use {new_name!r}, its new name",
            )
        checks.choice("eviction_policy", self.eviction_policy, EVICTION_POLICIES, ConfigError)
        if self.salt_quota_blocks is not None:
            _require_int("salt_quota_blocks", self.salt_quota_blocks, 1)
        _check_shares(self.salt_shares)
        checks.choice("admission", self.admission, ADMISSION_ORDERS, ConfigError)
        checks.seconds(
            "max_overtake_seconds", self.max_overtake_seconds, error=ConfigError, minimum=0.0
        )
        if self.max_running_leases is not None:
            _require_int("max_running_leases", self.max_running_leases, 1)
        checks.seconds(
            "drain_timeout_seconds", self.drain_timeout_seconds, error=ConfigError, minimum=0.0
        )
        _check_windows(self.windows, self.host_blocks, external=self.external_device)
        self._check_stores()
        if checks.flag("external_device", self.external_device, ConfigError):
            self._check_external_device()

    def _check_external_device(self) -> None:
        if not self.host_blocks:
            raise ConfigError(
                "host_blocks is 0, and external_device is True: the engine would keep no block",
                hint="set host_blocks, best larger than device_blocks",
            )
        for name, unset, reason in _NOT_WITH_EXTERNAL_DEVICE:
            if (value := getattr(self, name)) != unset:
                raise ConfigError(
                    f"{name} is {checks.shown(value)}, and external_device is True: {reason}",
                    hint=f"set {name}={unset!r}, or external_device=False",
                )
        for name, group in self.windows.items():
            for field_name, is_right, required in (
                (
                    "device_blocks",
                    group.device_blocks <= self.device_blocks,
                    "at most device_blocks",
                ),
                ("step_tokens", group.step_tokens is None, "None"),
                ("host_blocks", group.host_blocks > 0, "at least 1"),
            ):
                if not is_right:
                    raise ConfigError(
                        f"windows[{name!r}] has {field_name}={getattr(group, field_name)}, and "
                        f"external_device is True: it must be {required}",
                        hint="all groups of the server share one pool, and have host copies",
                    )
        if self.write_policy == "write_back":
            raise ConfigError(
                "write_policy is 'write_back', and external_device is True: the engine does not "
                "see the server's evictions, so it cannot save blocks before them",
                hint="use 'write_through' or 'nth_use:N'",
            )

    def _check_stores(self) -> None:
        checks.text("model", self.model, ConfigError)
        checks.text("weights_version", self.weights_version, ConfigError)
        SavePolicy.parse("store_policy", self.store_policy, STORE_POLICIES)
        _require_int("store_queue_blocks", self.store_queue_blocks, 1)
        speed = self.prefill_tokens_per_second
        if speed is not None:
            checks.positive("prefill_tokens_per_second", speed, ConfigError)

    @classmethod
    def for_regions(
        cls,
        regions: Regions,
        *,
        device_bytes: int | None = None,
        host_bytes: int = 0,
        with_stores: bool = False,
        **options: Any,
    ) -> Self:
        """Return a configuration whose capacities are computed from bytes.

        Args:
            regions: the tensors, over all layers. To size the tensors themselves, register tensors
                of one block and call ``num_blocks_for(device_bytes, regions.block_bytes)``.
            device_bytes: bytes of the tensors to use; None for all.
            host_bytes: bytes of host memory, alignment included; 0 for no host tier.
            with_stores: True if the engine gets stores: its host blocks are larger then.
            options: the other fields.

        Raises:
            ConfigError: ``device_bytes`` or ``host_bytes`` is less than one block; or as the
                constructor.
        """
        if regions.num_blocks is None:
            raise ConfigError(
                "regions has no tensors, so the bytes of a block are unknown",
                hint="register the tensors with Regions.add first",
            )
        device_blocks = regions.num_blocks
        if device_bytes is not None:
            fitting = _fitting_blocks("device_bytes", device_bytes, regions.block_bytes)
            device_blocks = min(device_blocks, fitting)
        host_blocks = 0
        if host_bytes:
            checks.flag("with_stores", with_stores, ConfigError)
            pitch = pitch_bytes(regions.payload_bytes, with_stores=with_stores)
            host_blocks = _fitting_blocks("host_bytes", host_bytes, pitch)
        return cls(device_blocks=device_blocks, host_blocks=host_blocks, **options)

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        *,
        env: bool = True,
        block: Regions | int | None = None,
        with_stores: bool = False,
        **overrides: Any,
    ) -> Self:
        """Return a configuration from keywords, environment variables, a TOML file and defaults.

        Each setting comes from the first of these sources that has it: the keywords; the variable
        ``AIOKV_`` and the name of the field in capitals; the file; the default. Each source may
        have ``device_bytes`` and ``host_bytes`` in place of ``device_blocks`` and ``host_blocks``:
        a number of bytes, or a text such as ``"40GiB"``. ``"none"`` is None where a field accepts
        it; an empty variable counts as not set. ``AIOKV_WINDOWS`` is JSON.

        Args:
            file: path of a TOML file, whose keys are the fields; a window group is a table
                ``[windows.NAME]``. None for the file that ``AIOKV_CONFIG`` names, if any.
            env: False to read no environment variable.
            block: bytes of one block, or the tensors, for sizes in bytes. With tensors,
                ``device_blocks`` defaults to the number of their blocks, which also limits the
                blocks of ``device_bytes``.
            with_stores: True if the engine gets stores: its host blocks are larger then.
            overrides: fields, ``device_bytes`` and ``host_bytes``.

        Raises:
            ConfigError: the file cannot be read; a name is unknown, or a value has the wrong type
                or is out of range (the message has the file and its line, or the variable); a size
                in bytes is set without ``block``, or is less than one block; or ``device_blocks``
                is missing.
        """
        from aiokv.config.settings import Settings

        environ = os.environ if checks.flag("env", env, ConfigError) else None
        settings = Settings(file, environ, overrides)
        settings.resolve(block, with_stores=checks.flag("with_stores", with_stores, ConfigError))
        return settings.config(cls)

    @property
    def watermark_blocks(self) -> int:
        """``low_watermark_blocks``, or its default."""
        if self.low_watermark_blocks is not None:
            return min(self.low_watermark_blocks, self.device_blocks)
        return min(self.device_blocks // 32, 8_192)

    @property
    def min_onload_blocks(self) -> int:
        return -(-self.min_onload_tokens // self.block_tokens)


def _require_int(name: str, value: object, minimum: int) -> None:
    if not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be an int")
    checks.integer(name, value, minimum=minimum, maximum=2**30 - 1, error=ConfigError)


def _check_shares(shares: object) -> None:
    hint = "salt_shares={'chat': 0.25}"
    if not isinstance(shares, Mapping):
        raise ConfigError(f"salt_shares is {shares!r}; it must be a mapping of salts", hint=hint)
    if len(shares) > MAX_SHARES:
        raise ConfigError(f"salt_shares has {len(shares)} salts; it must have at most {MAX_SHARES}")
    for salt, share in shares.items():
        checks.text("a salt of salt_shares", salt, ConfigError)
        checks.positive(f"salt_shares[{salt!r}]", share, ConfigError)
    if (total := math.fsum(shares.values())) > 1.0:
        raise ConfigError(f"salt_shares has a sum of {total:g}; it must be at most 1", hint=hint)


def _check_windows(windows: object, host_blocks: int, *, external: bool) -> None:
    hint = "windows={'local': WindowGroup(window_tokens=..., device_blocks=...)}"
    if not isinstance(windows, Mapping):
        raise ConfigError(f"windows is {windows!r}; it must be a mapping of names", hint=hint)
    for name, group in windows.items():
        if not isinstance(name, str):
            raise ConfigError(f"windows: group name {name!r} is not a str", hint=hint)
        if is_reserved(name):
            raise ConfigError(
                f"windows: group name {name!r} is reserved; use a name other than {ATTENTION!r} "
                f"and {STATE!r} that does not begin with '{ATTENTION} '",
                hint=hint,
            )
        if not isinstance(group, WindowGroup):
            raise ConfigError(
                f"windows[{name!r}] is {group!r}; it must be a WindowGroup", hint=hint
            )
        if group.retention != "window" and not external:
            raise ConfigError(
                f"windows[{name!r}] has retention={group.retention!r}, and external_device is "
                "False: the engine then has groups of windows only",
                hint="register the tensors with Regions.add or Regions.add_state instead",
            )
        if group.host_blocks and not host_blocks:
            raise ConfigError(
                f"windows[{name!r}] has host_blocks={group.host_blocks}, but "
                "CacheConfig.host_blocks is 0; window blocks are copied together with other blocks",
                hint="set CacheConfig.host_blocks, or host_blocks=0 for the group",
            )


def _fitting_blocks(field: str, total_bytes: int, block_bytes: int) -> int:
    from aiokv.layout.regions import num_blocks_for

    total_bytes = checks.integer(field, total_bytes, error=ConfigError)
    num_blocks = num_blocks_for(total_bytes, block_bytes)
    if num_blocks == 0:
        raise ConfigError(
            f"{field} is {total_bytes}; it must be at least {block_bytes}, the bytes of one block"
        )
    return num_blocks
