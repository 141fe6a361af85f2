"""KV events over ZeroMQ: frames, lost messages and their replay, late subscribers, errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import UsageError
from aiokv.events import ZmqPublisher
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import BLOCK_TOKENS, prompt
from tests.harness.events import Receiver
from tests.models.kv_events import View, index_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ANY_PORT = "tcp://127.0.0.1:0"


def config(**more: Any) -> CacheConfig:
    return CacheConfig(
        **{"block_tokens": BLOCK_TOKENS, "device_blocks": 64, "host_blocks": 16, **more}
    )


async def compute(engine: CacheEngine, seed: int, blocks: int = 4) -> None:
    tokens = prompt(seed, blocks)
    async with engine.match(tokens) as lease:
        await lease.allocate(len(tokens))
        lease.commit(len(tokens))
        engine.step()


@asynccontextmanager
async def receiving(publisher: ZmqPublisher, **options: Any) -> AsyncIterator[Receiver]:
    receiver = Receiver(publisher, **options)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not publisher.statistics().snapshots:  # noqa: ASYNC110 - its subscription
                await asyncio.sleep(0)
        yield receiver
    finally:
        receiver.close()


def publisher_of(engine: CacheEngine, **options: Any) -> ZmqPublisher:
    return ZmqPublisher(engine, **{"bind": ANY_PORT, "replay": ANY_PORT, "topic": "kv", **options})


@pytest.mark.asyncio
@pytest.mark.parametrize("layout", ["map", "array"])
async def test_receiver_follows_the_index(layout: str):
    async with (
        CacheEngine(config()) as engine,
        publisher_of(engine, layout=layout) as publisher,
        receiving(publisher, layout=layout) as receiver,
    ):
        for seed in range(40):
            await compute(engine, seed)
            if seed % 10 == 0:
                await receiver.catch_up(engine.inspect.parts.scheduler.read)
        await engine.evict(20)
        await engine.drain()
        await receiver.catch_up(engine.inspect.parts.scheduler.read)
        await engine.reset()
        await receiver.catch_up(engine.inspect.parts.scheduler.read)
        assert receiver.view.clears == 1
        assert receiver.lost == []


@pytest.mark.asyncio
async def test_lost_messages_are_replayed():
    async with (
        CacheEngine(config(host_blocks=0)) as engine,
        publisher_of(engine) as publisher,
        receiving(publisher) as receiver,
    ):
        await compute(engine, 1)
        await receiver.catch_up(engine.inspect.parts.scheduler.read)
        for seed in range(2, 30):
            await compute(engine, seed)
            await spin(3)
        lost = [(await receiver.message())[0] for _ in range(20)]
        await compute(engine, 99)
        await receiver.catch_up(engine.inspect.parts.scheduler.read)
        assert receiver.lost == lost
        assert publisher.statistics().replay_requests == 1
        assert publisher.statistics().replayed_batches >= len(lost)


@pytest.mark.asyncio
async def test_replay_has_no_more_batches_than_the_buffer():
    async with (
        CacheEngine(config(host_blocks=0)) as engine,
        publisher_of(engine, buffer_batches=5) as publisher,
        receiving(publisher) as receiver,
    ):
        for seed in range(30):
            await compute(engine, seed)
            await spin(3)
        published = publisher.statistics().published_batches
        assert published > 20
        receiver.next = 0
        assert await receiver.replay() == list(range(published - 5, published))
        receiver.next = published
        assert await receiver.replay() == []


@pytest.mark.asyncio
async def test_late_subscriber_gets_the_blocks_that_are_there():
    async with (
        CacheEngine(config()) as engine,
        publisher_of(engine) as publisher,
        receiving(publisher) as early,
    ):
        for seed in range(20):
            await compute(engine, seed)
        await engine.drain()
        await early.catch_up(engine.inspect.parts.scheduler.read)
        late = Receiver(publisher)
        try:
            sequence, payload = await late.message()
            assert sequence > 0
            late.next = sequence
            late.apply(sequence, payload)
            await late.catch_up(engine.inspect.parts.scheduler.read)
            await compute(engine, 50)
            for receiver in (late, early):
                await receiver.catch_up(engine.inspect.parts.scheduler.read)
            assert early.view.clears == 0
        finally:
            late.close()


@pytest.mark.asyncio
async def test_closed_publisher_reports_that_nothing_is_left():
    async with CacheEngine(config()) as engine:
        publisher = publisher_of(engine)
        async with publisher, receiving(publisher) as receiver:
            await compute(engine, 1)
            await receiver.catch_up(engine.inspect.parts.scheduler.read)
            await publisher.aclose()
            while receiver.view.clears == 0:
                receiver.apply(*await receiver.message())
        await publisher.aclose()
        with pytest.raises(UsageError, match="not open"):
            _ = publisher.address


@pytest.mark.asyncio
async def test_failed_publisher_reports_that_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(batch: object) -> bytes:
        monkeypatch.undo()
        raise ValueError("cannot be encoded")

    async with (
        CacheEngine(config(host_blocks=0)) as engine,
        publisher_of(engine) as publisher,
        receiving(publisher) as receiver,
    ):
        await compute(engine, 1)
        await receiver.catch_up(engine.inspect.parts.scheduler.read)
        monkeypatch.setattr(publisher, "_encode", fail)
        await compute(engine, 2)
        while not receiver.view.clears:
            receiver.apply(*await receiver.message())
        assert not any(receiver.view.contents().values())
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "events.publisher_failed" in line.getMessage()


@pytest.mark.asyncio
async def test_engine_that_is_closed_first_ends_the_events():
    engine = CacheEngine(config())
    publisher = publisher_of(engine)
    async with engine:
        await publisher.__aenter__()
        await compute(engine, 1)
        await spin(3)
    async with receiving(publisher) as receiver:
        receiver.next = 0
        assert await receiver.replay() == [0, 1]
        assert receiver.view.clears == 1
    await publisher.aclose()


@pytest.mark.asyncio
async def test_subscriber_that_joins_after_the_end_gets_the_last_batch(caplog):
    engine = CacheEngine(config())
    async with AsyncExitStack() as stack:
        async with engine:
            publisher = await stack.enter_async_context(publisher_of(engine))
            await compute(engine, 1)
            await spin(3)
        first = await stack.enter_async_context(receiving(publisher))
        while first.view.clears == 0:
            await first.receive()
        assert (first.next, first.view.contents()) == (2, View().contents())
        second = await stack.enter_async_context(receiving(publisher))
        assert (await second.message())[0] == 1
        assert publisher.statistics().published_batches == 2
    assert "publisher_failed" not in caplog.text


@pytest.mark.asyncio
async def test_subscriber_that_joins_while_the_last_batch_is_sent_gets_it(caplog, monkeypatch):
    engine = CacheEngine(config())
    last_may_go = asyncio.Event()
    async with AsyncExitStack() as stack:
        async with engine:
            publisher = await stack.enter_async_context(publisher_of(engine))
            await compute(engine, 1)
            await spin(3)
            send = publisher._send_again

            async def held_back(sequence: int, payload: bytes) -> None:
                await last_may_go.wait()
                await send(sequence, payload)

            monkeypatch.setattr(publisher, "_send_again", held_back)
        await spin(3)
        assert publisher.statistics().published_batches == 2
        subscriber = await stack.enter_async_context(receiving(publisher))
        monkeypatch.undo()
        last_may_go.set()
        assert (await subscriber.message())[0] == 1
    assert "publisher_failed" not in caplog.text


@pytest.mark.asyncio
async def test_invalid_replay_requests_are_counted_and_do_no_harm(caplog):
    async with (
        CacheEngine(config(host_blocks=0)) as engine,
        publisher_of(engine) as publisher,
        receiving(publisher) as receiver,
    ):
        await compute(engine, 1)
        await receiver.catch_up(engine.inspect.parts.scheduler.read)
        with receiver.context.socket(zmq.DEALER) as dealer:
            dealer.connect(publisher.replay_address)
            for frames in ((b"",), (b"", b"short"), (b"", bytes(8), b"more")):
                await dealer.send_multipart(frames)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while publisher.statistics().invalid_requests < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        receiver.next = 0
        receiver.view = View()
        await receiver.replay()
        assert receiver.view.contents() == index_of(engine.inspect.parts.scheduler.read)
        assert "events.invalid_replay_request" in caplog.text


@pytest.mark.asyncio
async def test_bad_addresses_and_options_are_refused():
    async with CacheEngine(config()) as engine, publisher_of(engine, replay=None) as publisher:
        with pytest.raises(UsageError, match="no such socket"):
            _ = publisher.replay_address
        for wrong, message in (
            ({"bind": "tcp://nowhere"}, "bind is 'tcp://nowhere', which cannot be bound"),
            ({"bind": publisher.address}, "cannot be bound: Address already in use"),
            ({"bind": "tcp://127.0.0.1:65536"}, "its port must be between 0 and 65535"),
            ({"bind": "tcp://*:0", "replay": "tcp://*:99999"}, "replay .* between 0 and 65535"),
            ({"replay": "udp://x"}, "replay is 'udp://x'"),
        ):
            with pytest.raises(UsageError, match=message):
                await publisher_of(engine, **wrong).__aenter__()
        for option in (
            {"layout": "json"}, {"buffer_batches": 0}, {"topic": 5}, {"hashes": "md5"},
            {"bind": None},
        ):  # fmt: skip
            with pytest.raises(UsageError, match=next(iter(option))):
                publisher_of(engine, **option)
        with pytest.raises(UsageError, match="engine is 3; it must be a CacheEngine"):
            ZmqPublisher(3, bind="tcp://127.0.0.1:0")
        with pytest.raises(UsageError, match="entered once"):
            await publisher.__aenter__()


def test_missing_pyzmq_is_a_configuration_error():
    code = (
        "import sys; sys.modules['zmq'] = None\n"
        "from aiokv import CacheConfig, CacheEngine\n"
        "from aiokv.errors import ConfigError\n"
        "from aiokv.events import ZmqPublisher\n"
        "try: ZmqPublisher(CacheEngine(CacheConfig(device_blocks=8)), bind='tcp://*:5557')\n"
        "except ConfigError as error: print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "pip install 'aiokv[events]'"
