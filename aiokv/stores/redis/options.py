"""Options of a RedisStore: where the servers are, and how to authenticate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    import ssl
    from types import ModuleType
    from urllib.parse import SplitResult

DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26379
SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
SECRET_OPTIONS: Final = ("password", "sentinel_password", "ssl_password", "username")


class Address(NamedTuple):
    """Host name or IP address, and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class RedisServer:
    """Parsed URL and credentials.

    Attributes:
        seeds: addresses to connect to first: the server, some nodes of a cluster, or Sentinels.
        database: number for ``SELECT``.
        username: user of ``AUTH``; empty for the default user.
        password: empty for no ``AUTH``. Not part of ``repr``.
        tls: context of TLS connections, or None.
    """

    seeds: tuple[Address, ...]
    database: int
    username: str
    password: str = field(repr=False)
    tls: ssl.SSLContext | None


def redis_py() -> Any:
    """Return the package redis-py.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import redis.asyncio.connection
        import redis.crc
    except ImportError as error:
        raise ConfigError(
            "RedisStore needs the package redis", hint="pip install 'aiokv[redis]'"
        ) from error
    return redis


def parse_server(
    url: str, username: str | None, password: str | None, default_port: int
) -> RedisServer:
    """Parse a URL and the credentials; arguments replace those of the URL.

    Raises:
        ConfigError: redis-py is not installed, or the URL is wrong. The text has no password.
    """
    redis = redis_py()
    parts = split_url(url)
    if parts.scheme not in SCHEMES:
        raise _wrong(url, f"the scheme must be one of {', '.join(SCHEMES)}")
    if any("@" in part for part in (parts.path, parts.query, parts.fragment)):
        raise _wrong(url, "special characters of the user and the password must be quoted with %")
    user, at, hosts = parts.netloc.rpartition("@")
    first, *others = [_address(host, url, default_port) for host in hosts.split(",")]
    parts = parts._replace(scheme=parts.scheme.replace("valkey", "redis"), netloc=f"{user}{at}host")
    try:
        options = dict(redis.asyncio.connection.parse_url(parts.geturl()))
    except (ValueError, TypeError) as error:
        raise _wrong(url, str(error)) from None
    uses_tls = options.pop("connection_class", None) is not None
    found = options.pop("username", ""), options.pop("password", "")
    tls_options = {name: options.pop(name) for name in list(options) if name.startswith("ssl_")}
    database = _database(url, options.pop("db", 0))
    del options["host"]
    unknown = [*options, *([] if uses_tls else tls_options)]
    if unknown:
        raise _wrong(url, f"unknown options: {', '.join(unknown)}")
    return RedisServer(
        seeds=(first, *others),
        database=database,
        username=found[0] if username is None else username,
        password=found[1] if password is None else password,
        tls=_tls(redis, url, tls_options) if uses_tls else None,
    )


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL.

    Raises:
        ConfigError: it has none; the text has no password.
    """
    try:
        return urlsplit(url)
    except ValueError:
        raise _wrong(url, "a special character is not quoted with %") from None


def without_secrets(url: str) -> str:
    """Return a URL without user, password and secret options, for messages."""
    scheme, separator, _ = url.partition("://")
    beginning = f"{scheme}://" if separator else ""
    # The password may extend to the last @, because its characters may be unquoted.
    place, _, query = url.removeprefix(beginning).rpartition("@")[2].partition("?")
    shown = [(name, value) for name, value in parse_qsl(query) if name not in SECRET_OPTIONS]
    return f"{beginning}{place}" + (f"?{urlencode(shown)}" if shown else "")


def _wrong(url: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the URL {without_secrets(url)!r} of RedisStore is wrong: {reason}",
        hint="redis://[user:password@]host[:port][,host2...][/database], or rediss:// for TLS",
    )


def _address(host: str, url: str, default_port: int) -> Address:
    parts = urlsplit(f"//{host}")
    try:
        return Address(parts.hostname or "localhost", parts.port or default_port)
    except ValueError:
        raise _wrong(url, "a port must be a number between 1 and 65535") from None


def _database(url: str, number: int) -> int:
    path = urlsplit(url).path.strip("/")
    if (path and not path.isdecimal()) or number < 0:
        raise _wrong(url, f"database {path or number}; it must be a number of 0 or more")
    return number


def _tls(redis: ModuleType, url: str, options: dict[str, Any]) -> ssl.SSLContext:
    """Return the context of the options ``ssl_*`` of the URL, as redis-py reads them."""
    options.setdefault("ssl_check_hostname", options.get("ssl_cert_reqs") != "none")
    try:
        context: ssl.SSLContext = redis.asyncio.SSLConnection(**options).ssl_context.get()
    except (TypeError, ValueError, OSError, redis.RedisError) as error:
        raise _wrong(url, f"{type(error).__name__}: {error}") from None
    return context
