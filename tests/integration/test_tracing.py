"""OpenTelemetry: spans of waits and transfers are children of the span of the request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import AllocateTimeout, ConfigError, TransferError, UsageError
from aiokv.observe.tracing import EngineTracer
from aiokv.testing import spin
from tests.harness.served import Served

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]
B = [11, 12, 13, 14, 15, 16, 17]


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


async def request(
    served: Served, provider: TracerProvider, name: str, tokens: list[int], **allocate
):
    """Serve a request as a server does that makes a span per request."""
    with provider.get_tracer("server").start_as_current_span(name):
        async with served.engine.match(tokens, owner=name) as lease:
            await lease.allocate(len(tokens), **allocate)
            await lease.layers.wait_all()


async def test_spans_are_children_of_the_request_that_waited(exporter, provider):
    async with Served(device_blocks=4) as served:
        await served.to_host(A)
        with EngineTracer(served.engine, provider):
            tasks = [asyncio.ensure_future(request(served, provider, "first", A))]
            await spin(2)
            tasks.append(asyncio.ensure_future(request(served, provider, "second", B)))
            await spin(2)
            served.device.complete_all()
            await asyncio.gather(*tasks)
            await served.settle()
    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans}
    tree = sorted(
        (by_id[span.parent.span_id].name, span.name) for span in spans if span.parent is not None
    )
    assert tree == [
        ("first", "aiokv.granted"),
        ("first", "aiokv.onload"),
        ("first", "aiokv.transfer"),
        ("second", "aiokv.granted"),
        ("second", "aiokv.wait.capacity"),
    ]
    for span in spans:
        if span.parent is not None:
            request_span = by_id[span.parent.span_id]
            assert span.context.trace_id == request_span.context.trace_id
            assert request_span.start_time <= span.start_time + 1_000_000_000
            assert span.start_time <= span.end_time
            assert abs(span.end_time - time.time_ns()) < 60e9
            assert span.instrumentation_scope.name == "aiokv"


async def test_attributes_name_the_lease_and_the_transfer(exporter, provider):
    async with Served() as served:
        await served.to_host(A)
        with EngineTracer(served.engine, provider):
            task = asyncio.ensure_future(request(served, provider, "r1", A))
            await spin(2)
            served.device.complete_all()
            await task
            await served.settle()
    attributes = {span.name: dict(span.attributes) for span in exporter.get_finished_spans()}
    transfer = attributes["aiokv.transfer"]
    assert transfer.pop("aiokv.queued_seconds") >= 0
    assert transfer == {
        "aiokv.transfer_id": transfer["aiokv.transfer_id"],
        "aiokv.lease_id": attributes["aiokv.granted"]["aiokv.lease_id"],
        "aiokv.route": "onload",
        "aiokv.group": "attention",
        "aiokv.blocks": 3,
        "aiokv.bytes": 3 * served.memory.regions.block_bytes,
        "aiokv.outcome": "done",
    }
    granted = attributes["aiokv.granted"]
    assert granted == {
        "aiokv.lease_id": granted["aiokv.lease_id"],
        "aiokv.owner": "r1",
        "aiokv.outcome": "released",
        "aiokv.prompt_tokens": 7,
        "aiokv.cached_tokens": 6,
    }


async def test_timeouts_and_failures_are_errors(exporter, provider):
    async with Served(device_blocks=4) as served:
        await served.to_host(A)
        with EngineTracer(served.engine, provider):
            failing = asyncio.ensure_future(request(served, provider, "failing", A))
            await spin(2)
            with pytest.raises(AllocateTimeout):
                await request(served, provider, "late", B, timeout=0.0)
            served.device.onloads[0].fail_all(block=0, reason="a bad page")
            with pytest.raises(TransferError):
                await failing
            await served.settle()
    status = {span.name: span.status for span in exporter.get_finished_spans() if span.parent}
    assert not status["aiokv.wait.capacity"].is_ok
    assert status["aiokv.wait.capacity"].description == "timeout"
    assert (status["aiokv.transfer"].is_ok, status["aiokv.transfer"].description) == (
        False, "a bad page",
    )  # fmt: skip
    assert status["aiokv.granted"].is_ok


@pytest.mark.parametrize("roots", [False, True])
async def test_records_without_a_request_are_roots_or_left_out(exporter, provider, roots):
    async with Served() as served:
        with EngineTracer(served.engine, provider, roots=roots):
            await served.serve(A)
            await served.complete_offloads()
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == ["aiokv.granted", "aiokv.transfer"] * roots
    assert all(span.parent is None for span in spans)


async def test_no_span_after_stop(exporter, provider):
    async with Served(manual=False) as served:
        tracer = EngineTracer(served.engine, provider, roots=True)
        tracer.start()
        with pytest.raises(UsageError, match="was added already"):
            tracer.start()
        tracer.stop()
        tracer.stop()
        await served.serve(A)
        assert not served.engine.inspect.parts.observers.active
    assert exporter.get_finished_spans() == ()


async def test_without_a_provider_the_global_one_is_used():
    async with Served(manual=False) as served:
        with EngineTracer(served.engine, roots=True):
            await served.serve(A)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


async def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    engine = CacheEngine(CacheConfig(device_blocks=8))
    with pytest.raises(ConfigError, match=r"opentelemetry-api.*aiokv\[tracing\]"):
        EngineTracer(engine)
    assert not engine.inspect.parts.observers.active


async def test_a_wrong_flag_is_refused():
    with pytest.raises(ConfigError, match="roots"):
        EngineTracer(CacheEngine(CacheConfig(device_blocks=8)), roots=1)  # type: ignore[arg-type]


async def test_aiokv_alone_does_not_import_opentelemetry():
    code = "import sys, aiokv, aiokv.observe.tracing; print('opentelemetry' in sys.modules)"
    done = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == "False"
