"""Several ranks behind one engine: all get the same plans, and a block is VALID when all have it.

The manager uses :class:`RankGroup`, each rank :class:`Rank`; ``messages`` defines the protocol.
"""

from aiokv.ranks.group import GroupStatistics, RankGroup
from aiokv.ranks.rank import Rank
from aiokv.ranks.rank_state import RankTimeouts

__all__ = ["GroupStatistics", "Rank", "RankGroup", "RankTimeouts"]
