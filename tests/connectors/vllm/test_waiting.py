"""The order in which vLLM's waiting requests begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import RequestStatus

from aiokv.connectors.vllm.waiting import (
    LOOKUP_SECONDS,
    LOOKUP_TOKENS,
    MOST_COMPARED,
    WaitingOrder,
)
from aiokv.errors import BrokenEngineError
from tests.connectors.vllm.model import generate
from tests.connectors.vllm.serving import evicted_prompt, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from tests.connectors.vllm.server import Server

OVERTAKE_SECONDS = 5.0
TOKENS = 100


class Line:
    """A line of requests, of which host memory has ``cached[name]`` tokens, and a clock."""

    def __init__(self, *, overtake_seconds: float = OVERTAKE_SECONDS, priorities: bool = False):
        self.now = 100.0
        self.cached: dict[str, int] = {}
        self.looked_up: list[str] = []
        self.error: BaseException | None = None
        self.requests: dict[str, Any] = {}
        self.room = 0  # prompt tokens for which the next step has room
        self.order = WaitingOrder(
            self,  # type: ignore[arg-type]
            overtake_seconds,
            has_priorities=priorities,
            room=lambda: self.room,
            clock=lambda: self.now,
        )

    # --- the engine -------------------------------------------------------------------------------

    is_usable = True
    done = True

    def calls(self) -> Line:
        return self

    def retain(self, tokens: NDArray[np.int32], *, seconds: float, **names: Any) -> Any:
        assert seconds > LOOKUP_SECONDS
        ids = tokens.tolist()
        (name,) = [each for each, one in self.requests.items() if one.all_token_ids == ids]
        assert names["salt"] == "salt"
        self.looked_up.append(name)
        return SimpleNamespace(value=self.cached.get(name, 0), error=self.error)

    def run(self, calls: Line) -> None:
        assert calls is self

    def post(self, calls: Line) -> None:
        assert calls is self

    def succeeded(self, answers: list[Any], what: str) -> bool:
        return all(answer.error is None for answer in answers)

    # --- vLLM -------------------------------------------------------------------------------------

    def add(self, name: str, cached: int = 0, tokens: int = TOKENS, **fields: Any) -> None:
        self.cached[name] = cached
        self.requests[name] = SimpleNamespace(
            **{
                "request_id": name,
                "all_token_ids": [len(self.requests)] * tokens,
                "num_tokens": tokens,
                "prompt_token_ids": [0],
                "prompt_embeds": None,
                "resumable": False,
                "skip_reading_prefix_cache": False,
                "kv_transfer_params": None,
                "priority": 0,
                "status": RequestStatus.WAITING,
                "lora_request": None,
                "cache_salt": "salt",
                "mm_features": [],
            }
            | fields
        )
        self.order.add(self.requests[name])

    def step(self, *, is_idle: bool = False) -> None:
        self.order.begin_step(is_idle=is_idle)

    def asks(self, name: str, local: int = 0) -> bool:
        """Return True if the request may begin."""
        return not self.order.is_overtaken(self.requests[name], local)

    def begins(self, *room: int) -> list[str]:
        """Schedule steps, with room for so many requests each; return those that begin in order."""
        begun: list[str] = []
        for count in room or (1,) * len(self.requests):
            self.step()
            left = count
            for name in list(self.requests):
                if self.asks(name):
                    if not left:
                        break  # vLLM asks for no request behind one that has no room
                    left -= 1
                    begun.append(name)
                    self.end(name)
        return begun

    def end(self, name: str) -> None:
        self.order.remove(name)
        del self.requests[name]


def test_the_largest_cached_share_begins_first() -> None:
    line = Line()
    line.add("none")
    line.add("half", 50)
    line.add("most", 90)
    line.add("long", 900, tokens=1_000)
    assert line.begins() == ["most", "long", "half", "none"]


def test_of_equal_shares_the_one_with_the_fewest_tokens_begins_first_then_the_first() -> None:
    line = Line()
    line.add("long", tokens=1_000)
    line.add("first", tokens=100)
    line.add("second", tokens=90)  # as many in powers of two
    line.add("short", tokens=20)
    assert line.begins() == ["short", "first", "second", "long"]


def test_vllms_own_hit_counts() -> None:
    line = Line()
    line.add("local")
    line.add("host", 50)
    assert line.asks("local", 90)
    line.step()
    assert not line.asks("local", 0)
    assert line.asks("host")


def test_no_request_is_overtaken_after_two_steps_that_compute_nothing() -> None:
    line = Line()
    line.add("first")
    line.add("cached", 90)
    for is_idle in (False, True):
        line.step(is_idle=is_idle)
        assert [line.asks(name) for name in ("first", "cached")] == [False, True]
    line.step(is_idle=True)
    assert [line.asks(name) for name in ("first", "cached")] == [True, True]
    line.step()
    assert not line.asks("first")


def test_the_others_do_not_wait_for_a_request_that_vllm_does_not_ask_for() -> None:
    line = Line(priorities=True)
    line.add("first", priority=2)
    line.add("cached", 90, priority=1)  # another connector is asked before, and is not ready
    assert not line.asks("first")
    line.step()
    assert not line.asks("first")
    line.step()
    assert line.asks("first")


def test_the_others_do_not_wait_for_the_last_request_if_vllm_does_not_ask_for_it() -> None:
    line = Line()
    line.add("first")
    line.add("second")
    line.add("cached", 90)  # another connector is asked before, and is not ready
    assert [line.asks(name) for name in ("first", "second")] == [False, False]
    line.step()
    assert [line.asks(name) for name in ("first", "second")] == [False, False]
    for _ in range(3):
        line.step()
        assert line.asks("first")  # vLLM has no room for it


def test_first_request_that_has_no_room_is_overtaken_when_the_share_of_another_grows() -> None:
    line = Line()
    for name in ("first", "second", "third"):
        line.add(name)
    for _ in range(3):
        line.step()
        assert line.asks("first")  # vLLM has no room for it, and asks for no other one
    line.cached["third"] = 90
    line.now += LOOKUP_SECONDS
    line.step()
    assert [line.asks(name) for name in ("first", "second", "third")] == [False, False, True]


def test_the_others_do_not_wait_for_a_request_that_is_skipped() -> None:
    line = Line()
    line.add("first")
    line.add("cached", 90)
    assert not line.asks("first")
    assert line.asks("cached")
    line.order.skip("cached")  # it waits for blocks of the stores
    line.step()
    assert line.asks("first")


def test_request_that_has_waited_for_long_is_overtaken_by_none() -> None:
    line = Line()
    line.add("first")
    line.add("second")
    line.now += OVERTAKE_SECONDS - 1
    line.add("cached", 90)
    assert not line.asks("first")
    line.now += 1
    assert line.begins() == ["first", "second", "cached"]


def test_only_requests_of_equal_priority_overtake() -> None:
    line = Line(priorities=True)
    line.add("urgent", priority=1)
    line.add("cached", 90, priority=2)
    line.add("urgent and cached", 90, priority=1)
    assert line.begins() == ["urgent and cached", "urgent", "cached"]
    line = Line(priorities=False)
    line.add("urgent", priority=1)
    line.add("cached", 90, priority=2)
    assert line.begins() == ["cached", "urgent"]


@pytest.mark.parametrize(
    "change",
    [
        {"status": RequestStatus.WAITING_FOR_REMOTE_KVS},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="b")},
    ],
)
def test_the_others_do_not_wait_for_a_request_that_vllm_may_not_begin(
    change: dict[str, Any],
) -> None:
    line = Line()
    line.add("first")
    line.add("cached", 90, **change)
    assert line.asks("first")
    assert line.asks("cached")


def test_the_others_do_not_wait_for_a_request_that_vllm_skips() -> None:
    line = Line()
    line.add("a")
    line.add("b", 90)
    line.add("c", 50)
    assert [line.asks(name) for name in "abc"] == [False, True, True]  # b was skipped
    line.step()
    assert [line.asks(name) for name in "abc"] == [False, True, True]
    line.step()
    assert not line.asks("a")  # because of c
    assert line.asks("b")  # vLLM has no room for it, and asks for no other
    line.step()
    assert [line.asks(name) for name in "ab"] == [False, True]


def test_cached_parts_are_looked_up_a_few_per_step_and_again_after_a_while() -> None:
    line = Line()
    names = [f"r{i}" for i in range(4)]
    for name in names:
        line.add(name, tokens=LOOKUP_TOKENS // 2)
    assert line.asks(names[0])
    assert line.looked_up == names[:2]
    line.step()
    assert line.asks(names[0])
    assert line.looked_up == names
    line.cached[names[1]] = LOOKUP_TOKENS // 4
    line.step()
    assert line.asks(names[1])  # as much as the others, as far as is known
    line.now += LOOKUP_SECONDS
    line.step()
    assert not line.asks(names[0])


def test_cached_parts_are_looked_up_again_while_the_scheduler_goes_on() -> None:
    line = Line()
    line.add("first")
    line.add("second")
    assert line.asks("first")
    line.cached["second"] = 90
    line.now += LOOKUP_SECONDS
    line.done = False
    for _ in range(3):
        line.step()
        assert line.asks("first")
    assert line.looked_up == ["first", "second"] * 2
    line.done = True
    line.step()
    assert not line.asks("first")


def test_new_requests_for_which_the_next_step_has_room_begin_in_vllms_order() -> None:
    line = Line()
    line.room = 2 * TOKENS
    line.add("first")
    line.add("cached", 90)
    assert [line.asks(name) for name in ("first", "cached")] == [True, True]
    assert not line.looked_up
    line.step()  # without room for a block, so both are left in line
    assert [line.asks(name) for name in ("first", "cached")] == [False, True]


def test_new_requests_for_which_the_next_step_has_no_room_are_compared() -> None:
    line = Line()
    line.room = 2 * TOKENS
    line.add("first")
    line.add("second")
    assert line.asks("first")
    line.add("cached", 90)
    assert not line.asks("first")


@pytest.mark.parametrize(
    "wishes",
    [
        {"kv_transfer_params": {"aiokv": {"read": False}}},
        {"skip_reading_prefix_cache": True},
        {"prompt_token_ids": None},
    ],
)
def test_a_request_that_reads_nothing_is_not_looked_up(wishes: dict[str, Any]) -> None:
    line = Line()
    line.add("first")
    line.add("cached", 90, **wishes)
    assert line.asks("first")
    assert line.looked_up == ["first"]


def test_one_request_is_not_looked_up() -> None:
    line = Line()
    line.add("cached", 90)
    assert line.begins(1) == ["cached"]
    assert not line.looked_up


def test_requests_far_behind_wait_for_the_first_ones_in_line() -> None:
    line = Line()
    first = [f"r{i}" for i in range(MOST_COMPARED - 1)]
    for name in first:
        line.add(name)
    line.add("cached", 50)
    line.add("behind", 90)
    assert not line.asks("behind")
    assert line.begins() == ["cached", "behind", *first]
    assert set(line.looked_up) == {"cached", "behind", *first}


def test_a_request_far_behind_with_a_higher_priority_goes_first() -> None:
    line = Line(priorities=True)
    for i in range(MOST_COMPARED):
        line.add(f"r{i}", 90, priority=1)
    line.add("urgent", priority=0)
    line.add("behind", 90, priority=1)
    assert line.asks("urgent")
    assert not line.asks("behind")


def test_without_a_time_to_overtake_the_order_is_vllms() -> None:
    line = Line(overtake_seconds=0.0)
    line.add("first")
    line.add("cached", 90)
    assert line.begins() == ["first", "cached"]
    assert not line.looked_up


def test_a_failed_lookup_counts_as_nothing_cached() -> None:
    line = Line()
    line.error = BrokenEngineError("test")
    line.add("first")
    line.add("cached", 90)
    assert line.begins() == ["first", "cached"]


# --- with vLLM's scheduler ------------------------------------------------------------------------


def _occupy(server: Server) -> None:
    """Let a request decode."""
    running = server.add("running", prompt(5, 60), 24)
    while not running.num_output_tokens:
        server.step()


def _begun(server: Server, *names: str) -> list[str]:
    """Run until requests have begun; return them in this order."""
    begun: list[str] = []
    while len(begun) < len(names):
        assert server.is_busy
        server.step()
        begun += [
            name
            for name in names
            if name not in begun
            and (request := server.scheduler.requests.get(name)) is not None
            and request.status == RequestStatus.RUNNING
        ]
    return begun


@pytest.mark.parametrize("admission", ["cached_first", "arrival"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_request_whose_prompt_is_in_host_memory_begins_first(
    make_server: Callable[..., Server], admission: str, async_scheduling: bool
) -> None:
    server = make_server({"admission": admission}, num_blocks=24, async_scheduling=async_scheduling)
    cached = evicted_prompt(server, 1)
    _occupy(server)
    new = prompt(6, 60)
    server.add("new", new, 2)
    server.add("cached", cached, 2)
    names = ["cached", "new"] if admission == "cached_first" else ["new", "cached"]
    assert _begun(server, "new", "cached") == names
    server.run()
    assert server.outputs["new"] == generate(new, 0, 2)
    assert server.outputs["cached"] == generate(cached, 0, 2)


def test_request_that_waits_for_a_grammar_lets_others_begin(
    make_server: Callable[..., Server],
) -> None:
    server = make_server(num_blocks=200)
    cached = evicted_prompt(server, 1)
    _occupy(server)
    request = server.add("new", prompt(6, 60), 2)
    waiting = server.add(
        "cached",
        cached,
        2,
        sampling_params=SamplingParams(
            max_tokens=2, structured_outputs=StructuredOutputsParams(regex="a")
        ),
    )
    waiting.status = _grammar_status()
    server.step()
    assert request.status == RequestStatus.RUNNING
    server.abort("cached")
    server.run()


def test_aborted_request_is_not_waited_for(make_server: Callable[..., Server]) -> None:
    server = make_server(num_blocks=24)
    cached = evicted_prompt(server, 1)
    _occupy(server)
    new = server.add("new", prompt(6, 60), 2)
    server.add("cached", cached, 2)
    server.step()
    server.abort("cached")
    server.abort("running")
    server.step()
    assert new.status == RequestStatus.RUNNING
    server.run()


def _grammar_status() -> RequestStatus:
    names = ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_FSM")
    return next(RequestStatus[name] for name in names if name in RequestStatus.__members__)
