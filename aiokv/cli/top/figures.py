"""Figures of an engine that are shown: its state, and rates since the previous dump."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.cli.top.dump import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.cli.top.dump import Dump, EngineState, Pools


class TierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks, or slots, of one pool."""

    name: str
    capacity: int
    free: int
    cached: int
    leased: int
    in_flight: int

    @property
    def used_share(self) -> float:
        """Share of the capacity that is not free."""
        return 1 - self.free / self.capacity if self.capacity else 0.0


class HitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens, and the part that was cached; ``store`` is a part of device and host."""

    prompt_tokens: int
    device: int
    host: int
    store: int

    def share(self, tokens: int) -> float | None:
        """Return a part of the prompt tokens; None without prompts."""
        return tokens / self.prompt_tokens if self.prompt_tokens else None


class RouteFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of one route; rates are None until there are two dumps."""

    name: str
    queued: int
    submitted: int
    done: int
    failed: int
    moved_bytes: int
    done_per_second: float | None
    bytes_per_second: float | None


class StoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one store."""

    url: str
    pool: str
    reading: str
    saving: str
    found_share: float | None
    loaded_blocks: int
    saved_blocks: int
    failures: int
    used_bytes: int


class LeaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One lease."""

    owner: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    blocks: int
    age_seconds: float
    waits_for: str


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        seconds: time since the dump before; None for the first.
        tiers: pools of blocks, and of recurrent state.
        total: prompts since the engine was made.
        recent: prompts since the dump before; None for the first.
        grants_per_second: leases that got their blocks.
        evictions_per_second: blocks evicted from the device.
        waiting: leases in a waiting line.
        poller_p99_seconds: latency from the end of a transfer to its callback.
        poller_share: CPU time of the poller per second.
        routes: routes with at least one transfer.
        stores: stores and their breakers.
        leases: leases; those that wait first, then the oldest.
    """

    seconds: float | None
    tiers: list[TierFigures]
    total: HitFigures
    recent: HitFigures | None
    grants_per_second: float | None
    evictions_per_second: float | None
    num_leases: int
    waiting: int
    poller_p99_seconds: float
    poller_share: float | None
    routes: list[RouteFigures]
    stores: list[StoreFigures]
    leases: list[LeaseFigures]


def figures_of(dump: Dump, before: Dump | None) -> dict[str, EngineFigures]:
    """Return the figures of each engine.

    Args:
        dump: the newest dump.
        before: an earlier one; None for none. An engine whose counters are smaller now, as after a
            restart, has no rates.
    """
    found = {}
    for name, engine in dump.engines.items():
        old = None if before is None else before.engines.get(name)
        seconds = 0.0 if before is None else dump.time_seconds - before.time_seconds
        if old is None or seconds <= 0 or _restarted(engine.statistics, old.statistics):
            found[name] = _figures(engine, None, 1.0)
        else:
            found[name] = _figures(engine, old, seconds)
    return found


def _restarted(now: Pools, before: Pools) -> bool:
    return now.prompt_tokens < before.prompt_tokens or now.grants < before.grants


def _figures(engine: EngineState, before: EngineState | None, seconds: float) -> EngineFigures:
    now = engine.statistics
    old = now if before is None else before.statistics
    busy = engine.poller.busy_seconds
    busy_before = busy if before is None else before.poller.busy_seconds

    def rate(change: float) -> float | None:
        return None if before is None else change / seconds

    return EngineFigures(
        seconds=None if before is None else seconds,
        tiers=list(_tiers(now)),
        total=_hits(now, None),
        recent=None if before is None else _hits(now, old),
        grants_per_second=rate(now.grants - old.grants),
        evictions_per_second=rate(now.evicted_device_blocks - old.evicted_device_blocks),
        num_leases=now.leases,
        waiting=now.waiting,
        poller_p99_seconds=engine.poller.latency_p99_seconds,
        poller_share=rate(busy - busy_before),
        routes=list(_routes(engine, before, seconds)),
        stores=list(_stores(engine)),
        leases=list(_leases(engine)),
    )


def _tiers(now: Pools) -> Iterator[TierFigures]:
    yield TierFigures(
        name="device",
        capacity=now.device_blocks,
        free=now.device_free,
        cached=now.device_cached,
        leased=now.device_leased,
        in_flight=now.device_in_flight,
    )
    if now.host_blocks:
        yield TierFigures(
            name="host",
            capacity=now.host_blocks,
            free=now.host_free,
            cached=now.host_cached,
            leased=0,
            in_flight=now.host_in_flight,
        )
    if now.state_slots:
        yield TierFigures(
            name="state slots",
            capacity=now.state_slots,
            free=now.state_free,
            cached=now.state_snapshots,
            leased=now.state_slots - now.state_free - now.state_snapshots,
            in_flight=0,
        )


def _hits(now: Pools, old: Pools | None) -> HitFigures:
    def since(name: str) -> int:
        earlier: int = 0 if old is None else getattr(old, name)
        return int(getattr(now, name)) - earlier

    return HitFigures(
        prompt_tokens=since("prompt_tokens"),
        device=since("hit_device_tokens"),
        host=since("hit_host_tokens"),
        store=since("hit_store_tokens"),
    )


def _routes(
    engine: EngineState, before: EngineState | None, seconds: float
) -> Iterator[RouteFigures]:
    for name, lane in engine.worker.items():
        if not isinstance(lane, Lane):
            continue
        if not (lane.queued or lane.submitted or lane.done or lane.failed):
            continue
        old = None if before is None else before.worker.get(name)
        yield RouteFigures(
            name=name,
            queued=lane.queued,
            submitted=lane.submitted,
            done=lane.done,
            failed=lane.failed,
            moved_bytes=lane.moved_bytes,
            done_per_second=(lane.done - old.done) / seconds if isinstance(old, Lane) else None,
            bytes_per_second=(
                (lane.moved_bytes - old.moved_bytes) / seconds if isinstance(old, Lane) else None
            ),
        )


def _stores(engine: EngineState) -> Iterator[StoreFigures]:
    for store in engine.stores:
        yield StoreFigures(
            url=store.url,
            pool=store.pool,
            reading=store.reading,
            saving=store.saving,
            found_share=store.found_keys / store.lookup_keys if store.lookup_keys else None,
            loaded_blocks=store.loaded_blocks,
            saved_blocks=store.saved_blocks,
            failures=store.wrong_blocks + store.failed_blocks + store.timeouts,
            used_bytes=-1 if store.store is None else store.store.used_bytes,
        )


def _leases(engine: EngineState) -> Iterator[LeaseFigures]:
    ordered = sorted(engine.leases, key=lambda lease: (not lease.waits_for, -lease.age_seconds))
    for lease in ordered:
        yield LeaseFigures(
            owner=lease.owner,
            state=lease.state,
            prompt_tokens=lease.prompt_tokens,
            cached_tokens=lease.cached_tokens,
            blocks=lease.blocks,
            age_seconds=lease.age_seconds,
            waits_for=lease.waits_for,
        )
