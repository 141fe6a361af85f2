"""The parts of ``/dump`` that are shown, and the client that reads them.

Fields that a server does not send have defaults, and other fields are ignored: the server may have
another version of aiokv.
"""

from __future__ import annotations

import base64
import http.client
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import msgspec

from aiokv.errors import AiokvError, UsageError

if TYPE_CHECKING:
    from urllib.parse import SplitResult

MAX_BYTES: Final = 64 << 20
_CHUNK_BYTES: Final = 64 << 10
_REDIRECTS: Final = (301, 302, 303, 307, 308)


class DumpError(AiokvError):
    """No state of an aiokv engine can be read from a URL."""


class Pools(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and pools of one engine; see :class:`aiokv.Statistics`."""

    device_blocks: int
    prompt_tokens: int
    device_free: int = 0
    device_cached: int = 0
    device_leased: int = 0
    device_in_flight: int = 0
    host_blocks: int = 0
    host_free: int = 0
    host_cached: int = 0
    host_in_flight: int = 0
    state_slots: int = 0
    state_free: int = 0
    state_snapshots: int = 0
    leases: int = 0
    waiting: int = 0
    hit_device_tokens: int = 0
    hit_host_tokens: int = 0
    hit_store_tokens: int = 0
    grants: int = 0
    evicted_device_blocks: int = 0
    failed_blocks: int = 0


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of one route; see ``aiokv.LaneStatistics``."""

    queued: int = 0
    submitted: int = 0
    done: int = 0
    failed: int = 0
    moved_bytes: int = 0


class Poller(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting for transfers; see ``aiokv.PollerStatistics``."""

    latency_p50_seconds: float = 0.0
    latency_p99_seconds: float = 0.0
    busy_seconds: float = 0.0


class StoreUsed(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a store; -1 for unknown."""

    blocks: int = -1
    used_bytes: int = -1


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one store; see ``GuardStatistics``."""

    url: str
    pool: str = "host"
    reading: str = ""
    saving: str = ""
    lookup_keys: int = 0
    found_keys: int = 0
    loaded_blocks: int = 0
    saved_blocks: int = 0
    wrong_blocks: int = 0
    failed_blocks: int = 0
    timeouts: int = 0
    store: StoreUsed | None = None


class LeaseState(msgspec.Struct, frozen=True, kw_only=True):
    """One lease."""

    lease_id: int
    owner: str = ""
    state: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    blocks: int = 0
    age_seconds: float = 0.0
    waits_for: str = ""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one engine."""

    statistics: Pools
    worker: dict[str, Lane | int] = {}
    poller: Poller = Poller()
    stores: list[StoreState] = []
    leases: list[LeaseState] = []


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engines of a server."""

    time_seconds: float
    engines: dict[str, EngineState]


class DumpClient:
    """Reads ``/dump`` of a server, on a new connection each time.

    Args:
        url: where the ASGI app of aiokv is mounted; without a scheme, ``http``.
        timeout_seconds: deadline of one request.

    Raises:
        UsageError: the URL is malformed.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        parts = _split(url if "://" in url else f"http://{url}")
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/dump") else f"{path}/dump"
        self._parts = parts
        self._timeout_seconds = timeout_seconds
        netloc = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{netloc}{self._path}"  # without a password

    def fetch(self) -> Dump:
        """Return the state of the server.

        Raises:
            DumpError: the server does not answer in time, or its answer is not the state of an
                engine.
        """
        try:
            body = self._get()
        except TimeoutError:
            raise DumpError(
                f"no answer from {self.url} within {self._timeout_seconds:g} s"
            ) from None
        except OSError as error:
            raise DumpError(
                f"cannot reach {self.url}: {error.strerror or error}",
                hint="start the server, and mount aiokv.observe.asgi in it",
            ) from None
        except http.client.HTTPException as error:
            raise DumpError(f"{self.url} does not speak HTTP: {error!r}") from None
        try:
            return msgspec.json.decode(body, type=Dump)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DumpError(f"{self.url} is not a dump of aiokv: {error}", hint=_HINT) from None

    def _get(self) -> bytes:
        ends = time.monotonic() + self._timeout_seconds
        is_secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection: http.client.HTTPConnection = kind(
            self._parts.hostname or "", self._parts.port, timeout=self._timeout_seconds
        )
        try:
            connection.request("GET", self._path, headers=self._headers())
            with connection.getresponse() as response:
                self._check(response)
                return self._read(response, ends)
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse, ends: float) -> bytes:
        """Return the body; a server that sends it in small pieces has the same deadline."""
        chunks, size = [], 0
        while chunk := response.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_BYTES:
                raise DumpError(f"{self.url} is larger than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > ends:
                raise TimeoutError
        return b"".join(chunks)

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status == 200:
            return
        hint = _HINT
        if response.status in _REDIRECTS:
            hint = f"it redirects to {response.headers.get('Location', 'nowhere')}"
        elif response.status in (401, 403):
            hint = "pass the user and the password: http://USER:PASSWORD@HOST:PORT"
        raise DumpError(f"{self.url} answered {response.status} {response.reason}", hint=hint)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._parts.username is not None:
            user = unquote(self._parts.username)
            secret = f"{user}:{unquote(self._parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(secret.encode()).decode()}"
        return headers


_HINT: Final = (
    "pass the URL at which the ASGI app of aiokv is mounted, such as http://HOST:PORT/aiokv"
)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises ValueError for a port that is no number
    except ValueError as error:
        raise UsageError(f"the URL is malformed: {error}") from None
    if not known or any(character.isspace() for character in url):
        raise UsageError(f"{url!r} is not a URL", hint="pass http://HOST:PORT, or HOST:PORT")
    return parts
