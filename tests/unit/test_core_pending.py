"""Pending blocks behind cached ones that cannot be hit yet."""

from __future__ import annotations

import numpy as np

from aiokv._native import Core, Outcome

PROMPT = np.arange(9, dtype=np.int32)  # 4 blocks of 2 that an equal prompt can hit


def test_an_equal_prompt_goes_on_waiting_while_the_owner_computes_in_chunks():
    """Chunk by chunk KV is cached, and the state that a hit needs comes with the last."""
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
