"""Dict by lease id, split into shards."""

from __future__ import annotations

from aiokv.scheduler.sharded import SHARDS, Sharded


def test_a_sharded_dict_behaves_as_a_dict():
    sharded: Sharded[str] = Sharded()
    model: dict[int, str] = {}
    assert not sharded
    for lease_id in (0, 1, SHARDS, SHARDS + 1, (5 << 32) | 1):
        sharded[lease_id] = model[lease_id] = f"lease {lease_id}"
    assert dict(sharded) == model
    assert len(sharded) == 5
    assert sharded
    assert SHARDS in sharded
    assert 2 not in sharded
    assert sharded.get(2) is None
    assert sharded.pop(1) == "lease 1"
    del sharded[0]
    assert sorted(sharded) == [SHARDS, SHARDS + 1, (5 << 32) | 1]


def test_consecutive_leases_fill_the_shards_evenly():
    sharded: Sharded[int] = Sharded()
    for slot in range(10 * SHARDS):
        sharded[(3 << 32) | slot] = slot
    assert {len(shard) for shard in sharded.shards} == {10}
