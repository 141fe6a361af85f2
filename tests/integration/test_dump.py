"""engine.inspect.dump(): leases, pins and their blocks as plain values."""

from __future__ import annotations

import asyncio
import json

import pytest

from aiokv.testing import spin
from tests.harness.served import Served, computed, swapped_out

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


def by_owner(served: Served) -> dict[str, dict]:
    dump = json.loads(json.dumps(served.engine.inspect.dump()))
    return {lease["owner"]: lease for lease in dump["leases"]}


async def test_dump_shows_leases_in_every_state():
    async with Served(device_blocks=8) as served:
        await served.to_host(A)
        swapped = await computed(served, [31, 32, 33], owner="swapped")
        await swapped_out(served, swapped)
        loading = await served.engine.match(A, owner="loading").allocate(7)
        matched = served.engine.match(A)
        large = served.engine.match(range(100, 114), owner="large")
        task = asyncio.create_task(large.allocate(14))
        await spin(2)
        leases = by_owner(served)
        assert leases["loading"]["granted"]
        assert leases["loading"]["block_table"] == loading.block_table.tolist()
        assert leases["loading"]["hit_blocks"] == {"device": 0, "host": 3}
        assert len(leases["loading"]["onloads"]) == 1
        assert leases["swapped"]["swapped"]
        assert leases["swapped"]["computed_tokens"] == 3
        assert leases["swapped"]["block_table"] == []
        assert not leases[hex(matched.id)]["granted"]
        dump = served.engine.inspect.dump()
        assert dump["waiting"] == [{"owner": "large", "num_tokens": 14}]
        assert dump["paused"] is False
        assert dump["statistics"]["leases"] == 4
        assert dump["statistics"]["worker"]["groups"]["attention"]["onload"]["submitted"] == 1
        served.device.complete_all()
        await served.settle()
        assert by_owner(served)["loading"]["onloads"] == []
        loading.release()
        await task
        for lease in (swapped, matched, large):
            lease.release()
        dump = served.engine.inspect.dump()
        assert dump["leases"] == dump["waiting"] == []
        assert dump["pins"] == 0


async def test_dump_shows_pins_and_pauses():
    async with Served() as served:
        await served.serve(A)
        pin = await served.engine.pin(A)
        served.engine.pause()
        dump = served.engine.inspect.dump()
        assert (dump["pins"], dump["paused"]) == (1, True)
        assert by_owner(served)["pin"]["num_tokens"] == 6
        served.engine.resume()
        pin.release()
        await served.complete_offloads()


async def test_dump_shows_leases_that_wait_for_quota():
    async with Served(salt_quota_blocks=4, write_policy="none") as served:
        first = await served.engine.match(A, salt="a", owner="first").allocate(7)
        second = served.engine.match(A, salt="a", owner="second")
        task = asyncio.create_task(second.allocate(7))
        await spin(2)
        dump = served.engine.inspect.dump()
        assert dump["waiting_for_quota"] == [{"owner": "second", "salt": "a", "num_blocks": 4}]
        assert dump["quota"] == {"a": 4}
        first.release()
        await task
        second.release()
        assert served.engine.inspect.dump()["quota"] == {}
