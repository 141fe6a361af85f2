"""Looks at running requests: when tokens are committed and blocks are taken in advance."""

from __future__ import annotations

import random
import sys

import pytest

from aiokv.connectors.fastdeploy.holding import Holding
from aiokv.connectors.fastdeploy.settings import Sizes
from tests.connectors.fastdeploy_requests import count_crossings, finish, opened, prompt, start
from tests.connectors.fastdeploy_server import BLOCK, Request, fd_config


def is_due(holding: Holding, sizes: Sizes, outputs: int) -> bool:
    """Return True if a look at a request with this number of generated tokens changes something."""
    size, total = sizes.block_tokens, len(holding.request.prompt_token_ids) + outputs
    if holding.shares_blocks:
        computed = holding.scheduled_tokens
        if outputs > holding.base_outputs:
            computed = max(computed, total - sizes.tail_tokens)
        usable = len(holding.table) if holding.usable_blocks is None else holding.usable_blocks
        computed = min(computed, usable * size)
        if not sizes.shares_outputs:
            computed = min(computed, holding.prefill_tokens)
        if computed // size * size > holding.committed_tokens:
            return True
    takes = bool(sizes.decode_blocks) and not holding.spare and holding.usable_blocks is None
    return takes and holding.given * size - total <= sizes.decode_slots


@pytest.mark.parametrize("seed", range(200))
def test_next_outputs_is_the_first_number_of_tokens_that_is_due(seed):
    chance = random.Random(seed)
    size = chance.choice([1, 4, 16])
    sizes = Sizes(
        block_tokens=size,
        device_blocks=64,
        decode_blocks=chance.choice([0, 2]),
        decode_slots=chance.randrange(1, 6),
        tail_tokens=chance.choice([1, 3]),
        shares_outputs=chance.random() < 0.7,
    )
    tokens = list(range(chance.randrange(1, 5 * size + 1)))
    holding = Holding(Request("a", tokens), len(tokens), ())
    holding.shares_blocks = chance.random() < 0.8
    holding.given = -(-len(tokens) // size) + chance.randrange(3)
    holding.table = list(range(holding.given + chance.choice([0, 0, 2])))
    holding.scheduled_tokens = len(tokens)
    if chance.random() < 0.3:
        holding.usable_blocks = chance.randrange(holding.given + 1)
    computed = len(tokens) // size * size
    holding.committed_tokens = chance.randrange(0, computed + 1, size)
    holding.note_looked(sizes)
    due = (outputs for outputs in range(1, 40 * size) if is_due(holding, sizes, outputs))
    first = next(due, sys.maxsize)
    assert max(holding.next_outputs, 1) == first


def test_a_request_in_prefill_is_looked_at_each_time():
    holding = Holding(Request("a", list(range(8))), 8, ())
    sizes = Sizes(block_tokens=4, device_blocks=8)
    holding.next_outputs, holding.scheduled_tokens = 5, 4
    holding.note_looked(sizes)
    assert holding.next_outputs == 0, "a part of the prompt is not scheduled"
    holding.next_outputs, holding.scheduled_tokens, holding.last_batch = 5, 8, 3
    holding.note_looked(sizes)
    assert holding.next_outputs == 0, "the first token has not arrived"


@pytest.mark.parametrize(
    ("block_tokens", "drafts", "looks"), [(4, None, 1), (64, None, 8), (64, 3, 2), (16, 7, 1)]
)
def test_requests_are_looked_at_before_their_blocks_are_used_up(block_tokens, drafts, looks):
    config = fd_config(64, speculative=drafts)
    config.cache_config.block_size = block_tokens
    sizes = Sizes.of(config)
    assert sizes.look_schedules == looks
    assert looks * sizes.tail_tokens <= sizes.decode_slots


def decode(manager, request: Request, token: int) -> None:
    """Let a token arrive, and schedule the next step as FastDeploy does."""
    request.output_token_ids.append(token)
    request.num_computed_tokens = request.num_total_tokens - 1
    if len(request.block_tables) * manager.block_size <= request.num_total_tokens:
        assert manager.can_allocate_gpu_blocks(1)
        request.block_tables += manager.allocate_gpu_blocks(request, 1)
    manager.issue_pending_backup_to_batch_request()


def test_decoding_crosses_at_looks_only_and_a_match_finds_all_tokens(monkeypatch):
    with opened(64, decode_blocks=2) as manager:
        manager.blocks.note_resize(
            Sizes(block_tokens=BLOCK, device_blocks=64, decode_blocks=2, decode_slots=2,
                  look_schedules=6, batch_tokens=64)
        )  # fmt: skip
        request = Request("a", prompt(1, 2, more=1), 100)
        start(manager, request)
        manager.issue_pending_backup_to_batch_request()
        counts = count_crossings(monkeypatch)
        schedules = 36
        for token in range(schedules):
            decode(manager, request, token)
        assert 3 <= len(counts) <= schedules // 6 + 36 // (2 * BLOCK) + 1, counts
        computed = request.num_total_tokens - 1
        again = Request("b", [*request.tokens, 1])
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == computed // BLOCK
        finish(manager, request)
        finish(manager, again)


def test_a_match_takes_blocks_for_the_requests_that_decode(monkeypatch):
    with opened(64, decode_blocks=2) as manager:
        manager.blocks.note_resize(
            Sizes(block_tokens=BLOCK, device_blocks=64, decode_blocks=2, decode_slots=1,
                  look_schedules=100, batch_tokens=64)
        )  # fmt: skip
        running = Request("a", prompt(1, 2, more=1), 100)
        start(manager, running)
        manager.issue_pending_backup_to_batch_request()
        counts = count_crossings(monkeypatch)
        for token in range(2):  # one position of the last block is left then
            decode(manager, running, token)
        assert counts == []
        new = Request("b", prompt(2, 1))
        start(manager, new)
        running.block_tables += manager.allocate_gpu_blocks(running, 2)
        manager.issue_pending_backup_to_batch_request()
        assert len(counts) == 1, counts
        assert len({*running.block_tables, *new.block_tables}) == 6
        finish(manager, running)
        finish(manager, new)


def test_blocks_taken_with_a_match_are_room_for_every_request():
    with opened(32, batch_tokens=16) as manager:
        request = Request("a", prompt(1, 3))
        manager.match_prefix(request)
        device = manager.engine.statistics().attention.device
        assert device.free == 28, "blocks of the prompt and of its first tokens were taken"
        assert manager.num_free_device_blocks == 32
        assert manager.can_allocate_device_blocks(32)
        assert not manager.can_allocate_device_blocks(33)
        other = Request("b", prompt(2, 32))
        assert len(manager.allocate_device_blocks(other, 32)) == 32
        assert manager.allocate_device_blocks(request, 1) == []
        finish(manager, other)
        assert len(manager.allocate_device_blocks(request, 3)) == 3


def test_blocks_taken_with_a_match_are_given_back_with_it():
    with opened(32, batch_tokens=16) as manager:
        request = Request("a", prompt(1, 3))
        manager.match_prefix(request)
        finish(manager, request)
        assert manager.engine.statistics().attention.device.free == 32
        assert manager.can_allocate_device_blocks(32)
        assert not manager.can_allocate_device_blocks(33)


def test_match_takes_only_the_blocks_of_the_prompt_if_a_further_step_has_no_room():
    with opened(8, batch_tokens=16) as manager:
        first = Request("a", prompt(1, 4))
        start(manager, first)
        request = Request("b", prompt(2, 2))
        manager.match_prefix(request)
        assert manager.engine.statistics().attention.device.free == 2
        assert manager.can_allocate_device_blocks(4)
        assert not manager.can_allocate_device_blocks(5)
