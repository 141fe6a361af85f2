"""StoreUse: a store, and how an engine uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.base import checks
from aiokv.errors import ConfigError
from aiokv.stores.base import Store  # noqa: TC001  (get_type_hints needs it)
from aiokv.stores.options import parse_bytes

RETRY_SECONDS: Final = 10.0
_METHODS: Final = (
    "open",
    "lookup",
    "may_have_any",
    "shared_filter",
    "lookup_prefix",
    "load",
    "save",
    "save_chains",
    "remove",
    "quarantine",
    "purge",
    "probe",
    "statistics",
    "aclose",
)


@checks.arguments()
@dataclass(frozen=True, slots=True)
class StoreUse:
    """A store, and how an engine uses it.

    ::

        stores=[DiskStore("/nvme/kv", bytes="400GiB"), StoreUse(RedisStore(url), save=False)]

    Attributes:
        store: the store; it belongs to one engine.
        read: False to look up and load no block of the store.
        save: False to save no block to the store, and to remove none.
        deadline_seconds: limit of one load or save. Requests do not wait longer for its blocks.
            A batch of more than 256 MiB is moved in parts, each with this deadline.
        lookup_deadline_seconds: limit of one lookup, with all of its calls of the store; None for
            that of the kind of store: 1 s for S3, 0.5 s for a directory, otherwise 0.25 s.
        remember_missing_seconds: time for which a block counts as missing without another lookup
            after the store has answered that it does not have it, unless this engine saves it. A
            block that another engine saves meanwhile is computed. 0 for never; None for that of the
            kind of store: 5 s for Redis, Mooncake and S3, otherwise 0.
        retry_seconds: longest pause between two probes of a store that is unavailable, or between
            two attempts to open it. When the store works again, it is used at the latest after this
            pause, with the first request that asks for its blocks.
        required: True to end the start of the engine when the store cannot be opened. Otherwise the
            engine starts without a store whose disk or server fails, or that takes longer than
            ``deadline_seconds``, and tries again to open the store. A store that is configured
            wrongly ends the start in both cases.
        write_bytes_per_day: limit of the bytes written to the store in any 24 hours, such as
            ``"1TB"``; one block more may be written. None for no limit. The last eighth is for
            blocks that are used a second time. A disk store keeps the used blocks and what was
            written in the last 24 hours over a restart.
        write_bytes_per_second: the same for the mean of any minute.

    Raises:
        ConfigError: a value is out of range, or ``store`` is not a store.
    """

    store: Store
    read: bool = True
    save: bool = True
    deadline_seconds: float = 5.0
    lookup_deadline_seconds: float | None = None
    remember_missing_seconds: float | None = None
    retry_seconds: float = RETRY_SECONDS
    required: bool = False
    write_bytes_per_day: int | str | None = None
    write_bytes_per_second: int | str | None = None

    def __post_init__(self) -> None:
        if any(not callable(getattr(self.store, method, None)) for method in _METHODS):
            raise ConfigError(
                f"store is {checks.shown(self.store)}; it must be a Store",
                hint="pass DiskStore(path, bytes=...), RedisStore(url), ..., stores_from(urls), or "
                "an object of a subclass of Store",
            )
        checks.flag("read", self.read, ConfigError)
        checks.flag("save", self.save, ConfigError)
        checks.flag("required", self.required, ConfigError)
        checks.positive("deadline_seconds", self.deadline_seconds, ConfigError)
        checks.positive("lookup_deadline_seconds", self.lookup_seconds, ConfigError)
        name = "remember_missing_seconds"
        checks.seconds(name, self.missing_seconds, error=ConfigError, minimum=0.0, maximum=3600.0)
        checks.positive("retry_seconds", self.retry_seconds, ConfigError)
        if not self.read and not self.save:
            raise ConfigError(f"store {self.store.url}: read and save are both False")
        self.write_limits()

    def write_limits(self) -> list[tuple[int, float]]:
        """Return the limits of writes: bytes, and the seconds that they are for.

        Raises:
            ConfigError: a limit is no positive size.
        """
        limits = []
        if self.write_bytes_per_day is not None:
            limits.append((parse_bytes(self.write_bytes_per_day), 86_400.0))
        if self.write_bytes_per_second is not None:
            limits.append((60 * parse_bytes(self.write_bytes_per_second), 60.0))
        return limits

    @property
    def lookup_seconds(self) -> float:
        """Limit of one lookup: ``lookup_deadline_seconds``, or the default of the store."""
        if self.lookup_deadline_seconds is None:
            return self.store.lookup_deadline_seconds
        return self.lookup_deadline_seconds

    @property
    def missing_seconds(self) -> float:
        """Time for which answers are remembered: ``remember_missing_seconds``, or the default of
        the store."""
        if self.remember_missing_seconds is None:
            return self.store.remember_missing_seconds
        return self.remember_missing_seconds
