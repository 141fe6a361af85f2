"""Pending blocks behind cached ones that cannot be hit yet."""

from __future__ import annotations

import numpy as np

from aiokv._native import Core, Outcome

PROMPT = np.arange(9, dtype=np.int32)  # 4 blocks of 2 that an equal prompt can hit


def test_equal_prompt_keeps_waiting_while_the_owner_computes_in_chunks():
    """KV is cached chunk by chunk, and the state that a hit needs arrives with the last chunk."""
    core = Core(block_tokens=2, device_blocks=16, state_slots=4)
    owner, *_ = core.match(PROMPT)
    core.allocate(owner, len(PROMPT))
    core.complete(core.onloads(owner)[0], Outcome.DONE)
    waiting, *_ = core.match(PROMPT)
    for end in (2, 4, 6):
        assert core.pending(waiting) == (owner, 5 - end // 2)
        core.commit(owner, end)
    assert core.pending(waiting) == (owner, 1)
    core.commit(owner, 8)
    core.snapshot(owner, 8)
    assert core.pending(waiting) == (0, 0)
    assert core.allocate(waiting, len(PROMPT)) == 2
    assert core.cached_tokens(waiting) == 8
    for lease_id in (owner, waiting):
        core.release(lease_id)
    assert core.violations() == []


def test_tokens_appended_after_the_grant_are_pending():
    core = Core(block_tokens=2, device_blocks=16)
    owner, *_ = core.match(PROMPT[:4])
    core.allocate(owner, len(PROMPT))
    waiting, *_ = core.match(PROMPT)
    assert core.pending(waiting) == (owner, 2)
    core.append(owner, PROMPT[4:7])
    assert core.pending(waiting) == (owner, 3)
    core.truncate(owner, 5)
    assert core.pending(waiting) == (owner, 2)
    assert core.extend([owner], 4)
    core.append(owner, PROMPT[5:])
    assert core.pending(waiting) == (owner, 4)
    core.release(owner)
    assert core.pending(waiting) == (0, 0)


def test_longest_of_many_pending_prefixes_is_found():
    """Of several owners with equal prefixes, one continues like the waiting prompt."""
    core = Core(block_tokens=2, device_blocks=2000)
    owners = []
    for number in range(200):
        prompt = np.concatenate([PROMPT[: 2 + 2 * (number % 3)], [100 + number, 0, 0]])
        owner, *_ = core.match(prompt.astype(np.int32))
        assert core.allocate(owner, len(prompt)) == 1
        owners.append(owner)
    waiting, *_ = core.match(PROMPT)
    for expected, number in ((3, 2), (2, 1), (1, 0)):
        owner, blocks = core.pending(waiting)
        assert (blocks, owner in owners[number::3]) == (expected, True)
        for owner in owners[number::3]:
            core.release(owner)
    assert core.pending(waiting) == (0, 0)
