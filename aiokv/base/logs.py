"""Structured logs: silent until the application configures logging or structlog.

An application that has called ``structlog.configure`` gets each line through that configuration.
Otherwise lines go to the standard library's loggers ``aiokv.*``. The message contains the event and
its fields, for formatters that print only the message; the record has them as attributes, for JSON
formatters. This module never imports structlog, whose import takes longer than the rest of aiokv.

``EVENTS.md`` in this folder lists all events with their levels and fields.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

logging.getLogger("aiokv").addHandler(logging.NullHandler())

DEBUG: Final = logging.DEBUG
INFO: Final = logging.INFO

RESERVED: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "event"}
"""Names that fields cannot have: attributes of the standard library's records."""

_METHODS: Final = {DEBUG: "debug", INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}

_fields: ContextVar[Mapping[str, object]] = ContextVar(
    "aiokv_log_fields", default=MappingProxyType({})
)


@contextmanager
def log_fields(**fields: object) -> Iterator[None]:
    """Add fields to all lines that aiokv logs in this context, such as the id of a request.

    ::

        with log_fields(request_id=request.id):
            async with engine.match(tokens) as lease:
                ...

    Tasks and callbacks that begin inside the ``with`` block inherit the fields. Applications that
    use ``structlog.contextvars`` need not call this.

    Args:
        fields: names and values; a field of the event itself overrides one of the context.

    Raises:
        UsageError: a name is an attribute of ``logging.LogRecord``.
    """
    if wrong := sorted(RESERVED & fields.keys()):
        raise UsageError(
            f"log_fields: {', '.join(wrong)} cannot be fields; log records have such attributes",
            hint="choose other names, e.g. request_id",
        )
    token = _fields.set(MappingProxyType({**_fields.get(), **fields}))
    try:
        yield
    finally:
        _fields.reset(token)


def join_log(of: str) -> None:
    """Show the lines of aiokv in the log of a server that configures only its own loggers.

    This changes nothing if the application has configured ``structlog``, the root logger or the
    logger ``aiokv``, which then show the lines. Idempotent.

    Args:
        of: name of the server's logger. The logger ``aiokv`` gets its handlers, and its level
            unless ``aiokv`` has a level.
    """
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        return
    ours, theirs = logging.getLogger("aiokv"), logging.getLogger(of)
    shown_by = [*ours.handlers, *(ours.parent.handlers if ours.parent and ours.propagate else ())]
    if any(not isinstance(handler, logging.NullHandler) for handler in shown_by):
        return
    if not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:  # lines that no handler shows stay disabled
        lowest = min(handler.level for handler in theirs.handlers)
        ours.setLevel(max(theirs.getEffectiveLevel(), lowest))


class Log:
    """Log of one module; event names are ``noun.verb``, and all values are keywords."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logger = logging.getLogger(name)
        # Set with structlog: the wrapper class of its configuration, and the check of a level.
        self._wrapper: object = None
        self._shows: Callable[[int], bool] | None = None

    def is_on(self, level: int) -> bool:
        """Return True if lines of a level are shown: a check of cached values.

        Test it before the fields of a frequent line are computed.
        """
        structlog = sys.modules.get("structlog")
        if structlog is None or not structlog.is_configured():
            return self._logger.isEnabledFor(level)
        return self._is_on_in(structlog, level)

    def debug(self, event: str, **fields: object) -> None:
        """Log an event of one request or transfer."""
        self._log(DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log an event of the engine that is part of its normal operation."""
        self._log(INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log an event that the application can recover from."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log a failure."""
        self._log(logging.ERROR, event, fields)

    def _log(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if not self.is_on(level):
            return
        if bound := _fields.get():
            fields = {**bound, **fields}
        try:
            structlog = sys.modules.get("structlog")
            if structlog is not None and structlog.is_configured():
                logger = structlog.get_logger(self._name)
                getattr(logger, _METHODS[level])(event, **fields)
                return
            error = fields.pop("exc_info", None)
            self._logger.log(
                level,
                " ".join([event, *(f"{name}=%r" for name in fields)]),
                *fields.values(),
                exc_info=error,
                extra={"event": event, **fields},
                stacklevel=3,  # the line that calls warning() or error()
            )
        except Exception:  # raised by a processor or filter: printed, as logging does
            if logging.raiseExceptions:
                traceback.print_exc()

    def _is_on_in(self, structlog: ModuleType, level: int) -> bool:
        """Return True if the application's configuration of structlog shows lines of a level.

        The wrapper class of the configuration decides, and a level that was set for the standard
        library's logger ``aiokv``, or one below it.
        """
        if _own_level(self._logger) > level:
            return False
        wrapper = structlog.get_config()["wrapper_class"]
        if wrapper is not self._wrapper:
            logger = structlog.get_logger(self._name).bind()
            self._shows = getattr(logger, "is_enabled_for", None) or getattr(
                logger, "isEnabledFor", None
            )
            self._wrapper = wrapper
        return self._shows is None or self._shows(level)


def _own_level(logger: logging.Logger) -> int:
    """Return the level that was set for a logger or its parents, except for the root logger."""
    current: logging.Logger | None = logger
    while current is not None and current.parent is not None:
        if current.level:
            return current.level
        current = current.parent
    return logging.NOTSET
