"""Requests of a FastDeploy scheduler over the connector; the worker compares each KV it reads."""

from __future__ import annotations

import pickle
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from aiokv.connectors.fastdeploy import LayerSwapTimeoutError
from aiokv.connectors.fastdeploy import manager as manager_module
from aiokv.errors import TransferError, UsageError
from aiokv.testing import ScriptedDevice
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_server import BLOCK, Cluster, Request, Server, next_token

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


@pytest.mark.parametrize("kind", ["v1", "layers", "v0"])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_requests_get_their_outputs(policy, kind):
    """Chunks, shared prefixes, decoding, preemption, resume and abort, with a small device."""
    choose = random.Random(policy)
    with Server(14, 40, kind=kind, write_policy=policy, batch_tokens=16) as server:
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
        assert server.scheduler.preemptions > 0
        assert server.manager.metrics.hit_req_ratio > 0.2
        server.drain()
        assert server.manager.free_all_device_blocks() > 0
        assert server.manager.num_free_device_blocks == 14
        onloaded = server.manager.engine.statistics().attention.onloaded_blocks
        again = [Request(f"again {seed}", prompt(seed, 24), 6) for seed in range(1, 5)]
        server.scheduler.add(*again)
        server.scheduler.run()
        assert [request.output_token_ids for request in again] == list(map(outputs_of, again))
        assert server.manager.engine.statistics().attention.onloaded_blocks > onloaded
    assert BLOCK == 4


def test_finish_threads_and_schedule_loop_work_at_the_same_time():
    """As in FastDeploy: one thread schedules, others take results and finish requests."""
    choose = random.Random(5)
    with (
        Server(24, 64, write_policy="write_through", batch_tokens=24) as server,
        ThreadPoolExecutor(2, "finish") as finishers,
        ThreadPoolExecutor(1, "add") as adder,
    ):
        scheduler = server.scheduler
        requests = [
            Request(f"r{i}", prompt(choose.randint(1, 6), choose.randint(1, 30)), 6)
            for i in range(120)
        ]
        adding = adder.submit(lambda: [scheduler.add(request) for request in requests])
        finishing: list[Future] = []
        polled = threading.Event()

        def poll() -> None:
            """Read gauges, as FastDeploy's metrics thread does."""
            while not polled.is_set():
                assert 0 <= server.manager.num_free_device_blocks <= 24
                assert server.manager.gauges()["max_gpu_block_num"] == 24

        poller = threading.Thread(target=poll)
        poller.start()
        try:
            while not (adding.done() and scheduler.is_idle):
                ended = scheduler.take_answers(server.worker.run(scheduler.schedule()))
                finishing += [finishers.submit(scheduler.finish, request) for request in ended]
            for future in finishing:
                future.result(PATIENCE_SECONDS)
        finally:
            polled.set()
            poller.join()
        assert len(scheduler.finished) == len(requests)
        for request in requests:
            assert request.output_token_ids == outputs_of(request), request.request_id
        server.drain()
        server.manager.reset_cache()
        assert server.manager.num_free_device_blocks == 24


def test_verbs_without_the_scheduler_lock_are_safe():
    """Four threads match, allocate and finish requests of their own."""
    with Server(40) as server:
        manager = server.manager

        def serve(thread: int) -> None:
            choose = random.Random(thread)
            for i in range(60):
                request = Request(f"t{thread}.{i}", prompt(choose.randint(1, 3), 20))
                manager.match_prefix(request)
                table = list(request.match_result.device_block_ids)
                table += manager.allocate_device_blocks(request, 5 - len(table))
                request.block_tables = table
                if len(table) == 5:
                    assert len(set(table)) == 5
                    request.num_computed_tokens = 20
                manager.request_finish(request)

        with ThreadPoolExecutor(4) as threads:
            for future in [threads.submit(serve, thread) for thread in range(4)]:
                future.result(60.0)
        assert manager.get_stats()["device_pool"]["used"] == 0


def test_failed_onload_reaches_worker_and_scheduler():
    """The worker must not use what it computes; nothing of the request is shared."""
    device = ScriptedDevice()
    device.fail("onload", copy=0, layer=1, block=1)
    with Server(6, 12, device, "layers", write_policy="write_through") as server:
        manager, scheduler = server.manager, server.scheduler
        tokens = prompt(1, 13)
        scheduler.add(Request("a", tokens, 1))
        scheduler.run()
        server.drain()
        scheduler.add(Request("b", prompt(2, 21), 1))  # evicts the blocks of the first one
        scheduler.run()
        server.drain()
        again = Request("c", tokens, 9)
        scheduler.add(again)
        batch = scheduler.schedule()
        assert again.match_result.matched_host_nums == 3
        with pytest.raises(TransferError):
            server.worker.run(batch)
        server.drain()
        assert len(manager.allocate_device_blocks(again, 1)) == 1, "the request can go on"
        assert manager.failed_requests() == ["c"]
        again.output_token_ids += [1, 2, 3]
        before = manager.engine.would_hit(again.tokens)
        scheduler.finish(again)
        assert manager.failed_requests() == []
        assert manager.engine.would_hit(again.tokens) == before, "nothing of it was shared"
        server.worker.running.clear()
        retried = Request("d", tokens, 3)
        scheduler.add(retried)
        scheduler.run()
        assert retried.output_token_ids == outputs_of(retried)


def test_request_whose_onload_fails_is_computed_again():
    """The worker is told of no onload that fails."""
    device = ScriptedDevice()
    device.fail("onload", copy=0, layer=1, block=1)
    with Server(6, 12, device, write_policy="write_through") as server:
        scheduler = server.scheduler
        tokens = prompt(1, 13)
        for request in (Request("a", tokens, 1), Request("b", prompt(2, 21), 1)):
            scheduler.add(request)
            scheduler.run()
            server.drain()
        again = Request("c", tokens, 9)
        scheduler.add(again)
        scheduler.run()
        assert again.output_token_ids == outputs_of(again)
        assert again.num_cached_tokens == BLOCK, "the block before the failure has arrived"
        assert server.manager.metrics.matched_token_num == BLOCK
        assert server.manager.failed_requests() == []


def test_request_whose_onload_fails_at_once_is_computed_again():
    """The onload has ended when the match returns, and its blocks hold other bytes."""
    device = ScriptedDevice()
    device.reject("onload", copy=0)
    with Server(6, 12, device, write_policy="write_through") as server:
        manager, scheduler = server.manager, server.scheduler
        tokens = prompt(1, 13)
        for request in (Request("a", tokens, 1), Request("b", prompt(2, 21), 1)):
            scheduler.add(request)
            scheduler.run()
            server.drain()
        again = Request("c", tokens, 9)
        match = manager.blocks.match

        def match_and_drain(*args, **options):
            holding = match(*args, **options)
            server.drain()
            return holding

        manager.blocks.match = match_and_drain
        scheduler.add(again)
        scheduler.run()
        assert again.output_token_ids == outputs_of(again)
        assert again.num_cached_tokens == 0


def test_other_requests_are_scheduled_while_one_waits_for_its_onload():
    device = ScriptedDevice()
    with Server(16, 12, device, write_policy="write_through") as server:
        manager, scheduler = server.manager, server.scheduler
        tokens = prompt(1, 13)
        scheduler.add(Request("a", tokens, 1))
        scheduler.run()
        server.drain()
        manager.free_all_device_blocks()
        gate = device.hold("onload", copy=0)
        waits, other = Request("b", tokens, 3), Request("c", prompt(2, 9), 20)
        scheduler.add(waits, other)
        assert len(scheduler.schedule()) == 0, "the request in front begins its onload"
        scheduler.step()
        assert [request.request_id for request in scheduler.running] == ["c"]
        for _ in range(3):
            scheduler.step()
        assert len(other.output_token_ids) == 4
        assert manager.metrics.req_count == 2, "a request that waits does not count"
        gate.open()
        for future in waits.async_process_futures:
            assert future.exception(PATIENCE_SECONDS) is None
        scheduler.step()
        assert waits.num_cached_tokens == 3 * BLOCK
        assert waits.match_result.matched_host_nums == 3
        assert manager.metrics.total_cpu_matched_token_num == 3 * BLOCK
        scheduler.run()
        assert waits.output_token_ids == outputs_of(waits)
        assert other.output_token_ids == outputs_of(other)


def test_requests_that_run_take_the_blocks_of_one_that_waits():
    """The scheduler may forget a waiting request, and its blocks are not lost."""
    device = ScriptedDevice()
    with Server(6, 12, device, write_policy="write_through") as server:
        manager, scheduler = server.manager, server.scheduler
        tokens = prompt(1, 13)
        scheduler.add(Request("a", tokens, 1))
        scheduler.run()
        server.drain()
        manager.free_all_device_blocks()
        gate = device.hold("onload", copy=0)
        scheduler.add(Request("b", tokens, 3))
        scheduler.schedule()
        gate.open()
        server.drain()
        scheduler.waiting.clear()
        other = Request("c", prompt(2, 21), 1)
        scheduler.add(other)
        scheduler.run()
        assert other.output_token_ids == outputs_of(other)


def test_failed_onload_reaches_a_worker_that_gets_the_batch_late():
    """The scheduler has begun other onloads meanwhile."""
    device = ScriptedDevice()
    device.fail("onload", copy=0, layer=1, block=1)
    with Server(16, 24, device, "layers", write_policy="write_through") as server:
        manager, controller = server.manager, server.worker.controller
        prompts = [prompt(seed, 13) for seed in (1, 2)]
        server.scheduler.add(*(Request(f"a{i}", tokens, 1) for i, tokens in enumerate(prompts)))
        server.scheduler.run()
        server.drain()
        manager.free_all_device_blocks()
        late, other = (Request(f"b{i}", tokens, 1) for i, tokens in enumerate(prompts))
        manager.match_prefix(late)
        server.drain()  # the onload has failed
        manager.match_prefix(other)
        server.drain()
        counter = controller.submit_swap_tasks(None, late.cache_swap_metadata[0])
        with pytest.raises(TransferError):
            counter.wait_all(timeout=PATIENCE_SECONDS)
        counter = controller.submit_swap_tasks(None, other.cache_swap_metadata[0])
        assert counter.wait_all(timeout=PATIENCE_SECONDS)
        manager.request_finish(late)
        manager.request_finish(other)


def test_layer_that_does_not_arrive_in_time_is_a_timeout():
    device = ScriptedDevice()
    with Server(6, 12, device, "layers", write_policy="write_through") as server:
        scheduler = server.scheduler
        tokens = prompt(1, 13)
        scheduler.add(Request("a", tokens, 1), Request("b", prompt(2, 21), 1))
        scheduler.run()
        server.drain()
        gate = device.hold("onload", copy=0, layer=1)
        again = Request("c", tokens, 1)
        scheduler.add(again)
        batch = scheduler.schedule()
        counter = server.worker.controller.submit_swap_tasks(None, batch.cache_swap_metadata)
        assert server.worker.controller.swap_layer_done_counter is counter
        assert counter.wait_for_layer(0, timeout=PATIENCE_SECONDS)
        with pytest.raises(LayerSwapTimeoutError, match="layer 1 did not arrive within"):
            counter.wait_for_layer(1, timeout=0.0)
        with pytest.raises(UsageError, match="layer_idx is 2"):
            counter.wait_for_layer(2)
        gate.open()
        assert counter.wait_all(timeout=PATIENCE_SECONDS)
        assert counter.get_layer_wait_time(1) >= 0.0
        assert server.worker.controller.submit_swap_tasks(None, None) is None
        for request in scheduler.take_answers(server.worker.run(batch)):
            scheduler.finish(request)
        assert again.output_token_ids == outputs_of(again)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["v1", "layers", "v0", "in_batch"])
def test_two_ranks_compute_while_the_next_batch_is_scheduled(kind, policy, tmp_path, monkeypatch):
    # An onload that waits for the end of the present step cannot end during schedule().
    monkeypatch.setattr(manager_module, "ONLOAD_SECONDS", 1000.0)
    choose = random.Random(policy)
    with Cluster(tmp_path, 14, 40, kind, write_policy=policy, batch_tokens=16) as cluster:
        requests = [
            Request(f"r{i}", prompt(choose.randint(1, 4), choose.randint(1, 24)), 6)
            for i in range(80)
        ]
        cluster.scheduler.add(*requests)
        cluster.run()
        for request in requests:
            assert request.output_token_ids == outputs_of(request), request.request_id
        statistics = cluster.manager.engine.statistics()
        assert statistics.attention.onloaded_blocks > 10, statistics
        assert cluster.workers[1].read_positions > 500
        assert cluster.empty_batches < cluster.sent_batches


def test_requests_of_one_batch_share_the_blocks_that_it_computes(tmp_path):
    with Cluster(tmp_path, 40, 40, "in_batch", batch_tokens=64) as cluster:
        same = [Request(f"r{i}", [*prompt(1, 4 * BLOCK), i], 3) for i in range(4)]
        longer = Request("long", [*prompt(1, 6 * BLOCK), 9], 3)
        cluster.scheduler.add(longer, *same)
        batch = cluster.scheduler.schedule()
        assert [task.first for task in batch] == [0, *[4 * BLOCK] * 4]
        cluster.batches.put(pickle.dumps(batch))
        cluster.run()
        for request in (longer, *same):
            assert request.output_token_ids == outputs_of(request), request.request_id
