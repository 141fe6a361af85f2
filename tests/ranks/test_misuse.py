"""Arguments of the wrong type or out of range get a typed error, and nothing has changed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from aiokv.base.plan import ONLOAD, TransferPlan
from aiokv.errors import ClosedError, ConfigError, UsageError
from aiokv.ranks import Rank, RankGroup, RankTimeouts
from aiokv.ranks.rank_state import MAX_RANKS
from aiokv.worker.base import UNLIMITED_BLOCKS
from aiokv.worker.lanes import IDLE
from tests.ranks.loopback import Ranked
from tests.ranks.test_protocol import regions_of

NO_NUMBERS = [None, "1", True, math.nan, math.inf, -math.inf, 0, -1.0, 1j, [1]]
FIELDS = ["start", "hello", "heartbeat", "silence", "transfer", "min_bytes_per_second", "close"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_timeout_that_is_no_finite_number_above_0_is_named(field):
    for value in NO_NUMBERS:
        with pytest.raises(ConfigError) as raised:
            RankTimeouts(**{field: value})
        text = rf"RankTimeouts\.{field} is .*finite number above 0"
        assert re.search(text, str(raised.value)), value


def test_numbers_of_other_libraries_are_accepted():
    assert RankTimeouts(start=np.float32(2), close=3).start == 2
    assert RankGroup(np.int64(2), path="s").num_ranks == 2
    assert Rank(Path("s"), np.int32(1), regions_of(8), connect_timeout=1).rank == 1


@pytest.mark.parametrize("num_ranks", [0, -1, MAX_RANKS + 1, 1.0, "2", None, True, math.nan])
def test_invalid_number_of_ranks_is_named(num_ranks):
    with pytest.raises(ConfigError, match=f"num_ranks is .*(an integer|between 1 and {MAX_RANKS})"):
        RankGroup(num_ranks, path="s")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"path": 5}, "path is 5"),
        ({"path": b"s"}, "path is b's'"),
        ({"path": ""}, "path is ''"),
        ({"path": "a\0b"}, "path is 'a.x00b'"),
        ({"path": "s", "entry": 5}, "entry is 5"),
        ({"path": "s", "entry": b"a:b"}, "entry is b'a:b'"),
        ({"path": "s", "timeouts": 5.0}, "timeouts is 5.0"),
        ({"path": "s", "timeouts": {"start": 5.0}}, "timeouts is {"),
        ({"path": "s", "clock": 5.0}, "clock is 5.0"),
        ({}, "path is required when ranks are started externally"),
    ],
)
def test_an_argument_of_a_group_that_is_wrong_is_named(options, why):
    with pytest.raises(ConfigError, match=why):
        RankGroup(2, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        ((5, 0, regions_of(8)), {}, "path is 5"),
        (("s", -1, regions_of(8)), {}, "rank is -1"),
        (("s", MAX_RANKS, regions_of(8)), {}, f"rank is {MAX_RANKS}"),
        (("s", "0", regions_of(8)), {}, "rank is '0'"),
        (("s", 0, None), {}, "regions is None"),
        (("s", 0, [np.zeros(3)]), {}, "regions is "),
        (("s", 0, regions_of(8), "tpu:0"), {}, "device is 'tpu:0'; it must be 'cpu'"),
        (("s", 0, regions_of(8)), {"connect_timeout": math.nan}, "connect_timeout is nan"),
        (("s", 0, regions_of(8)), {"connect_timeout": None}, "connect_timeout is None"),
    ],
)
def test_an_argument_of_a_rank_that_is_wrong_is_named(arguments, options, why):
    with pytest.raises(ConfigError, match=why):
        Rank(*arguments, **options)


@pytest.mark.asyncio
async def test_use_of_a_rank_before_async_with_is_refused(tmp_path):
    worker = Rank(tmp_path / "s", 0, regions_of(8))
    for call in (
        lambda: worker.closed(),
        lambda: worker.layers([1]),
    ):
        with pytest.raises(UsageError, match="must be entered with 'async with'"):
            await call()
    with pytest.raises(UsageError, match="must be entered with 'async with'"):
        worker.step(1)
    with pytest.raises(UsageError, match="must be entered with 'async with'"):
        worker.statistics()
    await worker.aclose()
    assert "not connected" in repr(worker)


@pytest.mark.asyncio
async def test_a_group_that_was_never_opened_has_initial_values_and_takes_no_plans():
    group = RankGroup(1, path="s")
    facts, state = group.facts, group.inspect()
    assert (group.layout, facts.num_layers, facts.device_blocks) == (None, 0, UNLIMITED_BLOCKS)
    assert (group.failure, state.ranks, state.stores, state.peers) == (None, [], [], [])
    assert group.statistics() == IDLE
    assert group.group_statistics().generation == 0
    plan = TransferPlan(transfer_id=1, route=ONLOAD, source_blocks=bytes(4), target_blocks=bytes(4))
    with pytest.raises(ClosedError, match="transfer 1: the group of ranks is not open"):
        group.plans.submit(plan)
    for verb in (group.sleep, group.wake_up):
        with pytest.raises(UsageError, match="the group of ranks is not open"):
            await verb(frozenset({"host"}))
    await group.aclose()
    with pytest.raises(ClosedError, match="transfer 1: the group of ranks is closing"):
        group.plans.submit(plan)


@pytest.mark.asyncio
async def test_a_rank_is_entered_once(tmp_path):
    async with Ranked(tmp_path) as ranked:
        worker = ranked.shards[0].worker
        with pytest.raises(UsageError, match="entered once"):
            await worker.__aenter__()
        assert ranked.group.failure is None


@pytest.mark.asyncio
async def test_wrong_arguments_of_a_rank_s_verbs_change_nothing(tmp_path):
    async with Ranked(tmp_path) as ranked:
        worker = ranked.shards[0].worker
        for step in (0, -1, 1.0, "1", None, True):
            with pytest.raises(UsageError, match=r"step is .*(an integer|at least 1)"):
                worker.step(step)
        with pytest.raises(UsageError, match="event is 'done'"):
            worker.step(1, "done")
        for ids in (None, 5, ["a"], [1.5]):
            with pytest.raises(UsageError, match="transfer_ids is"):
                await worker.layers(ids)
        for timeout in (math.nan, "1", True):
            with pytest.raises(UsageError, match="timeout is"):
                await worker.layers([], timeout)
        assert (await worker.layers(np.array([], np.int64))).is_done
        for shard in ranked.shards:
            shard.worker.step(np.int64(1))
        ranked.engine.step()
        assert await ranked.serve([1, 2, 3]) == 0
        await ranked.finish()
