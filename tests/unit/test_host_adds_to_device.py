"""Host memory adds to the device: a full host tier keeps what the device does not have."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv._native import Core, Outcome, SavePolicy

BT = 2
BLOCKS = 4
PROMPTS = [np.full(BLOCKS * BT + 1, token, np.int32) for token in range(4)]
SAVING = [SavePolicy.WRITE_THROUGH, SavePolicy.NTH_USE, SavePolicy.WRITE_BACK]


def new_core(policy: SavePolicy, **options) -> Core:
    sizes = {"device_blocks": BLOCKS + 1, "host_blocks": BLOCKS} | options
    return Core(block_tokens=BT, write_policy=policy, write_uses=2, **sizes)


def end(core: Core, transfer_id: int) -> int:
    """End a transfer; return the number of its blocks."""
    if not transfer_id:
        return 0
    blocks = len(core.transfer(transfer_id)[1]) // 4
    core.complete(transfer_id, Outcome.DONE, 0)
    return blocks


def serve(core: Core, tokens: np.ndarray) -> tuple[int, int]:
    """Serve a prompt; return the blocks that it has hit on the device and on the host."""
    lease = core.match(tokens)[0]
    for _ in range(3):
        if core.allocate(lease, len(tokens)):
            break
        end(core, core.take_write_backs(BLOCKS + 1))
    hit = core.hit(lease)
    for transfer_id in core.onloads(lease):
        core.complete(transfer_id, Outcome.DONE, 0)
    core.commit(lease, len(tokens), 0)
    core.release(lease, 0)
    end(core, core.take_backups())
    assert core.violations() == []
    return hit


@pytest.mark.parametrize("policy", SAVING)
def test_blocks_on_the_host_alone_survive_new_commits(policy: SavePolicy):
    core = new_core(policy)
    for tokens in PROMPTS[:2]:
        assert serve(core, tokens) == (0, 0)
    lease, on_device, on_host = core.match(PROMPTS[0])
    core.release(lease, 0)
    assert (on_device, on_host) == (0, BLOCKS)
    assert core.match(PROMPTS[1])[1:] == (BLOCKS, 0)


@pytest.mark.parametrize("policy", SAVING)
def test_evicted_blocks_are_saved_and_replace_the_oldest_of_the_host(policy: SavePolicy):
    core = new_core(policy)
    for tokens in PROMPTS[:3]:
        assert serve(core, tokens) == (0, 0)
    found = [core.match(tokens)[1:] for tokens in PROMPTS[:3]]
    assert found == [(0, 0), (0, BLOCKS), (BLOCKS, 0)]
    assert core.statistics().attention.offloaded_blocks == 2 * BLOCKS


def test_early_copies_take_free_host_blocks_alone():
    core = new_core(SavePolicy.WRITE_THROUGH, host_blocks=BLOCKS + 1)
    serve(core, PROMPTS[0])
    assert core.statistics().attention.host.free == 1
    serve(core, PROMPTS[1])
    statistics = core.statistics()
    assert statistics.attention.offloaded_blocks == BLOCKS + 1, "one early copy fits"
    assert statistics.attention.host.evicted_blocks == statistics.skipped_backups == 0


def test_copies_of_device_blocks_give_way_before_blocks_on_the_host_alone():
    core = new_core(SavePolicy.WRITE_THROUGH, device_blocks=2 * BLOCKS + 1, host_blocks=BLOCKS)
    serve(core, PROMPTS[0])  # has the host copies
    serve(core, PROMPTS[1])  # has none: the host is full
    serve(core, PROMPTS[0])  # used last
    serve(core, PROMPTS[2])  # evicts the blocks of PROMPTS[1], which need room on the host
    assert core.match(PROMPTS[1])[1:] == (0, BLOCKS)
    assert core.match(PROMPTS[0])[1:] == (BLOCKS, 0)
    assert core.statistics().reclaimed_host_copies == BLOCKS


@pytest.mark.parametrize("policy", SAVING)
def test_extend_fails_for_an_unsaved_block_only_with_write_back(policy: SavePolicy):
    core = new_core(policy)
    for tokens in PROMPTS[:2]:
        serve(core, tokens)
    lease = core.match(PROMPTS[2])[0]
    end(core, core.take_write_backs(1))
    assert core.allocate(lease, BT)
    extended = core.extend([lease], BLOCKS * BT)
    assert extended == (policy != SavePolicy.WRITE_BACK)
