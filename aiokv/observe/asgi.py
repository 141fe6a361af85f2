"""An ASGI app with the metrics, probes, state and live page of engines; it has no dependencies.

::

    from aiokv.observe.asgi import asgi

    app = Starlette(routes=[Mount("/aiokv", asgi(engine))])  # or FastAPI, or asgi(engine) alone

| path | answer |
|---|---|
| ``/`` | live page: tiers, hit rates, transfers, leases, hottest prefixes, stores |
| ``/metrics`` | metrics for Prometheus; see :mod:`aiokv.observe.metrics` |
| ``/dump`` | state of the engines as JSON; see :mod:`aiokv.observe.snapshot` |
| ``/healthz`` | 200 while the loop answers and no engine is broken, else 503 |
| ``/readyz`` | 200 while the engines can serve, else 503; JSON names the failed checks |
| ``/events`` | KV events as server-sent events, without token ids; ``?engine=NAME`` of several |
| ``/live`` | data of the live page, read once per second while the page is visible; may change |

The app answers ``GET`` and ``HEAD``, and changes nothing. It sends no CORS headers and has no
authentication: serve it where only operators reach it. Answers contain the owners of leases and the
URLs of stores, but no tokens and no secrets, and of salts and adapters only digests.

The app samples each open engine once per second, for ten minutes of history on the live page: 50 µs
and 38 KiB per engine. The first samples are taken when the app is made on a running loop, else when
the server starts (lifespan), or at the first request, such as a probe. Five seconds after the last
request of a live page, the app stops observing the engine. A stream of ``/events`` ends when its
client disconnects or the engine closes. A server that waits for all connections when it stops has
to call ``app.end_streams()`` first, or needs a limit, such as ``timeout_graceful_shutdown`` of
uvicorn::

    class Server(uvicorn.Server):
        async def shutdown(self, sockets=None):
            app.end_streams()
            await super().shutdown(sockets)

An engine may be used on its event loop only, so the server of the app must run on that loop, as
it does when one process serves requests and this app. On another loop, all paths but the page
itself answer 503. If the engine's loop runs in a separate thread, run the server there, too:
``asyncio.run_coroutine_threadsafe(uvicorn.Server(config).serve(), engine.loop)``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote

import msgspec

from aiokv.errors import ConfigError, UsageError
from aiokv.observe.metrics import CONTENT_TYPE as METRICS_TYPE
from aiokv.observe.metrics import exposition, named_engines
from aiokv.observe.snapshot import hidden, snapshot, without_credentials
from aiokv.observe.watching import PERIOD_SECONDS, Watching

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from aiokv.engine import CacheEngine

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
EVENTS: Final = "text/event-stream"
TOLERATED: Final = {"stores"}  # checks that may fail while the engine serves all requests
PAGE: Final = {  # path -> file in the package, content type
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# The page loads only files of this app and connects only to this app. No script of another origin
# runs.
PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


class Response(NamedTuple):
    """Status, content type, body and further headers of an answer."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


def asgi(
    engines: CacheEngine | Mapping[str, CacheEngine], *, show_salts: bool = False
) -> Application:
    """Return an ASGI app for one engine or several.

    Args:
        engines: an engine, or engines by name. A mapping is read again for each request, so
            engines can be added to it later.
        show_salts: True to show the names of salts and adapters, which may name tenants; False
            for digests of them.

    Raises:
        ConfigError: ``engines`` is neither an engine nor a mapping of names to engines.
    """
    return Application(engines, show_salts=show_salts)


class Application:
    """ASGI 3 application; see :func:`asgi`."""

    def __init__(
        self, engines: CacheEngine | Mapping[str, CacheEngine], *, show_salts: bool
    ) -> None:
        from aiokv import CacheEngine

        if not isinstance(engines, CacheEngine | Mapping):
            raise ConfigError(
                f"engines is {engines!r}; it must be a CacheEngine or a mapping of names to engines"
            )
        self._engines = named_engines(engines)
        given: Mapping[Any, Any] = self._engines
        for name, engine in given.items():
            if not isinstance(name, str) or not isinstance(engine, CacheEngine):
                raise ConfigError(
                    f"engines has {name!r}: {engine!r}; it must map str to CacheEngine"
                )
        self._show_salts = show_salts
        self._watching: dict[str, Watching] = {}  # engines that were open, by name
        self._timer: asyncio.TimerHandle | None = None  # of the next samples
        self._name_of = str if show_salts else hidden
        self._streams: set[asyncio.Future[None]] = set()  # done when the client of a stream leaves
        self._answers: dict[str, Callable[[Scope], Response | CacheEngine]] = {
            "/metrics": self._metrics,
            "/dump": self._dump,
            "/healthz": self._health,
            "/readyz": self._ready,
            "/events": self._events,
            "/live": self._live,
        }
        with suppress(RuntimeError):  # no loop is running
            self._start_sampling()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; see the ASGI specification."""
        self._start_sampling()
        if scope["type"] == "http":
            response = self._answer(scope)
            if isinstance(response, Response):
                await _send(response, send, has_body=scope["method"] != "HEAD")
            else:
                await self._stream(response, scope, receive, send)
        elif scope["type"] == "lifespan":
            await _serve_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            raise ValueError(f"aiokv serves no ASGI scope of type {scope['type']!r}")

    def _answer(self, scope: Scope) -> Response | CacheEngine:
        """Return an answer, or the engine whose events are to be streamed."""
        path, root = _path_in_app(scope)
        if path not in PAGE and path not in self._answers and path != "":
            return _text(404, f"not found: {path}; there are {', '.join(self._paths())}")
        if scope["method"] not in ("GET", "HEAD"):
            return _text(405, "only GET and HEAD are allowed", (b"allow", b"GET, HEAD"))
        if path == "":  # the page's relative URLs need the slash
            # Relative, because a proxy may have removed a part of the path.
            location = f"{quote(root.rpartition('/')[2]) or '.'}/"
            return _text(307, f"see {location}", (b"location", location.encode()))
        if path in PAGE:
            return _page(path)
        if strange := self._on_other_loops():
            return _text(
                503,
                f"engines {strange} belong to another event loop; serve this app on their loop, "
                "see aiokv.observe.asgi",
            )
        try:
            return self._answers[path](scope)
        except UsageError as error:  # its loop was closed before the engine
            return _text(503, str(error))

    async def _stream(
        self, engine: CacheEngine, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Stream the events of an engine."""
        from aiokv.observe.streaming import disconnected, stream_events

        async def write(part: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": more})

        headers = [*_headers(EVENTS), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] != "HEAD":
            gone = asyncio.ensure_future(disconnected(receive))
            self._streams.add(gone)
            gone.add_done_callback(self._streams.discard)
            with suppress(OSError):  # the client has left
                await stream_events(engine, gone, write, self._name_of)
        with suppress(OSError):
            await write(b"", more=False)

    def end_streams(self) -> None:
        """End all streams of ``/events``: the server shuts down. Call it on the loop of the app."""
        for gone in list(self._streams):
            gone.cancel()

    def _start_sampling(self) -> None:
        """Sample the engines once per second until all of them are closed. Idempotent.

        Raises:
            RuntimeError: no loop is running.
        """
        loop = asyncio.get_running_loop()
        if self._timer is None and any(map(_may_serve_here, self._engines.values())):
            self._timer = loop.call_later(PERIOD_SECONDS, self._sample)

    def _sample(self) -> None:
        self._timer = None
        self._start_sampling()
        loop, engines = asyncio.get_running_loop(), dict(self._engines)
        for name, watching in list(self._watching.items()):
            if not _may_serve_here(watching.engine):
                del self._watching[name]
            elif engines.get(name) is not watching.engine:
                self._watching.pop(name).stop()
        for name, engine in engines.items():
            if engine.loop is loop and _may_serve_here(engine):
                watching = self._watch(name, engine)
                watching.sample()
                watching.stop_if_idle(loop.time())

    def _paths(self) -> list[str]:
        return ["/", *self._answers]

    def _on_other_loops(self) -> list[str]:
        """Return the names of engines that belong to another event loop, which may be running."""
        here = asyncio.get_running_loop()
        loops = {name: engine.loop for name, engine in self._engines.items()}
        return [
            name
            for name, loop in loops.items()
            if loop is not None and loop is not here and not loop.is_closed()
        ]

    def _events(self, scope: Scope) -> Response | CacheEngine:
        name = _query(scope).get("engine")
        if name is None and len(self._engines) == 1:
            (name,) = self._engines
        engine = None if name is None else self._engines.get(name)
        if engine is None:
            return _text(404, f"engine is {name!r}; it must be one of {list(self._engines)}")
        if (phase := engine.health().phase) != "open":
            return _text(503, f"the engine is {phase}")
        return engine

    # --- answers --------------------------------------------------------------------------------

    def _metrics(self, scope: Scope) -> Response:
        text = exposition(self._engines, salt_label=self._name_of)
        return Response(200, METRICS_TYPE, text.encode())

    def _dump(self, scope: Scope) -> Response:
        dumps = {
            name: snapshot(engine, show_salts=self._show_salts)
            for name, engine in self._engines.items()
        }
        return _json(200, {"time_seconds": time.time(), "engines": dumps})

    def _live(self, scope: Scope) -> Response:
        now, loop = time.monotonic(), asyncio.get_running_loop()
        after = _number(scope, "after", -math.inf)
        dumps = {}
        for name, engine in self._engines.items():
            watching = self._watch(name, engine)
            transfers = watching.transfers(max(after, now - 60), loop.time())
            dump = snapshot(engine, transfers, show_salts=self._show_salts)
            dumps[name] = {**dump, "history": watching.history(after)}
        failed = {name: failed_checks(engine) for name, engine in self._engines.items()}
        answer = {"time_seconds": time.time(), "failed": failed, "engines": dumps}
        # The next answer repeats one second, because records arrive some time after their end.
        return _json(200, {**answer, "after": now - 1.0})

    def _watch(self, name: str, engine: CacheEngine) -> Watching:
        watching = self._watching.get(name)
        if watching is None or watching.engine is not engine:
            if watching is not None:
                watching.stop()
            watching = Watching(engine)
            if _may_serve_here(engine):
                self._watching[name] = watching
        return watching

    def _health(self, scope: Scope) -> Response:
        failures = {name: engine.health().failure for name, engine in self._engines.items()}
        broken = {name: failure for name, failure in failures.items() if failure}
        return _json(503 if broken else 200, {"ok": not broken, "broken": broken})

    def _ready(self, scope: Scope) -> Response:
        failed = {name: failed_checks(engine) for name, engine in self._engines.items()}
        is_ready = bool(failed) and not any(checks.keys() - TOLERATED for checks in failed.values())
        return _json(200 if is_ready else 503, {"ready": is_ready, "failed": failed})


def _may_serve_here(engine: CacheEngine) -> bool:
    """Return True for an engine that is not closed, and not entered on another loop."""
    if engine.loop not in (None, asyncio.get_running_loop()):
        return False
    try:
        return engine.health().phase not in ("closed", "abandoned")
    except UsageError:  # a failure has left its state unknown
        return False


def failed_checks(engine: CacheEngine) -> dict[str, str]:
    """Return the checks that an engine fails now, each with a sentence about the reason.

    The checks are ``open``, ``working`` (the device and all ranks), ``awake``, ``pinned`` (the
    device has page-locked the host memory), and ``stores`` (no store that the engine uses is
    unavailable). A pause is not a failure. Engines that fail ``stores`` alone serve all requests,
    with fewer hits, so ``/readyz`` answers 200.

    Raises:
        UsageError: the call is made in another thread than that of the engine's loop.
    """
    health = engine.health()
    unavailable = sorted(set(map(without_credentials, health.unavailable_stores)))
    checks = {
        "open": health.phase != "open" and f"the engine is {health.phase}",
        "working": health.failure and f"the engine is broken: {health.failure}",
        "awake": health.asleep and f"asleep: {', '.join(health.asleep)}",
        "pinned": health.unpinned_bytes
        and f"{health.unpinned_bytes} bytes of host memory are not page-locked yet",
        "stores": unavailable and f"unavailable: {', '.join(unavailable)}",
    }
    return {name: str(sentence) for name, sentence in checks.items() if sentence}


def _path_in_app(scope: Scope) -> tuple[str, str]:
    """Return the path below the mount point, and the mount point.

    By the ASGI specification, ``path`` includes ``root_path``; some servers and older frameworks
    leave it out.
    """
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path, root


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))


def _number(scope: Scope, name: str, default: float) -> float:
    """Return a number of the query; ``default`` if there is none."""
    try:
        return float(_query(scope)[name])
    except (KeyError, ValueError):
        return default


@cache
def _page(path: str) -> Response:
    name, content_type = PAGE[path]
    body = files("aiokv.observe").joinpath("page", name).read_bytes()
    policy = (b"content-security-policy", PAGE_POLICY.encode())
    return Response(200, content_type, body, (policy, (b"referrer-policy", b"no-referrer")))


def _json(status: int, value: object) -> Response:
    return Response(status, JSON, msgspec.json.encode(value))


def _text(status: int, text: str, *headers: tuple[bytes, bytes]) -> Response:
    return Response(status, TEXT, f"{text}\n".encode(), headers)


def _headers(content_type: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", content_type.encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]


async def _send(response: Response, send: Send, *, has_body: bool) -> None:
    length = (b"content-length", str(len(response.body)).encode())
    headers = [*_headers(response.content_type), length, *response.headers]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body if has_body else b""})


async def _serve_lifespan(receive: Receive, send: Send) -> None:
    """Answer the messages of a server that starts and stops: there is nothing to do."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
