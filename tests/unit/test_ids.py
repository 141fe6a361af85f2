"""Bad block ids of a plan are refused, with the numbers."""

from __future__ import annotations

import pytest

from aiokv.base.groups import ATTENTION, STATE
from aiokv.base.plan import CLONE, OFFLOAD, ONLOAD, AnyTier, Route, TransferPlan, id_bytes
from aiokv.errors import UsageError
from aiokv.worker.ids import check_ids

SIZES: dict[str, dict[AnyTier, int]] = {
    ATTENTION: {"device": 4, "host": 8},
    STATE: {"device": 3, "host": 5},
}


def plan(route: Route, group: str, sources: list[int], targets: list[int]) -> TransferPlan:
    return TransferPlan(
        transfer_id=1,
        route=route,
        group=group,
        source_blocks=id_bytes(sources),
        target_blocks=id_bytes(targets),
    )


@pytest.mark.parametrize(
    ("route", "group", "sources", "targets"),
    [
        (ONLOAD, ATTENTION, [7, 7, 0], [0, 1, 3]),
        (OFFLOAD, ATTENTION, [3, 3], [7, 0]),
        (CLONE, ATTENTION, [1, 1], [2, 3]),
        (CLONE, STATE, [-1, 2], [0, 1]),
    ],
    ids=str,
)
def test_valid_ids_are_accepted(
    route: Route, group: str, sources: list[int], targets: list[int]
) -> None:
    check_ids(plan(route, group, sources, targets), SIZES[group])


@pytest.mark.parametrize(
    ("route", "group", "sources", "targets", "message"),
    [
        (ONLOAD, ATTENTION, [], [], "the copy has no blocks"),
        (ONLOAD, ATTENTION, [1, 2], [1], "2 source ids, 1 target ids"),
        (ONLOAD, ATTENTION, [8], [0], r"host block 8 at index 0 is not in \[0, 8\)"),
        (ONLOAD, ATTENTION, [0, 1], [0, 4], r"device block 4 at index 1 is not in \[0, 4\)"),
        (OFFLOAD, ATTENTION, [-1], [0], r"device block -1 at index 0 is not in \[0, 4\)"),
        (OFFLOAD, ATTENTION, [0, 1], [6, 6], "duplicate destination: host block 6"),
        (CLONE, ATTENTION, [0, 1], [1, 2], "device block 1 is both a source and a destination"),
        (CLONE, STATE, [-2], [0], r"state slot -2 at index 0 is not in \[-1, 3\)"),
        (CLONE, STATE, [0], [-1], r"state slot -1 at index 0 is not in \[0, 3\)"),
        (OFFLOAD, STATE, [-1], [0], r"state device block -1 at index 0 is not in \[0, 3\)"),
        (CLONE, STATE, [2], [2], "state slot 2 is both a source and a destination"),
    ],
)
def test_bad_ids_are_refused_with_the_numbers(
    route: Route, group: str, sources: list[int], targets: list[int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_ids(plan(route, group, sources, targets), SIZES[group])
