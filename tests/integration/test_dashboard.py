"""Dashboards, alert rules and documented expressions, evaluated by a real Prometheus server.

The server scrapes an engine that uses all its parts: both tiers, a store, a peer, quotas and
preemption. Each expression must then have a finite result.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
import shutil
import subprocess
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from aiokv import CacheConfig, CacheEngine, Peers, WindowGroup
from aiokv.errors import AllocateTimeout
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.observe.metrics import CONTENT_TYPE, exposition
from aiokv.testing import run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.filled import engine_with, filled_records
from tests.harness.memory import Memory
from tests.harness.patience import STORE_OPTIONS
from tests.peers.engines import SECRET, Side, prompt
from tests.ranks.loopback import Ranked
from tests.stores.servers import HINT, Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy as np

    from aiokv import Lease

DASHBOARD = json.loads((files("aiokv.observe") / "grafana.json").read_text())
VLLM_DASHBOARD = json.loads((files("aiokv.observe") / "grafana-vllm.json").read_text())
ALERTS = Path(str(files("aiokv.observe") / "alerts.yml"))
ROOT = Path(__file__).parents[2]
ALERT_TESTS = ROOT / "tests" / "data" / "alert_tests.yml"
# The engine that uses the part of a row; "decode" for the others.
ENGINES = {"Recurrent state": "hybrid", "Window groups": "hybrid", "Ranks": "ranked"}
LOCAL = WindowGroup(window_tokens=16, device_blocks=8, host_blocks=8)
RANGE = "1m"  # longer than the test

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason=f"Debian's package prometheus is absent; {HINT}",
)


def entries(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows and panels in order; a closed row has its panels inside."""
    return [each for entry in dashboard["panels"] for each in (entry, *entry.get("panels", ()))]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in entries(dashboard) if panel["type"] != "row"]


def documented() -> dict[str, str]:
    """Return the expressions of the table in the documentation, by themselves."""
    page = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    found = re.findall(r"^\| [^|`]+ \| `(.*)` \|$", page, re.MULTILINE)
    assert len(found) > 4
    return {expression: expression for expression in found}


def expressions() -> dict[str, str]:
    """Return the expressions of the dashboards by panel, with the values of their variables."""
    found = {}
    engine = ""
    for panel in entries(DASHBOARD) + entries(VLLM_DASHBOARD):
        if panel["type"] == "row":
            engine = ENGINES.get(panel["title"], "decode")
            continue
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", RANGE).replace("$engine", engine)
            text = text.replace("$instance", ".*").replace("$model", ".*")
            assert "$" not in text, text
            found[f"{panel['title']} {target['refId']}"] = text
    return found


def vllm_metrics() -> list[str]:
    """Return the names of the connector's metrics, read without vLLM."""
    tree = ast.parse((ROOT / "aiokv/connectors/vllm/statistics.py").read_text())
    texts: dict[str, dict[str, str]] = {
        node.target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Dict)
    }
    counters = [f"vllm:aiokv_{name}_total" for name in texts["COUNTERS"]]
    return counters + [f"vllm:aiokv_{name}" for name in texts["GAUGES"]]


def vllm_page(value: int) -> str:
    """Return a page of a vLLM server on which each counter has the same value."""
    own = ["vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"]
    lines = [f'{name}{{model_name="m",engine="0"}} {value}' for name in own + vllm_metrics()]
    bucket = "vllm:time_to_first_token_seconds_bucket"
    lines += [f'{bucket}{{model_name="m",engine="0",le="{le}"}} {value}' for le in ("1", "+Inf")]
    return "\n".join([*lines, ""])


# --- an engine that does everything ---------------------------------------------------------------


class Decode:
    """An engine with a small device tier, a disk store and peers."""

    def __init__(self, folder: Path) -> None:
        self.memory = Memory(16, 4, axes=("tokens", "dim"))
        ring = 8 * (self.memory.regions.payload_bytes + TRAILER_BYTES)
        self.engine = CacheEngine(
            CacheConfig(
                model="m", block_tokens=4, device_blocks=16, host_blocks=16, salt_quota_blocks=14
            ),
            self.memory.regions,
            stores=[f"disk:{folder}?bytes=64MiB&{STORE_OPTIONS}"],
            peers=Peers(
                secret=SECRET, listen="127.0.0.1", ring_bytes=ring, outgoing_bytes=ring,
                chunk_blocks=2,
            ),
        )  # fmt: skip

    async def serve(self, tokens: np.ndarray, **allocate: Any) -> None:
        """Serve a whole request, and wait for the copies that follow from it."""
        async with self.engine.match(tokens, salt="s") as lease:
            await lease.allocate(len(tokens), **allocate)
            await lease.layers.wait_all()
            lease.commit(len(tokens))
        self.engine.step()
        await self.engine.drain()

    async def work(self, prefill: Side) -> None:
        """Let each part of the engine do something."""
        engine = self.engine
        for seed in range(1, 9):
            await self.serve(prompt(21, seed))  # evicts on both tiers
        await self.serve(prompt(21, 8))  # hits the device
        await run_until_idle(lambda: engine.statistics().attention.saved_blocks > 0)
        await engine.evict(16)
        await self.serve(prompt(21, 8))  # hits host memory
        await engine.evict(16)
        await engine.evict(16, tier="host")
        await self.serve(prompt(21, 8), wait_store=30)
        assert engine.statistics().hit_store_tokens > 0
        await self.wait_for_capacity()
        await self.wait_for_another_lease()
        await self.receive(prefill)

    async def wait_for_capacity(self) -> None:
        first = await self.granted(prompt(50, 20))
        async with self.engine.match(prompt(21, 21)) as lease:
            with pytest.raises(AllocateTimeout):
                await lease.allocate(21, timeout=0)
            task = asyncio.ensure_future(lease.allocate(21))
            await spin(2)
            await first.preempt()
            await task
        await first.resume(50)
        first.release()

    async def wait_for_another_lease(self) -> None:
        tokens = prompt(21, 30)
        first = await self.granted(tokens)
        async with self.engine.match(tokens, salt="s") as lease:
            task = asyncio.ensure_future(lease.allocate(21, wait_pending=60))
            await spin(2)
            first.commit(21)
            await task
        first.release()

    async def receive(self, prefill: Side) -> None:
        tokens = prompt(21, 40)
        lease = await self.granted(tokens)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            sent, arrived = await asyncio.gather(
                prefill.prefill(tokens, receiving.ticket, salt="s"), receiving.wait()
            )
        assert sent == (21, None)
        assert arrived == 21
        lease.release()

    async def granted(self, tokens: np.ndarray) -> Lease:
        lease = self.engine.match(tokens, salt="s")
        await lease.allocate(len(tokens))
        await lease.layers.wait_all()
        return lease


# --- the server -----------------------------------------------------------------------------------


class Scraped:
    """A page of metrics, and a Prometheus server that scrapes it each second.

    The page has those of the engines, and those of a vLLM server, which grow by one per scrape.
    """

    def __init__(self, engines: dict[str, CacheEngine], folder: Path) -> None:
        self.engines = engines
        self._folder = folder
        self._answers = 0
        self._open = 0  # connections
        self._scraped = asyncio.Event()
        self._client = httpx.AsyncClient(timeout=PATIENCE_SECONDS)
        self._server = Server(self._command, folder / "log", is_ready=self._is_ready)

    def _command(self, port: int) -> list[str]:
        return [
            "prometheus", f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ]  # fmt: skip

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/-/ready", timeout=PATIENCE_SECONDS).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        page = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = page.sockets[0].getsockname()[1]
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {"job_name": "aiokv", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            ],
        }
        (self._folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        await asyncio.to_thread(self._server.start)
        try:
            async with self._client:
                yield
        finally:
            self._server.kill()
            page.close()
            await page.wait_closed()
            await run_until_idle(lambda: self._open == 0)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            await self._answer_with(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the server was killed
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._open -= 1

    async def _answer_with(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self._answers += 1
        body = (exposition(self.engines) + vllm_page(self._answers)).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await writer.drain()
        self._scraped.set()

    async def get(self, path: str, **parameters: Any) -> Any:
        """Return the data of a reply of the server's interface."""
        reply = (await self._client.get(f"{self._url}/api/v1/{path}", params=parameters)).json()
        assert reply["status"] == "success", f"{parameters}: {reply}"
        return reply["data"]

    async def values(self, expression: str, at: float | None = None) -> list[float]:
        """Return the values of an expression, now or at a time."""
        when = {} if at is None else {"time": at}
        data = await self.get("query", query=expression, **when)
        return [float(result["value"][1]) for result in data["result"]]

    async def next_sample(self) -> float:
        """Wait for a successful scrape that begins from now on; return its time."""
        (began,) = await self.values("vector(time())")
        while True:
            self._scraped.clear()
            await self._scraped.wait()
            for time in await self.values('timestamp(up{job="aiokv"} == 1)'):
                if time > began:
                    return time


@needs_prometheus
@pytest.mark.loop("asyncio")
@pytest.mark.asyncio
async def test_each_expression_has_a_finite_result(tmp_path: Path):
    decode = Decode(tmp_path / "store")
    hybrid = CacheConfig(
        device_blocks=8, host_blocks=8, state_slots=4, host_state_slots=2, windows={"local": LOCAL}
    )
    async with (
        decode.engine,
        Side(listen=None) as prefill,
        CacheEngine(hybrid) as hybrid_engine,
        Ranked(tmp_path, new_device=None) as ranked,
    ):
        engines = {
            "decode": decode.engine,
            "prefill": prefill.engine,
            "hybrid": hybrid_engine,
            "ranked": ranked.engine,
        }
        scraped = Scraped(engines, tmp_path)
        async with scraped.running():
            await scraped.next_sample()
            await decode.work(prefill)
            ranked.pass_time(1.0)  # a heartbeat: the statistics of the ranks
            await run_until_idle(lambda: ranked.engine.statistics().ranks)
            await scraped.next_sample()
            at = await scraped.next_sample()
            bad = {}
            for name, expression in (expressions() | documented()).items():
                values = await scraped.values(expression, at)
                if not values or not all(map(math.isfinite, values)):
                    bad[name] = (expression, values)
            assert bad == {}
            assert await asyncio.to_thread(lint, exposition(scraped.engines)) == ""
            groups = (await scraped.get("rules", type="alert"))["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert {rule["name"] for rule in rules} == set(alerts())
            assert [
                (rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"
            ] == []


def lint(text: str) -> str:
    """Return what promtool finds wrong with an exposition."""
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


# --- the files ------------------------------------------------------------------------------------


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", ALERTS.read_text())


def test_the_dashboard_has_a_row_for_each_part():
    rows = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] == "row"}
    closed = ["Stores", "Peers", "Recurrent state", "Window groups", "Ranks"]
    assert [*rows] == [
        "Hit rate by tier", "Occupancy", "Transfers", "Waits", "Leases", "Poller", *closed,
    ]  # fmt: skip
    ids = [panel["id"] for panel in entries(DASHBOARD)]
    assert len(ids) == len(set(ids))
    for shown in (DASHBOARD["panels"], *(row["panels"] for row in rows.values())):
        places = [tuple(panel["gridPos"].values()) for panel in shown]
        assert len(places) == len(set(places))
    # A part that an engine may not have takes one line, and sends no queries, until it is opened.
    assert [title for title, row in rows.items() if row["collapsed"]] == closed
    assert all(bool(row["panels"]) == row["collapsed"] for row in rows.values())
    assert DASHBOARD["panels"][-len(closed) :] == [rows[title] for title in closed]
    assert all(panel["description"].endswith(".") for panel in panels(DASHBOARD))
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {
        "datasource", "instance", "engine",
    }  # fmt: skip


def test_dashboard_of_vllm_shows_each_metric_of_the_connector():
    shown = re.findall(r"vllm:aiokv_\w+", " ".join(expressions().values()))
    assert set(shown) == set(vllm_metrics())
    ids = [panel["id"] for panel in entries(VLLM_DASHBOARD)]
    places = [tuple(panel["gridPos"].values()) for panel in entries(VLLM_DASHBOARD)]
    assert len(set(ids)) == len(ids) == len(set(places))
    assert all(panel["description"].endswith(".") for panel in panels(VLLM_DASHBOARD))


def test_dashboards_and_alerts_name_metrics_that_exist():
    text = exposition(engine_with(filled_records()))
    known = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    known |= {f"{name}_{end}" for name in known for end in ("bucket", "count", "sum")}
    used = set(
        re.findall(r"(?:vllm:)?aiokv_\w+", " ".join(expressions().values()) + ALERTS.read_text())
    )
    assert used - known - set(vllm_metrics()) == set()


@needs_prometheus
def test_each_alert_fires_in_its_test_and_only_there():
    """Each alert of the file has a test that expects it to fire, and one that it does not."""
    done = subprocess.run(
        ["promtool", "test", "rules", str(ALERT_TESTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = ALERT_TESTS.read_text()
    for alert in alerts():
        checks = text.split(f"alertname: {alert}\n")[1:]
        fires = ["exp_alerts: []" not in check.split("alertname:")[0] for check in checks]
        assert set(fires) == {True, False}, alert
