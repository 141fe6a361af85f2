"""``aiokv demo --split``: a prefill and a decode process, and what a user sees if one is killed."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING

import pytest
import uvloop

from aiokv.cli import main
from aiokv.demo.channel import Channel, ServerLostError
from aiokv.demo.ledger import Ledger
from tests.integration.test_demo import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    Demo = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def split(tmp_path: Path) -> Demo:
    """Return a function that runs the command and returns its status and ``--json``."""

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "demo.json"
        status = main(["demo", "--split", *SMALL, "--json", str(path), *flags])
        return status, json.loads(path.read_text())

    return run


def check_equal(status: int, found: dict[str, Any]) -> None:
    """Every request was answered with the logits and tokens of one server."""
    assert status == 0
    assert found["tokens_equal"]
    assert found["logits_equal"]
    assert found["blocks_equal"]
    assert found["compared"]["tokens_compared"] == found["one_server"]["generated_tokens"]
    assert found["compared"]["blocks_read"] > 0


def test_decode_process_computes_one_position_per_prompt(split: Demo) -> None:
    status, found = split()
    check_equal(status, found)
    one, prefill, decode = found["one_server"], found["prefill"], found["decode"]
    assert decode["computed_tokens"] == decode["requests"] == one["requests"]
    assert 0 < decode["received_tokens"] < decode["prompt_tokens"] - decode["requests"]
    assert prefill["sent_tokens"] == decode["received_tokens"]
    assert prefill["sent_bytes"] == decode["received_bytes"] > 0
    assert prefill["sent_early_blocks"] < prefill["sent_blocks"]
    assert prefill["generated_tokens"] == prefill["requests"] == one["requests"]
    assert found["killed"] is None


def test_decode_process_computes_the_rest_when_prefill_is_killed(
    split: Demo, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = split("--kill", "prefill")
    check_equal(status, found)
    assert found["prefill"] is None
    assert found["killed"]["name"] == "prefill"
    decode = found["decode"]
    assert decode["computed_tokens"] > decode["requests"]
    assert decode["received_tokens"] > 0
    assert "no request failed" in " ".join(capsys.readouterr().out.split())


def test_prefill_process_keeps_its_cache_when_decode_is_killed(
    split: Demo, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = split("--kill", "decode")
    check_equal(status, found)
    assert found["killed"]["name"] == "decode"
    assert found["killed"]["sent_again"] > 0
    assert found["prefill"]["requests"] > found["one_server"]["requests"]
    # The second process answered what the first one had not.
    answered = found["killed"]["answered_requests"]
    assert found["decode"]["requests"] <= found["one_server"]["requests"] - answered
    assert "the prefill process kept its cache" in " ".join(capsys.readouterr().out.split())


def test_split_of_one_request_kills_nothing(split: Demo) -> None:
    cached = ["--conversations", "1", "--turns", "1", "--system-tokens", "1", "--user-tokens", "1"]
    status, found = split("--kill", "prefill", *cached)
    assert found["killed"] is None
    assert status == 4


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--kill", "decode"], "--kill is given without --split"),
        (["--transport", "nixl"], "--transport is given without --split"),
        (["--split", "--corrupt"], "--split and --corrupt cannot be used together"),
        (["--split", "--store", "disk:/x"], "--split and --store cannot be used together"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *flags]) == 2
    assert error in capsys.readouterr().err


def test_blocks_of_another_server_are_right_once_its_ledger_is_added() -> None:
    decode, prefill = Ledger(), Ledger()
    decode.check_read_block("a", 0, b"prefix", b"right")
    decode.check_read_block("b", 1, b"prefix", b"wrong")
    prefill.record_computed_block(b"prefix", b"right")
    prefill.record_rows("a", 3, [b"row"])
    decode.record_rows("a", 3, [b"other"])
    decode.add(prefill)
    assert [str(read) for read in decode.wrong_blocks] == ["b, block 1"]
    assert decode.unequal_copies == [("a", 3)]


def test_error_of_a_server_that_does_not_start_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiokv.demo.split.run_server", asyncio.sleep)  # refuses the arguments
    with pytest.raises(TypeError, match="sleep"):
        main(["demo", "--split", *SMALL])


def test_call_of_a_process_that_has_ended_fails() -> None:
    async def call_late() -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(*await asyncio.open_unix_connection(sock=ours))
        async with asyncio.TaskGroup() as group:
            early = group.create_task(_refused(channel))
            await asyncio.sleep(0)
            theirs.close()
            await channel.run(group, {})
            await early
        await channel.aclose()
        await _refused(channel)

    uvloop.run(call_late())


async def _refused(channel: Channel) -> None:
    with pytest.raises(ServerLostError):
        await channel.call("serve", "request")
