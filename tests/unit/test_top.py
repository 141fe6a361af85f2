"""``aiokv top``: against a real HTTP server with recorded answers, and in a real terminal."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest
from rich.console import Console

from aiokv import cli
from aiokv.cli.top import dump as dump_module
from aiokv.cli.top import show
from aiokv.cli.top.dump import Dump, DumpClient, DumpError, dump_of
from aiokv.cli.top.figures import figures_of
from aiokv.cli.top.screen import screen
from aiokv.errors import UsageError

DATA = Path(__file__).parents[1] / "data"
FIRST, SECOND = ((DATA / f"dump-{number}.json").read_bytes() for number in (1, 2))


class Answers:
    """An HTTP server that gives the answers of a list, the last one again and again.

    Attributes:
        answers: status, headers and body of each.
        requests: path and headers of each request.
    """

    def __init__(self, *answers: bytes | tuple[int, dict[str, str], bytes], port: int = 0) -> None:
        self.answers = [a if isinstance(a, tuple) else (200, {}, a) for a in answers]
        self.requests: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append((self.path, dict(self.headers)))
                many = len(outer.answers) > 1
                status, headers, body = outer.answers.pop(0) if many else outer.answers[0]
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = False  # server_close() waits for them
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def fetch(url: str, timeout: float = 30.0) -> Dump:
    return DumpClient(url, timeout).fetch()


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ("{url}", "/dump"),
        ("{url}/", "/dump"),
        ("127.0.0.1:{port}", "/dump"),
        ("{url}/aiokv", "/aiokv/dump"),
        ("{url}/aiokv/", "/aiokv/dump"),
        ("{url}/aiokv/dump", "/aiokv/dump"),
    ],
)
def test_the_dump_is_read_where_the_app_is_mounted(form, path):
    with Answers(FIRST) as server:
        dump = fetch(form.format(url=server.url, port=server.port))
        assert [where for where, _ in server.requests] == [path]
    assert list(dump.engines) == ["default"]
    assert dump.engines["default"].statistics.attention.device.blocks == 128


def test_a_password_is_sent_and_not_shown():
    with Answers((401, {}, b"")) as server:
        client = DumpClient(f"http://me:s%20x@127.0.0.1:{server.port}", 30.0)
        with pytest.raises(DumpError, match=r"answered 401.*USER:PASSWORD") as caught:
            client.fetch()
        assert server.requests[0][1]["Authorization"] == "Basic bWU6cyB4"
    assert "s%20x" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:y", "http://[", "a b:1"])
def test_what_is_no_url_is_refused(url, capsys):
    with pytest.raises(UsageError, match="URL"):
        DumpClient(url, 1.0)
    assert cli.main(["top", "--once", url]) == 2
    assert capsys.readouterr().err.startswith("aiokv: error: ")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {}, b"no"), r"/dump answered 404 Not Found.*is mounted"),
        ((500, {}, b"no"), "answered 500 Internal Server Error"),
        ((302, {"Location": "/login"}, b""), "answered 302 Found.*redirects to /login"),
        (b"<html>", "is not a dump of aiokv: .*malformed.*is mounted"),
        (b'{"engines": 3}', "is not a dump of aiokv: Expected `object`"),
        (b'{"status": "ok"}', "is not a dump of aiokv: .*missing required field"),
        (b"\xff\xfe", "is not a dump of aiokv"),
        (FIRST[:500], "is not a dump of aiokv"),
        ((200, {"Content-Length": "100000"}, FIRST[:500]), "is not a dump|does not speak HTTP"),
    ],
)
def test_other_answers_are_refused_in_one_line(answer, message, capsys):
    with Answers(answer) as server:
        with pytest.raises(DumpError, match=message):
            fetch(server.url)
        assert cli.main(["top", "--once", server.url]) == 2
    error, *hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"aiokv: error: {server.url}/dump")
    assert len(hint) <= 1


def test_an_answer_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(dump_module, "MAX_BYTES", 1 << 20)
    with Answers(b" " * (3 << 20)) as server, pytest.raises(DumpError, match="larger than 1 MiB"):
        fetch(server.url)


def test_a_server_that_is_down_or_does_not_answer_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(DumpError, match=r"no answer from .* within 0\.2 s"):
            fetch(f"127.0.0.1:{port}", 0.2)
    assert cli.main(["top", f"127.0.0.1:{port}"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"aiokv: error: cannot reach http://127.0.0.1:{port}/dump: Connection refused"
    assert "aiokv.observe.asgi" in hint
    with pytest.raises(DumpError, match="cannot reach"):
        fetch("http://no-such-host.invalid:80")


def test_a_server_of_another_protocol_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(DumpError, match="does not speak HTTP: BadStatusLine"):
            fetch(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


@pytest.fixture
def dumps():
    return tuple(dump_of(body) for body in (FIRST, SECOND))


def test_rates_are_differences_per_second(dumps):
    first, second = (json.loads(body)["engines"]["default"] for body in (FIRST, SECOND))
    seconds = json.loads(SECOND)["time_seconds"] - json.loads(FIRST)["time_seconds"]
    figures = figures_of(dumps[1], dumps[0])["default"]

    def change(*names: str) -> float:
        values = []
        for engine in (first, second):
            value = engine["statistics"]
            for name in names:
                value = value[name]
            values.append(value)
        return values[1] - values[0]

    assert figures.seconds == pytest.approx(seconds)
    recent = figures.recent
    assert recent.prompt_tokens == change("prompt_tokens") > 0
    assert recent.hit_device_tokens == change("hit_device_tokens") > 0
    assert recent.hit_host_tokens == change("hit_host_tokens")
    assert recent.grants == change("grants")
    evicted = change("groups", "attention", "device", "evicted_by_cause", "capacity")
    assert recent.attention.device.evicted_blocks == evicted
    assert recent.poller.busy_seconds == pytest.approx(change("poller", "busy_seconds"))
    onload = recent.worker.attention.onload
    assert onload.done == change("worker", "groups", "attention", "onload", "done")
    assert onload.moved_bytes == change("worker", "groups", "attention", "onload", "moved_bytes")
    statistics = second["statistics"]
    assert figures.total.prompt_tokens == statistics["prompt_tokens"]
    assert recent.leases == figures.total.leases == statistics["leases"], "no counter"
    device = figures.total.attention.device
    assert device.used_share == pytest.approx(
        1 - statistics["groups"]["attention"]["device"]["free"] / 128
    )
    assert device.cached + device.leased + device.in_flight + device.free == 128
    text = rendered(dumps[1], dumps[0])
    assert f"granted {recent.grants / seconds:,.1f}/s, evicted {evicted / seconds:,.1f}/s" in text


def test_there_are_no_rates_without_an_earlier_dump_or_after_a_restart(dumps):
    assert figures_of(dumps[0], None)["default"].recent is None
    restarted = figures_of(dumps[0], dumps[1])["default"]  # time goes backwards, counters too
    assert restarted.recent is None
    later = dumps[0]._replace(time_seconds=dumps[1].time_seconds + 5)
    assert figures_of(later, dumps[1])["default"].recent is None
    other = Dump(dumps[0].time_seconds - 1, {"other": dumps[0].engines["default"]})
    assert figures_of(dumps[0], other)["default"].recent is None


def test_leases_that_wait_come_first_then_the_oldest():
    def lease(owner, age, waits_for=""):
        return {"lease_id": 1, "owner": owner, "age_seconds": age, "waits_for": waits_for}

    leases = [lease("a", 1), lease("b", 5), lease("c", 2, "capacity"), lease("d", 3, "store")]
    body = {
        "time_seconds": 1.0,
        "engines": {
            "x": {
                "statistics": {
                    "groups": {"attention": {"device": {"blocks": 4, "something_new": 5}}},
                    "something_new": {"a": 5},
                    "worker": {
                        "held": 3,
                        "groups": {
                            "attention": {"onload": {}, "offload": {"queued": 1}},
                            "state": {"onload": {"done": 2}},
                        },
                    },
                },
                "leases": leases,
            }
        },
    }
    dump = dump_of(json.dumps(body).encode())
    figures = figures_of(dump, None)["x"]
    assert [lease.owner for lease in figures.leases] == ["d", "c", "b", "a"]
    assert figures.total.attention.device.blocks == 4
    assert figures.total.requests.hold.count == 0
    text = rendered(dump)
    assert "offload" in text
    assert "state onload" in text
    assert "onload " not in text.replace("state onload", "").replace("offload", "")
    assert "0 prompt tokens, - cached" in text


def rendered(dump, before=None, **arguments):
    console = Console(file=io.StringIO(), width=140, highlight=False)
    engines = figures_of(dump, before)
    console.print(screen("title", engines, **{"max_leases": 5} | arguments))
    return console.file.getvalue()


def test_a_screen_has_tiers_hits_routes_stores_and_leases(dumps):
    text = rendered(dumps[1], dumps[0])
    assert "engine default" in text
    assert "tokens/s" in text
    for word in ("device", "host", "onload", "disk:/nvme/kv", "up", "granted"):
        assert word in text
    assert "0.000" not in text
    leases = json.loads(SECOND)["engines"]["default"]["leases"]
    assert sum(lease["owner"] in text for lease in leases) == 5
    assert leases[0]["owner"] not in rendered(dumps[1], max_leases=0)


def test_a_screen_shows_state_slots_open_breakers_and_failures():
    store = {"url": "redis://[bold]x", "reading": "open", "saving": "probing", "failed_blocks": 7}
    body = {
        "time_seconds": 1.0,
        "engines": {
            "x": {
                "statistics": {
                    "groups": {
                        "attention": {"device": {"blocks": 4}},
                        "state": {"device": {"blocks": 8, "free": 2, "cached": 1}},
                    },
                    "stores": [store],
                },
            }
        },
    }
    text = rendered(dump_of(json.dumps(body).encode()))
    assert "redis://[bold]x" in text
    assert " down " in text
    assert " probing " in text
    assert "\nstate " in text
    assert "75.0%" in text
    assert "the server has no engines" in rendered(Dump(1.0, {}))


def test_one_screen_is_printed_where_there_is_no_terminal(capsys):
    with Answers(FIRST, SECOND) as server:
        assert cli.main(["top", server.url]) == 0
        assert len(server.requests) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"{server.url}/dump\n")
    assert "engine default" in printed
    assert "\x1b" not in printed


def test_json_has_a_line_per_answer_and_goes_on_after_a_failure(capsys, monkeypatch):
    sleeps = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    with Answers(FIRST, (503, {}, b""), SECOND) as server:
        assert cli.main(["top", "--json", "--interval", "0.5", server.url]) == 0
    printed = capsys.readouterr()
    first, second = map(json.loads, printed.out.splitlines())
    assert sleeps == [0.5] * 3
    assert first["engines"]["default"]["recent"] is None
    assert second["engines"]["default"]["recent"]["prompt_tokens"] > 0
    assert "answered 503 Service Unavailable" in printed.err


def test_json_can_be_printed_once(capsys):
    with Answers(FIRST) as server:
        assert cli.main(["top", "--json", "--once", server.url]) == 0
    assert json.loads(capsys.readouterr().out)["engines"]["default"]["total"]["leases"] > 0


def test_a_lost_server_is_shown_and_found_again():
    """The server stops behind the first screen, and is back behind the second."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    screens: list[str] = []
    server = Answers(FIRST)
    client = DumpClient(server.url, 30.0)
    running: list[Answers] = [server]

    def sleep(seconds: float) -> None:
        screens.append(console.file.getvalue())
        console.file.seek(0)
        console.file.truncate()
        if len(screens) == 1:
            running.pop().close()
        elif len(screens) == 2:
            running.append(Answers(SECOND, port=server.port))
        elif len(screens) == 3:
            raise KeyboardInterrupt

    dump = client.fetch()
    arguments = argparse.Namespace(interval=1.0, leases=5)
    try:
        with pytest.raises(KeyboardInterrupt):
            show(console, client, dump, arguments, sleep)
    finally:
        for each in running:
            each.close()
    first, lost, found = screens
    assert "trying again" not in first
    assert "lost 0 s ago, trying again: cannot reach" in lost
    assert "engine default" in lost  # the last known state
    assert "trying again" not in found
    assert "tokens/s" in found
    assert console.file.getvalue().endswith("\x1b[?25h\x1b[?1049l")


@pytest.mark.parametrize(("height", "leases"), [(5, 0), (15, 0), (16, 1), (20, 5), (40, 6)])
def test_leases_fill_the_lines_that_the_tables_leave(height, leases):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=height)

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    arguments = argparse.Namespace(interval=1.0, leases=100)
    with Answers(FIRST) as server:
        client = DumpClient(server.url, 5.0)
        with pytest.raises(KeyboardInterrupt):
            show(console, client, client.fetch(), arguments, sleep)
    owners = {lease["owner"] for lease in json.loads(FIRST)["engines"]["default"]["leases"]}
    text = console.file.getvalue()
    assert sum(owner in text for owner in owners) == leases
    assert ("waits for" in text) == (leases > 0)  # the names of the columns


def read_until(terminal: int, wanted: bytes, seen: bytes = b"") -> bytes:
    while wanted not in seen:
        assert select.select([terminal], [], [], 60)[0], f"no output: {seen[-500:]!r}"
        try:
            chunk = os.read(terminal, 65_536)
        except OSError:  # the process has ended
            chunk = b""
        assert chunk, f"ended without {wanted!r}: {seen[-500:]!r}"
        seen += chunk
    return seen


def _take_terminal() -> None:
    """Let Ctrl-C of the terminal reach this process, even if a shell ignores it for the tests."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_leaves_the_terminal_clean():
    parent, child = pty.openpty()
    with Answers(FIRST, SECOND) as server:
        before = termios.tcgetattr(child)
        process = subprocess.Popen(
            [sys.executable, "-m", "aiokv", "top", "--interval", "0.01", server.url],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        )
        try:
            seen = read_until(parent, b"tokens/s")
            assert b"\x1b[?1049h" in seen  # the alternate screen
            os.write(parent, b"\x03")
            read_until(parent, b"\x1b[?25h\x1b[?1049l")  # the cursor, and the usual screen
            assert process.wait(60) == 0
            assert termios.tcgetattr(child) == before
        finally:
            process.kill()
            process.wait()
            os.close(parent)
            os.close(child)


def test_control_codes_of_the_server_do_not_reach_the_terminal(dumps):
    state = json.loads(SECOND)
    (engine,) = state["engines"].values()
    engine["leases"] = [{"lease_id": 1, "owner": "[red]\x1b[2Jo\n", "waits_for": "\x1b]0;x\x07"}]
    state["engines"] = {"\x1b[31mname": engine}
    text = rendered(dump_of(json.dumps(state).encode()))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]\ufffd[2Jo\ufffd" in text
