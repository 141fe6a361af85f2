"""Groups of a cache beside full attention, as hits, stores and transitions of peers need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv._native import STATE_GROUP
from aiokv.base.groups import STATE, BlockGroup

if TYPE_CHECKING:
    from aiokv.config.cache_config import CacheConfig


def is_storable(config: CacheConfig) -> bool:
    """Return True if all that a hit needs can be in host memory, and so in stores."""
    has_windows = all(group.host_blocks for group in config.windows.values())
    return has_windows and bool(config.host_state_slots or not config.state_slots)


def block_groups(config: CacheConfig) -> dict[str, BlockGroup]:
    """Return the window groups, and the recurrent state, of a cache."""
    size = config.block_tokens
    groups = {
        name: BlockGroup(
            name, number, -(-group.sink_tokens // size), -(-group.retained_tokens // size)
        )
        for number, (name, group) in enumerate(config.windows.items())
    }
    if config.state_slots:
        groups[STATE] = BlockGroup(STATE, STATE_GROUP, 0, 1)
    return groups
