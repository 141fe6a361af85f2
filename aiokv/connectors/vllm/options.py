"""Options: settings of the connector, from ``kv_connector_extra_config``."""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from aiokv.base import checks
from aiokv.config.cache_config import ADMISSION_ORDERS, DEFAULT_EVICTION_POLICY
from aiokv.config.save_policy import SaveMoment, SavePolicy
from aiokv.errors import ConfigError
from aiokv.stores.options import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.config.cache_config import AdmissionOrder, EvictionPolicy, Verify

Load = Literal["auto", "async", "layerwise"]
WRITE_POLICIES: Final[tuple[SaveMoment, ...]] = ("write_through", "nth_use", "none")

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the connector.

    Attributes:
        host_gib: host memory of all ranks together, in GiB, or with a unit, such as ``"64GiB"``.
            Set this or ``cpu_bytes_to_use``.
        cpu_bytes_to_use: the same in bytes or with a unit, under the name of vLLM's own offloading.
        load: ``"auto"``: a request waits for its blocks while other requests compute, and a step
            waits layer by layer for the end of a load if this delays its requests less; a failure
            of this load ends the server. With ``--no-async-scheduling``, several ranks, ``verify``
            or several KV cache groups, steps wait for no load. ``"async"``: steps wait for no load.
            ``"layerwise"``: the first step of a request waits for its blocks layer by layer, unless
            other loads are queued before its own; several ranks or ``verify`` require
            ``--no-async-scheduling``, and with asynchronous scheduling, a failed load of a step
            ends the server.
        step_wait_seconds: with ``"layerwise"``, the longest expected duration of a load that a step
            with other requests waits for. For a longer load, the request waits, not the step. With
            ``"auto"``, the longest expected time that a step without other requests waits.
        write_policy: when computed blocks are copied to host memory, as
            ``CacheConfig.write_policy``.
        eviction_policy: as ``CacheConfig.eviction_policy``.
        admission: order in which vLLM's waiting requests begin, as ``CacheConfig.admission``:
            ``"cached_first"``, or vLLM's own order with ``"arrival"``. With vLLM's scheduling
            policy ``"priority"``, it orders the requests of each priority.
        max_overtake_seconds: with ``"cached_first"``, a request that has waited for this time is
            overtaken by none.
        min_load_tokens: shorter hits in host memory are computed again.
        verify: ``"checksum"`` verifies each loaded block; with one GPU only.
        stores: URLs of stores below host memory, such as ``"disk:/var/cache/aiokv?bytes=200GiB"``;
            ``{rank}`` stands for the number of the rank, ``{dp}`` for that of the engine of data
            parallelism; each disk store needs a folder of its own.
        store_policy: as ``CacheConfig.store_policy``.
        store_wait_seconds: the longest that a request waits for blocks of the stores; 0 never asks
            them.
        prefill_tokens_per_second: as ``CacheConfig.prefill_tokens_per_second``; None to measure it.
        model: name under which blocks are kept in stores; None for the name of the model, its
            revision and the element types.
        weights_version: as ``CacheConfig.weights_version``.
        follow_resets: True to forget all blocks when vLLM empties its prefix cache, as it does
            before an update of the weights; False to forget them with ``reset_connector`` only.
        in_process: False to connect to the worker through a socket even if it is in the process of
            the scheduler.
        socket: path of the Unix socket between scheduler and workers, with ``{dp}`` as in
            ``stores``; None for a path in the directory of temporary files, from ``engine_id`` of
            vLLM's configuration.
        transfer_timeout_seconds: the longest that a step waits for a transfer.
    """

    host_gib: float | None = None
    cpu_bytes_to_use: int | None = None
    load: Load = "auto"
    step_wait_seconds: float = 0.05
    write_policy: str = "write_through"
    eviction_policy: EvictionPolicy = DEFAULT_EVICTION_POLICY
    admission: AdmissionOrder = "cached_first"
    max_overtake_seconds: float = 2.0
    min_load_tokens: int = 0
    verify: Verify = "off"
    stores: tuple[str, ...] = ()
    store_policy: str = "write_through"
    store_wait_seconds: float = 1.0
    prefill_tokens_per_second: float | None = None
    model: str | None = None
    weights_version: str = ""
    follow_resets: bool = True
    in_process: bool = True
    socket: str | None = None
    transfer_timeout_seconds: float = 60.0

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> Self:
        """Return the settings of ``kv_connector_extra_config``.

        Raises:
            ConfigError: a key is unknown, or a value is of the wrong type or out of range.
        """
        known = [field.name for field in fields(cls)]
        for key in extra_config:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                raise ConfigError(
                    f"kv_connector_extra_config has the unknown key {key!r}",
                    hint=(f"did you mean {close[0]!r}? " if close else "")
                    + f"the keys are {', '.join(known)}",
                )
        values = dict(extra_config)
        if "stores" in values:
            values["stores"] = _urls(values["stores"])
        if isinstance(size := values.get("host_gib"), str):
            if size.strip().replace(".", "", 1).isdecimal():
                raise ConfigError(
                    f"host_gib is {size!r}, a text without a unit",
                    hint=f'write {size.strip()} for GiB, or "{size.strip()}GiB"',
                )
            values["host_gib"] = _bytes("host_gib", size) / GIB
        if isinstance(size := values.get("cpu_bytes_to_use"), str):
            values["cpu_bytes_to_use"] = _bytes("cpu_bytes_to_use", size)
        options = cls(**values)
        options.check()
        return options

    def check(self) -> None:
        """Raise if a value is out of range.

        Raises:
            ConfigError: names the key, its value and the limit.
        """
        checks.choice("load", self.load, get_args(Load), ConfigError)
        SavePolicy.parse("write_policy", self.write_policy, WRITE_POLICIES)
        checks.choice("admission", self.admission, ADMISSION_ORDERS, ConfigError)
        checks.flag("follow_resets", self.follow_resets, ConfigError)
        checks.flag("in_process", self.in_process, ConfigError)
        checks.integer("min_load_tokens", self.min_load_tokens, error=ConfigError)
        for name in ("model", "socket"):
            if getattr(self, name) is not None:
                checks.text(name, getattr(self, name), ConfigError)
        for name in ("step_wait_seconds", "store_wait_seconds"):
            checks.seconds(name, getattr(self, name), error=ConfigError, minimum=0.0)
        checks.positive("max_overtake_seconds", self.max_overtake_seconds, ConfigError)
        checks.positive("transfer_timeout_seconds", self.transfer_timeout_seconds, ConfigError)
        if (self.host_gib is None) == (self.cpu_bytes_to_use is None):
            raise ConfigError(
                f"host_gib is {self.host_gib} and cpu_bytes_to_use is {self.cpu_bytes_to_use}; "
                "exactly one of them must be set",
                hint='"kv_connector_extra_config": {"host_gib": 32}',
            )
        if self.host_gib is not None:
            checks.positive("host_gib", self.host_gib, ConfigError)
        else:
            checks.integer("cpu_bytes_to_use", self.cpu_bytes_to_use, minimum=1, error=ConfigError)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of all ranks together."""
        if self.cpu_bytes_to_use is not None:
            return self.cpu_bytes_to_use
        return int((self.host_gib or 0.0) * GIB)

    @staticmethod
    def default_socket_path(engine_id: str) -> str:
        """Return the path of the socket of one engine.

        Raises:
            ConfigError: the directory belongs to another user, or other users can access it.
        """
        name = hashlib.sha256(engine_id.encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"aiokv-vllm-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o77
        ):
            raise ConfigError(
                f"{folder} has another owner, or a mode other than 0700",
                hint='set "socket" to a path in a directory of mode 0700 of this user',
            )
        return str(folder / f"{name}.sock")


def _bytes(name: str, value: str) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name} is {value!r}; it must be a size", hint=error.hint) from None


def _urls(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(
            f"stores is {value!r}; it must be a list of URLs",
            hint='"stores": ["disk:/var/cache/aiokv?bytes=200GiB"]',
        )
    return tuple(checks.text("stores", url, ConfigError) for url in value)
