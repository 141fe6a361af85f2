"""EngineCollector: the metrics of an engine in a registry of prometheus_client.

::

    from prometheus_client import REGISTRY
    REGISTRY.register(EngineCollector(engine))

Needs ``pip install 'aiokv[metrics]'``. A server that has no other metrics needs no registry: see
:func:`aiokv.observe.metrics.exposition`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final

from aiokv.errors import ConfigError, UsageError
from aiokv.observe.exposition import labelled, merged
from aiokv.observe.metrics import families, named_engines

try:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        "EngineCollector needs prometheus_client, which is not installed",
        hint="pip install 'aiokv[metrics]'",
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiokv.engine import CacheEngine
    from aiokv.observe.exposition import Family

SCRAPE_SECONDS: Final = 5.0


class EngineCollector(Collector):
    """Collector of one or several engines.

    Args:
        engines: an engine, or engines by name; the name is the label ``engine``.
        labels: further labels of all samples.

    A registry may call ``collect`` in any thread, as the server of
    ``prometheus_client.start_http_server`` does: the statistics are then read on the loop of each
    engine. Register one collector for all engines of a process, because a name of a metric may
    appear once in a scrape.

    Raises:
        ConfigError: prometheus_client is not installed; raised by the import of this module.
    """

    def __init__(
        self,
        engines: CacheEngine | Mapping[str, CacheEngine],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._engines = named_engines(engines)
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        """Yield one metric per family.

        Raises:
            UsageError: the loop of an engine did not run for ``SCRAPE_SECONDS``.
        """
        found: list[Family] = []
        for name, engine in self._engines.items():
            found += labelled(_read(engine), {"engine": name, **self._labels})
        for family in merged(found):
            kind = "unknown" if family.kind == "untyped" else family.kind
            metric = Metric(family.name.removesuffix("_total"), family.help, kind)
            for sample in family.samples:
                metric.add_sample(family.name + sample.suffix, dict(sample.labels), sample.value)
            yield metric


def _read(engine: CacheEngine) -> list[Family]:
    """Return the families of an engine, read on its loop if that runs in another thread."""
    loop = engine.loop
    if loop is None or not loop.is_running() or asyncio._get_running_loop() is loop:
        return families(engine)
    done: Future[list[Family]] = Future()
    loop.call_soon_threadsafe(partial(_read_into, done, engine))
    try:
        return done.result(SCRAPE_SECONDS)
    except TimeoutError:
        done.cancel()
        raise UsageError(
            f"the event loop of {engine!r} did not run for {SCRAPE_SECONDS} s",
            hint="another callback blocks the loop; run blocking work in a thread",
        ) from None


def _read_into(done: Future[list[Family]], engine: CacheEngine) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(families(engine))
    except Exception as error:
        done.set_exception(error)
