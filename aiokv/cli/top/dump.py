"""The parts of ``/dump`` that are shown, and the client that reads them.

Fields that a server does not send are zeros, and unknown fields are ignored: the server may have
another version of aiokv.
"""

from __future__ import annotations

import base64
import http.client
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import unquote, urlsplit

import msgspec

from aiokv.base.statistics import Statistics
from aiokv.errors import AiokvError, UsageError

if TYPE_CHECKING:
    from urllib.parse import SplitResult

MAX_BYTES: Final = 64 << 20
_CHUNK_BYTES: Final = 64 << 10
_REDIRECTS: Final = (301, 302, 303, 307, 308)


class DumpError(AiokvError):
    """No state of an aiokv engine can be read from a URL."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One lease; see ``aiokv.statistics.LeaseInfo``."""

    lease_id: int
    owner: str = ""
    state: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    blocks: int = 0
    age_seconds: float = 0.0
    waits_for: str = ""


class EngineState(NamedTuple):
    """State of one engine."""

    statistics: Statistics
    leases: list[Lease]


class Dump(NamedTuple):
    """State of the engines of a server."""

    time_seconds: float
    engines: dict[str, EngineState]


class _Engine(msgspec.Struct, frozen=True, kw_only=True):
    statistics: dict[str, Any]
    leases: list[Lease] = []


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    time_seconds: float
    engines: dict[str, _Engine]


def dump_of(body: bytes) -> Dump:
    """Return the state that the body of an answer has.

    Raises:
        msgspec.DecodeError: the body is not a dump of aiokv.
        UnicodeDecodeError: likewise.
    """
    decoded = msgspec.json.decode(body, type=_Body)
    engines = {}
    for name, engine in decoded.engines.items():
        if "groups" not in engine.statistics:
            raise msgspec.ValidationError(f"the statistics of {name!r} have no groups of blocks")
        statistics = msgspec.convert(_completed(Statistics, engine.statistics), Statistics)
        engines[name] = EngineState(statistics, engine.leases)
    return Dump(decoded.time_seconds, engines)


def _completed(kind: Any, value: Any) -> Any:
    """Return a decoded value of a type, with zeros for the fields that it lacks."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        hints = get_type_hints(kind)
        missing = {
            field.name: _zero(hints[field.name])
            for field in msgspec.structs.fields(kind)
            if field.required and field.name not in value
        }
        known = {name: part for name, part in value.items() if name in hints}
        return {name: _completed(hints[name], part) for name, part in (known | missing).items()}
    if get_origin(kind) is dict and isinstance(value, dict):
        return {key: _completed(get_args(kind)[1], part) for key, part in value.items()}
    if get_origin(kind) is list and isinstance(value, list):
        return [_completed(get_args(kind)[0], part) for part in value]
    return value


def _zero(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {}
    return (get_origin(kind) or kind)()


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
            return dump_of(body)
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
