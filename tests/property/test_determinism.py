"""I9: decisions are a function of the ordered list of calls; replaying it gives equal plans."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv._native import Core, CoreStatistics, EventStream, GroupStatistics, TierCounts
from aiokv.errors import AiokvError
from tests.property.test_core_walks import walk

# Digests that the core keeps for subscribers; no decision depends on them.
OF_DIGESTS = {"index_bytes"}


class Recorder:
    """Core with a list of its calls and results."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.core, name)

        def call(*args: Any) -> Any:
            answer = result_of(verb, args)
            self.calls.append((name, args, answer))
            if isinstance(answer, AiokvError):
                raise answer
            return answer

        return call


def result_of(verb: Any, args: tuple[Any, ...]) -> Any:
    try:
        return verb(*args)
    except AiokvError as error:
        return error


def plain(answer: Any) -> Any:
    """Return comparable values: arrays as lists, errors as text, statistics without addresses."""
    if isinstance(answer, AiokvError):
        return type(answer), str(answer)
    if hasattr(answer, "tolist"):
        return answer.tolist()
    if isinstance(answer, CoreStatistics | GroupStatistics | TierCounts):
        names = {name for name in dir(answer) if not name.startswith("_")} - OF_DIGESTS
        return {name: plain(getattr(answer, name)) for name in names}
    return answer


@pytest.mark.parametrize("seed", range(8))
def test_replayed_calls_give_equal_results(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[Recorder] = []
    arguments: list[dict[str, Any]] = []

    def record(**sizes: Any) -> Recorder:
        arguments.append(sizes)
        recorders.append(Recorder(Core(**sizes)))
        return recorders[-1]

    def subscribe(recorder: Recorder, max_blocks: int, with_stores: bool) -> EventStream:
        """Subscribe to events; the replay does not, because no decision depends on them."""
        return EventStream(recorder.core, max_blocks, with_stores)

    monkeypatch.setattr("aiokv.scheduler.plans.Core", record)
    monkeypatch.setattr("aiokv.scheduler.events.EventStream", subscribe)
    walk(seed, 120).teardown()
    (recorder,) = recorders
    assert {"match", "allocate", "take_backups"} <= {name for name, _, _ in recorder.calls}
    replayed = Core(**arguments[0])
    for name, args, answer in recorder.calls:
        assert plain(result_of(getattr(replayed, name), args)) == plain(answer), name
