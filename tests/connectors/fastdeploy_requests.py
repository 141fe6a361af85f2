"""Requests that a test serves with a ``CacheManager``, verb by verb."""

from __future__ import annotations

from contextlib import contextmanager

from aiokv.connectors.fastdeploy import CacheManager
from aiokv.sync import Calls
from tests.connectors.fastdeploy_server import BLOCK, Request, Status, fd_config


@contextmanager
def opened(device_blocks: int, host_blocks: int = 0, options: dict | None = None, **fields):
    options = {"waits_for_onloads": False, **(options or {})}
    manager = CacheManager(fd_config(device_blocks, host_blocks, **fields), **options)
    try:
        yield manager
        engine = manager.engine
        assert engine.call(engine.cache.check_invariants) == []
    finally:
        manager.close()


def prompt(seed: int, num_blocks: int, more: int = 0) -> list[int]:
    return [seed * 1_000 + i for i in range(num_blocks * BLOCK + more)]


def start(manager: CacheManager, request: Request, num_blocks: int | None = None) -> list[int]:
    """Match a request and take the blocks of its prompt, as the scheduler does."""
    manager.match_prefix(request, True)
    if request.match_result is not None:
        request.block_tables = list(request.match_result.device_block_ids)
    if num_blocks is None:
        num_blocks = -(-request.num_total_tokens // BLOCK) - len(request.block_tables)
    ids = manager.allocate_device_blocks(request, num_blocks)
    request.block_tables += ids
    request.num_computed_tokens = request.num_total_tokens
    return ids


def finish(manager: CacheManager, request: Request) -> None:
    request.status = Status.FINISHED
    manager.request_finish(request)
    request.block_tables = []


def serve(manager: CacheManager, name: str, tokens: list[int]) -> Request:
    """Compute a prompt and end the request: its full blocks are cached."""
    request = Request(name, tokens)
    start(manager, request)
    manager.issue_pending_backup_to_batch_request()
    finish(manager, request)
    return request


def count_crossings(monkeypatch) -> list[int]:
    """Count ``Calls.run`` with at least one call."""
    counts: list[int] = []
    run = Calls.run

    def counting(calls: Calls, **options):
        if len(calls):
            counts.append(len(calls))
        return run(calls, **options)

    monkeypatch.setattr(Calls, "run", counting)
    return counts
