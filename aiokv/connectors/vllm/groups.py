"""Groups of vLLM's KV cache, and the blocks of a request in each of them.

A model has one or more groups of layers. Each group has a table of blocks per request; all tables
take their blocks from one pool. The *main* group is of full attention. The others are *side*
groups, which differ in the blocks that a hit of ``n`` blocks needs:

    full attention    all ``n`` blocks
    sliding window    the blocks of the last window
    recurrent state   block ``n - 1``, with the state behind its last position

vLLM frees the other blocks of windows and of states while the request runs. A table of
:class:`BlockTables` keeps their ids, as the tables of vLLM's workers do.

A model of windows or states only has side groups only. The engine finds prefixes by the blocks of
its main group, so this group then has *numbers* in place of vLLM's blocks: ids behind those of
vLLM's pool, of blocks without content.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from aiokv.connectors.vllm import compat
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from aiokv.base.groups import Retention

NULL_BLOCK: Final = 0
"""Block that stands in vLLM's tables for a block that was freed, or was never there."""

NO_BLOCK: Final = -1
"""The same in a table of the engine."""

NUMBERS: Final = 1 << 18
"""Numbers of blocks of a main group without content.

They are used again in turn, in whatever request: leases may share ids. A load or save in flight
whose number a request computes is given up.
"""

NUMBER_BYTES: Final = 16
"""Bytes per block of a main group without content; the engine copies at least some bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideGroup:
    """A group besides the main one.

    Attributes:
        index: place among vLLM's groups.
        name: name of the group in the engine.
        retention: ``"all"``, ``"window"`` or ``"last"`` (recurrent state).
        window_tokens: positions that a position attends to, itself included; 0 without a window.
        block_bytes: bytes per block on one rank.
        is_sparse: True for recurrent state that vLLM keeps only where a step ends.
    """

    index: int
    name: str
    retention: Retention
    window_tokens: int
    block_bytes: int
    is_sparse: bool = False

    def most_blocks(self, step_tokens: int, block_tokens: int) -> int:
        """Return the most blocks that a request of any length has at a time."""
        if self.retention == "all":
            return sys.maxsize
        if self.retention == "last":
            return 3  # the states that were hit, of the last step, and of the next one
        return -(-(self.window_tokens + step_tokens) // block_tokens) + 1

    def first_kept(self, num_tokens: int, block_tokens: int) -> int:
        """Return the first block that vLLM keeps to compute behind ``num_tokens`` positions."""
        window = {"all": num_tokens + 1, "window": self.window_tokens, "last": 2}[self.retention]
        return max(num_tokens - window + 1, 0) // block_tokens


@dataclass(frozen=True, kw_only=True)
class KVGroups:
    """The groups of a model.

    Attributes:
        main: place of the main group among vLLM's groups; None without full attention.
        sides: the other groups, in vLLM's order.
        num_blocks: blocks of vLLM's pool.
        block_bytes: bytes per block of the main group on one rank.
        block_tokens: positions per block, the same in all groups.
        layers: names of the layers of all groups, in vLLM's order.
    """

    main: int | None
    sides: tuple[SideGroup, ...]
    num_blocks: int
    block_bytes: int
    block_tokens: int
    layers: tuple[tuple[str, ...], ...]
    _count: Iterator[int] = field(default_factory=itertools.count, compare=False)

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig) -> Self:
        """Return the groups of vLLM's configuration.

        Raises:
            ConfigError: the connector does not serve a group; with the reason.
        """
        groups = kv_cache_config.kv_cache_groups
        retentions = [_retention_of(group) for group in groups]
        sizes = {int(group.kv_cache_spec.block_size) for group in groups}
        if len(sizes) > 1:
            raise ConfigError(
                f"the KV cache groups have blocks of {sorted(sizes)} tokens; AiokvConnector serves "
                "groups with blocks of one size",
                hint="serve this model without kv_transfer_config",
            )
        main = retentions.index("all") if "all" in retentions else None
        pages = page_bytes_of(kv_cache_config)
        block_bytes = [sum(pages[name] for name in group.layer_names) for group in groups]
        sides = tuple(
            _side_group(index, group, retention, block_bytes[index])
            for index, (group, retention) in enumerate(zip(groups, retentions, strict=True))
            if index != main
        )
        return cls(
            main=main,
            sides=sides,
            num_blocks=kv_cache_config.num_blocks,
            block_bytes=NUMBER_BYTES if main is None else block_bytes[main],
            block_tokens=sizes.pop(),
            layers=tuple(tuple(group.layer_names) for group in groups),
        )

    @property
    def main_blocks(self) -> int:
        """Number of ids of the main group."""
        return self.num_blocks + (NUMBERS if self.main is None else 0)

    def main_table(self, block_ids: Sequence[Sequence[int]]) -> list[int]:
        """Return the ids of the main group for vLLM's new blocks of a request in all groups."""
        if self.main is not None:
            return list(block_ids[self.main])
        numbers = itertools.islice(self._count, len(block_ids[0]))
        return [self.num_blocks + number % NUMBERS for number in numbers]

    @functools.cached_property
    def states(self) -> tuple[tuple[int, SideGroup], ...]:
        """The groups of sparse recurrent state, with their places among ``sides``."""
        return tuple((place, side) for place, side in enumerate(self.sides) if side.is_sparse)

    def blocks_of(self, block_ids: Sequence[Sequence[int]], first: int) -> list[int]:
        """Return the blocks of all groups from index ``first`` of their tables on."""
        if not self.sides:
            return list(block_ids[0][first:])
        return [block for table in block_ids for block in table[first:] if block != NULL_BLOCK]

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most blocks of all groups that a request of ``num_tokens`` has at a time.

        Args:
            num_tokens: positions of the request.
            step_tokens: most positions that one step computes.
        """
        blocks = -(-num_tokens // self.block_tokens)
        main = 0 if self.main is None else blocks
        return main + sum(
            min(blocks, side.most_blocks(step_tokens, self.block_tokens)) for side in self.sides
        )

    def layout_prefix(self, index: int) -> str:
        """Return a prefix for the layouts of a group, which names its layers.

        Another version of vLLM may divide the layers into other groups of equal sizes. Blocks in
        stores are then those of other layers.
        """
        if not self.sides:
            return ""
        digest = hashlib.sha256("\0".join(self.layers[index]).encode()).hexdigest()[:8]
        return f"{index}-{digest}."


@dataclass(slots=True)
class BlockTables:
    """vLLM's blocks of one request, as its workers know them.

    Attributes:
        main: blocks of the main group.
        is_numbered: True if the main group has no blocks of vLLM.
        sides: blocks of the side groups; NULL_BLOCK for none.
        states: by index of a block: the blocks with the recurrent state behind its last position,
            by the index of their group in vLLM.
    """

    main: list[int] = field(default_factory=list)
    is_numbered: bool = False
    sides: list[list[int]] = field(default_factory=list)
    states: dict[int, dict[int, int]] = field(default_factory=dict)

    def set(self, groups: KVGroups, block_ids: Sequence[Sequence[int]]) -> None:
        """Replace all tables."""
        self.main = groups.main_table(block_ids)
        self.is_numbered = groups.main is None
        self.sides = [list(block_ids[side.index]) for side in groups.sides]
        self.states.clear()

    def extend(self, groups: KVGroups, block_ids: Sequence[Sequence[int]]) -> None:
        """Append new blocks to all tables."""
        if not groups.sides:
            self.main += block_ids[0]
            return
        self.main += groups.main_table(block_ids)
        for table, side in zip(self.sides, groups.sides, strict=True):
            table += block_ids[side.index]

    def ids(self, first: int = 0, end: int | None = None) -> list[int]:
        """Return vLLM's blocks of all groups from index ``first`` to before ``end``."""
        ids = [] if self.is_numbered else self.main[first:end]
        for table in self.sides:
            ids += [block for block in table[first:end] if block != NULL_BLOCK]
        return ids

    def sides_of_hit(self, groups: KVGroups, end: int) -> dict[str, list[int]]:
        """Return the side groups' tables of the first ``end`` blocks, for a load of a hit there."""
        return {
            side.name: [NO_BLOCK if block == NULL_BLOCK else block for block in table[:end]]
            for table, side in zip(self.sides, groups.sides, strict=True)
        }

    def sides_to_save(
        self, groups: KVGroups, first: int, end: int, kept_tokens: int
    ) -> dict[str, list[int]]:
        """Return the side groups' blocks ``[first, end)`` that have the bytes to save.

        Args:
            groups: the groups.
            first: index of the first block.
            end: index behind the last block.
            kept_tokens: vLLM may have freed the blocks that it does not need to compute behind
                this many positions.
        """
        found = {}
        for place, side in enumerate(groups.sides):
            kept = side.first_kept(kept_tokens, groups.block_tokens)
            blocks = (
                [self.states.get(i, {}).get(side.index, NULL_BLOCK) for i in range(first, end)]
                if side.is_sparse
                else self.sides[place][first:end]
            )
            found[side.name] = [
                block if i >= kept and block != NULL_BLOCK else NO_BLOCK
                for i, block in enumerate(blocks, first)
            ]
        for index in [index for index in self.states if index < end]:
            del self.states[index]
        return found

    def note_states(self, groups: KVGroups, num_tokens: int) -> None:
        """Note the states behind ``num_tokens`` positions, where a step has ended."""
        blocks, rest = divmod(num_tokens, groups.block_tokens)
        for place, side in groups.states:
            table = self.sides[place]
            if not rest and 0 < blocks <= len(table):
                self.note_state(groups, side.index, num_tokens, table[blocks - 1])

    def note_state(self, groups: KVGroups, group: int, num_tokens: int, block: int) -> None:
        """Note a block that has the state of one of vLLM's groups behind ``num_tokens`` positions.

        Only states at the ends of blocks are noted.
        """
        blocks, rest = divmod(num_tokens, groups.block_tokens)
        if block != NULL_BLOCK and not rest:
            self.states.setdefault(blocks - 1, {})[group] = block


def _retention_of(group: KVCacheGroupSpec) -> Retention:
    kinds = [_kind_of(spec) for spec in specs_of(group)]
    if len(set(kinds)) > 1:
        raise ConfigError(f"a KV cache group has layers of different kinds: {sorted(set(kinds))}")
    return kinds[0]


def specs_of(group: KVCacheGroupSpec) -> list[Any]:
    """Return the descriptions of the layers of a group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _kind_of(spec: Any) -> Retention:
    """Return the retention of a layer.

    Raises:
        ConfigError: the connector does not serve it.
    """
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return "all"
    if type(spec) is SlidingWindowSpec:
        return "window"
    if type(spec) is MambaSpec:
        if not compat.CAN_LOAD_STATES:
            raise ConfigError(
                "the model has recurrent state, which this version of vLLM lets no connector load",
                hint="install vLLM 0.32 or newer",
            )
        if spec.mamba_cache_mode == "none":
            raise ConfigError(
                "the recurrent state of the model is not kept at block boundaries "
                "(mamba_cache_mode is 'none'); no prefix could be loaded",
                hint="pass --enable-prefix-caching",
            )
        if spec.num_speculative_blocks:
            raise ConfigError(
                "the model has recurrent state, and speculative decoding is on; AiokvConnector "
                "does not serve both together",
                hint="drop --speculative-config, or kv_transfer_config",
            )
        return "last"
    raise ConfigError(
        f"the KV cache is of the kind {type(spec).__name__}; AiokvConnector serves full attention "
        "(MHA, GQA, MLA), sliding windows and recurrent state",
        hint="serve this model without kv_transfer_config",
    )


def _side_group(
    index: int, group: KVCacheGroupSpec, retention: Retention, block_bytes: int
) -> SideGroup:
    window = 0
    if retention == "window":
        window = max(
            one.sliding_window + getattr(one, "extra_retained_tokens", 0) for one in specs_of(group)
        )
    return SideGroup(
        index=index,
        name=f"{ {'all': 'full', 'window': 'window', 'last': 'state'}[retention] }{index}",
        retention=retention,
        window_tokens=window,
        block_bytes=block_bytes,
        is_sparse=retention == "last" and specs_of(group)[0].mamba_cache_mode == "align",
    )


def page_bytes_of(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Return the bytes per block of each layer.

    A group may have layers with pages of several sizes: latent attention with an indexer, a draft
    model with fewer heads. vLLM describes all of them to its workers, and one of them to its
    scheduler, which finds the sizes by the places of the layers in memory.
    """
    pages: dict[str, int] = {}
    placed = compat.placed_pages(kv_cache_config)
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        found = {name: placed[name] for name in group.layer_names if name in placed}
        if isinstance(spec, UniformTypeKVCacheSpecs):
            found = {name: one.page_size_bytes for name, one in spec.kv_cache_specs.items()}
        elif len(set(found.values())) <= 1:
            found = dict.fromkeys(group.layer_names, int(spec.page_size_bytes))
        pages |= found
    return pages
