"""Several ranks behind one engine: the same plan to all, and a block is VALID when all have it.

The manager's side is :class:`RankGroup`, a rank's is :class:`Rank`; ``messages`` is between them.
"""

from aiokv.ranks.group import GroupStatistics, RankGroup
from aiokv.ranks.rank import Rank
from aiokv.ranks.rank_state import RankTimeouts

__all__ = ["GroupStatistics", "Rank", "RankGroup", "RankTimeouts"]
