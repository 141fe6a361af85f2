"""Shared parts of an engine, made from the arguments of ``CacheEngine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from aiokv.base.plan import OFFLOAD, ONLOAD, group_routes
from aiokv.base.state_guard import StateGuard
from aiokv.config.cache_config import CacheConfig
from aiokv.engine.compute_times import BatchTimes, ComputeTimes, StepTimes
from aiokv.engine.dispatcher import Dispatcher
from aiokv.engine.lifetime import Lifetime
from aiokv.engine.observers import Observers
from aiokv.engine.open_step import OpenStep
from aiokv.engine.requests import RequestCounts
from aiokv.engine.speed import PrefillSpeed
from aiokv.engine.transfers import Transfers
from aiokv.errors import ConfigError, UsageError
from aiokv.layout.regions import Regions
from aiokv.peers.options import Peers, check_peers
from aiokv.scheduler.scheduler import CacheScheduler
from aiokv.stores.identity import StoreIdentity
from aiokv.stores.pools import StorePools
from aiokv.stores.urls import stores_from
from aiokv.worker.controller import CacheController
from aiokv.worker.device.names import named_device
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.ranks.group import RankGroup
    from aiokv.stores.base import Store
    from aiokv.stores.use import StoreUse
    from aiokv.worker.base import Worker
    from aiokv.worker.device.base import Device


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that the other parts of an engine share."""

    config: CacheConfig
    lifetime: Lifetime
    guard: StateGuard
    scheduler: CacheScheduler
    worker: Worker
    poller: EventPoller
    observers: Observers
    open_step: OpenStep
    transfers: Transfers
    dispatcher: Dispatcher
    speed: PrefillSpeed
    times: ComputeTimes
    requests: RequestCounts
    identity: StoreIdentity | None
    peers: Peers | None

    @classmethod
    def new(
        cls,
        config: CacheConfig,
        regions: Regions,
        device: Device | str | None,
        ranks: RankGroup | None,
        stores: Sequence[Store | StoreUse | str],
        peers: Peers | None,
    ) -> Self:
        """Make the parts of an empty cache.

        Args:
            config: a checked configuration.
            regions: device tensors of this process; without layers if there are none.
            device: device of the tensors.
            ranks: worker that replaces ``regions``, ``device``, ``stores`` and ``peers``.
            stores: stores of this process, in the order in which they are asked.
            peers: how this process exchanges blocks with other engines.

        Raises:
            ConfigError: the worker does not support a setting of ``config``, or there is not enough
                memory for the index.
            UsageError: the tensors hold fewer blocks or state slots than ``config`` requires, or
                are missing for a window group with ``host_blocks``.
        """
        lifetime, guard = Lifetime(), StateGuard()
        poller = EventPoller(guard)
        worker = _worker_of(config, regions, device, ranks, stores, peers)
        can = worker.facts.capabilities
        scheduler = _new_scheduler(config, guard, has_stores=can.stores)
        open_step = OpenStep(lifetime, scheduler.read, worker)
        speed = PrefillSpeed(config.prefill_tokens_per_second)
        times_of = StepTimes if worker.facts.computes_in_stream else BatchTimes
        requests = RequestCounts(scheduler.read, speed)
        observers = Observers(scheduler.read, poller)
        transfers = Transfers(
            config,
            lifetime,
            scheduler.read,
            worker,
            open_step,
            observers,
            on_onload=requests.onload.add,
        )
        return cls(
            config=config,
            lifetime=lifetime,
            guard=guard,
            scheduler=scheduler,
            worker=worker,
            poller=poller,
            observers=observers,
            open_step=open_step,
            transfers=transfers,
            dispatcher=Dispatcher(scheduler, lifetime, guard, worker, poller, transfers),
            speed=speed,
            times=times_of(speed, lambda: scheduler.read.computed_prompt_tokens),
            requests=requests,
            identity=_identity_of(config) if can.stores or can.peers else None,
            peers=peers,
        )


def check_arguments(
    config: object,
    regions: object,
    device: object,
    ranks: object,
    stores: object,
    peers: object,
) -> None:
    """Check the types of the arguments of ``CacheEngine``, and that they do not contradict.

    Raises:
        ConfigError: an argument has the wrong type, or contradicts another argument.
    """
    if not isinstance(config, CacheConfig):
        raise ConfigError(
            f"config is {config!r}; it must be a CacheConfig",
            hint="CacheEngine(CacheConfig(device_blocks=...)), or CacheConfig(**mapping)",
        )
    if regions is not None and not isinstance(regions, Regions):
        raise ConfigError(
            f"regions is {regions!r}; it must be a Regions",
            hint="register the tensors: regions = Regions(num_layers=...); regions.add(...)",
        )
    check_peers(peers)
    if ranks is None:
        return
    if not hasattr(ranks, "restart"):
        raise ConfigError(f"ranks is {ranks!r}; it must be an aiokv.ranks.RankGroup")
    if stores:
        raise ConfigError(
            "stores is given, but ranks is given, too; pass only one of them",
            hint="pass the stores to each Rank, and has_stores=True to the RankGroup",
        )
    if peers is not None:
        raise ConfigError(
            "peers is given, but ranks is given, too; pass only one of them",
            hint="pass the peers to each Rank, and has_peers=True to the RankGroup",
        )
    if device is not None:
        raise ConfigError(
            f"device is {device!r}, but ranks is given, too; pass only one of them",
            hint="pass the device to each Rank",
        )


def _worker_of(
    config: CacheConfig,
    regions: Regions,
    device: Device | str | None,
    ranks: RankGroup | None,
    stores: Sequence[Store | StoreUse | str],
    peers: Peers | None,
) -> Worker:
    """Return the worker of the engine.

    Raises:
        ConfigError: the worker does not support a setting of ``config``.
        UsageError: the tensors hold fewer blocks or state slots than ``config`` requires.
    """
    worker: Worker
    if ranks is not None:
        worker = ranks
    else:
        uses = stores_from(stores)
        worker = CacheController(
            regions,
            named_device(device),
            checksums=config.verify == "checksum",
            stores=StorePools(uses) if uses else None,
            host_state_slots=config.host_state_slots,
            peers=peers,
        )
    can = worker.facts.capabilities
    if can.stores:
        _check_stores(config)
    if can.peers:
        _check_peers(config)
    blocks = regions.num_blocks
    if not can.owns_tensors and blocks is not None:
        raise ConfigError(
            "regions has tensors, but ranks is given, too; pass only one of them",
            hint="pass the regions to each Rank",
        )
    if not can.checksums and config.verify != "off":
        raise ConfigError(f"CacheConfig.verify is {config.verify!r}; with ranks it must be 'off'")
    if not can.recurrent_state and config.state_slots:
        raise ConfigError(
            f"CacheConfig.state_slots is {config.state_slots}; with ranks, which do not support "
            "recurrent state, it must be 0"
        )
    if config.host_state_slots and not can.routes >= group_routes(
        ONLOAD, OFFLOAD, retentions=["last"]
    ):
        raise ConfigError(
            f"CacheConfig.host_state_slots is {config.host_state_slots}, but the worker does not "
            "copy recurrent state to host memory",
            hint="use the cpu or the cuda device, or set host_state_slots=0",
        )
    on_host = [name for name, group in config.windows.items() if group.host_blocks]
    if on_host and not can.routes >= group_routes(ONLOAD, OFFLOAD, retentions=["window"]):
        raise ConfigError(
            f"the groups {on_host} of CacheConfig.windows have host_blocks, but the worker does "
            "not copy window blocks to host memory",
            hint="use the cpu or the cuda device, or set host_blocks=0 for these groups",
        )
    if blocks is not None and blocks < config.device_blocks:
        raise UsageError(
            f"device_blocks is {config.device_blocks}, but the registered tensors hold only "
            f"{blocks} blocks",
            hint="make the tensors larger, or lower CacheConfig.device_blocks",
        )
    _check_state(config, regions)
    _check_windows(config, regions)
    return worker


def _check_stores(config: CacheConfig) -> None:
    if not config.model:
        raise ConfigError(
            "CacheConfig.model is empty; with stores it must name the model",
            hint="set it to name and revision: without it, two models would share blocks",
        )
    if not config.host_blocks:
        raise ConfigError(
            "CacheConfig.host_blocks is 0; with stores it must be at least 1",
            hint="blocks move between the stores and the device through host memory",
        )


def _check_peers(config: CacheConfig) -> None:
    if config.external_device:
        raise ConfigError(
            "peers are given, and CacheConfig.external_device is True: leases that send or receive "
            "need device blocks of the engine",
            hint="leave the peers out, or set external_device=False",
        )
    if not config.model:
        raise ConfigError(
            "CacheConfig.model is empty; with peers it must name the model",
            hint="set it to name and revision: without it, two models would share blocks",
        )


def _identity_of(config: CacheConfig) -> StoreIdentity:
    return StoreIdentity(
        model=config.model,
        weights_version=config.weights_version,
        block_tokens=config.block_tokens,
        windows=dict(config.windows),
    )


def _check_state(config: CacheConfig, regions: Regions) -> None:
    slots = regions.num_state_slots
    if slots is None and (not config.state_slots or regions.num_blocks is None):
        return
    sentinel = int(config.sentinel_state_slot)
    if not 0 < config.state_slots <= (slots or 0) - sentinel:
        also = " and the sentinel slot" if sentinel else ""
        raise UsageError(
            f"state_slots is {config.state_slots}, but the registered tensors hold {slots or 0} "
            f"slots of recurrent state, for state_slots{also}",
            hint="register the state with Regions.add_state, and set CacheConfig.state_slots",
        )


def _check_windows(config: CacheConfig, regions: Regions) -> None:
    hint = "register the tensors of the group with Regions.add_window"
    registered = regions.num_window_blocks
    for name in registered.keys() - config.windows.keys():
        raise UsageError(
            f"regions has tensors of the window group {name!r}, but CacheConfig.windows does not",
            hint=f"CacheConfig.windows has the groups {list(config.windows)}",
        )
    for name, group in config.windows.items():
        if name not in registered:
            if group.host_blocks and regions.num_blocks is not None:
                raise UsageError(
                    f"the window group {name!r} has host_blocks={group.host_blocks}, but no "
                    "registered tensors",
                    hint=hint,
                )
        elif registered[name] < group.device_blocks:
            raise UsageError(
                f"the window group {name!r} has device_blocks={group.device_blocks}, but its "
                f"registered tensors hold only {registered[name]} blocks",
                hint="make the tensors larger, or lower WindowGroup.device_blocks",
            )


def _new_scheduler(config: CacheConfig, guard: StateGuard, *, has_stores: bool) -> CacheScheduler:
    """Return the scheduler of an empty cache.

    Raises:
        ConfigError: there is not enough memory for the index.
    """
    try:
        return CacheScheduler(config, has_stores, guard)
    except MemoryError:
        sizes = ("device_blocks", "host_blocks", "block_tokens", "state_slots")
        raise ConfigError(
            "there is not enough memory for the index of a cache with "
            + ", ".join(f"{name}={getattr(config, name)}" for name in sizes),
            hint="lower them; CacheConfig.for_regions computes the blocks from bytes",
        ) from None
