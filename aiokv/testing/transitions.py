"""Record the transitions of a scheduler, and run them again.

The decisions of a cache are a function of the ordered list of its scheduler's transitions. So a
recorded list reproduces them without the server, the model and the device: attach it to a bug
report, or bisect with it.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np

from aiokv.base.checks import Unique
from aiokv.base.plan import TransferReport
from aiokv.config.cache_config import CacheConfig, WindowGroup
from aiokv.errors import AiokvError, UsageError
from aiokv.scheduler.effects import Effects
from aiokv.scheduler.scheduler import TRANSITIONS, CacheScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO, Self

    from aiokv.engine import CacheEngine

VERSION: Final = 2

Plain: TypeAlias = Any
"""A value of JSON types."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One transition, as plain values.

    Attributes:
        name: name of the method of ``CacheScheduler``, or ``part.method``, e.g. ``peers.receive``.
        args: its positional arguments; arrays, bytes, sets and reports are tagged objects.
        kwargs: its keyword arguments.
        result: the value that it returned, or the error that it raised.
        effects: those that were not empty, by name: plans, grants, ends of waits ...
    """

    name: str
    args: list[Plain]
    kwargs: dict[str, Plain] = {}
    result: Plain = None
    effects: dict[str, Plain] = {}


class TransitionLog(msgspec.Struct, kw_only=True):
    """The transitions of one scheduler, from its first one on.

    Attributes:
        config: keyword arguments of its ``CacheConfig``.
        has_stores: True if it fetches blocks from stores and saves blocks to them.
        transitions: in the order in which they were made.
    """

    config: dict[str, Plain]
    has_stores: bool = False
    transitions: list[Transition] = []

    @classmethod
    def load(cls, path: str | Path) -> TransitionLog:
        """Read a log that a :class:`Recording` has written.

        Raises:
            UsageError: the file is not such a log, or is of another version.
            OSError: it cannot be read.
        """
        with Path(path).open("rb") as lines:
            try:
                head = msgspec.json.decode(lines.readline(), type=_Head)
            except msgspec.DecodeError as error:
                raise UsageError(f"{path} is not a log of transitions: {error}") from error
            if head.version != VERSION:
                raise UsageError(f"{path} has version {head.version}; this is version {VERSION}")
            decoder = msgspec.json.Decoder(Transition)
            transitions = []
            for number, line in enumerate(lines, 2):
                try:
                    transitions.append(decoder.decode(line))
                except msgspec.DecodeError as error:
                    raise UsageError(f"{path}, line {number}: {error}") from error
        return cls(config=head.config, has_stores=head.has_stores, transitions=transitions)


class _Head(msgspec.Struct):
    version: int
    config: dict[str, Plain]
    has_stores: bool = False


class Mismatch(AssertionError):
    """A transition that was run again did something else.

    Attributes:
        index: index of the transition in the log.
        recorded: the transition as it was.
        replayed: the same call, with what it returned and left to do now.
    """

    def __init__(self, index: int, recorded: Transition, replayed: Transition) -> None:
        super().__init__(
            f"transition {index}, {recorded.name}: recorded {_outcome(recorded)}, replayed "
            f"{_outcome(replayed)}"
        )
        self.index = index
        self.recorded = recorded
        self.replayed = replayed


def _outcome(transition: Transition) -> str:
    return f"{transition.result!r} with effects {transition.effects!r}"


class Recording(Unique):
    """The transitions of one engine; made by :func:`record`.

    A context manager: its end stops the recording, and closes the file.

    Attributes:
        log: what was recorded; without its transitions when they go to a file.
    """

    def __init__(
        self, scheduler: CacheScheduler, config: CacheConfig, file: BinaryIO | None
    ) -> None:
        has_stores = scheduler.has_stores
        self.log = TransitionLog(config=_plain_config(config), has_stores=has_stores)
        self._file = file
        self._inside = False  # True inside a transition: those that it calls are not recorded
        self._names: tuple[str, ...] = TRANSITIONS
        self._scheduler = scheduler
        if file is not None:
            self._write(_Head(VERSION, self.log.config, has_stores))
        for name in TRANSITIONS:
            owner, method = _method_of(scheduler, name)
            setattr(owner, method, self._recorded(name, getattr(owner, method)))

    def _recorded(self, name: str, transition: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(transition)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return transition(*args, **kwargs)
            plain_args = [
                _plain(arg) for arg in args
            ]  # converted first, because the call may change them
            plain_kwargs = {key: _plain(value) for key, value in kwargs.items()}
            self._inside = True
            try:
                outcome = transition(*args, **kwargs)
            except AiokvError as error:
                self._add(name, plain_args, plain_kwargs, _plain(error), {})
                raise
            finally:
                self._inside = False
            value, effects = outcome
            self._add(name, plain_args, plain_kwargs, _plain(value), _plain_effects(effects))
            return outcome

        return call

    def _add(
        self,
        name: str,
        args: list[Plain],
        kwargs: dict[str, Plain],
        result: Plain,
        effects: dict[str, Plain],
    ) -> None:
        transition = Transition(name=name, args=args, kwargs=kwargs, result=result, effects=effects)
        if self._file is None:
            self.log.transitions.append(transition)
        else:
            self._write(transition)

    def _write(self, line: msgspec.Struct) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")

    def stop(self) -> None:
        """Record no more, and close the file. Idempotent."""
        names, self._names = self._names, ()
        for name in names:
            delattr(*_method_of(self._scheduler, name))
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def record(engine: CacheEngine, path: str | Path | None = None) -> Recording:
    """Record the transitions of an engine from now on.

    Args:
        engine: not entered so far: a log begins with an empty cache.
        path: file to write, one line of JSON per transition, with the token ids of all prompts;
            None to keep them in ``Recording.log``.

    Returns:
        The recording; call ``stop()``, or use it with ``with``.

    Raises:
        UsageError: the engine was entered before.
        OSError: the file cannot be written.
    """
    if engine.health().phase != "new":
        raise UsageError(
            "record: the engine was entered before; a log begins with an empty cache",
            hint="call record(engine) before `async with engine`",
        )
    file = None if path is None else Path(path).open("wb")  # noqa: SIM115 (closed by stop)
    return Recording(engine.inspect.parts.scheduler, engine.config, file)


def replay_transitions(log: TransitionLog) -> int:
    """Run the transitions of a log on a new scheduler, and compare each with the recorded one.

    Returns:
        The number of transitions.

    Raises:
        Mismatch: a transition returned another value, raised another error, or left other things
            to do: a plan, a grant, the end of a wait.
        UsageError: the log has a transition that this version lacks.
    """
    scheduler = CacheScheduler(_config_of(log.config), log.has_stores)
    for index, (recorded, replayed) in enumerate(
        zip(log.transitions, _run(scheduler, log.transitions), strict=True)
    ):
        if recorded != replayed:
            raise Mismatch(index, recorded, replayed)
    return len(log.transitions)


def _run(scheduler: CacheScheduler, transitions: Iterable[Transition]) -> Iterator[Transition]:
    for transition in transitions:
        if transition.name not in TRANSITIONS:
            raise UsageError(f"the log has an unknown transition {transition.name!r}")
        call = getattr(*_method_of(scheduler, transition.name))
        args = [_value(arg) for arg in transition.args]
        kwargs = {key: _value(value) for key, value in transition.kwargs.items()}
        try:
            value, effects = call(*args, **kwargs)
        except AiokvError as error:
            yield msgspec.structs.replace(transition, result=_plain(error), effects={})
        else:
            yield msgspec.structs.replace(
                transition, result=_plain(value), effects=_plain_effects(effects)
            )
            effects.clear()
        scheduler.applied()


def _method_of(scheduler: CacheScheduler, name: str) -> tuple[object, str]:
    """Return the object that has a transition, and the name of its method."""
    part, _, method = name.rpartition(".")
    return (getattr(scheduler, part) if part else scheduler), method


# --- plain values ---------------------------------------------------------------------------------


def _plain(value: object) -> Plain:
    """Return a value as JSON types, which ``_value`` reverses for arguments."""
    if value is None or isinstance(value, bool | int | float | str):
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        kind, dtype = ("int64", "<i8") if value.dtype == np.int64 else ("int32", "<i4")
        return {kind: base64.b64encode(np.asarray(value, dtype).tobytes()).decode()}
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, TransferReport):
        return {"report": msgspec.to_builtins(value)}
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, Exception):
        return {"error": f"{type(value).__name__}: {value}"}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    raise TypeError(f"a transition has a {type(value).__name__}, which cannot be recorded")


def _value(plain: Plain) -> Any:
    """Return an argument from its plain form."""
    if isinstance(plain, list):
        return [_value(element) for element in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "int32":
        return np.frombuffer(base64.b64decode(content), "<i4").astype(np.int32)
    if kind == "int64":
        return np.frombuffer(base64.b64decode(content), "<i8").astype(np.int64)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "set":
        return frozenset(content)
    if kind == "report":
        return msgspec.convert(content, TransferReport)
    raise UsageError(f"the log has an argument of unknown kind {kind!r}")


def _plain_effects(effects: Effects) -> dict[str, Plain]:
    """Return the effects that are not empty."""
    named = ((name, getattr(effects, name)) for name in Effects.__slots__ if name != "has_entries")
    return {
        name: value if isinstance(value, bool) else [_plain(entry) for entry in value]
        for name, value in named
        if value
    }


def _plain_config(config: CacheConfig) -> dict[str, Plain]:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values["windows"] = {name: dataclasses.asdict(group) for name, group in config.windows.items()}
    return values


def _config_of(values: dict[str, Plain]) -> CacheConfig:
    windows = {name: WindowGroup(**group) for name, group in values["windows"].items()}
    return CacheConfig(**{**values, "windows": windows})
