"""Options of stores: sizes with units, and options in the query of a URL."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from aiokv.base import checks
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_UNITS: Final = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def url_text(url: object) -> str:
    """Return the URL of a store, which must be a str. The error does not show it: it may have a
    password.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(url, str):
        raise ConfigError(f"url is of type {type(url).__name__}; it must be a str")
    return url


def parse_bytes(value: int | str) -> int:
    """Return a size in bytes: ``4096``, ``"400GiB"``, ``"1.5 TB"``.

    Raises:
        ConfigError: the text is not a number with a known unit, or is not positive.
    """
    found = re.fullmatch(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([A-Za-z]*)\s*", str(value))
    unit = found and _UNITS.get(found[2].upper())
    size = round(float(found[1]) * unit) if found and unit else 0
    if size < 1:
        raise ConfigError(
            f"size is {value!r}; it must be a positive number of bytes",
            hint="write it as 4096, '400GiB' or '1.5TB'",
        )
    return size


def store_path(path: object) -> str:
    """Return the absolute path of a folder.

    Raises:
        ConfigError: the value is not a path, is empty, or has a null character.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"path is {checks.shown(path)}; it must be the path of a folder")
    return os.path.abspath(text)


def url_path(url: str, example: str) -> str:
    """Return the path of a URL without a host, such as ``disk:/nvme/kv``.

    Args:
        url: the URL.
        example: a right URL, for the error.

    Raises:
        ConfigError: the URL has a host, as in ``disk://nvme/kv``, or no path.
    """
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigError(
            f"{without_query(url)!r} has a host; the path begins after '{parts.scheme}:'",
            hint=f"write {example}",
        )
    if not parts.path:
        raise ConfigError(f"{without_query(url)!r} has no path", hint=f"write {example}")
    return unquote(parts.path)


def parse_flag(text: str) -> bool:
    """Return the flag that a text of a URL stands for.

    Raises:
        ConfigError: the text is neither true nor false.
    """
    match text.lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise ConfigError(f"value is {text!r}; it must be true or false")


def url_options(url: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Return the options in the query of a URL, each converted by its function in ``known``.

    Raises:
        ConfigError: an option is unknown, is given twice, or its value cannot be converted.
    """
    options: dict[str, Any] = {}
    for name, text in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name not in known:
            raise ConfigError(
                f"option {name!r} of {without_query(url)} is unknown",
                hint=f"known options: {', '.join(sorted(known)) or 'none'}",
            )
        if name in options:
            raise ConfigError(f"option {name!r} of {without_query(url)} is given twice")
        try:
            options[name] = known[name](text)
        except ValueError as error:
            raise ConfigError(f"option {name!r} of {without_query(url)}: {error}") from error
    return options


def parted_url(url: str, names: Collection[str]) -> tuple[str, str]:
    """Return a URL with the options ``names`` only, and the URL with the other options only."""
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    own = [pair for pair in pairs if pair[0] in names]
    others = [pair for pair in pairs if pair[0] not in names]
    first, second = (parts._replace(query=urlencode(some)).geturl() for some in (own, others))
    return first, second


def without_user(url: str) -> str:
    """Return a URL without user and password."""
    scheme, separator, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


def without_query(url: str) -> str:
    """Return a URL without query, user and password, for messages."""
    parts = urlsplit(url)
    return parts._replace(query="", fragment="", netloc=parts.netloc.rpartition("@")[2]).geturl()
