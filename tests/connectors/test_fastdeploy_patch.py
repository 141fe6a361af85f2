"""``fastdeploy.patch``: the script that applies it, and the calls that it adds."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiokv.connectors.fastdeploy import (
    BatchRequest,
    CacheController,
    CacheManager,
    controller,
    peers,
)
from tests.connectors.fastdeploy_server import Request, fd_config

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
SCRIPT = runpy.run_path(str(GUIDE / "fastdeploy_patch.py"))
PATCH = (GUIDE / "fastdeploy.patch").read_text()
CHANGES = SCRIPT["read_patch"](PATCH)


@pytest.fixture
def tree(tmp_path):
    """A folder with the lines that the patch expects."""
    for change in CHANGES:
        path = tmp_path / change.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("\n".join([f"# before line {change.line}", *change.old]) + "\n")
    return tmp_path


def texts(tree: Path) -> dict[str, str]:
    return {change.path: (tree / change.path).read_text() for change in CHANGES}


def test_all_changes_are_made(tree, capsys):
    before = texts(tree)
    assert SCRIPT["apply"](tree, CHANGES, writes=False) == []
    assert texts(tree) == before
    assert SCRIPT["apply"](tree, CHANGES, writes=True) == []
    for change in CHANGES:
        assert "\n".join(change.new) in (tree / change.path).read_text()
    capsys.readouterr()
    changed = texts(tree)
    assert SCRIPT["apply"](tree, CHANGES, writes=True) == []
    assert capsys.readouterr().out.count("is there already") == len(CHANGES)
    assert texts(tree) == changed


def test_the_patch_counts_its_lines_as_git_and_patch_expect():
    headers = re.findall(r"^@@ -\d+,(\d+) \+\d+,(\d+) @@$", PATCH, re.MULTILINE)
    assert headers == [(str(len(change.old)), str(len(change.new))) for change in CHANGES]


def test_nothing_is_written_if_a_change_does_not_apply(tree):
    first, last = CHANGES[0], CHANGES[-1]
    path = tree / first.path
    path.write_text(path.read_text().replace("\n".join(first.old), "\n".join(first.old[:-1])))
    (tree / last.path).unlink()
    before = path.read_text()
    missing, absent = SCRIPT["apply"](tree, CHANGES, writes=True)
    assert missing.startswith(f"change 1 of {len(CHANGES)}, {first.path}:{first.line}: these lines")
    assert first.old[0] in missing
    assert absent.endswith(f"{last.path}:{last.line}: the file is missing")
    assert path.read_text() == before


def test_lines_that_stand_twice_are_refused(tree):
    change = CHANGES[0]
    with (tree / change.path).open("a") as file:
        file.write("\n".join(change.old) + "\n")
    (problem,) = SCRIPT["apply"](tree, CHANGES, writes=True)
    assert "these lines are there 2 times" in problem


def test_the_connector_has_what_the_patch_calls():
    added = {line for change in CHANGES for line in change.new if line not in change.old}
    called = {
        name
        for line in added
        for name in re.findall(r"(?:[mM]anager|[cC]ontroller)\.(\w+)\(", line)
    }
    assert called == {
        *("for_workers", "for_worker", "begin_fetch", "submit_swap_tasks", "expired_requests"),
        *("begin_receive", "begin_send", "finished_sends", "has_received"),
    }
    assert called <= {*dir(CacheManager), *dir(CacheController)}


def lines_between(first: str, path: str) -> list[str]:
    return next(change.new for change in CHANGES if change.path.endswith(path) and any(
        first in line for line in change.new
    ))  # fmt: skip


def run(lines: list[str], **names: object) -> None:
    """Run lines of the patch in a function of their own."""
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    code = "\n".join(line[indent:] for line in lines)
    exec(compile(code, "fastdeploy.patch", "exec"), names)


def test_a_batch_without_requests_reaches_the_workers():
    """The scheduler asks for metadata each time, and a worker without requests closes the step."""
    batch, calls = BatchRequest(), []
    manager = SimpleNamespace(issue_pending_backup_to_batch_request=lambda: "step")
    batch.append_evict_metadata = calls.append
    lines = lines_between("issue_pending_backup", "resource_manager_v1.py")
    resources = SimpleNamespace(enable_cache_manager_v1=True, cache_manager=manager)
    start = next(i for i, line in enumerate(lines) if "if self.enable" in line)
    body = [*lines[start:], " " * 20 + "batch_request.append_evict_metadata([evict_metadata])"]
    run(body, self=resources, batch_request=batch)
    assert calls == [["step"]]
    sent = []
    controller = SimpleNamespace(submit_swap_tasks=lambda *metadata: sent.append(metadata))
    runner = SimpleNamespace(cache_controller=controller)
    lines = lines_between("elif batch_request.cache_evict_metadata", "worker_process.py")
    start = next(i for i, line in enumerate(lines) if "elif" in line)
    worker = SimpleNamespace(model_runner=runner)
    for metadata in ("step", None):
        batch = SimpleNamespace(cache_evict_metadata=metadata)
        body = [line.replace("elif", "if") for line in lines[start : start + 4]]
        run(body, self=SimpleNamespace(worker=worker), batch_request=batch)
    assert sent == [("step", None)]


def test_requests_whose_blocks_never_arrive_end_with_an_error():
    late, freed = SimpleNamespace(request_id="a", idx=1), []
    errors: list[tuple[str, str]] = []
    resources = SimpleNamespace(
        enable_cache_manager_v1=True,
        cache_manager=SimpleNamespace(expired_requests=lambda: [late]),
        tasks_list=[None, late],
        stop_flags=[True, False],
        requests={"a": late},
        req_dict={"a": 1},
        _free_blocks=freed.append,
    )
    lines = lines_between("expired_requests", "resource_manager_v1.py")
    start = next(i for i, line in enumerate(lines) if "if self.enable" in line)
    run(lines[start : start + 8], self=resources, error_reqs=errors)
    assert freed == [late]
    assert [request_id for request_id, _ in errors] == ["a"]
    assert (resources.tasks_list, resources.stop_flags) == ([None, None], [True, True])
    assert {**resources.requests, **resources.req_dict} == {}


ENVS = SimpleNamespace(ENABLE_V1_KVCACHE_MANAGER=True)


def peer_engine(**calls: object) -> SimpleNamespace:
    """Return what the changes use of FastDeploy's engine, with a manager that has peers."""
    manager = SimpleNamespace(has_peers=True, **calls)
    return SimpleNamespace(
        resource_manager=SimpleNamespace(cache_manager=manager),
        engine_worker_queue=SimpleNamespace(get_finished_req=list),
        current_request_ids={},
        enable_decode_cache_task=False,
    )


def test_tickets_travel_with_the_answer_of_the_decode_server():
    engine = peer_engine(begin_receive=lambda task: f"ticket of {task}")
    lines = lines_between("begin_receive", "splitwise_connector.py")
    start = next(i for i, line in enumerate(lines) if ".has_peers:" in line)
    names = {"self": engine, "info": {}, "tasks": ["a"], "i": 0, "envs": ENVS}
    run(lines[start : start + 2], **names)
    assert names["info"] == {"ticket": "ticket of a"}
    sent, ids = [], []

    def begin_send(name: str, ticket: str | None) -> None:
        ids.append(dict(engine.current_request_ids))
        sent.append((name, ticket))

    engine.resource_manager.cache_manager.begin_send = begin_send
    lines = lines_between("begin_send", "splitwise_connector.py")
    start = next(i for i, line in enumerate(lines) if "current_status = " in line)
    for task in (
        {"request_id": "a", "ticket": "b"},
        {"request_id": "c"},
        {"request_id": "d", "error_msg": "full"},
    ):
        body = [line for line in lines[start:] if line]
        run(body, self=engine, task=task, payload=[], envs=ENVS)  # no queue is written
    assert sent == [("a", "b"), ("c", None)]
    assert ids == [{}, {"a": "finished"}], "the send begins before the request can be scheduled"
    assert engine.current_request_ids == {"a": "finished", "c": "finished", "d": "full"}


def test_first_tokens_wait_for_the_blocks_on_both_servers():
    engine = peer_engine(finished_sends=lambda name: [(name, "finished")])
    lines = lines_between("finished_sends", "token_processor.py")
    start = next(i for i, line in enumerate(lines) if "get_finished_req" in line)
    names = {"self": engine, "task_id": "a", "envs": ENVS}
    run([*lines[start : start + 3], "found.append(finished_task_ids)".rjust(47)],
        found=(found := []), **names)  # fmt: skip
    assert found == [[("a", "finished")]]
    arrived = {"a"}
    engine.resource_manager.cache_manager.has_received = lambda output: output.request_id in arrived
    lines = lines_between("has_received", "common_engine.py")
    start = next(i for i, line in enumerate(lines) if "has_received" in line)
    waiting, ready = [], []
    for name in "ab":
        output = SimpleNamespace(request_id=name)
        body = ["for req_output in outputs:", *(line[12:] for line in lines[start : start + 4])]
        run(body, self=engine, envs=ENVS, outputs=[output], waiting_request_outputs=waiting,
            ready_request_outputs=ready)  # fmt: skip
    assert [output.request_id for output in waiting] == ["b"]
    assert [output.request_id for output in ready] == ["a"]


def test_a_prefill_server_with_peers_waits_for_no_other_process():
    lines = lines_between("finished_ids.extend", "common_engine.py")
    start = next(i for i, line in enumerate(lines) if ".has_peers:" in line)
    finished: list[str] = []
    run(lines[start : start + 4], self=peer_engine(), finished_ids=finished,
        need_check_req_ids=["a", "b"], envs=ENVS)  # fmt: skip
    assert finished == ["a", "b"]
    lines = lines_between("no process reads", "splitwise_connector.py")
    start = next(i for i, line in enumerate(lines) if ".has_peers:" in line)
    run(["def send(self, cache_info):", *(line[4:] for line in lines[start:]), "send(engine, [])"],
        engine=peer_engine(), envs=ENVS)  # fmt: skip


def test_workers_with_peers_do_not_let_attention_kernels_report_layers(monkeypatch):
    """The attention backend reads the mode when it is created: no process reads the reports."""
    monkeypatch.setenv(peers.SECRET_VARIABLE, "a secret of the test")
    paddle = SimpleNamespace(is_compiled_with_cuda=lambda: False)
    monkeypatch.setattr(controller, "import_paddle", lambda: paddle)
    config = fd_config(16, 0)
    config.parallel_config = SimpleNamespace(
        pd_disaggregation_mode="per_chunk", local_engine_worker_queue_port=1
    )
    config.scheduler_config.splitwise_role = "prefill"
    modes: list[str] = []

    def initialize() -> None:
        modes.append(config.parallel_config.pd_disaggregation_mode)

    runner = SimpleNamespace(local_rank=0, device_id=0, _initialize_attn_backend=initialize)
    lines = lines_between("for_worker", "gpu_model_runner.py")
    start = next(i for i, line in enumerate(lines) if "ENABLE_V1_KVCACHE_MANAGER" in line)
    envs = SimpleNamespace(ENABLE_V1_KVCACHE_MANAGER=True)
    run([line for line in lines[start:] if line], self=runner, envs=envs, fd_config=config)
    assert isinstance(runner.cache_controller, CacheController)
    assert modes == ["None"]


def test_a_new_request_begins_its_fetch():
    fetched = []
    manager = SimpleNamespace(begin_fetch=fetched.append)
    lines = [line for line in lines_between("begin_fetch", "resource_manager_v1.py") if line]
    request = Request("a", [1])
    resources = SimpleNamespace(
        enable_cache_manager_v1=True, cache_manager=manager, waiting=[], requests={}
    )
    run([line for line in lines if "def " not in line], self=resources, request=request)
    assert fetched == [request]
