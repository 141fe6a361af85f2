"""``aiokv demo`` end to end on tiny sizes: equal bits, the negative control, the report."""

import json
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import aiokv
from aiokv.cli import main
from aiokv.demo import weights
from aiokv.demo.ledger import Ledger
from aiokv.demo.row_tiles import RowTiles
from aiokv.demo.weights import random_weights
from aiokv.demo.workload import ChatSizes, chat_workload
from tests.harness.patience import PROGRAM_SECONDS
from tests.models.demo import command as repository
from tests.models.demo.trace import trace_workload

SMALL_MODEL = ["--layers", "2", "--hidden", "32", "--heads", "2", "--kv-heads", "1"]
SMALL_WORK = ["--conversations", "6", "--turns", "3", "--system-prompts", "2"]
SMALL_WORK += ["--system-tokens", "32", "--user-tokens", "12", "--answer-tokens", "6"]
# a last turn has about 86 tokens in 22 blocks: 60 blocks hold three, not six conversations
SMALL_CACHE = ["--block-tokens", "4", "--device-blocks", "256", "--pressure-blocks", "60"]
SMALL_CACHE += ["--host-blocks", "256", "--max-running", "3", "--chunk-tokens", "8"]
SMALL = [*SMALL_MODEL, *SMALL_WORK, *SMALL_CACHE]

TRACE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 300, "hash_ids": [0, 1]},
    {"timestamp": 5, "input_length": 1500, "output_length": 200, "hash_ids": [0, 1, 2]},
    {"timestamp": 9, "input_length": 9000, "output_length": 1, "hash_ids": [0, *range(3, 20)]},
]


@pytest.fixture
def demo(tmp_path):
    """Return a function that runs the command and returns its status and ``--json``."""
    return partial(run_demo, tmp_path / "demo.json", lambda flags: main(["demo", *flags]))


@pytest.fixture
def more_demo(tmp_path):
    """Return the same function of the program with the models of the repository."""
    return partial(run_demo, tmp_path / "demo.json", repository.main)


def run_demo(path, program, *flags):
    status = program([*SMALL, "--json", str(path), *flags])
    return status, json.loads(path.read_text())


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return path


def test_three_runs_compute_equal_bits(demo, capsys):
    status, found = demo()
    assert status == 0
    assert found["tokens_equal"] is True
    assert found["logits_equal"] is True
    no_cache, device, both = found["runs"]
    assert [run["name"] for run in found["runs"]] == ["no_cache", "device", "device_host"]
    for run in found["runs"]:
        assert run["requests"] == 18
        assert run["generated_tokens"] == 18 * 6
        assert run["prompt_tokens"] == no_cache["prompt_tokens"]
        assert run["computed_tokens"] + run["reused_tokens"]["total"] == run["prompt_tokens"]
        assert 0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p99"]
    assert no_cache["reused_tokens"] == {"device": 0, "host": 0, "store": 0, "total": 0}
    assert device["reused_tokens"]["host"] == 0
    assert device["reused_tokens"]["device"] > 0
    assert both["reused_tokens"]["host"] > 0
    assert both["onload"]["bytes"] > 0
    assert both["offload"]["bytes"] > 0
    assert both["offload"]["gigabytes_per_second"] > 0
    assert no_cache["layer_wait_ms"] == 0
    for run in (device, both):
        assert run["compared"]["rows_compared"] >= run["generated_tokens"]
        assert run["compared"]["tokens_compared"] == 18 * 6
        assert run["compared"]["blocks_read"] * 4 >= run["reused_tokens"]["total"]
        assert run["compared"]["blocks_wrong"] == 0
    assert "equal in all runs" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["nth_use:2", "write_back"])
def test_each_write_policy_computes_equal_bits(demo, capsys, policy):
    status, found = demo("--write-policy", policy)
    assert status == 0
    assert found["runs"][2]["label"] == f"device + host, {policy}"
    assert found["runs"][2]["offload"]["bytes"] > 0
    assert policy in capsys.readouterr().out


def test_prompts_with_different_images_are_not_confused(more_demo, monkeypatch):
    """Equal placeholder tokens with different KV: a match without items would serve wrong bytes."""
    status, found = more_demo("--images", "2")
    assert status == 0
    assert "2 images" in found["workload"]
    assert found["runs"][2]["reused_tokens"]["host"] > 0
    told = aiokv.CacheEngine.match

    def without_items(engine, tokens, *, items, **more):
        return told(engine, tokens, **more)

    monkeypatch.setattr(aiokv.CacheEngine, "match", without_items)
    status, found = more_demo("--images", "2")
    assert status == 1
    assert found["logits_equal"] is False
    assert found["blocks_equal"] is False


def test_batch_dependent_products_are_not_reported_as_wrong_bytes(demo, capsys, monkeypatch):
    exact = RowTiles.matmul

    def depends_on_the_rows_beside(tiles, x, weight):
        return exact(tiles, x, weight) * np.float32(1 + 1e-6 * len(x))

    monkeypatch.setattr(RowTiles, "matmul", depends_on_the_rows_beside)
    status, found = demo()
    assert status == 4
    assert found["logits_equal"] is False
    assert found["blocks_equal"] is True
    printed = " ".join(capsys.readouterr().out.split())
    assert "INCONCLUSIVE: the runs differ, but every cached block held the bytes" in printed
    assert demo("--corrupt")[0] == 1


def test_nan_logits_are_not_reported_as_equal(demo, capsys, monkeypatch):
    def weights_with_nan(config):
        drawn = random_weights(config)
        drawn.final_norm[0] = np.nan
        return drawn

    monkeypatch.setattr(weights, "random_weights", weights_with_nan)
    status, found = demo()
    assert status == 4
    reference = found["runs"][0]
    assert reference["rows_not_finite"] == reference["prompt_tokens"] + 18 * 5
    assert "hold NaN or infinity" in " ".join(capsys.readouterr().out.split())


def test_preempted_requests_repeat_their_bits(demo):
    status, found = demo(
        "--block-tokens", "8", "--pressure-blocks", "15", "--answer-tokens", "12", "--turns", "2"
    )
    assert status == 0
    both = found["runs"][2]
    assert both["preemptions"] > 0
    assert both["repeated_tokens"] > 0


def test_requests_that_are_cancelled_while_computed_change_no_output(demo, capsys):
    status, found = demo("--disconnect", "0.8")
    assert status == 0
    assert found["runs"][0]["disconnections"] == 0
    assert sum(run["disconnections"] for run in found["runs"]) > 0
    for run in found["runs"]:
        assert run["requests"] == 18
        assert run["generated_tokens"] == 18 * 6
    assert "requests were cancelled while they were computed" in capsys.readouterr().out


def test_corrupted_block_is_detected(demo, capsys):
    """Negative control: the check must be able to fail."""
    status, found = demo("--corrupt")
    assert status == 1
    assert found["logits_equal"] is False
    _, device, both = found["runs"]
    assert device["compared"]["rows_different"] == 0
    assert both["compared"]["rows_different"] > 0
    assert both["corrupted"]
    assert both["compared"]["blocks_wrong"] > 0
    assert "control worked" in capsys.readouterr().out


def test_negative_control_without_a_block_to_corrupt_fails(demo, capsys):
    status, _ = demo("--corrupt", "--conversations", "1", "--turns", "1")
    assert status == 3
    assert "control FAILED" in capsys.readouterr().out


def test_a_trace_is_served(more_demo, trace_file):
    status, found = more_demo("--trace", str(trace_file), "--block-tokens", "16")
    assert status == 0
    no_cache, device, _ = found["runs"]
    # 1000 and 1500 tokens divided by 512 / 16; 9000 / 32 = 281 fits into 512 as it is
    assert no_cache["prompt_tokens"] == 31 + 46 + 281
    assert device["requests"] == 3


def test_terminal_output_has_a_progress_bar(demo, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, _ = demo("--conversations", "2", "--turns", "1")
    assert status == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert re.search(r"device only .*2/2 requests", plain)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pressure-blocks", "10"], r"pressure_blocks is 10\n(.|\n)*--pressure-blocks"),
        (["--hidden", "33"], r"hidden \(33\)"),
        (["--kv-heads", "3"], r"kv_heads \(3\)"),
        (["--json", "no/such/folder.json"], r"cannot write no/such/folder\.json"),
    ],
)
def test_flags_that_contradict_each_other_are_explained(flags, message, capsys):
    assert main(["demo", *SMALL, *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "flags", [["--turns", "0"], ["--turns", "x"], ["--seed", "-1"], ["--disconnect", "1.5"]]
)
def test_flags_out_of_range_are_refused_by_the_parser(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *flags])
    assert f"argument {flags[0]}" in capsys.readouterr().err


def test_trace_that_does_not_exist_is_refused(capsys):
    assert repository.main([*SMALL, "--trace", "no-such-file.jsonl"]) == 2
    assert "no-such-file.jsonl: No such file" in capsys.readouterr().err


def test_program_of_the_repository_serves_a_trace(tmp_path, trace_file):
    path = tmp_path / "demo.json"
    flags = [*SMALL, "--trace", str(trace_file), "--requests", "1", "--json", str(path)]
    command = [sys.executable, "-m", "tests.models.demo", *flags]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(path.read_text())["runs"][0]["requests"] == 1


@pytest.mark.parametrize("flag", ["--pressure", "--corr", "--trace"])
def test_abbreviated_and_unknown_options_are_refused(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *SMALL, f"{flag}=1"])
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


def test_demo_of_the_package_imports_no_module_of_the_repository():
    program = "import sys; from aiokv.cli import main; main(['demo', *sys.argv[1:]]); "
    program += "sys.exit(any(name.partition('.')[0] == 'tests' for name in sys.modules))"
    command = [sys.executable, "-c", program, *SMALL, "--conversations", "1"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


# A process that was started in the background of a shell script ignores SIGINT, and so does what it
# starts; the command is tested as if a user had started it.
FROM_A_TERMINAL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
from aiokv.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (signal.SIGINT, 130, "aiokv: interrupted\n"),
        (signal.SIGTERM, 143, "aiokv: terminated\n"),
    ],
)
@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_ends_the_demo_cleanly(number, status, message, inherited):
    before = signal.signal(number, inherited)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", FROM_A_TERMINAL, "demo", "--conversations", "200"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(number, before)
    with process:
        assert process.stdout.readline().startswith("no cache")
        process.send_signal(number)
        _, errors = process.communicate(timeout=PROGRAM_SECONDS)
    assert process.returncode == status
    assert errors == message


def run_with_closed(streams, *flags):
    """The demo in a process that closed some standard streams before it started Python."""
    closing = " ".join(f"{number}>&-" for number in streams)
    command = f'exec {closing} "$0" -m aiokv demo "$@"'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *SMALL, "--conversations", "2", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_SECONDS,
    )


@pytest.mark.parametrize("streams", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_the_demo_works_with_closed_standard_streams(streams, tmp_path):
    path = tmp_path / "demo.json"
    ended = run_with_closed(streams, "--json", str(path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(path.read_text())["logits_equal"] is True
    assert ("equal in all runs" in ended.stdout) == (1 not in streams)


def test_error_with_closed_standard_streams_sets_the_exit_status(tmp_path):
    for streams in ((1,), (2,), (0, 1, 2)):
        ended = run_with_closed(streams, "--json", str(tmp_path / "absent" / "demo.json"))
        assert ended.returncode == 2
        assert ("is not a folder" in ended.stderr) == (2 not in streams)


def test_importing_aiokv_does_not_import_the_demo():
    command = "import sys, aiokv; sys.exit(any(m.startswith('aiokv.demo') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_equal_seeds_make_equal_workloads():
    sizes = ChatSizes(conversations=5, system_prompts=2)

    def added(seed):
        workload = chat_workload(sizes, vocab=512, seed=seed)
        return [[turn.added.tolist() for turn in each.turns] for each in workload.conversations]

    first, again, other = added(1), added(1), added(2)
    assert first == again
    assert first != other
    shared = sizes.system_tokens
    assert first[0][0][:shared] == first[2][0][:shared] == first[4][0][:shared]
    assert first[0][0][:shared] != first[1][0][:shared]


def test_equal_hash_ids_become_equal_tokens(trace_file):
    workload = trace_workload(
        trace_file, requests=3, block_tokens=16, max_context_tokens=64, vocab=512, seed=0
    )
    first, second, third = (each.turns[0] for each in workload.conversations)
    assert first.added.tolist() == second.added[:31].tolist()
    assert third.added[:16].tolist() == first.added[:16].tolist()
    assert third.added[16:31].tolist() != first.added[16:].tolist()
    assert len(third.added) == 64 - third.output_tokens
    assert max(each.context_tokens for each in workload.conversations) <= 64


def test_workload_has_whole_conversations_of_the_trace(tmp_path):
    """Two interleaved conversations; the second one starts with the second request."""
    path = tmp_path / "trace.jsonl"
    lines = [(0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 1, 3, 5)]
    path.write_text(
        "".join(
            json.dumps(
                {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 9}
                | {"hash_ids": ids}
            )
            + "\n"
            for ids in lines
        )
    )
    workload = trace_workload(
        path, requests=4, block_tokens=16, max_context_tokens=512, vocab=512, seed=0
    )
    names = [each.name for each in workload.conversations]
    assert names == ["request-0", "request-1", "request-2", "request-4"]


def test_a_ledger_finds_every_kind_of_difference():
    def ledger(digest, tokens):
        made = Ledger()
        made.record_rows("a", 0, [b"0", digest])
        made.record_tokens("a", tokens)
        return made

    reference = ledger(b"1", [5, 6])
    assert ledger(b"1", [5, 6]).compare(reference).equal
    other_row = ledger(b"2", [5, 6]).compare(reference)
    assert (other_row.rows_different, other_row.first_difference) == (1, "a, position 1")
    assert ledger(b"1", [5, 7]).compare(reference).tokens_different == 1
    assert ledger(b"1", [5]).compare(reference).tokens_different == 1
    wrong_bytes = ledger(b"1", [5, 6])
    wrong_bytes.record_computed_block(b"prefix", b"right")
    wrong_bytes.check_read_block("a", 0, b"prefix", b"right")
    assert wrong_bytes.compare(reference).equal
    wrong_bytes.check_read_block("a", 3, b"prefix", b"wrong")
    compared = wrong_bytes.compare(reference)
    assert not compared.equal
    assert (compared.blocks_read, compared.blocks_wrong) == (2, 1)
    assert compared.first_wrong_block == "a, block 3"
    twice = ledger(b"1", [5, 6])
    twice.record_rows("a", 1, [b"3"])
    assert twice.compare(reference).rows_different == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--live", "--split"], "--live and --split cannot be used together"),
        (["--live", "0", "--corrupt"], "--live and --corrupt"),
        (["--live", "65536"], "--live is 65536; it must be a port, from 0 to 65535"),
    ],
)
def test_options_that_contradict_live_are_refused(options, message, capsys):
    assert main(["demo", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert main(["demo", "--live", str(listener.getsockname()[1])]) == 2
    assert "cannot be bound: Address already in use" in capsys.readouterr().err
