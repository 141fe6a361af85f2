"""Structured logs: silent until the application configures logging or structlog.

An application that has called ``structlog.configure`` gets each line through that configuration.
Otherwise lines go to the standard library's loggers ``aiokv.*``. The message contains the event and
its fields, for formatters that print only the message; the record has them as attributes, for JSON
formatters. This module never imports structlog, whose import takes longer than the rest of aiokv.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logging.getLogger("aiokv").addHandler(logging.NullHandler())


class Log:
    """Log of one module; event names are ``noun.verb``, and all values are keywords."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logger = logging.getLogger(name)

    def warning(self, event: str, **fields: object) -> None:
        """Log an event that the application can recover from."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log a failure."""
        self._log(logging.ERROR, event, fields)

    def _log(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if not self._logger.isEnabledFor(level):
            return
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            logger = structlog.get_logger(self._name)
            getattr(logger, logging.getLevelName(level).lower())(event, **fields)
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
