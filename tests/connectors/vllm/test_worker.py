"""WorkerHalf: times at which a step waits for the layers of its loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

import torch

from aiokv.connectors.vllm import compat
from aiokv.connectors.vllm.messages import Load, StepMetadata
from aiokv.connectors.vllm.tensors_here import Tensors
from aiokv.connectors.vllm.worker import WorkerHalf
from aiokv.errors import TransferError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ("layer.0", "layer.1", "layer.2")
LOAD = Load("r", (7,), (1, 2), in_step=True)


class Transfers:
    """Transfers that record the layers for which a step waits."""

    is_done = True

    def __init__(self) -> None:
        self.waits: list[int] = []
        self.failed: set[int] = set()

    def failed_blocks(self, block_ids: Sequence[int]) -> set[int]:
        return self.failed

    def wait_layer(self, layer: int, timeout: float) -> None:
        self.waits.append(layer)

    def wait_all(self, timeout: float) -> None: ...


class World:
    """A worker half with the transfers of this test."""

    def __init__(self, *, is_async: bool = False, has_sides: bool = False) -> None:
        self.transfers = Transfers()
        tensors: Any = SimpleNamespace(
            device="cpu",
            regions=SimpleNamespace(num_layers=len(NAMES)),
            layer_of={name: layer for layer, name in enumerate(NAMES)},
        )
        source: Any = SimpleNamespace(
            transfers=lambda load: self.transfers,
            close_step=lambda step, event: self.closed.append(step),
        )
        self.closed: list[int] = []
        self.half = WorkerHalf(tensors, source, 1.0, is_async=is_async, has_sides=has_sides)
        self.loaded: set[str] = set()
        self.step = 0

    def compute(
        self, *loads: Load, names: Sequence[str] = NAMES, ended: Sequence[str] = ()
    ) -> list[int]:
        """Run a step; return the layers for which it waited before its first layer."""
        self.step += 1
        self.transfers.waits.clear()
        self.half.begin(StepMetadata(self.step, list(loads)), layers_are_hooked=True)
        before = list(self.transfers.waits)
        for name in names:
            self.half.wait_layer(name)
        self.loaded = self.half.take_loaded(ended)
        return before


def test_step_waits_for_each_layer_when_it_is_computed() -> None:
    world = World()
    world.compute()
    assert world.compute(LOAD) == []
    assert world.transfers.waits == [0, 1, 2]
    assert world.half.take_failed() == set()


def test_step_waits_for_all_layers_until_the_model_has_called_all() -> None:
    world = World()
    assert world.compute(LOAD) == [0, 1, 2]
    assert world.compute(LOAD) == []


def test_step_waits_for_all_layers_after_a_step_that_called_some() -> None:
    world = World()
    world.compute()
    world.compute(names=NAMES[:2])
    assert world.compute(LOAD, names=NAMES[:2]) == [0, 1, 2]
    assert world.half.take_failed() == set()


def test_step_of_a_graph_without_calls_changes_nothing() -> None:
    world = World()
    world.compute()
    world.compute(names=())
    assert world.compute(LOAD) == []


def test_blocks_of_a_layer_that_was_not_called_have_failed() -> None:
    world = World()
    world.compute()
    world.compute(LOAD, names=NAMES[:2])
    assert world.half.take_failed() == {1, 2}


def test_failed_load_raises_with_asynchronous_scheduling() -> None:
    world = World(is_async=True)
    world.compute()
    world.transfers.failed = {2}
    with pytest.raises(TransferError, match="loads of 1 blocks have failed in step 2"):
        world.compute(LOAD)


def test_load_that_could_not_begin_raises_with_asynchronous_scheduling() -> None:
    world = World(is_async=True)
    with pytest.raises(TransferError, match="loads of 2 blocks"):
        world.compute(Load("r", (), (1, 2), in_step=True, failed=True))


def test_failed_load_outside_a_step_is_reported_with_asynchronous_scheduling() -> None:
    world = World(is_async=True)
    world.transfers.failed = {2}
    world.compute(Load("r", (7,), (1, 2)))
    assert world.half.take_failed() == {2}


@pytest.mark.parametrize("ends_in", ["same step", "next step", "step before", "never"])
def test_failed_load_of_a_request_that_has_ended_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, ends_in: str
) -> None:
    monkeypatch.setattr(compat, "CAN_FAIL_REQUESTS", False)
    world = World(has_sides=True)
    world.transfers.is_done = False
    world.compute(Load("r", (7,), (1, 2)), ended=["r"] if ends_in == "step before" else [])
    world.transfers.is_done = True
    world.transfers.failed = {2}
    world.compute(ended=["r"] if ends_in == "same step" else [])
    assert (world.loaded == {"r"}) == (ends_in in ("same step", "step before"))
    world.compute(ended=["r"] if ends_in == "next step" else [])
    assert (world.loaded == {"r"}) == (ends_in == "next step")
    if ends_in == "never":
        with pytest.raises(TransferError, match="the load of request r has failed; this version"):
            world.compute()
    else:
        world.compute()


def test_step_is_closed_only_behind_the_work_that_follows_the_reports() -> None:
    world = World()
    world.compute()
    assert world.closed == []
    world.half.close_step()
    assert world.closed == [1]


@pytest.mark.parametrize(("device", "waits"), [("cuda:0", ["event", "device"]), ("cpu", ["event"])])
def test_a_step_without_an_event_is_waited_for_with_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, waits: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("device"))
    layers: Any = SimpleNamespace(device=device)
    tensors = Tensors(layers)
    event: Any = SimpleNamespace(synchronize=lambda: found.append("event"))
    tensors.note_event(1, event)
    tensors.note_event(2, None)
    for step in (1, 2, 3):
        tensors.wait_computed(step)
    assert found == waits


def test_kv_cache_is_not_unmapped_under_a_load() -> None:
    world = World()
    world.transfers.is_done = False
    world.compute(Load("r", (7,), (1, 2)))
    with pytest.raises(UsageError, match=r"loads of the requests \['r'\] are in flight"):
        world.half.check_idle()
    world.transfers.is_done = True
    world.half.check_idle()
