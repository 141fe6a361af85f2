"""A prefill server and a decode server whose engines move the KV of prompts, over TCP."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from aiokv.connectors.fastdeploy import (
    BatchRequest,
    CacheController,
    CacheManager,
    blocks,
    handovers,
    peers,
)
from aiokv.connectors.fastdeploy.metadata import layer_marks_of
from aiokv.errors import ConfigError, LeaseError
from aiokv.ranks import RankGroup
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_requests import count_crossings, finish, prompt
from tests.connectors.fastdeploy_server import (
    BLOCK,
    Backend,
    Request,
    Status,
    Task,
    Type,
    Worker,
    fd_config,
    next_token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECRET = "a secret of the test"


def wait_until(ready: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert time.monotonic() < until


def role_config(role: str, device_blocks: int = 16, host_blocks: int = 0, ranks: int = 1):
    config = fd_config(device_blocks, host_blocks)
    config.scheduler_config.splitwise_role = role
    config.parallel_config = SimpleNamespace(tensor_parallel_size=ranks)
    config.model_config.model, config.host_ip = "test", "127.0.0.1"
    return config


class Server:
    """Manager and workers of one role."""

    def __init__(self, role: str, folder: Path, **sizes) -> None:
        config = role_config(role, **sizes)
        num_ranks, path = config.parallel_config.tensor_parallel_size, folder / role
        self.manager = CacheManager(config, ranks=RankGroup(num_ranks, path=path, has_peers=True))
        self.workers = []
        for rank in range(num_ranks):
            controller = CacheController(config, rank, path=path, peers=peers.peers_of(config))
            layers = controller.initialize_kv_cache(Backend(), config.cache_config.total_block_num)
            self.workers.append(Worker(layers, controller))
        self.manager.open()
        for worker in self.workers:
            worker.controller.wait_ready(PATIENCE_SECONDS)

    def run(self, *tasks: Task) -> list[str]:
        """Let the workers compute a batch; return the names in its metadata."""
        metadata = self.manager.issue_pending_backup_to_batch_request()
        for worker in self.workers:
            batch = BatchRequest()
            batch.append_evict_metadata([] if metadata is None else [metadata])
            for task in tasks:
                batch.add_request(Task(**vars(task)))
            worker.run(batch)
        return [] if metadata is None else metadata.hash_values

    def compute(self, request: Request, last: int) -> list[str]:
        """Compute the next positions of a prompt."""
        first, request.num_computed_tokens = request.num_computed_tokens, last
        table, tokens = list(request.block_tables), list(request.prompt_token_ids)
        return self.run(
            Task(request.request_id, Type.PREFILL, table, tokens, first, last, len(tokens) + 1)
        )

    def preallocate(self, request: Request) -> None:
        """Take the blocks of a prompt and of its first outputs, as both roles do."""
        if self.manager.config.scheduler_config.splitwise_role == "prefill":
            self.manager.match_prefix(request)
            request.block_tables = list(request.match_result.device_block_ids)
            request.num_computed_tokens = len(request.block_tables) * BLOCK
        else:
            request.num_computed_tokens = request.need_prefill_tokens
        num_blocks = request.need_prefill_tokens // BLOCK + 1 - len(request.block_tables)
        assert self.manager.can_allocate_gpu_blocks(num_blocks)
        request.block_tables += self.manager.allocate_gpu_blocks(request, num_blocks)

    def decode(self, request: Request, token: int) -> None:
        """Take the first token, and compute the next one, which reads the KV of the prompt."""
        request.output_token_ids.append(token)
        tokens = request.tokens
        self.run(
            Task(
                request.request_id, Type.PREFILL, list(request.block_tables), list(tokens),
                len(tokens) - 1, len(tokens), len(tokens) + 1,
            )
        )  # fmt: skip

    def cached_blocks(self, tokens: list[int]) -> int:
        return self.manager.engine.would_hit([*tokens, 1]).total // BLOCK

    def sends(self) -> int:
        engine = self.manager.engine
        return engine.call(engine.cache.statistics).peers.sends

    def outcome(self, name: str) -> str:
        return self.manager.blocks.handovers.receive_outcome(name)

    def check(self) -> None:
        engine = self.manager.engine
        assert engine.call(engine.cache.check_invariants) == []

    def close(self) -> None:
        self.manager.close()
        for worker in self.workers:
            worker.controller.stop()


class Pair:
    """Both servers."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill, self.decode = prefill, decode

    def begin(self, name: str, tokens: list[int]) -> tuple[Request, Request]:
        """Take blocks on both servers; return when the send has begun."""
        source, target = Request(name, tokens), Request(name, tokens)
        self.prefill.preallocate(source)
        self.decode.preallocate(target)
        before = self.prefill.sends()
        ticket = self.decode.manager.begin_receive(target)
        assert ticket
        self.prefill.manager.begin_send(name, ticket)
        wait_until(lambda: self.prefill.sends() > before)
        return source, target

    def outcomes(self, name: str) -> tuple[str, str]:
        """Run empty batches until both servers know the outcome of a transfer."""
        found: list[tuple[str, str]] = []

        def has_ended() -> bool:
            self.prefill.run()
            self.decode.run()
            found[:] = found or self.prefill.manager.finished_sends(name)
            return bool(found) and bool(self.decode.outcome(name))

        wait_until(has_ended)
        return found[0][1], self.decode.outcome(name)


@contextmanager
def servers(folder: Path, **sizes) -> Iterator[Pair]:
    with ExitStack() as stack:
        pair = []
        for role in ("prefill", "decode"):
            pair.append(Server(role, folder, **sizes))
            stack.callback(pair[-1].close)
        yield Pair(*pair)


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv(peers.SECRET_VARIABLE, SECRET)


def output_of(name: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, error_code=200, error_msg="")


@pytest.mark.parametrize("host_blocks", [0, 16])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("more", [0, 3])
def test_a_prompt_moves_while_it_is_computed(tmp_path, ranks, host_blocks, more):
    tokens = prompt(1, 5, more)
    with servers(tmp_path, ranks=ranks, host_blocks=host_blocks) as pair:
        source, target = pair.begin("a", tokens)
        for last in (9, 14, len(tokens)):
            names = pair.prefill.compute(source, last)
            assert [layers for layers, _ in layer_marks_of(SimpleNamespace(hash_values=names))] == [
                1
            ], "the first of two layers is sent early"
        assert pair.outcomes("a") == ("finished", "finished")
        assert pair.decode.manager.has_received(output := output_of("a"))
        assert output.error_code == 200
        finish(pair.prefill.manager, source)
        assert pair.decode.cached_blocks(tokens) == 5
        pair.decode.decode(target, next_token(tokens))
        finish(pair.decode.manager, target)
        for server in (pair.prefill, pair.decode):
            server.run()
            server.check()


def test_a_cached_prefix_and_several_prompts_move_at_once(tmp_path):
    with servers(tmp_path, device_blocks=40) as pair:
        first, target = pair.begin("a", prompt(1, 5))
        pair.prefill.compute(first, 20)
        assert pair.outcomes("a") == ("finished", "finished")
        pairs = [pair.begin(name, [*prompt(1, 4), 7, 8, int(name)]) for name in "123"]
        assert [source.num_computed_tokens for source, _ in pairs] == [16] * 3
        for source, _ in pairs:
            pair.prefill.compute(source, 19)
        for source, received in pairs:
            assert pair.outcomes(source.request_id) == ("finished", "finished")
            pair.decode.decode(received, next_token(received.prompt_token_ids))
        pair.decode.check()
        del target


def test_a_chunk_and_its_layers_cross_once(tmp_path, monkeypatch):
    with servers(tmp_path) as pair:
        source, _ = pair.begin("a", prompt(1, 4))
        counts = count_crossings(monkeypatch)
        for last in (7, 12, 16):
            assert layer_marks_of(SimpleNamespace(hash_values=pair.prefill.compute(source, last)))
        assert len(counts) == 3
        pair.prefill.run()  # commits the last chunk
        assert len(counts) == 4
        assert pair.outcomes("a") == ("finished", "finished")
        crossings = len(counts)
        for _ in range(3):
            pair.prefill.run()
        assert len(counts) == crossings, "nothing has changed"


def test_a_prompt_moves_as_a_whole_where_its_layers_cannot_be_announced(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise LeaseError("the lease was released")

    monkeypatch.setattr(handovers.Sent, "layers_done", fail)
    with servers(tmp_path) as pair:
        source, _ = pair.begin("a", prompt(1, 4))
        names = pair.prefill.compute(source, 16)
        assert layer_marks_of(SimpleNamespace(hash_values=names)) == []
        pair.prefill.run()  # commits the prompt
        assert pair.outcomes("a") == ("finished", "finished")


def test_nothing_is_ready_or_shared_before_the_prompt_has_arrived(tmp_path):
    tokens = prompt(1, 4)
    with servers(tmp_path) as pair:
        source, _ = pair.begin("a", tokens)
        pair.prefill.compute(source, 10)
        pair.prefill.run()
        for _ in range(3):
            pair.decode.run()
        assert pair.prefill.manager.finished_sends("a") == []
        assert not pair.decode.manager.has_received(output_of("a"))
        assert pair.decode.cached_blocks(tokens) <= 2, "blocks of positions that were committed"
        pair.prefill.compute(source, 16)
        assert pair.outcomes("a") == ("finished", "finished")
        assert pair.decode.cached_blocks(tokens) == 4


def test_layers_of_positions_that_were_never_committed_are_not_shared(tmp_path):
    """The prefill server aborts a request whose first layers were sent already."""
    tokens = prompt(1, 4)
    with servers(tmp_path) as pair:
        source, target = pair.begin("a", tokens)
        received = pair.decode.workers[0].controller
        before = received.get_stats()["received"].received_bytes
        pair.decode.run()
        pair.prefill.compute(source, 16)
        wait_until(lambda: received.get_stats()["received"].received_bytes > before)
        source.status = Status.PREEMPTED
        pair.prefill.manager.request_finish(source)
        wait_until(lambda: pair.decode.outcome("a"))
        assert pair.decode.cached_blocks(tokens) == 0
        output = output_of("a")
        assert pair.decode.manager.has_received(output)
        assert output.error_code == 501
        assert "released" in output.error_msg
        ((_, outcome),) = pair.prefill.manager.finished_sends("a")
        assert outcome != "finished"
        pair.prefill.run()
        assert pair.prefill.manager.can_allocate_gpu_blocks(16), "no block is kept for the send"
        finish(pair.decode.manager, target)
        pair.decode.run()
        assert pair.decode.manager.can_allocate_gpu_blocks(16)
        pair.decode.check()


def test_a_resumed_request_of_a_prefill_server_reports_that_its_send_has_failed(tmp_path):
    with servers(tmp_path) as pair:
        source, _ = pair.begin("a", prompt(1, 4))
        pair.prefill.compute(source, 10)
        source.status = Status.PREEMPTED
        pair.prefill.manager.request_finish(source)
        source.status, source.block_tables = Status.RUNNING, []
        pair.prefill.preallocate(source)
        pair.prefill.compute(source, 16)
        ((name, outcome),) = pair.prefill.manager.finished_sends("a")
        assert name == "a"
        assert outcome not in ("", "finished")
        finish(pair.prefill.manager, source)
        assert pair.prefill.manager.finished_sends("a") == [
            ("a", "the request has given its blocks back")
        ]


def test_preempted_requests_keep_the_outcomes_of_their_sends_up_to_a_limit(tmp_path, monkeypatch):
    """FastDeploy preempts the requests that it aborts, and never calls for them again."""
    monkeypatch.setattr(handovers, "MAX_PREEMPTED", 2)
    with servers(tmp_path, device_blocks=40) as pair:
        for name in "abc":
            for request, server in zip(
                pair.begin(name, prompt(1, 4)), (pair.prefill, pair.decode), strict=True
            ):
                request.status = Status.PREEMPTED
                server.manager.request_finish(request)
        found = pair.prefill.manager.finished_sends
        wait_until(lambda: all(found(name) for name in "abc"))
        oldest, *others = (found(name)[0][1] for name in "abc")
        assert oldest == "the request has given its blocks back"
        assert oldest not in others
        assert pair.decode.manager.blocks.handovers._received == {}


def test_a_request_without_blocks_reports_that_nothing_is_sent(tmp_path):
    with servers(tmp_path) as pair:
        source = Request("a", prompt(1, 4))
        pair.prefill.preallocate(source)
        pair.prefill.manager.blocks.lose_all()  # the workers have freed their tensors
        pair.prefill.manager.begin_send("a", b"")
        assert pair.prefill.manager.finished_sends("a") == [
            ("a", "the request has given its blocks back")
        ]


def test_an_aborted_request_of_a_decode_server_ends_the_send(tmp_path):
    with servers(tmp_path) as pair:
        source, target = pair.begin("a", prompt(1, 4))
        pair.prefill.compute(source, 10)
        finish(pair.decode.manager, target)
        pair.prefill.compute(source, 16)
        wait_until(lambda: pair.prefill.manager.finished_sends("a"))
        assert pair.decode.manager.has_received(output := output_of("a"))
        assert output.error_code == 501
        for server in (pair.prefill, pair.decode):
            server.run()
            server.check()
        assert pair.decode.manager.can_allocate_gpu_blocks(16)


def test_a_prefill_server_that_dies_ends_the_receive_and_then_the_request(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1.0)
    for module in (blocks, handovers):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with servers(tmp_path) as pair:
        source, target = pair.begin("a", prompt(1, 4))
        pair.prefill.compute(source, 10)
        for worker in pair.prefill.workers:
            worker.controller.stop()
        wait_until(lambda: pair.decode.outcome("a"))
        assert pair.decode.outcome("a") != "finished"
        manager = pair.decode.manager
        assert manager.expired_requests() == [], "the prefill server may still report the failure"
        clock.now += handovers.GIVEN_UP_SECONDS - 1
        assert manager.expired_requests() == []
        clock.now += 1
        assert manager.expired_requests() == [target]
        finish(manager, target)
        pair.decode.run()
        assert manager.can_allocate_gpu_blocks(16)
        pair.decode.check()


def test_a_prompt_that_comes_too_late_is_refused(tmp_path):
    with servers(tmp_path) as pair:
        pair.decode.manager._prefill_timeout_seconds = 0.2
        source, _ = pair.begin("a", prompt(1, 4))
        wait_until(lambda: pair.decode.outcome("a"))
        pair.prefill.compute(source, 16)
        sent, received = pair.outcomes("a")
        assert "finished" not in (sent, received)
        assert pair.decode.cached_blocks(prompt(1, 4)) == 0


def test_a_prompt_whose_blocks_were_dropped_after_it_has_arrived_is_refused(tmp_path):
    with servers(tmp_path) as pair:
        source, _ = pair.begin("a", prompt(1, 4))
        pair.prefill.compute(source, 16)
        assert pair.outcomes("a") == ("finished", "finished")
        assert pair.decode.manager.reset_cache()
        assert pair.decode.manager.has_received(output := output_of("a"))
        assert output.error_code == 501


def test_blocks_that_were_allocated_twice_receive_nothing(tmp_path):
    """FastDeploy asks again if the answer of the decode server came too late."""
    with servers(tmp_path) as pair:
        again = [Request("a", prompt(1, 4)) for _ in range(2)]
        for target in again:
            pair.decode.preallocate(target)
        assert pair.decode.manager.begin_receive(again[1]) is None
        source = Request("a", prompt(1, 4))
        pair.prefill.preallocate(source)
        pair.prefill.manager.begin_send("a", None)
        wait_until(lambda: pair.prefill.manager.finished_sends("a"))


def test_promised_room_stays_while_prompts_arrive(tmp_path):
    """An arrived block keeps the cached blocks before it, which could be evicted until then."""
    with servers(tmp_path, device_blocks=12) as pair:
        first, target = pair.begin("a", prompt(1, 3))
        pair.prefill.compute(first, 12)
        assert pair.outcomes("a") == ("finished", "finished")
        for manager, request in ((pair.prefill.manager, first), (pair.decode.manager, target)):
            finish(manager, request)
        source, _ = pair.begin("b", prompt(1, 4))
        assert pair.decode.manager.num_free_device_blocks == 4
        assert pair.decode.manager.can_allocate_gpu_blocks(7)
        pair.decode.run()
        assert pair.decode.manager.can_allocate_gpu_blocks(7)
        pair.prefill.compute(source, 16)
        wait_until(lambda: pair.prefill.run() or pair.prefill.manager.finished_sends("b"))
        wait_until(lambda: pair.decode.outcome("b"))
        assert len(pair.decode.manager.allocate_gpu_blocks(Request("c", prompt(2, 6)), 7)) == 7
        pair.decode.check()


def test_peers_come_from_the_environment(monkeypatch):
    found = peers.peers_of(role_config("decode"))
    assert (found.listen, found.key, found.layer_ranges) == ("127.0.0.1", SECRET.encode(), 4)
    assert peers.peers_of(role_config("prefill")).listen is None
    assert peers.peers_of(role_config("mixed")) is None
    monkeypatch.setenv(peers.TRANSPORT_VARIABLE, "carrier pigeon")
    with pytest.raises(ConfigError, match="carrier pigeon"):
        peers.peers_of(role_config("decode"))
    monkeypatch.delenv(peers.SECRET_VARIABLE)
    assert peers.peers_of(role_config("decode")) is None


def test_layers_are_announced_to_transports_that_send_parts_of_blocks(monkeypatch):
    assert peers.layer_ends(10) == (2, 5, 7)
    assert peers.layer_ends(2) == (1,)
    monkeypatch.setenv(peers.TRANSPORT_VARIABLE, "cuda_ipc")
    assert peers.layer_ends(10) == ()


def test_servers_without_peers_leave_the_transfer_to_fastdeploy():
    manager = CacheManager(role_config("decode"))
    assert not manager.has_peers
    assert manager.begin_receive(Request("a", [1])) is None
    manager.begin_send("a", None)
    assert manager.finished_sends("a") == []
    assert manager.has_received(output_of("a"))


def test_two_parts_of_a_batch_send_no_layer_early(tmp_path, monkeypatch):
    monkeypatch.setenv("USE_TBO", "1")
    with servers(tmp_path) as pair:
        source, _ = pair.begin("a", prompt(1, 4))
        pair.prefill.compute(source, 16)
        assert pair.prefill.workers[0].controller.swap_layer_done_counter is None
        assert pair.outcomes("a") == ("finished", "finished")
