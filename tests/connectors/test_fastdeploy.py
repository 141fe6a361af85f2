"""Requests of a FastDeploy scheduler over the connector; the worker compares each KV it reads."""

from __future__ import annotations

import random

import pytest

from tests.connectors.fastdeploy_server import BLOCK, Request, Server, next_token

POLICIES = ("write_through", "write_through_selective", "write_back")


def prompt(seed: int, length: int) -> list[int]:
    return [seed * 1_000 + i for i in range(length)]


def outputs_of(request: Request) -> list[int]:
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_outputs):
        tokens.append(next_token(tokens))
    return tokens[len(request.prompt_token_ids) :]


def test_one_request_runs_to_its_end():
    with Server(16) as server:
        request = Request("a", prompt(1, 13))
        server.scheduler.add(request)
        server.scheduler.run()
        assert request.output_token_ids == outputs_of(request)
        assert request.num_cached_tokens == 0


def test_second_turn_hits_prompt_and_outputs():
    with Server(32) as server:
        first = Request("a", prompt(1, 13))
        server.scheduler.add(first)
        server.scheduler.run()
        second = Request("b", [*first.tokens, 5, 6, 7])
        server.scheduler.add(second)
        server.scheduler.run()
        assert second.num_cached_tokens == 20  # 13 + 8 tokens, the last one without KV
        assert second.output_token_ids == outputs_of(second)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_requests_get_their_outputs(policy):
    """Chunks, shared prefixes, decoding, preemption, resume and abort, with a small device."""
    choose = random.Random(policy)
    with Server(14, 40, write_policy=policy, batch_tokens=16) as server:
        requests = []
        for i in range(60):
            length = choose.randint(1, 24)
            requests.append(Request(f"r{i}", prompt(choose.randint(1, 4), length), 6))
        for request in requests:
            server.scheduler.add(request)
            if choose.random() < 0.5:
                server.scheduler.step()
            if choose.random() < 0.1:
                server.scheduler.abort(choose.choice(requests).request_id)
        server.scheduler.run()
        for request in requests:
            if request.request_id not in server.scheduler.aborted:
                assert request.output_token_ids == outputs_of(request), request.request_id
        assert server.worker.read_positions > 500
        statistics = server.manager.engine.statistics()
        assert statistics.onloaded_blocks > 10, statistics
        assert server.scheduler.preemptions > 0
        assert server.manager.metrics.hit_req_ratio > 0.2
        server.drain()
        assert server.manager.free_all_device_blocks() > 0
        assert server.manager.num_free_device_blocks == 14
    assert BLOCK == 4
