"""Check of a plan's block ids, before a worker accepts the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv import _native
from aiokv.base.groups import ATTENTION, STATE
from aiokv.base.plan import CLONE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.base.plan import AnyTier, TransferPlan


def check_ids(plan: TransferPlan, num_blocks: Mapping[AnyTier, int]) -> None:
    """Raise unless a plan can be executed on tiers of these sizes.

    Args:
        plan: to check.
        num_blocks: blocks of its group, by tier.

    Raises:
        UsageError: ids out of range, unequal or empty lists, a duplicate destination, or a
            destination that is a source of the same pool.
    """
    source, target = plan.route.source, plan.route.target
    _native.check_ids(
        plan.source_ids,
        plan.target_ids,
        source=_name(plan, source),
        source_blocks=num_blocks[source],
        target=_name(plan, target),
        target_blocks=num_blocks[target],
    )


def _name(plan: TransferPlan, tier: AnyTier) -> str:
    """Return the name of a pool in errors; ids of ``"state"`` may be ``ZEROS``."""
    if plan.group == ATTENTION:
        return tier
    if plan.group == STATE and plan.route == CLONE:
        return STATE
    return f"{plan.group} {tier}"
