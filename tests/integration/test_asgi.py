"""The ASGI app: paths, methods, headers, probes, mounts, loops, and what it must not show."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import time
import weakref
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from aiokv import CacheConfig, CacheEngine, Peers
from aiokv.errors import ConfigError, DeviceError, TransferError
from aiokv.observe.asgi import asgi, failed_checks
from aiokv.observe.snapshot import hidden, snapshot, without_credentials
from aiokv.statistics import Inspection
from aiokv.testing import ManualDevice, ScriptedStore, run_until_idle, running_clock, spin
from tests.harness.served import Served, begin

pytestmark = pytest.mark.asyncio

TOKENS = [70_001, 70_002, 70_003, 70_004, 70_005, 70_006, 70_007]
SECRET = "correct horse battery staple"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def ask(app, path: str, method: str = "GET", *, query: bytes = b"", **scope: Any) -> Answer:
    """Call an ASGI app as a server does."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    http = {"type": "http", "method": method, "path": path, "query_string": query, "headers": []}
    await app({**http, **scope}, receive, send)
    start, *bodies = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert len(headers) == len(start["headers"])
    return Answer(start["status"], headers, b"".join(body["body"] for body in bodies))


def new_engine(**config: Any) -> CacheEngine:
    return CacheEngine(CacheConfig(device_blocks=8, host_blocks=8, block_tokens=2, **config))


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
        ("/page.css", "text/css; charset=utf-8"),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
        ("/dump", "application/json"),
        ("/live", "application/json"),
        ("/healthz", "application/json"),
        ("/readyz", "application/json"),
    ],
)
async def test_each_path_answers_get_and_head_only(path: str, content_type: str):
    async with new_engine() as engine:
        app = asgi(engine)
        answer = await ask(app, path)
        assert (answer.status, answer.headers["content-type"]) == (200, content_type)
        assert int(answer.headers["content-length"]) == len(answer.body) > 0
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not any(name.startswith("access-control") for name in answer.headers)
        head = await ask(app, path, "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            refused = await ask(app, path, method)
            assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")


async def test_unknown_paths_name_the_known_ones():
    answer = await ask(asgi(new_engine()), "/nope")
    assert answer.status == 404
    assert b"/metrics" in answer.body
    assert (await ask(asgi(new_engine()), "/page/index.html")).status == 404


@pytest.mark.parametrize("includes_root", [True, False])
async def test_paths_below_a_mount_point(includes_root: bool):
    """Servers and frameworks differ in whether ``path`` includes ``root_path``."""
    app = asgi(new_engine())
    root = "/ops/aiokv"
    before = root if includes_root else ""
    for path in ("/", "/page.js", "/healthz"):
        assert (await ask(app, before + path, root_path=root)).status == 200
    if includes_root:
        moved = await ask(app, root, root_path=root)
        assert (moved.status, moved.headers["location"]) == (307, "aiokv/")


async def test_the_app_is_mounted_under_a_prefix_of_starlette():
    async with new_engine() as engine:
        app = Starlette(routes=[Mount("/aiokv", asgi(engine))])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            page = await client.get("/aiokv", follow_redirects=True)
            assert (page.status_code, page.url.path) == (200, "/aiokv/")
            for path in re.findall(r'(?:href|src)="([^"]*)"', page.text):
                if not path.startswith("data:"):
                    found = await client.get(page.url.join(path))
                    assert found.status_code == 200, path
            assert (await client.get("/aiokv/live?after=1")).json()["failed"] == {"default": {}}
            assert (await client.get("/metrics")).status_code == 404


async def test_the_page_loads_nothing_from_elsewhere():
    app = asgi(new_engine())
    page = await ask(app, "/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in ("/", "/page.css", "/page.js"):
        text = (await ask(app, path)).body.decode()
        links = set(re.findall(r"https?://[^\s\"']+", text))
        assert links <= {"http://www.w3.org/2000/svg"}  # a name, which nothing fetches


async def test_lifespan_and_other_scopes():
    app = asgi(new_engine())
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[str] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    messages = iter([{"type": "websocket.connect"}])
    await app({"type": "websocket", "path": "/live"}, receive, send)
    assert sent[-1] == "websocket.close"
    with pytest.raises(ValueError, match="'mqtt'"):
        await app({"type": "mqtt"}, receive, send)


async def test_an_engine_that_was_closed_before_it_was_opened_is_not_ready():
    engine = CacheEngine(CacheConfig(device_blocks=1))
    await engine.aclose()
    assert engine.loop is None
    for path, status in (("/readyz", 503), ("/healthz", 200), ("/metrics", 200), ("/live", 200)):
        assert (await ask(asgi(engine), path)).status == status


async def test_bad_arguments_are_refused():
    for wrong in ({"a": 3}, {1: CacheEngine(CacheConfig(device_blocks=1))}):
        with pytest.raises(ConfigError, match=r"engines has .*; it must map str to CacheEngine"):
            asgi(wrong)
    with pytest.raises(ConfigError, match="engines is 3"):
        asgi(3)  # type: ignore[arg-type]


# --- probes ---------------------------------------------------------------------------------------


async def test_readiness_follows_the_life_of_an_engine():
    device = ManualDevice()
    device.unpinned_bytes = 4096
    served = Served()
    engine = CacheEngine(
        CacheConfig(device_blocks=8, host_blocks=8, block_tokens=2), served.memory.regions, device
    )
    app = asgi({"chat": engine})

    async def failed() -> dict[str, str]:
        answer = await ask(app, "/readyz")
        assert answer.json()["ready"] == (answer.status == 200)
        checks: dict[str, str] = answer.json()["failed"]["chat"]
        assert bool(checks) == (answer.status == 503)
        return checks

    assert (await failed())["open"] == "the engine is new"
    async with engine:
        assert await failed() == {"pinned": "4096 bytes of host memory are not page-locked yet"}
        device.unpinned_bytes = 0
        assert await failed() == {}
        engine.pause()
        assert await failed() == {}
        engine.resume()
        await engine.sleep(["host"])
        assert await failed() == {"awake": "asleep: host"}
        await engine.wake_up()
        assert await failed() == {}
    assert await failed() == {"open": "the engine is closed"}
    assert (await ask(app, "/healthz")).status == 200


async def test_no_engine_is_not_ready():
    assert (await ask(asgi({}), "/readyz")).status == 503
    assert (await ask(asgi({}), "/healthz")).status == 200
    assert (await ask(asgi({}), "/metrics")).status == 200


async def test_a_broken_engine_is_neither_healthy_nor_ready():
    async with Served() as served:
        app = asgi(served.engine)
        assert (await ask(app, "/healthz")).json() == {"ok": True, "broken": {}}
        await served.to_host(TOKENS)
        lease = await served.engine.match(TOKENS).allocate(7)
        served.device.failure = DeviceError("the GPU is gone", cuda_code=719)
        served.device.onloads[0].fail_all(block=1)
        with pytest.raises(TransferError):
            await lease.layers.wait_all()
        health = await ask(app, "/healthz")
        assert (health.status, list(health.json()["broken"])) == (503, ["default"])
        assert "the GPU is gone" in health.json()["broken"]["default"]
        assert "working" in (await ask(app, "/readyz")).json()["failed"]["default"]
        assert 'aiokv_failed{engine="default"} 1\n' in (await ask(app, "/metrics")).body.decode()
        lease.release()


async def test_an_unavailable_store_is_named_without_its_password():
    store = ScriptedStore()
    store.url = f"memory://user:{SECRET}@host/0?key={SECRET}"
    async with Served(stores=[store], manual=False) as served:
        app = asgi(served.engine)
        assert failed_checks(served.engine) == {}
        store.fail("lookup")
        for _ in range(3):
            async with served.engine.match(TOKENS) as lease:
                await lease.allocate(7, wait_store=1)
        answer = await ask(app, "/readyz")
        assert answer.json()["failed"]["default"] == {"stores": "unavailable: memory://host/0"}
        assert (answer.status, answer.json()["ready"]) == (200, True)  # requests are served
        (shown,) = (await ask(app, "/dump")).json()["engines"]["default"]["statistics"]["stores"]
        assert (shown["url"], shown["reading"]) == ("memory://host/0", "open")


# --- what is shown --------------------------------------------------------------------------------


async def test_a_dump_has_the_documented_parts():
    async with Served(device_blocks=8) as served:
        await served.to_host(TOKENS)
        loading = await served.engine.match(TOKENS, owner="loading").allocate(7)
        large = served.engine.match(range(100, 114), owner="large")
        task = await begin(served, large.allocate(14))
        dump = (await ask(asgi({"chat": served.engine}), "/dump")).json()
        assert dump["time_seconds"] > 1e9
        engine = dump["engines"]["chat"]
        assert set(engine) == {
            "health", "config", "statistics", "leases", "waiting", "transfers", "prefixes",
            "prefixes_complete",
        }  # fmt: skip
        assert engine["config"]["device_blocks"] == 8
        assert [lease["owner"] for lease in engine["waiting"]] == ["large"]
        assert {lease["owner"]: lease["waits_for"] for lease in engine["leases"]} == {
            "large": "capacity",
            "loading": "onload",
        }
        (transfer,) = engine["transfers"]
        assert (transfer["route"], transfer["outcome"], transfer["blocks"]) == ("onload", "open", 3)
        assert abs(transfer["queued_seconds"] - dump["time_seconds"]) < 60
        assert engine["prefixes"][0]["host_blocks"] == 3
        assert set(engine["leases"][0]) >= {
            "lease_id", "owner", "state", "prompt_tokens", "cached_tokens", "blocks",
            "age_seconds", "waits_for",
        }  # fmt: skip
        task.cancel()
        await asyncio.wait([task])
        served.device.complete_all()
        await served.settle()
        loading.release()
        large.release()


async def test_neither_tokens_nor_secrets_nor_salts_are_shown():
    peers = Peers(secret=SECRET)
    store = ScriptedStore()
    store.url = f"memory://user:{SECRET}@host/0"
    async with Served(manual=False) as served:
        engine = CacheEngine(
            CacheConfig(
                device_blocks=8, host_blocks=8, block_tokens=2, model="m", salt_quota_blocks=8
            ),
            served.memory.regions,
            stores=[store],
            peers=peers,
        )
    async with engine:
        lease = engine.match(TOKENS, salt="tenant-7", adapter="adapter-7", owner="request-7")
        await lease.allocate(7)
        lease.commit(7)
        app, open_app = asgi(engine), asgi(engine, show_salts=True)
        for path in ("/dump", "/live", "/metrics", "/readyz", "/healthz"):
            text = (await ask(app, path)).body.decode()
            for hidden_text in (SECRET, "tenant-7", "adapter-7", *map(str, TOKENS)):
                assert hidden_text not in text, path
        for shown_by, label in ((app, hidden("tenant-7")), (open_app, "tenant-7")):
            metrics = (await ask(shown_by, "/metrics")).body.decode()
            assert f'aiokv_salt_blocks{{engine="default",salt="{label}"}} 4' in metrics
        shown = (await ask(open_app, "/dump")).json()["engines"]["default"]["prefixes"]
        assert [(prefix["salt"], prefix["adapter"]) for prefix in shown] == [
            ("tenant-7", "adapter-7")
        ]
        (prefix,) = (await ask(app, "/dump")).json()["engines"]["default"]["prefixes"]
        assert prefix["salt"] == hidden("tenant-7") != hidden("adapter-7") == prefix["adapter"]
        lease.release()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@h:1/0", "redis://h:1/0"),
        ("s3://bucket/prefix?key=pw", "s3://bucket/prefix"),
        ("disk:/nvme/kv?bytes=1", "disk:/nvme/kv"),
        ("redis://a:p@w@[::1", "redis"),
        ("", ""),
    ],
)
async def test_urls_are_shown_without_credentials(url: str, shown: str):
    assert without_credentials(url) == shown


# --- the live page's questions --------------------------------------------------------------------


@pytest.mark.clock
async def test_an_engine_has_an_observer_only_while_a_page_asks(monkeypatch):
    records: list[object] = []
    add_observer = Inspection.add_observer

    def add_noted(inspection: Inspection, observer: Any) -> None:
        def noted(record: Any, context: Any) -> None:
            records.append(record)
            observer(record, context)

        monkeypatch.setattr(
            inspection, "remove_observer", lambda _: remove_observer(inspection, noted)
        )
        add_observer(inspection, noted)

    remove_observer = Inspection.remove_observer
    monkeypatch.setattr(Inspection, "add_observer", add_noted)
    async with Served() as served:
        app = asgi(served.engine)

        async def transfers(after: float = -1) -> list[dict[str, Any]]:
            answer = (await ask(app, "/live", query=f"after={after}".encode())).json()
            found: list[dict[str, Any]] = answer["engines"]["default"]["transfers"]
            return found

        async def save(first: int) -> None:
            await served.serve([first, *TOKENS])
            await served.complete_offloads()

        await save(1)
        assert await transfers() == []  # ended before the first question
        await save(2)
        (first,) = await transfers()
        assert (first["route"], first["outcome"]) == ("offload", "done")
        await running_clock().advance(4)
        assert len(await transfers()) == 1  # still observed
        await running_clock().advance(6)  # no page asks for longer than five seconds
        seen = len(records)
        await save(3)
        assert len(records) == seen > 0
        assert await transfers() == []


@pytest.mark.clock
async def test_ten_minutes_of_history_precede_the_first_page():
    async with Served(device_blocks=32) as served:
        app = asgi(served.engine)

        async def history(after: float = -1) -> tuple[list[dict[str, float]], float]:
            answer = (await ask(app, "/live", query=f"after={after}".encode())).json()
            found = answer["engines"]["default"]["history"]
            return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]], answer[
                "after"
            ]

        assert (await history())[0] == []
        await running_clock().advance(1)
        await served.serve(TOKENS)
        await served.serve(TOKENS)
        running = await served.engine.match(range(100, 140)).allocate(40)
        waiting = served.engine.match(range(200, 240))
        task = await begin(served, waiting.allocate(40))
        await running_clock().advance(2)
        rows, cursor = await history()
        assert [row["prompt_tokens"] for row in rows] == [0, 54, 54]
        assert [row["hit_device_tokens"] for row in rows] == [0, 6, 6]
        assert [(row["leases"], row["waiting"]) for row in rows] == [(0, 0), (2, 1), (2, 1)]
        assert all(abs(row["time_seconds"] - time.time()) < 60 for row in rows)
        assert [row["time_seconds"] for row in rows] == sorted(row["time_seconds"] for row in rows)
        assert (await history(cursor + 3600))[0] == []
        task.cancel()
        await asyncio.wait([task])
        waiting.release()
        running.release()
        for _ in range(700):
            await running_clock().advance(1)
        assert len((await history())[0]) == 600
    await running_clock().advance(2)
    assert running_clock().timers == 0


@pytest.mark.clock
async def test_an_app_without_a_running_loop_samples_from_its_first_request():
    engine = new_engine()
    app = await asyncio.to_thread(asgi, engine)
    async with engine:
        assert running_clock().timers == 0
        await ask(app, "/readyz")
        await running_clock().advance(3)
        rows = (await ask(app, "/live")).json()["engines"]["default"]["history"]["rows"]
        assert len(rows) == 3


@pytest.mark.clock
async def test_an_engine_that_is_entered_later_is_sampled():
    engine = new_engine()
    app = asgi(engine)
    await running_clock().advance(3)
    async with engine:
        await running_clock().advance(2)
        rows = (await ask(app, "/live")).json()["engines"]["default"]["history"]["rows"]
        assert len(rows) == 2


async def test_a_cursor_leaves_out_transfers_that_were_seen():
    async with Served() as served:
        app = asgi(served.engine)
        assert (await ask(app, "/live")).json()["engines"]["default"]["transfers"] == []
        await served.serve(TOKENS)
        await served.complete_offloads()
        answer = (await ask(app, "/live", query=b"after=nonsense")).json()
        assert len(answer["engines"]["default"]["transfers"]) == 1
        late = f"after={answer['after'] + 3600}".encode()
        assert (await ask(app, "/live", query=late)).json()["engines"]["default"]["transfers"] == []


async def test_a_page_may_ask_before_and_after_the_engine_is_open():
    engine = new_engine()
    app = asgi(engine)
    assert (await ask(app, "/live")).json()["failed"]["default"] == {"open": "the engine is new"}
    async with engine:
        assert (await ask(app, "/live")).json()["failed"]["default"] == {}
    assert (await ask(app, "/live")).status == 200
    assert (await ask(app, "/dump")).json()["engines"]["default"]["transfers"] == []


async def test_an_engine_that_replaces_another_under_its_name_is_shown():
    engines: dict[str, CacheEngine] = {}
    app = asgi(engines)
    for blocks in (8, 16):
        engine = CacheEngine(CacheConfig(device_blocks=blocks))
        async with engine:
            engines["chat"] = engine
            shown = (await ask(app, "/live")).json()["engines"]["chat"]
            assert shown["statistics"]["groups"]["attention"]["device"]["blocks"] == blocks


@pytest.mark.clock
async def test_an_engine_that_was_removed_is_not_kept():
    engines = {"chat": new_engine()}
    async with engines["chat"] as engine:
        app = asgi(engines)
        await ask(app, "/live")
    gone = weakref.ref(engine)
    del engine
    engines.clear()
    await running_clock().advance(6)
    gc.collect()
    assert gone() is None


async def test_another_loop_gets_the_page_and_a_reason():
    async with new_engine() as engine:
        app = asgi({"chat": engine})
        answers: dict[str, Answer] = {}

        async def ask_all() -> None:
            for path in ("/", "/metrics", "/dump", "/live", "/healthz", "/readyz"):
                answers[path] = await ask(app, path)

        thread = threading.Thread(target=asyncio.run, args=(ask_all(),))
        thread.start()
        while thread.is_alive():
            await spin(1)
        thread.join()
        assert answers.pop("/").status == 200
        assert {answer.status for answer in answers.values()} == {503}
        assert all(b"event loop" in answer.body for answer in answers.values())
        assert all(b"'chat'" in answer.body for answer in answers.values())


async def test_a_snapshot_of_many_leases_is_bounded():
    async with new_engine(write_policy="none") as engine:
        leases = [engine.match([i, i + 1, i + 2]) for i in range(1000)]
        shown = snapshot(engine)
        assert (len(shown["leases"]), shown["statistics"]["leases"]) == (128, 1000)
        assert shown["waiting"] == []
        for lease in leases:
            lease.release()


# --- events ---------------------------------------------------------------------------------------


class Client:
    """A client of a stream, which reads when the test says so."""

    def __init__(self, app: Any, query: bytes = b"", method: str = "GET") -> None:
        self.parts: list[bytes] = []
        self.started: dict[str, Any] = {}
        self.ended = False
        self.error: BaseException | None = None  # raised by the next `send`
        self._left = asyncio.Event()
        scope = {"type": "http", "method": method, "path": "/events", "query_string": query}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.error is not None:
            raise self.error
        if message["type"] == "http.response.start":
            self.started = message
        else:
            self.parts.append(message["body"])
            self.ended = not message.get("more_body", False)

    def leave(self) -> None:
        self._left.set()

    @property
    def events(self) -> list[dict[str, Any]]:
        batches = [part for part in self.parts if part.startswith(b"event: batch\ndata: ")]
        assert all(part.endswith(b"\n\n") and part.count(b"\n") == 3 for part in batches)
        return [
            event for part in batches for event in json.loads(part.split(b"data: ")[1])["events"]
        ]


async def test_events_are_streamed_without_tokens_until_the_client_leaves():
    async with Served(write_policy="none") as served:
        client = Client(asgi(served.engine))
        await spin(5)
        headers = dict(client.started["headers"])
        assert client.started["status"] == 200
        assert headers[b"content-type"] == b"text/event-stream"
        assert b"content-length" not in headers
        lease = served.engine.match(TOKENS, salt="tenant-7", adapter="adapter-7")
        await lease.allocate(7)
        lease.commit(7)
        lease.release()
        await spin(5)
        (stored,) = client.events
        assert stored == {
            "type": "BlockStored",
            "medium": "GPU",
            "block_hashes": stored["block_hashes"],
            "parent_block_hash": None,
            "block_size": 2,
            "lora_name": hidden("adapter-7"),
        }
        assert [len(value) for value in stored["block_hashes"]] == [16, 16, 16]
        await served.engine.reset()
        await spin(5)
        assert client.events[1:] == [{"type": "AllBlocksCleared"}]
        assert not client.ended
        client.leave()
        await client.task
        assert client.ended
        text = b"".join(client.parts)
        assert not any(str(token).encode() in text for token in TOKENS)
        assert b"tenant-7" not in text


async def test_a_stream_ends_with_the_engine():
    async with new_engine() as engine:
        client = Client(asgi(engine))
        await spin(5)
        assert not client.task.done()
    await client.task
    assert client.ended
    assert client.events == [{"type": "AllBlocksCleared"}]


async def test_streams_end_when_the_server_shuts_down():
    async with Served(write_policy="none") as served:
        app = asgi(served.engine)
        clients = [Client(app), Client(app)]
        await spin(5)
        app.end_streams()
        for client in clients:
            await client.task
            assert client.ended
        await served.serve(TOKENS)
        await spin(5)
        assert clients[0].events == []
        app.end_streams()


async def test_a_stream_ends_when_its_client_cannot_be_reached():
    async with Served(write_policy="none") as served:
        client = Client(asgi(served.engine))
        await spin(5)
        client.error = OSError("the connection is lost")
        await served.serve(TOKENS)
        await client.task
        assert client.events == []


async def test_a_cancelled_stream_leaves_nothing_behind():
    async with Served(write_policy="none") as served:
        client = Client(asgi(served.engine))
        await spin(5)
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        await served.serve(TOKENS)
        await spin(5)
        assert client.events == []


@pytest.mark.clock
async def test_a_silent_stream_is_kept_alive():
    async with new_engine() as engine:
        client = Client(asgi(engine))
        await running_clock().advance(46)
        assert client.parts == [b": keep-alive\n\n"] * 3
        client.leave()
        await client.task
        assert running_clock().timers == 1  # of the next samples


async def test_the_engine_of_a_stream_is_named_in_the_query():
    async with new_engine() as chat, new_engine() as code:
        app = asgi({"chat": chat, "code": code})
        for query in (b"", b"engine=other"):
            answer = await ask(app, "/events", query=query)
            assert answer.status == 404
            assert b"['chat', 'code']" in answer.body
        client = Client(app, b"engine=code")
        await spin(5)
        assert client.started["status"] == 200
        client.leave()
        await client.task
        head = Client(app, b"engine=code", "HEAD")
        await head.task
        assert (head.started["status"], head.parts) == (200, [b""])
    assert (await ask(app, "/events", query=b"engine=chat")).status == 503
    assert (await ask(app, "/events", "POST", query=b"engine=chat")).status == 405


async def test_a_real_server_streams_events_and_notices_that_the_client_leaves():
    async with Served(write_policy="none") as served:
        server = uvicorn.Server(uvicorn.Config(asgi(served.engine), port=0, log_config=None))
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: test\r\n\r\n")
        await served.serve(TOKENS)
        await reader.readuntil(b"event: batch\ndata: ")
        assert len(server.server_state.tasks) == 1
        writer.close()
        await run_until_idle(lambda: not server.server_state.tasks)
        server.should_exit = True
        await task
