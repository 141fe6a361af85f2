"""Check of a plan's block ids, before a worker accepts the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv import _native

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.base.plan import Pool, TransferPlan


def check_ids(plan: TransferPlan, num_blocks: Mapping[Pool, int]) -> None:
    """Raise unless a plan can be executed on pools of these sizes.

    Args:
        plan: of a route between two of the pools.
        num_blocks: by pool.

    Raises:
        UsageError: ids out of range, unequal or empty lists, a duplicate destination, or a
            destination that is a source of the same pool.
    """
    source, target = plan.route.source, plan.route.target
    _native.check_ids(
        plan.source_ids,
        plan.target_ids,
        source=source,
        source_blocks=num_blocks[source],
        target=target,
        target_blocks=num_blocks[target],
    )
