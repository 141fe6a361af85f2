"""A prefill server and a decode server of FastDeploy, between which aiokv moves the KV.

Runs where ``FASTDEPLOY_TREE`` names a tree of FastDeploy's source, and Paddle is installed.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import pytest

from aiokv.connectors.fastdeploy import peers
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_server import LAYERS, Worker, next_token
from tests.connectors.fastdeploy_source import PORTS, tree  # noqa: F401
from tests.connectors.fastdeploy_tree import Drive, PeerRoles, fd_config

if TYPE_CHECKING:
    from aiokv.sync import SyncEngine

pytestmark = pytest.mark.usefixtures("tree")


@pytest.fixture
def servers(monkeypatch, tmp_path):
    """Makes a prefill server and a decode server."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(peers.SECRET_VARIABLE, "a secret of the test")
    drives = []

    def start(
        chance: random.Random, *, host_blocks: int = 0, ranks: int = 1, drafts: int = 0
    ) -> PeerRoles:
        for role in ("prefill", "decode"):
            config = fd_config(
                60, host_blocks, seats=12, policy="write_through", drafts=drafts, images=False,
                port=next(PORTS), role=role, ranks=ranks,
            )  # fmt: skip
            config.host_ip = "127.0.0.1"
            drives.append(Drive(config, 12, ranks, chance))
        return PeerRoles(*drives, chance)

    yield start
    while drives:
        drives.pop().close()


def check_outputs(roles: PeerRoles) -> int:
    """Compare the outputs with those of the model, and all counts of both engines.

    Returns:
        The number of requests with all outputs. FastDeploy answers requests that its decode server
        preempts with an error.
    """
    complete = 0
    for name, prompt in roles.prompts.items():
        tokens, outputs = list(prompt), roles.decode.requests[name].output_token_ids
        for _ in outputs:
            tokens.append(next_token(tokens))
        assert outputs == tokens[len(prompt) :], name
        complete += len(outputs) == roles.decode.limits[name]
    for drive in (roles.prefill, roles.decode):
        engine = engine_of(drive)
        assert engine.call(engine.cache.check_invariants) == []
    return complete


def wait_until(ready) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert time.monotonic() < until


def engine_of(drive: Drive) -> SyncEngine:
    return drive.manager.cache_manager.engine


def begun_sends(drive: Drive) -> int:
    engine = engine_of(drive)
    return engine.call(engine.cache.statistics).peers.sends


def received_bytes(drive: Drive) -> int:
    return min(worker.controller.get_stats()["received"].received_bytes for worker in drive.workers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_first_layers_arrive_before_the_last_one_is_computed(servers, ranks):
    roles = servers(random.Random(1), ranks=ranks)
    roles.add("a", list(range(70)), 9)  # three batches
    roles.preallocate()
    wait_until(lambda: begun_sends(roles.prefill) == 1)
    early = []

    def execute(worker, batch, counter):
        """Stop before the last layer until layers before it have arrived on the other server."""
        before = received_bytes(roles.decode)

        def wait_for_layer(layer, timeout):
            counter.wait_for_layer(layer, timeout=timeout)
            if layer == LAYERS - 1 and worker is roles.prefill.workers[-1]:
                wait_until(lambda: received_bytes(roles.decode) > before)
                early.append(received_bytes(roles.decode) - before)
            return True

        patient = counter and SimpleNamespace(wait_for_layer=wait_for_layer)
        return Worker.execute(worker, batch, patient)

    for worker in roles.prefill.workers:
        worker.execute = partial(execute, worker)
    roles.run()
    assert len(early) == 3
    assert roles.sent == {"a": "finished"}
    assert check_outputs(roles) == 1


@pytest.mark.parametrize(
    ("host_blocks", "ranks", "drafts"), [(0, 1, 0), (0, 2, 0), (80, 1, 0), (80, 2, 0), (80, 1, 1)]
)
def test_random_prompts_read_no_wrong_kv(servers, host_blocks, ranks, drafts):
    seed = os.environ.get("FASTDEPLOY_SEED", "1")
    chance = random.Random(f"{seed} {host_blocks} {ranks} {drafts}")
    roles = servers(chance, host_blocks=host_blocks, ranks=ranks, drafts=drafts)
    for number in range(40):
        shared = list(range(chance.choice((4, 12, 40))))
        own = [chance.randrange(900) for _ in range(chance.randrange(1, 40))]
        roles.add(f"r{number}", shared + own, chance.randrange(1, 40))
    aborted = {f"r{chance.randrange(40)}" for _ in range(5)}
    for name in aborted:
        roles.decode.abort(name)
    roles.run()
    assert not roles.failed
    assert roles.prefill.cached_tokens
    assert check_outputs(roles) > 20
    print(f"{roles.decode.read_positions} positions read, {roles.decode.preemptions} preemptions")


def test_aborted_prefill_ends_the_receive_and_shares_nothing(servers):
    roles = servers(random.Random(1))
    roles.add("a", list(range(70)), 9)
    roles.preallocate()
    roles.step_prefill()
    wait_until(lambda: begun_sends(roles.prefill) == 1)
    roles.prefill.manager.pre_recycle_resource("a")
    handovers = roles.decode.manager.cache_manager.blocks.handovers
    wait_until(lambda: handovers.receive_outcome("a"))
    output = roles.output("a", 1)
    assert roles.decode.manager.cache_manager.has_received(output)
    assert output.error_code == 501
    assert "has not arrived from the prefill server" in output.error_msg
    assert roles.prefill.manager.cache_manager.finished_sends("a") == [
        ("a", "the request has given its blocks back")
    ]


class Queue:
    """The queue of an engine, in this process. Its transport never takes anything."""

    def __init__(self) -> None:
        self.items: list[tuple] = []

    def put_disaggregated_tasks(self, item: tuple) -> None:
        self.items.append(item)

    def disaggregate_queue_empty(self) -> bool:
        return not self.items

    def get_disaggregated_tasks(self) -> list[tuple]:
        items, self.items = self.items, []
        return items

    def get_finished_req(self) -> list:
        return []


class Splitwise:
    """FastDeploy's own code of one server for the exchange with the other one."""

    def __init__(self, drive: Drive, port: int) -> None:
        from fastdeploy.splitwise.splitwise_connector import SplitwiseConnector

        self.queue = Queue()
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(local_data_parallel_id=0, data_parallel_size=1),
            scheduler_config=SimpleNamespace(splitwise_role="mixed"),  # else it opens sockets
            cache_config=SimpleNamespace(local_pd_comm_port=port),
        )
        self.connector = SplitwiseConnector(config, self.queue, drive.manager)
        self.results: list = []
        self.engine = SimpleNamespace(
            running=True,
            engine_worker_queue=self.queue,
            resource_manager=drive.manager,
            split_connector=self.connector,
            scheduler=SimpleNamespace(
                has_request=lambda name: True, put_results=self.results.extend
            ),
            token_processor=SimpleNamespace(tokens_counter={}),
            cfg=SimpleNamespace(splitwise_version="v2"),
            enable_decode_cache_task=False,
            llm_logger=MagicMock(),
        )

    def connect(self, others: dict[str, Splitwise]) -> None:
        def send(address: str, kind: str, payload: list) -> None:
            connector = others[address].connector
            frames = [b"", *connector._serialize_message(kind, payload)]
            connector._process_message(frames)

        self.connector._send_message = send


@pytest.mark.parametrize("is_aborted", [False, True], ids=["", "aborted"])
def test_one_request_passes_through_fastdeploys_own_code(servers, monkeypatch, is_aborted):
    from fastdeploy import envs
    from fastdeploy.engine.common_engine import EngineService
    from fastdeploy.engine.request import CompletionOutput, RequestMetrics, RequestOutput
    from fastdeploy.output.token_processor import TokenProcessor

    roles = servers(random.Random(1))
    monkeypatch.setattr(envs, "ENABLE_V1_KVCACHE_SCHEDULER", 1)  # off without a GPU
    prefill, decode = roles.prefill, roles.decode
    here, there = Splitwise(prefill, 1), Splitwise(decode, 2)
    for server in (here, there):
        server.connect({"p:1": here, "d:2": there})
    tokens = list(range(70))
    source = prefill.make("a", tokens, 1)
    source.disaggregate_info = {
        "prefill_ip": "p", "decode_ip": "d", "decode_connector_port": 2, "role": "prefill"
    }  # fmt: skip
    assert prefill.manager.preallocate_resource_in_p(source)
    EngineService._decode_process_splitwise_requests(there.engine)
    try:
        here.connector.send_splitwise_tasks([source], source.idx)
        assert here.connector.check_decode_allocated(source) == (True, "")
        here.connector.send_cache_info_to_messager([source], 0)
        prefill.manager.add_request_in_p([source])
        target = decode.requests["a"] = decode.manager.requests["a"]
        decode.contents["a"], decode.limits["a"] = tokens, 9
        while not source.output_token_ids:
            roles.step_prefill()
        if is_aborted:
            decode.manager.pre_recycle_resource("a")
        ((_, token),) = roles.computed
        result = RequestOutput(
            "a", outputs=CompletionOutput(0, 0, [token]), metrics=RequestMetrics()
        )
        processor = SimpleNamespace(
            engine_worker_queue=here.queue, prefill_result_status={}, tokens_counter={},
            split_connector=here.connector, resource_manager=prefill.manager,
        )  # fmt: skip
        sending = Thread(
            target=TokenProcessor._recycle_resources,
            args=(processor, "a", source.idx, source, result, True),
        )
        sending.start()
        while sending.is_alive():
            prefill.schedule()
            prefill.compute()
        sending.join()
        if is_aborted:
            wait_until(lambda: there.results)
            assert [output.error_code for output in there.results] == [501]
        else:
            wait_until(lambda: target in decode.manager.running)
            decode.run()
            roles.prompts["a"] = tokens
            assert check_outputs(roles) == 1
        wait_until(lambda: not prefill.manager.requests)
    finally:
        there.engine.running = False
