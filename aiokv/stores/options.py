"""Options of stores: sizes with units, and options in the query of a URL."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_UNITS: Final = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(value: int | str) -> int:
    """Return a size in bytes: ``4096``, ``"400GiB"``, ``"1.5 TB"``.

    Raises:
        ConfigError: the text is not a number with a known unit, or is not positive.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = found and _UNITS.get(found[2].upper())
    size = round(float(found[1]) * unit) if found and unit else 0
    if size < 1:
        raise ConfigError(
            f"size is {value!r}; it must be a positive number of bytes",
            hint="write it as 4096, '400GiB' or '1.5TB'",
        )
    return size


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


def without_query(url: str) -> str:
    """Return a URL without query, user and password, for messages."""
    parts = urlsplit(url)
    return parts._replace(query="", fragment="", netloc=parts.netloc.rpartition("@")[2]).geturl()
