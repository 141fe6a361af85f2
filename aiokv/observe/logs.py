"""Structured logs on top of the standard library: silent until the application configures it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import structlog

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

logging.getLogger("aiokv").addHandler(logging.NullHandler())


def get_logger(name: str) -> BoundLogger:
    """A structlog logger over ``logging.getLogger(name)``; structlog's own defaults stay as they are."""
    return cast(
        "BoundLogger",
        structlog.wrap_logger(
            logging.getLogger(name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.format_exc_info,
                structlog.stdlib.render_to_log_kwargs,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        ),
    )
