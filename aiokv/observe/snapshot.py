"""The state of an engine as one dict that JSON can hold, for ``/dump`` and the live page.

A snapshot has no tokens, no secrets and no credentials: of a prefix it has lengths and counts, of a
store its URL without user, password and query. Salts and adapters are often names of tenants; a
snapshot has a digest in place of each, under a random key of the process, unless ``show_salts`` is
True. Owners are shown: they name the requests.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.stores.options import without_query

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.engine import CacheEngine
    from aiokv.statistics import TransferSpan

MAX_LEASES: Final = 128
MAX_WAITING: Final = 48  # of MAX_LEASES; the others run
MAX_PREFIXES: Final = 40
MAX_TRANSFERS: Final = 500

_KEY: Final = secrets.token_bytes(16)


def snapshot(
    engine: CacheEngine,
    transfers: Iterable[TransferSpan] | None = None,
    *,
    show_salts: bool = False,
) -> dict[str, Any]:
    """Return the state of an engine; holds the loop for at most about 1 ms.

    Args:
        engine: an engine, on whose loop the call is made.
        transfers: what to list as transfers; None for those in flight, at most ``MAX_TRANSFERS``.
        show_salts: True for the names of salts and adapters; False for digests of them, which are
            equal for equal names within one process.

    Returns:
        A dict with the keys ``health``, ``config``, ``statistics``, ``leases``, ``waiting``,
        ``transfers``, ``prefixes`` and ``prefixes_complete``. ``statistics`` is the tree of
        ``CacheEngine.statistics``. ``waiting`` has the leases of ``leases`` that wait in a line, in
        order. Times are seconds since the epoch. Salts and adapters are "" where a prompt has none.

    Raises:
        UsageError: the call is made in another thread than that of the engine's loop.
    """
    listed = engine.inspect.leases(MAX_LEASES, max_waiting=MAX_WAITING)
    leases = [msgspec.to_builtins(lease) for lease in listed]
    hottest = engine.inspect.hottest_prefixes(MAX_PREFIXES)
    name = _shown if show_salts else hidden
    spans = engine.inspect.in_flight()[-MAX_TRANSFERS:] if transfers is None else transfers
    epoch = time.time() - time.monotonic()
    return {
        "health": msgspec.to_builtins(engine.health()),
        "config": msgspec.to_builtins(engine.config),
        "statistics": _statistics(engine),
        "leases": leases,
        "waiting": [lease for lease in leases if lease["waits_for"] in _LINES],
        "transfers": [_transfer(span, epoch) for span in spans],
        "prefixes": [_prefix(prefix, name) for prefix in hottest.prefixes],
        "prefixes_complete": hottest.is_complete,
    }


_LINES: Final = ("capacity", "quota", "store", "pending")


def hidden(name: str) -> str:
    """Return a digest of a name, which is equal for equal names in this process only."""
    return hashlib.blake2s(name.encode(), key=_KEY, digest_size=5).hexdigest() if name else ""


def _shown(name: str) -> str:
    return name


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    try:
        return without_query(url)
    except ValueError:  # not a URL: a store of the user's own
        return url.partition(":")[0]


def _statistics(engine: CacheEngine) -> dict[str, Any]:
    """Return the statistics, without the credentials in URLs of stores."""
    statistics: dict[str, Any] = msgspec.to_builtins(engine.statistics())
    for store in statistics["stores"]:
        store["url"] = without_credentials(store["url"])
    return statistics


def _transfer(span: TransferSpan, epoch: float) -> dict[str, Any]:
    """Return a transfer with times since the epoch, whose names say so."""
    fields: dict[str, Any] = msgspec.to_builtins(span)
    for moment in ("queued", "started", "ended"):
        at = fields.pop(f"{moment}_at")
        fields[f"{moment}_seconds"] = None if at is None else at + epoch
    return fields


def _prefix(prefix: msgspec.Struct, name: Callable[[str], str]) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(prefix)
    fields["salt"], fields["adapter"] = name(fields["salt"]), name(fields["adapter"])
    return fields
