"""Stores from URLs, for configuration files and environment variables.

``host:///run/aiokv/host.sock``, ``disk:/nvme/kv?bytes=400GiB``, ``redis://host:6379/0``,
``mooncake://host:50051``, ``s3://bucket/prefix``, ``directory:/mnt/shared/kv``. The options
``read``, ``save``, ``required``, ``deadline``, ``lookup_deadline``, ``retry``,
``remember_missing``, ``write_bytes_per_day`` and ``write_bytes_per_second`` (see :class:`StoreUse`)
apply to all kinds; the other options are arguments of one kind.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from aiokv.base import checks
from aiokv.errors import ConfigError
from aiokv.stores.options import parse_bytes, parse_flag, parted_url, url_options
from aiokv.stores.use import StoreUse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.stores.base import Store

VARIABLE: Final = "AIOKV_STORES"
_KINDS: Final = {  # scheme -> (module, class)
    "host": ("aiokv.stores.host", "HostStore"),
    "disk": ("aiokv.stores.disk", "DiskStore"),
    "redis": ("aiokv.stores.redis", "RedisStore"),
    "rediss": ("aiokv.stores.redis", "RedisStore"),
    "valkey": ("aiokv.stores.redis", "RedisStore"),
    "valkeys": ("aiokv.stores.redis", "RedisStore"),
    "mooncake": ("aiokv.stores.mooncake", "MooncakeStore"),
    "s3": ("aiokv.stores.s3", "S3Store"),
    "gs": ("aiokv.stores.s3", "S3Store"),
    "az": ("aiokv.stores.s3", "S3Store"),
    "directory": ("aiokv.stores.directory", "DirectoryStore"),
}


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"value is {text!r}; it must be a number of seconds") from None


_USE_OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "read": parse_flag,
    "save": parse_flag,
    "required": parse_flag,
    "deadline": _seconds,
    "lookup_deadline": _seconds,
    "retry": _seconds,
    "remember_missing": _seconds,
    "write_bytes_per_day": parse_bytes,
    "write_bytes_per_second": parse_bytes,
}
_FIELDS: Final = {
    name: f"{name}_seconds" for name in ("deadline", "lookup_deadline", "retry", "remember_missing")
}


def stores_from(stores: Sequence[Store | StoreUse | str]) -> list[StoreUse]:
    """Return the stores of URLs. Store objects are returned unchanged.

    Args:
        stores: URLs and stores, in the order in which they are asked.

    Raises:
        ConfigError: a URL has an unknown scheme or option, or a bad value; or an element is not
            a store, or is listed twice.
    """
    if isinstance(stores, str):
        raise ConfigError(
            f"stores is {stores!r}; it must be a sequence", hint=f"stores=[{stores!r}]"
        )
    try:
        elements = list(stores)
    except TypeError:
        raise ConfigError(f"stores is {checks.shown(stores)}; it must be a sequence") from None
    uses = [_use(store) for store in elements]
    for i, use in enumerate(uses):
        if any(use.store is other.store for other in uses[:i]):
            raise ConfigError(f"stores: {use.store.url} is listed twice")
    return uses


def stores_from_environment() -> list[StoreUse]:
    """Return the stores of the environment variable ``AIOKV_STORES``.

    The variable holds URLs, separated by spaces. The engine does not read it by itself.

    Raises:
        ConfigError: as ``stores_from``.
    """
    return stores_from(os.environ.get(VARIABLE, "").split())


def _use(store: Store | StoreUse | str) -> StoreUse:
    if isinstance(store, StoreUse):
        return store
    return _parsed(store) if isinstance(store, str) else StoreUse(store)


def _parsed(url: str) -> StoreUse:
    try:
        parts = urlsplit(url)
    except ValueError as error:  # such as for an IPv6 address without its bracket
        raise ConfigError(f"stores: a URL is malformed: {error}") from None
    if parts.scheme not in _KINDS:
        raise ConfigError(
            f"stores: the scheme {parts.scheme!r} of a URL is unknown; it must be one of "
            + ", ".join(f"{scheme!r}" for scheme in _KINDS)
        )
    own, rest = parted_url(url, _USE_OPTIONS)
    options = url_options(own, _USE_OPTIONS)
    module, name = _KINDS[parts.scheme]
    kind: Any = getattr(import_module(module), name)
    return StoreUse(
        kind.from_url(rest),
        **{_FIELDS.get(name, name): value for name, value in options.items()},
    )
