"""Bad block ids of a plan are refused, with the numbers."""

from __future__ import annotations

import pytest

from aiokv.base.plan import CLONE, OFFLOAD, ONLOAD, STATE, Route, TransferPlan, id_bytes
from aiokv.errors import UsageError
from aiokv.worker.ids import check_ids

POOLS = {"device": 4, "host": 8, "state": 3}


def plan(route: Route, sources: list[int], targets: list[int]) -> TransferPlan:
    return TransferPlan(
        transfer_id=1,
        route=route,
        source_blocks=id_bytes(sources),
        target_blocks=id_bytes(targets),
    )


@pytest.mark.parametrize(
    ("route", "sources", "targets"),
    [
        (ONLOAD, [7, 7, 0], [0, 1, 3]),
        (OFFLOAD, [3, 3], [7, 0]),
        (CLONE, [1, 1], [2, 3]),
        (STATE, [-1, 2], [0, 1]),
    ],
    ids=str,
)
def test_valid_ids_are_accepted(route: Route, sources: list[int], targets: list[int]) -> None:
    check_ids(plan(route, sources, targets), POOLS)


@pytest.mark.parametrize(
    ("route", "sources", "targets", "message"),
    [
        (ONLOAD, [], [], "the copy has no blocks"),
        (ONLOAD, [1, 2], [1], "2 source ids, 1 target ids"),
        (ONLOAD, [8], [0], r"host block 8 at index 0 is not in \[0, 8\)"),
        (ONLOAD, [0, 1], [0, 4], r"device block 4 at index 1 is not in \[0, 4\)"),
        (OFFLOAD, [-1], [0], r"device block -1 at index 0 is not in \[0, 4\)"),
        (OFFLOAD, [0, 1], [6, 6], "duplicate destination: host block 6"),
        (CLONE, [0, 1], [1, 2], "device block 1 is both a source and a destination"),
        (STATE, [-2], [0], r"state slot -2 at index 0 is not in \[-1, 3\)"),
        (STATE, [0], [-1], r"state slot -1 at index 0 is not in \[0, 3\)"),
        (STATE, [2], [2], "state slot 2 is both a source and a destination"),
    ],
)
def test_bad_ids_are_refused_with_the_numbers(
    route: Route, sources: list[int], targets: list[int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_ids(plan(route, sources, targets), POOLS)
