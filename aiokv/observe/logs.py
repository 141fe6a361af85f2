"""Structured logs on top of the standard library: silent until the application configures it.

structlog is imported with the first message that somebody listens to: it would be two thirds of
the time that ``import aiokv`` takes.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

logging.getLogger("aiokv").addHandler(logging.NullHandler())


@cache
def _bound(name: str) -> BoundLogger:
    import structlog

    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.add_logger_name,
            structlog.processors.format_exc_info,
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return cast("BoundLogger", logger)


class Log:
    """The events of one module; names are ``noun.verb``, everything else a keyword."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logger = logging.getLogger(name)

    def warning(self, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(logging.WARNING):
            _bound(self._name).warning(event, **fields)

    def error(self, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(logging.ERROR):
            _bound(self._name).error(event, **fields)
