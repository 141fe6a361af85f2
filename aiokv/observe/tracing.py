"""OpenTelemetry spans of the waits, grants and transfers of leases (extra ``tracing``).

    engine = CacheEngine(...)
    with EngineTracer(engine):
        ...  # serve

A span is made when its wait or transfer has ended, as a child of the span that was current in the
task that called ``engine.match``: in a server with tracing, the span of the HTTP request.

=======================  =================================================================
span                     attributes, all with the prefix ``aiokv.``
=======================  =================================================================
``aiokv.wait.pending``   ``lease_id``, ``owner``, ``outcome``
``aiokv.wait.store``     the same
``aiokv.wait.capacity``  the same
``aiokv.wait.peer``      the same
``aiokv.onload``         the same, ``prompt_tokens``, ``cached_tokens``
``aiokv.granted``        the same, ``prompt_tokens``, ``cached_tokens``
``aiokv.transfer``       ``transfer_id``, ``lease_id``, ``route``, ``group``, ``blocks``,
                         ``bytes``, ``queued_seconds``, ``outcome``
=======================  =================================================================

A wait that timed out or failed, and a transfer that failed, has the status ERROR. An engine without
a tracer does nothing for this module.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Self

from aiokv.base.checks import Unique, flag
from aiokv.errors import ConfigError
from aiokv.statistics import BatchSpan, TransferSpan

if TYPE_CHECKING:
    from contextvars import Context

    from opentelemetry.trace import TracerProvider

    from aiokv import CacheEngine
    from aiokv.statistics import LeasePhase

_WAITS: Final = ("pending", "store", "capacity", "peer")
_ERRORS: Final = ("timeout", "failed", "lost")


class EngineTracer(Unique):
    """Makes spans of the waits, grants and transfers of leases, from ``with`` or ``start`` on.

    Args:
        engine: engine to observe; its loop calls the tracer.
        tracer_provider: makes the spans; None for the global provider of OpenTelemetry.
        roots: True to make spans, too, for leases whose request has no span, and for transfers that
            belong to no lease, such as copies to host memory. They are roots of their own traces.

    Raises:
        ConfigError: OpenTelemetry is not installed, or ``roots`` is not a bool.
    """

    def __init__(
        self,
        engine: CacheEngine,
        tracer_provider: TracerProvider | None = None,
        *,
        roots: bool = False,
    ) -> None:
        try:
            from opentelemetry import context, trace
        except ImportError:
            raise ConfigError(
                "EngineTracer needs the package opentelemetry-api",
                hint="pip install 'aiokv[tracing]'",
            ) from None
        self._engine = engine
        self._roots = flag("roots", roots, ConfigError)
        self._trace: Any = trace
        self._no_context = context.Context()
        self._current = context.get_current
        self._tracer = trace.get_tracer("aiokv", tracer_provider=tracer_provider)

    def start(self) -> None:
        """Make spans from now on.

        Raises:
            UsageError: the tracer was started already.
            ClosedError: the engine is closed.
        """
        self._engine.inspect.add_observer(self._note)

    def stop(self) -> None:
        """Make no more spans. Idempotent."""
        self._engine.inspect.remove_observer(self._note)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _note(self, record: TransferSpan | LeasePhase | BatchSpan, context: Context | None) -> None:
        if isinstance(record, BatchSpan):
            return  # a batch belongs to several requests
        parent = self._no_context if context is None else context.run(self._current)
        is_root = not self._trace.get_current_span(parent).get_span_context().is_valid
        if is_root and not self._roots:
            return
        if isinstance(record, TransferSpan):
            self._end(
                "aiokv.transfer",
                parent,
                record.queued_at,
                record,
                record.reason,
                {
                    "transfer_id": record.transfer_id,
                    "lease_id": record.lease_id,
                    "route": record.route,
                    "group": record.group,
                    "blocks": record.blocks,
                    "bytes": record.num_bytes,
                    "queued_seconds": (record.started_at or record.ended_at) - record.queued_at,
                },
            )
            return
        attributes: dict[str, Any] = {"lease_id": record.lease_id, "owner": record.owner}
        name = f"aiokv.{record.phase}"
        if record.phase in _WAITS:
            name = f"aiokv.wait.{record.phase}"
        else:
            attributes["prompt_tokens"] = record.prompt_tokens
            attributes["cached_tokens"] = record.cached_tokens
        self._end(name, parent, record.began_at, record, "", attributes)

    def _end(
        self,
        name: str,
        parent: Any,
        began_at: float,
        record: TransferSpan | LeasePhase,
        reason: str,
        attributes: dict[str, Any],
    ) -> None:
        """Make a span that has ended."""
        to_unix = _unix_offset_ns()
        span = self._tracer.start_span(
            name,
            parent,
            attributes={
                f"aiokv.{key}": value
                for key, value in (attributes | {"outcome": record.outcome}).items()
            },
            start_time=to_unix + round(began_at * 1e9),
        )
        if record.outcome in _ERRORS:
            status, code = self._trace.Status, self._trace.StatusCode.ERROR
            span.set_status(status(code, reason or record.outcome))
        span.end(end_time=to_unix + round(record.ended_at * 1e9))


def _unix_offset_ns() -> int:
    """Return Unix time minus ``time.monotonic()``, now, in nanoseconds.

    Of three readings, the one counts whose two clocks were read within the shortest time.
    """
    readings = []
    for _ in range(3):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]
