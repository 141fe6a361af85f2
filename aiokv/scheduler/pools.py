"""Auxiliary pools of host memory, by the names that stores and plans have for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from aiokv.base.groups import STATE
from aiokv.base.plan import store_pool

if TYPE_CHECKING:
    from aiokv.base.plan import StorePool
    from aiokv.config.cache_config import CacheConfig

_STATE: Final = -1  # group of recurrent state in the core


class AuxiliaryPool(NamedTuple):
    """A pool whose copies a hit needs beside the blocks of full attention.

    Attributes:
        name: name of the pool.
        group: number of the window group in the core; -1 for recurrent state.
        head_blocks: blocks at the beginning of a prompt whose copies a hit needs.
        tail_blocks: likewise, of the last blocks of the hit.
    """

    name: StorePool
    group: int
    head_blocks: int
    tail_blocks: int


def is_storable(config: CacheConfig) -> bool:
    """Return True if all that a hit needs can be in host memory, and so in stores."""
    has_windows = all(group.host_blocks for group in config.windows.values())
    return has_windows and bool(config.host_state_slots or not config.state_slots)


def group_numbers(config: CacheConfig) -> dict[StorePool, int]:
    """Return the number of each auxiliary pool in the core."""
    return {pool.name: pool.group for pool in auxiliary_pools(config)}


def auxiliary_pools(config: CacheConfig) -> list[AuxiliaryPool]:
    """Return the auxiliary pools of a cache that is storable; none for another one."""
    if not is_storable(config):
        return []
    size = config.block_tokens
    pools = [
        AuxiliaryPool(
            store_pool(name),
            number,
            -(-group.sink_tokens // size),
            -(-(group.window_tokens - 1) // size),
        )
        for number, (name, group) in enumerate(config.windows.items())
    ]
    if config.host_state_slots:
        pools.append(AuxiliaryPool(store_pool(STATE), _STATE, 0, 1))
    return pools
