"""Bad arguments, other threads and copies: a typed error, and nothing has changed."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import os
import pickle
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Item, Lease, Regions
from aiokv.devices import CpuEvent
from aiokv.errors import AiokvError, AllocateTimeout, LeaseError, UsageError
from aiokv.ranks import Rank, RankGroup
from aiokv.statistics import Inspection
from aiokv.testing import ManualDevice, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.worker.device.base import as_event
from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.asyncio

NAN = math.nan
TOKENS = np.arange(9, dtype=np.int32)


def new_engine(**config: Any) -> CacheEngine:
    kv = [np.zeros((16, 8), np.int8) for _ in range(2)]
    regions = Regions(num_layers=2)
    regions.add("kv", layers=kv)
    return CacheEngine(CacheConfig(device_blocks=16, block_tokens=4, **config), regions)


async def granted(engine: CacheEngine) -> Lease:
    """Return a lease of 12 positions: 4 are committed and 5 more have token ids."""
    lease = engine.match(TOKENS)
    await lease.allocate(12)
    lease.commit(4)
    return lease


def state(engine: CacheEngine) -> dict[str, Any]:
    """Return the state without the counters of matches: some calls match before they fail."""
    found: dict[str, Any] = engine.inspect.dump() | {"step": engine.open_step}
    found["statistics"] |= {"leases": 0, "prompt_tokens": 0, "hit_device_tokens": 0, "poller": {}}
    found["leases"] = [lease for lease in found["leases"] if lease["granted"]]
    return found


E, L = CacheEngine, Lease
CALLS: dict[str, tuple[str, Callable[[E, L], Any]]] = {
    # tokens, salt, items, flags
    "salt int": ("salt is 5", lambda e, _: e.match(TOKENS, salt=5)),
    "salt None": ("salt is None", lambda e, _: e.match(TOKENS, salt=None)),
    "salt bytes": ("salt is b'x'", lambda e, _: e.match(TOKENS, salt=b"x")),
    "salt surrogate": ("salt is .*Unicode", lambda e, _: e.match(TOKENS, salt="\ud800")),
    "adapter int": ("adapter is 3", lambda e, _: e.match(TOKENS, adapter=3)),
    "owner int": ("owner is 5", lambda e, _: e.match(TOKENS, owner=5)),
    "read int": ("read is 1", lambda e, _: e.match(TOKENS, read=1)),
    "write None": ("write is None", lambda e, _: e.match(TOKENS, write=None)),
    "tokens str": (r"tokens is a str; it must be .*tokenizer", lambda e, _: e.match("hello")),
    "tokens bytes": ("tokens is a bytes; it must be", lambda e, _: e.match(b"hello")),
    "tokens int": ("tokens is a int; it must be", lambda e, lease: lease.append(7)),
    **{
        f"append {tokens!r}": (message, lambda e, lease, t=tokens: lease.append(t))
        for tokens, message in (
            ([True], "dtype bool"),
            ([7, 1.5], "dtype float64"),
            ([np.float64(5)], "dtype float64"),
            (["7"], "dtype"),
            ([None], "dtype object"),
            ([7, 2**31], "2147483648 at position 1 is outside int32"),
            ([[7]], "2 dimensions"),
        )
    },
    "items int": ("items is 5", lambda e, _: e.match(TOKENS, items=5)),
    "items of ints": ("item is 5", lambda e, _: e.match(TOKENS, items=[5])),
    "items pair": ("Item", lambda e, _: e.match(TOKENS, items=[(b"a", 0)])),
    "items offset": ("offset is 0.5", lambda e, _: e.match(TOKENS, items=[(b"a", 0.5, 1)])),
    "items length bool": ("length is True", lambda e, _: e.match(TOKENS, items=[(b"a", 0, True)])),
    "items 2**70": ("offset is 1180", lambda e, _: e.match(TOKENS, items=[(b"a", 2**70, 1)])),
    # numbers of positions and blocks
    **{
        f"{verb} {value!r}": (
            "num_tokens is",
            lambda e, lease, verb=verb, value=value: getattr(lease, verb)(value),
        )
        for verb in ("allocate", "try_allocate", "resume", "commit", "truncate", "snapshot")
        for value in ("5", 5.0, None, True, NAN, 2**63, np.float64(5), np.arange(2))
    },
    **{
        f"extend {value!r}": (
            "num_tokens is",
            lambda e, lease, value=value: e.extend([lease], value),
        )
        for value in ("5", 1.5, None, 2**64)
    },
    **{
        f"evict {value!r}": ("num_blocks is", lambda e, _, value=value: e.evict(value))
        for value in ("5", 1.5, None, -1, 2**40)
    },
    **{
        f"resize {value!r}": ("device_blocks is", lambda e, _, value=value: e.resize(value))
        for value in ("5", 1.5, None)
    },
    # times
    **{
        f"{name} timeout {value!r}": (
            "timeout is",
            lambda e, lease, call=call, value=value: call(e, lease, value),
        )
        for name, call in {
            "allocate": lambda e, lease, t: e.match(TOKENS).allocate(4, timeout=t),
            "resume": lambda e, lease, t: lease.resume(12, timeout=t),
            "reset": lambda e, lease, t: e.reset(t),
            "drain": lambda e, lease, t: e.drain(t),
            "quiesce": lambda e, lease, t: e.quiesce(t),
            "resize": lambda e, lease, t: e.resize(8, t),
            "sleep": lambda e, lease, t: e.sleep(timeout=t),
            "wake_up": lambda e, lease, t: e.wake_up(timeout=t),
            "updating_weights": lambda e, lease, t: e.updating_weights(t).__aenter__(),
            "aclose": lambda e, lease, t: e.aclose(t),
            "layers.wait": lambda e, lease, t: lease.layers.wait(0, t),
            "layers.wait_all": lambda e, lease, t: lease.layers.wait_all(t),
        }.items()
        for value in ("5", NAN, True, b"")
    },
    **{
        f"wait_pending {value!r}": (
            "wait_pending is",
            lambda e, _, value=value: e.match(TOKENS).allocate(4, wait_pending=value),
        )
        for value in ("5", NAN, None)
    },
    **{
        f"{verb} ttl {value!r}": (
            "ttl_seconds is",
            lambda e, _, verb=verb, value=value: getattr(e, verb)(TOKENS, ttl_seconds=value),
        )
        for verb in ("prefetch", "pin")
        for value in ("5", NAN, -1, -math.inf)
    },
    # leases, events, tables, tiers
    "extend a lease": ("leases is <Lease", lambda e, lease: e.extend(lease, 1)),
    "extend str": ("lease is 'x'; it must be", lambda e, _: e.extend(["x"], 1)),
    "layers str": ("lease is 'x'; it must be", lambda e, _: e.layers(["x"])),
    "block_tables None": ("lease is None; it must be", lambda e, _: e.block_tables([None])),
    "commit ready str": ("ready is 'x'", lambda e, lease: lease.commit(8, "x")),
    "commit ready object": ("ready is <object", lambda e, lease: lease.commit(8, object())),
    "release after int": ("after is 5", lambda e, lease: lease.release(5)),
    "step str": ("event is 'x'", lambda e, _: e.step("x")),
    "fork owner": ("owner is 5", lambda e, lease: lease.fork(owner=5)),
    "window_table": ("group is None", lambda e, lease: lease.window_table(None)),
    "tables group": ("group is \\[\\]", lambda e, lease: e.block_tables([lease], group=[])),
    "tables fill": ("fill is", lambda e, lease: e.block_tables([lease], fill=2**40)),
    "tables out": ("out is \\[\\[0\\]\\]", lambda e, lease: e.block_tables([lease], [[0]])),
    "tables out int64": (
        "out is int64",
        lambda e, lease: e.block_tables([lease], np.zeros((1, 8), np.int64)),
    ),
    "tier": ("tier is 'disk'", lambda e, _: e.evict(1, "disk")),
    "tier None": ("tier is None", lambda e, _: e.evict(1, None)),
    "tags": ("tier is 'disk'", lambda e, _: e.sleep(["disk"])),
    "tags str": ("tags is 'device'", lambda e, _: e.sleep("device")),
    "tags int": ("tags is 3", lambda e, _: e.wake_up(3)),
    "layer": ("layer is 2", lambda e, lease: lease.layers.wait(2)),
    "layer -2": ("layer is -2", lambda e, lease: lease.layers.wait(-2)),
    "gpu_wait None": ("stream is None", lambda e, lease: lease.layers.gpu_wait(0, None)),
    "gpu_wait": ("layer is 99", lambda e, lease: lease.layers.gpu_wait(99, None)),
}


async def test_bad_arguments_are_usage_errors_that_change_nothing():
    async with new_engine() as engine:
        lease = await granted(engine)
        await engine.drain()
        for name, (message, call) in CALLS.items():
            before = state(engine)
            with pytest.raises(UsageError, match=message), note(name):
                await result_of(call(engine, lease))
            assert state(engine) == before, name
        lease.release()


@contextmanager
def note(name: str) -> Iterator[None]:
    """Add the call to pytest's message when another error, or none, is raised."""
    try:
        yield
    except UsageError:
        raise
    except BaseException as error:
        error.add_note(f"the call was: {name}")
        raise
    pytest.fail(f"no error: {name}")


async def result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@pytest.mark.parametrize(
    "items", [[Item(b"a", np.int64(0), np.int64(2))], (Item(b"a", i, 1) for i in range(2))]
)
async def test_items_of_numpy_integers_or_a_generator_are_accepted(items):
    async with new_engine() as engine, engine.match(TOKENS, items=items) as lease:
        await lease.allocate(9)


async def test_numpy_integers_are_numbers_of_tokens():
    async with new_engine() as engine, engine.match(TOKENS) as lease:
        await lease.allocate(np.int64(9))
        assert lease.commit(np.uint32(8)) == 2
        engine.extend([lease], np.int8(3))
        assert lease.num_tokens == 12


@pytest.mark.parametrize(
    "timeout", [math.inf, 10**400, 1e308, np.float32(math.inf)], ids=["inf", "int", "max", "f32"]
)
async def test_an_infinite_timeout_is_no_deadline(timeout):
    async with new_engine() as engine:
        holder, lease = engine.match(TOKENS), engine.match(TOKENS)
        await holder.allocate(64)
        waiting = [
            asyncio.ensure_future(lease.allocate(4, timeout=timeout)),
            asyncio.ensure_future(engine.quiesce(timeout)),
            asyncio.ensure_future(engine.resize(8, timeout)),
        ]
        await spin(5)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        lease.release()
        holder.release()
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), PATIENCE_SECONDS)
        engine.resume()


async def test_expired_timeout_raises_immediately():
    async with new_engine() as engine:
        holder = engine.match(TOKENS)
        await holder.allocate(64)
        for timeout in (0, -1, -math.inf):
            with pytest.raises(AllocateTimeout), engine_lease(engine) as lease:
                await lease.allocate(4, timeout=timeout)
        holder.release()


class engine_lease:
    def __init__(self, engine: CacheEngine) -> None:
        self.lease = engine.match(TOKENS)

    def __enter__(self) -> Lease:
        return self.lease

    def __exit__(self, *exc: object) -> None:
        self.lease.release()


async def test_infinite_ttl_never_expires(monkeypatch):
    loop = asyncio.get_running_loop()
    call_later, delays = loop.call_later, []

    def noting(delay, *args, **kwargs):
        delays.append(delay)
        return call_later(delay, *args, **kwargs)

    async with new_engine() as engine:
        async with engine.match(TOKENS) as lease:
            await lease.allocate(9)
            lease.commit(8)
        monkeypatch.setattr(loop, "call_later", noting)
        pin = await engine.pin(TOKENS, ttl_seconds=math.inf)
        await engine.pin(TOKENS, ttl_seconds=1000.0)
        assert delays == [1000.0]
        assert not pin.released


async def test_an_infinite_drain_timeout_waits_for_the_last_lease():
    engine = new_engine(drain_timeout_seconds=math.inf)
    await engine.__aenter__()
    lease = engine.match(TOKENS)
    closing = asyncio.ensure_future(engine.aclose())
    await spin(5)
    assert not closing.done()
    lease.release()
    await asyncio.wait_for(closing, PATIENCE_SECONDS)


# --- before entry and after closing -----------------------------------------------------------

READS: dict[str, Callable[[CacheEngine], object]] = {
    "dump": lambda e: e.inspect.dump(),
    "statistics": lambda e: e.statistics(),
    "cache_statistics": lambda e: e.cache_statistics(),
    "check_invariants": lambda e: e.check_invariants(),
    "asleep": lambda e: e.asleep,
    "open_step": lambda e: e.open_step,
    "repr": repr,
}


@pytest.mark.parametrize("name", READS)
async def test_reading_calls_work_before_entry_and_after_closing(name):
    read = READS[name]
    for engine in (new_engine(), CacheEngine(CacheConfig(device_blocks=4))):
        before = read(engine)
        async with engine:
            assert type(read(engine)) is type(before)
        assert type(read(engine)) is type(before)


async def test_reading_calls_work_when_entry_failed():
    class Unusable(ManualDevice):
        def attach(self, *memory: object) -> None:
            raise UsageError("no memory")

    engine = CacheEngine(CacheConfig(device_blocks=4), device=Unusable())
    with pytest.raises(UsageError, match="no memory"):
        await engine.__aenter__()
    for read in READS.values():
        read(engine)


async def test_reading_calls_work_on_an_engine_of_ranks_before_entry(tmp_path):
    engine = CacheEngine(CacheConfig(device_blocks=4), ranks=RankGroup(1, path=tmp_path / "ranks"))
    for read in READS.values():
        read(engine)


# --- other threads ----------------------------------------------------------------------------

ANY_THREAD = {
    "CacheEngine": {
        "batch", "statistics", "cache_statistics", "asleep", "open_step", "regions", "loop",
        "inspect", "free_device_blocks", "evictable_device_blocks",
    },
    "Inspection": {"device_blocks_by_salt", "retained_blocks_by_salt"},
    "Lease": {"block_table", "window_table", "id", "is_idle", "owner", "salt", "layers"},
}  # fmt: skip
ARGUMENTS: dict[str, Callable[[CacheEngine, Lease], tuple[Any, ...]]] = {
    "match": lambda e, lease: (TOKENS,),
    "would_hit": lambda e, lease: (TOKENS,),
    "send": lambda e, lease: (lease, b"ticket"),
    "advance": lambda e, lease: (e.batch(), []),
    "computing": lambda e, lease: ([lease],),
    "lengths": lambda e, lease: ([lease],),
    "extend": lambda e, lease: ([lease], 1),
    "layers": lambda e, lease: ([lease],),
    "block_tables": lambda e, lease: ([lease],),
    "evict": lambda e, lease: (1,),
    "note_prefill": lambda e, lease: (16, 0.1),
    "resize": lambda e, lease: (8,),
    "prefetch": lambda e, lease: (TOKENS,),
    "pin": lambda e, lease: (TOKENS,),
    "retain": lambda e, lease: (TOKENS,),  # and KEYWORDS
    "demote": lambda e, lease: (TOKENS,),
    "forget": lambda e, lease: (TOKENS,),
    "purge": lambda e, lease: ("s",),
    "allocate": lambda e, lease: (12,),
    "try_allocate": lambda e, lease: (12,),
    "can_allocate": lambda e, lease: (12,),
    "resume": lambda e, lease: (12,),
    "commit": lambda e, lease: (8,),
    "commit_blocks": lambda e, lease: ([0], [5]),
    "expire_after": lambda e, lease: (60.0,),
    "assign": lambda e, lease: ([0],),
    "truncate": lambda e, lease: (9,),
    "snapshot": lambda e, lease: (8,),
    "append": lambda e, lease: ([5],),
    "window_table": lambda e, lease: ("local",),
    "add_observer": lambda e, lease: (lambda record, context: None,),
    "remove_observer": lambda e, lease: (lambda record, context: None,),
    "timeline": lambda e, lease: (0.1,),
    "record_trace": lambda e, lease: (os.devnull,),
}
KEYWORDS: dict[str, dict[str, Any]] = {"retain": {"seconds": 1.0}}


def public_members(cls: type) -> list[str]:
    """Return the names of methods and properties; plain attributes are not included."""
    return [
        name
        for name in dir(cls)
        if not name.startswith("_") and not inspect.ismemberdescriptor(getattr(cls, name))
    ]


def use(owner: object, name: str, arguments: tuple[Any, ...]) -> object:
    """Call a method and await its result, or read a property."""
    value = getattr(owner, name)
    if not inspect.ismethod(value):
        return value
    result = value(*arguments, **KEYWORDS.get(name, {}))
    if hasattr(result, "__aenter__") and not isinstance(result, Lease):
        result = result.__aenter__()
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result


def outcome_in_thread(call: Callable[[], object]) -> object:
    """Return the result or the exception of a call in another thread."""
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(call())
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcomes[0]


@pytest.mark.parametrize("cls", [CacheEngine, Inspection, Lease])
async def test_other_threads_are_refused_except_by_documented_methods(cls):
    async with new_engine() as engine:
        lease = await granted(engine)
        await engine.drain()
        owner: Any = {CacheEngine: engine, Inspection: engine.inspect, Lease: lease}[cls]
        before = state(engine)
        for name in public_members(cls):
            arguments = ARGUMENTS.get(name, lambda e, lease: ())(engine, lease)
            if owner is engine and name == "resume":
                arguments = ()
            outcome = outcome_in_thread(lambda name=name, a=arguments: use(owner, name, a))
            if name in ANY_THREAD[cls.__name__]:
                assert not isinstance(outcome, BaseException) or "loop" not in str(outcome), name
            else:
                assert isinstance(outcome, UsageError), (name, outcome)
                assert "loop" in str(outcome), name
            assert state(engine) == before, name
        lease.release()


async def test_thread_that_ran_the_loop_is_refused_while_another_one_runs_it():
    assert outcome_in_thread(call_after_the_loop_has_moved) is None


def call_after_the_loop_has_moved() -> None:
    loop, engine, runs = asyncio.new_event_loop(), new_engine(), threading.Event()
    lease = loop.run_until_complete(enter_and_grant(engine))
    assert lease.num_tokens == 12  # the loop does not run
    loop.call_soon(runs.set)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert runs.wait(PATIENCE_SECONDS)
    for call in (lambda: engine.match(TOKENS), lease.release, engine.inspect.dump):
        with pytest.raises(UsageError, match="loop"):
            call()
    asyncio.run_coroutine_threadsafe(leave(engine, lease), loop).result(PATIENCE_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def enter_and_grant(engine: CacheEngine) -> Lease:
    await engine.__aenter__()
    return await granted(engine)


async def leave(engine: CacheEngine, lease: Lease) -> None:
    lease.release()
    await engine.__aexit__(None, None, None)


async def test_context_managers_of_other_threads_are_refused():
    engine = new_engine()
    async with engine:
        lease = await granted(engine)
        for leave in (lease.__aexit__, engine.__aexit__):
            outcome = outcome_in_thread(lambda leave=leave: asyncio.run(leave(None, None, None)))
            assert isinstance(outcome, UsageError)
        assert lease.num_tokens == 12
        lease.release()


# --- copies -----------------------------------------------------------------------------------

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.mark.parametrize("way", COPIES)
async def test_owners_of_resources_cannot_be_copied(way, tmp_path):
    async with new_engine() as engine:
        lease = await granted(engine)
        pin = await engine.pin(TOKENS)
        owners = [
            lease,
            pin,
            engine,
            CpuDevice(),
            RankGroup(1, path=tmp_path / "ranks"),
            Rank(tmp_path / "ranks", 0, Regions(num_layers=0)),
        ]
        for owner in owners:
            with pytest.raises(UsageError, match="cannot be copied or pickled"):
                COPIES[way](owner)
        assert len(lease.block_table) == 3
        lease.release()
        with pytest.raises(LeaseError):
            lease.commit(4)


# --- events -----------------------------------------------------------------------------------


async def test_events_with_query_are_wrapped_and_keep_their_handle():
    class LibraryEvent:
        """Event with the interface of PyTorch's events."""

        finished = False
        synchronized = False
        cuda_event = 77

        def query(self) -> bool:
            return self.finished

        def synchronize(self) -> None:
            self.synchronized = True

    from aiokv.worker.device.cuda_handles import event_handle

    library = LibraryEvent()
    event = as_event("ready", library)
    assert event is not None
    assert not event.done
    library.finished = True
    assert event.done
    event.synchronize()
    assert library.synchronized
    assert event_handle(event) == 77


async def test_events_are_passed_on_unchanged():
    event = CpuEvent()
    assert as_event("ready", event) is event
    assert as_event("ready", None) is None


@pytest.mark.parametrize("event", ["x", 5, object(), CpuEvent])
async def test_object_that_is_not_an_event_is_refused(event):
    with pytest.raises(AiokvError, match=r"ready is .* an event or None"):
        as_event("ready", event)
