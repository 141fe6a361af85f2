"""Settings of a cache from keywords, environment variables, a TOML file and defaults.

Keywords take precedence over ``AIOKV_*`` variables, variables over the file, and the file over the
defaults. A setting keeps its source, so that an error names the line of the file or the variable.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from aiokv.base import checks
from aiokv.config.cache_config import CacheConfig, WindowGroup
from aiokv.errors import ConfigError
from aiokv.layout.host_block import pitch_bytes
from aiokv.layout.regions import Regions, num_blocks_for
from aiokv.stores.options import parse_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

PREFIX: Final = "AIOKV_"
FILE_VARIABLE: Final = "AIOKV_CONFIG"
OTHER_VARIABLES: Final = frozenset(  # read by other parts of aiokv, by its tests and its benches
    PREFIX + name
    for name in (
        "CONFIG", "STORES", "IO", "DEEP", "TRACE", "MUTATION", "CRASH_ROUNDS", "GPU_LOCK_SECONDS",
        "BENCH_DISK", "BENCH_HOST", "BASELINE", "PICTURE", "TEST_FAULTS", "PEERS_SECRET",
        "PEERS_TRANSPORT",
    )
)  # fmt: skip
# Variables that Kubernetes sets in each container of a namespace with a service named "aiokv...".
_SERVICE_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT(_\d+_[A-Z]+(_[A-Z]+)?)?$")

FIELDS: Final = {field.name: field for field in dataclasses.fields(CacheConfig)}
BLOCKS_OF: Final = {"device_bytes": "device_blocks", "host_bytes": "host_blocks"}
NAMES: Final = (*FIELDS, *BLOCKS_OF)
WINDOWS: Final = "windows"

_BOOLEANS: Final = {"1": True, "true": True, "0": False, "false": False}
_PARSERS: Final[dict[Any, Callable[[str], object]]] = {
    bool: lambda text: _BOOLEANS[text.lower()],
    int: int,
    float: float,
    Mapping: json.loads,
}
_EXPECTED: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    Mapping: 'a table, as a variable in JSON: {"chat": 0.25}',
}
_UNSET: Final = object()
_Config = TypeVar("_Config", bound=CacheConfig)


class SourceKind(IntEnum):
    """Kinds of sources; a source with a larger number takes precedence."""

    DEFAULT = 0
    REGIONS = 1
    FILE = 2
    ENVIRONMENT = 3
    KEYWORD = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source.

    Attributes:
        value: the value, as the field has it.
        kind: kind of the source.
        source: ``"default"``, ``"keyword"``, ``"AIOKV_BLOCK_TOKENS"``, ``"aiokv.toml, line 3"``.
    """

    value: Any
    kind: SourceKind
    source: str


class Settings:
    """Settings by name: the fields of :class:`CacheConfig`, ``device_bytes`` and ``host_bytes``.

    Args:
        file: path of a TOML file; None for the one that ``AIOKV_CONFIG`` names, if any.
        environ: environment variables; None to read none.
        overrides: values of keywords.

    Raises:
        ConfigError: the file cannot be read, a name is unknown, or a value has the wrong type.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        variables = {} if environ is None else environ
        named = variables.get(FILE_VARIABLE) or None
        self.file = Path(file) if file is not None else None if named is None else Path(named)
        self._settings: dict[str, Setting] = {}
        if self.file is not None:
            self._add(_read_file(self.file))
        self._add(_read_environment(variables))
        self._add(_read_keywords(overrides or {}))

    def get(self, name: str) -> Setting | None:
        """Return a setting, or the default of its field; None for a setting without either."""
        found = self._settings.get(name)
        if found is not None or name in BLOCKS_OF:
            return found
        field = FIELDS[name]
        if field.default is not dataclasses.MISSING:
            return Setting(field.default, SourceKind.DEFAULT, "default")
        if field.default_factory is not dataclasses.MISSING:
            return Setting(field.default_factory(), SourceKind.DEFAULT, "default")
        return None

    def resolve(self, block: Regions | int | None, *, with_stores: bool = False) -> None:
        """Replace ``device_bytes`` and ``host_bytes`` by the blocks that fit in them.

        Args:
            block: bytes of one block, or the tensors; None if they are unknown.
            with_stores: True if the engine gets stores, whose host blocks are larger.

        Raises:
            ConfigError: a size in bytes is set and ``block`` is None, or is less than one block.
        """
        if isinstance(block, Regions):
            if block.num_blocks is None:
                raise ConfigError(
                    "block has no tensors, so the bytes of a block are unknown",
                    hint="register the tensors with Regions.add first",
                )
            if not {"device_blocks", "device_bytes"} & set(self._settings):
                self._settings["device_blocks"] = Setting(
                    block.num_blocks, SourceKind.REGIONS, "the tensors"
                )
        for name, blocks_name in BLOCKS_OF.items():
            setting = self._settings.pop(name, None)
            if setting is None:
                continue
            if block is None:
                raise _error(
                    setting,
                    f"{name} is {setting.value}, but the bytes of a block are unknown",
                    hint=f"pass block=, the bytes of a block or the Regions, or set {blocks_name}",
                )
            is_host = name == "host_bytes"
            size = _block_bytes(block, is_host=is_host)
            if is_host:
                size = pitch_bytes(size, with_stores=with_stores)
            num_blocks = num_blocks_for(setting.value, size)
            if num_blocks == 0 and setting.value:
                raise _error(
                    setting,
                    f"{name} is {setting.value}; it must be at least {size}, the bytes of a block",
                )
            if isinstance(block, Regions) and name == "device_bytes" and block.num_blocks:
                num_blocks = min(num_blocks, block.num_blocks)
            self._settings[blocks_name] = Setting(
                num_blocks, setting.kind, f"{name} of {setting.source}"
            )

    def config(self, cls: type[_Config]) -> _Config:
        """Return the configuration, an instance of ``cls``.

        Raises:
            ConfigError: ``device_blocks`` is missing, or a value is out of range.
        """
        if self.get("device_blocks") is None:
            places = "the keywords or the environment"
            if self.file is not None:
                places = f"{self.file}, the keywords or the environment"
            raise ConfigError(
                f"device_blocks is not set in {places}",
                hint="aiokv size computes it for a model and a GPU",
            )
        try:
            return cls(**{name: setting.value for name, setting in self._settings.items()})
        except ConfigError as error:
            raise self._with_source(error) from None

    def _add(self, settings: Iterable[tuple[str, Setting]]) -> None:
        """Replace settings of earlier sources.

        Raises:
            ConfigError: a source has the same capacity both in blocks and in bytes.
        """
        added = dict(settings)
        for bytes_name, blocks_name in BLOCKS_OF.items():
            if bytes_name in added and blocks_name in added:
                raise _error(
                    added[bytes_name],
                    f"{bytes_name} and {blocks_name} ({added[blocks_name].source}) are both set",
                    hint="set one of them",
                )
            if bytes_name in added:
                self._settings.pop(blocks_name, None)
            elif blocks_name in added:
                self._settings.pop(bytes_name, None)
        self._settings |= added

    def _with_source(self, error: ConfigError) -> ConfigError:
        """Return an error that names the sources of the settings that its message names."""
        message = str(error.args[0])
        words = re.findall(r"\w+", message)
        named = [name for name in self._settings if name in words]
        read = [name for name in named if self._settings[name].kind in _READ]
        if not read:
            return error
        if len(named) == 1:
            return _error(self._settings[read[0]], message, hint=error.hint)
        sources = "; ".join(f"{name}: {self._settings[name].source}" for name in named)
        return ConfigError(f"{message} ({sources})", hint=error.hint)


_READ: Final = (SourceKind.FILE, SourceKind.ENVIRONMENT)


def _block_bytes(block: Regions | int, *, is_host: bool) -> int:
    if isinstance(block, Regions):
        return block.payload_bytes if is_host else block.block_bytes
    return checks.integer("block", block, minimum=1, error=ConfigError)


def _read_file(path: Path) -> Iterator[tuple[str, Setting]]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    lines = _Lines(path, text)
    for name, value in values.items():
        setting = Setting(value, SourceKind.FILE, lines.source(name))
        _check_name(name, NAMES, setting.source)
        typed = _windows(value, setting, lines) if name == WINDOWS else _typed(name, value, setting)
        yield name, Setting(typed, SourceKind.FILE, setting.source)


class _Lines:
    """Lines of a TOML text at which its keys begin."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines: dict[tuple[str, ...], int] = {}
        lines = text.split("\n")
        parsed = 0  # lines that form a document
        for number in range(1, len(lines) + 1):
            try:
                values = tomllib.loads("\n".join(lines[:number]) + "\n")
            except tomllib.TOMLDecodeError:
                continue  # within a value of several lines
            for keys in _paths(values):
                self._lines.setdefault(keys, parsed + 1)
            parsed = number

    def source(self, *keys: str) -> str:
        """Return the file and the line of a key, for messages."""
        return f"{self._path}, line {self._lines[keys]}"


def _paths(values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *keys) for keys in _paths(value))


def _windows(value: object, setting: Setting, lines: _Lines | None = None) -> Any:
    """Return window groups from plain values, of a file or of JSON."""
    if not isinstance(value, Mapping):
        raise _error(
            setting,
            f"windows is {checks.shown(value)}; it must be a table of groups",
            hint="[windows.local] with window_tokens and device_blocks",
        )
    groups = {}
    names = [field.name for field in dataclasses.fields(WindowGroup)]
    for group, fields in value.items():
        if isinstance(fields, WindowGroup):
            groups[group] = fields
            continue
        place = setting
        if lines is not None:
            place = Setting(fields, setting.kind, lines.source(WINDOWS, group))
        if not isinstance(fields, Mapping):
            raise _error(place, f"windows.{group} is {checks.shown(fields)}; it must be a table")
        for name in fields:
            if lines is not None:
                place = Setting(fields, setting.kind, lines.source(WINDOWS, group, name))
            _check_name(name, names, place.source, prefix=f"windows.{group}.")
        try:
            groups[group] = WindowGroup(**fields)
        except ConfigError as error:
            wrong = [name for name in fields if name in re.findall(r"\w+", str(error.args[0]))]
            if lines is not None:
                place = Setting(fields, setting.kind, lines.source(WINDOWS, group, *wrong[:1]))
            raise _error(place, f"windows.{group}: {error.args[0]}", hint=error.hint) from None
    return groups


def _read_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    known = {PREFIX + name.upper(): name for name in NAMES}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not text.strip():
            continue
        if _SERVICE_LINK.search(variable):
            continue
        setting = Setting(text, SourceKind.ENVIRONMENT, variable)
        _check_name(variable, (*known, *OTHER_VARIABLES), "environment")
        name = known[variable]
        if name == WINDOWS:
            yield name, Setting(_windows_of_json(setting), setting.kind, variable)
        else:
            given = text if _kind(name) is str else text.strip()
            yield name, Setting(_parsed(name, given, setting), setting.kind, variable)


def _windows_of_json(setting: Setting) -> Any:
    try:
        value = msgspec.json.decode(setting.value)
    except msgspec.DecodeError as error:
        raise _error(
            setting,
            f"windows is not JSON: {error}",
            hint='{"local": {"window_tokens": 1024, "device_blocks": 512}}',
        ) from error
    return _windows(value, setting)


def _read_keywords(overrides: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    for name, value in overrides.items():
        setting = Setting(value, SourceKind.KEYWORD, "keyword")
        _check_name(name, NAMES, "CacheConfig.load")
        if name in BLOCKS_OF:
            value = _typed(name, value, setting)
        elif name == WINDOWS:
            value = _windows(value, setting)
        yield name, Setting(value, SourceKind.KEYWORD, "keyword")


def _check_name(name: str, known: Iterable[str], source: str, *, prefix: str = "") -> None:
    """Raise if a name is unknown.

    Args:
        name: the name.
        known: names that are accepted.
        source: where the name was read, for the message.
        prefix: name of the table that has it, with a dot.

    Raises:
        ConfigError: the name is unknown; the hint has the nearest known one.
    """
    names = list(known)
    if name in names:
        return
    hint = checks.known_names(name, names)
    if name == "stores":
        hint = "pass stores to the engine: CacheEngine(..., stores=[...])"
    raise ConfigError(f"{source}: {prefix}{name} is unknown", hint=hint)


def _parsed(name: str, text: str, setting: Setting) -> Any:
    """Return the value of the text of a variable."""
    if name in BLOCKS_OF or _kind(name) in (str, Literal):
        return _typed(name, text, setting)
    kind = _kind(name)
    value: object = _UNSET
    try:
        value = _PARSERS[kind](text)
    except (KeyError, ValueError):
        if text.lower() == "none":
            value = text
    if value is _UNSET:
        what = _EXPECTED[kind]
        raise _error(
            setting, f"{name} is {text!r}; it must be {what}", hint=_bytes_hint(name, text)
        )
    return _typed(name, value, setting)


def _typed(name: str, value: Any, setting: Setting) -> Any:
    """Return a value of the type of its field; the constructor checks ranges and choices."""
    if name in BLOCKS_OF:
        return _size(name, value, setting)
    if isinstance(value, str) and value.lower() == "none" and _is_optional(name):
        return None
    kind = _kind(name)
    if kind is bool and not isinstance(value, bool):
        raise _error(setting, f"{name} is {checks.shown(value)}; it must be {_EXPECTED[bool]}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and (not is_number or isinstance(value, float)):
        raise _error(
            setting,
            f"{name} is {checks.shown(value)}; it must be {_EXPECTED[int]}",
            hint=_bytes_hint(name, value),
        )
    if kind is float and not is_number:
        raise _error(setting, f"{name} is {checks.shown(value)}; it must be {_EXPECTED[float]}")
    if kind is Mapping and not isinstance(value, Mapping):
        raise _error(setting, f"{name} is {checks.shown(value)}; it must be {_EXPECTED[Mapping]}")
    if kind in (str, Literal) and not isinstance(value, str):
        raise _error(setting, f"{name} is {checks.shown(value)}; it must be a string")
    return value


def _size(name: str, value: object, setting: Setting) -> int:
    if isinstance(value, str) and value != "0":
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise _error(
                setting, f"{name} is {value!r}; it must be a size in bytes", hint=error.hint
            ) from None
    try:
        return checks.integer(name, 0 if value == "0" else value, minimum=0, error=ConfigError)
    except ConfigError as error:
        raise _error(setting, str(error.args[0]), hint="write it as 4096 or '40GiB'") from None


def _bytes_hint(name: str, value: object) -> str:
    """Return a hint for sizes such as ``device_blocks = "40GiB"``; empty for other values."""
    in_bytes = {blocks: size for size, blocks in BLOCKS_OF.items()}.get(name)
    if in_bytes is None or not isinstance(value, str):
        return ""
    try:
        parse_bytes(value)
    except ValueError:
        return ""
    return f"{in_bytes} = {value!r} gives a size in bytes"


def _kind(name: str) -> Any:
    """Return the type of a field, without None: int, float, bool, str, Literal or Mapping."""
    hint = _hints().get(name, int)  # sizes in bytes are no fields
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if (origin := typing.get_origin(hint)) in (Literal, Mapping):
        return origin
    return parts[0] if parts else hint


def _is_optional(name: str) -> bool:
    return type(None) in typing.get_args(_hints()[name])


def _hints() -> dict[str, Any]:
    return typing.get_type_hints(CacheConfig)


def _error(setting: Setting, message: str, *, hint: str = "") -> ConfigError:
    """Return an error that begins with the source of a setting that was read."""
    if setting.kind in _READ:
        message = f"{setting.source}: {message}"
    return ConfigError(message, hint=hint)
