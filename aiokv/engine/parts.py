"""The arguments of ``CacheEngine``: checks, and the parts that are chosen by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.config import CacheConfig
from aiokv.errors import ConfigError, UsageError
from aiokv.scheduler.scheduler import CacheScheduler
from aiokv.worker.controller import CacheController
from aiokv.worker.device.names import named_device
from aiokv.worker.regions import Regions

if TYPE_CHECKING:
    from aiokv.ranks.group import RankGroup
    from aiokv.worker.base import Worker
    from aiokv.worker.device.base import Device


def check_arguments(config: object, regions: object, device: object, ranks: object) -> None:
    """Raise unless the arguments have the right types and do not contradict each other.

    Raises:
        ConfigError: names the argument.
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
    if ranks is None:
        return
    if not hasattr(ranks, "restart"):
        raise ConfigError(f"ranks is {ranks!r}; it must be an aiokv.ranks.RankGroup")
    if device is not None:
        raise ConfigError("both device= and ranks=", hint="pass the device to each Rank")


def worker_of(
    config: CacheConfig, regions: Regions, device: Device | str | None, ranks: RankGroup | None
) -> Worker:
    """Return the worker of the engine, which can do what the configuration asks for.

    Raises:
        ConfigError: the worker cannot.
        UsageError: the regions are too small.
    """
    worker: Worker
    if ranks is not None:
        worker = ranks
    else:
        worker = CacheController(
            regions, named_device(device), checksums=config.verify == "checksum"
        )
    can = worker.capabilities
    blocks = regions.num_blocks
    if not can.owns_tensors and blocks is not None:
        raise ConfigError("both regions= and ranks=", hint="pass the regions to each Rank")
    if not can.checksums and config.verify != "off":
        raise ConfigError(
            f"verify is {config.verify!r}; with ranks, which have the tensors, it must be 'off'"
        )
    if not can.recurrent_state and config.state_slots:
        raise ConfigError(
            f"state_slots is {config.state_slots}; it must be 0, since ranks have no recurrent "
            "state"
        )
    if blocks is not None and blocks < config.device_blocks:
        raise UsageError(
            f"device_blocks is {config.device_blocks}, but the registered tensors hold only "
            f"{blocks} blocks",
            hint="make the tensors larger, or lower CacheConfig.device_blocks",
        )
    _check_state(config, regions)
    return worker


def _check_state(config: CacheConfig, regions: Regions) -> None:
    slots = regions.num_state_slots
    if slots is None and (not config.state_slots or regions.num_blocks is None):
        return
    if not 0 < config.state_slots <= (slots or 0):
        raise UsageError(
            f"state_slots is {config.state_slots}, but the registered tensors hold {slots or 0} "
            "slots of recurrent state",
            hint="register the state with Regions.add_state, and set CacheConfig.state_slots",
        )


def new_scheduler(config: CacheConfig) -> CacheScheduler:
    """Return the scheduler of an empty cache.

    Raises:
        ConfigError: there is not enough memory for the index.
    """
    try:
        return CacheScheduler(config)
    except MemoryError:
        sizes = ("device_blocks", "host_blocks", "block_tokens", "state_slots")
        raise ConfigError(
            "there is not enough memory for the index of a cache with "
            + ", ".join(f"{name}={getattr(config, name)}" for name in sizes),
            hint="lower them; CacheConfig.for_regions computes the blocks from bytes",
        ) from None
