"""``CacheManager`` of servers for prefill only and for decoding only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aiokv.connectors.fastdeploy import CacheManager, blocks, handovers, holdings
from tests.connectors.fastdeploy_requests import finish, prompt, serve, start
from tests.connectors.fastdeploy_server import BLOCK, Request, Status, fd_config


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1.0)
    for module in (blocks, handovers, holdings):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def manager(request):
    config = fd_config(16)
    config.scheduler_config.splitwise_role = request.param
    manager = CacheManager(config, prefill_timeout_seconds=20.0, shares_in_batch=True)
    yield manager
    engine = manager.engine
    assert engine.call(engine.cache.check_invariants) == []
    manager.close()


def preallocate(manager: CacheManager, name: str, tokens: list[int]) -> Request:
    """Do as ``preallocate_resource_in_d``."""
    request = Request(name, tokens)
    request.block_tables = manager.allocate_gpu_blocks(request, len(tokens) // BLOCK + 1)
    request.num_computed_tokens = request.need_prefill_tokens
    manager.issue_pending_backup_to_batch_request()
    manager.issue_pending_backup_to_batch_request()
    return request


def cached_blocks(manager: CacheManager, tokens: list[int]) -> int:
    request = Request("other", [*tokens, 1])
    manager.match_prefix(request)
    found = request.match_result.total_matched_blocks
    manager.request_finish(request)
    return found


@pytest.mark.parametrize("manager", ["decode"], indirect=True)
def test_preallocated_blocks_are_shared_when_the_first_token_has_arrived(manager):
    request = preallocate(manager, "a", prompt(1, 3))
    assert cached_blocks(manager, prompt(1, 3)) == 0
    request.output_token_ids.append(7)  # by add_prefilled_request
    manager.issue_pending_backup_to_batch_request()
    assert cached_blocks(manager, prompt(1, 3)) == 3
    finish(manager, request)
    assert cached_blocks(manager, prompt(1, 3)) == 3


@pytest.mark.parametrize("manager", ["decode"], indirect=True)
def test_preallocated_blocks_that_never_arrive_are_given_back_unshared(manager, clock):
    late = preallocate(manager, "a", prompt(1, 3))
    arrived = preallocate(manager, "b", prompt(2, 3))
    arrived.output_token_ids.append(7)
    clock.now += 19.0
    assert manager.expired_requests() == []
    clock.now += 1.0
    assert manager.expired_requests() == [late]
    finish(manager, late)
    assert manager.expired_requests() == []
    assert cached_blocks(manager, prompt(1, 3)) == 0
    assert manager.num_free_device_blocks == 12
    finish(manager, arrived)


@pytest.mark.parametrize("manager", ["prefill"], indirect=True)
def test_blocks_of_a_preempted_request_stay_until_they_may_have_been_sent(manager, clock):
    request = Request("a", prompt(1, 4))
    start(manager, request)
    manager.update_cache_blocks(request, BLOCK, request.need_prefill_tokens)
    manager.issue_pending_backup_to_batch_request()
    request.status = Status.PREEMPTED
    manager.request_finish(request)
    manager.issue_pending_backup_to_batch_request()
    assert not manager.can_allocate_gpu_blocks(13)
    clock.now += 61.0
    manager.issue_pending_backup_to_batch_request()
    assert manager.can_allocate_gpu_blocks(16)
    serve(manager, "b", prompt(2, 4))
    assert manager.can_allocate_gpu_blocks(16)
