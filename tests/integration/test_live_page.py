"""The live page in a headless Chromium: of the running demo, and of an engine in a known state."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn

from aiokv import CacheConfig, CacheEngine, WindowGroup
from aiokv.observe.asgi import asgi
from aiokv.testing import ScriptedStore
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.browser import CHROMIUM
from tests.harness.patience import STORE_OPTIONS
from tests.harness.served import Served, begin
from tests.peers.engines import Side, prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Page

playwright = pytest.importorskip("playwright.async_api", reason="needs playwright")
ROOT = Path(__file__).parents[2]
LAPTOP = {"width": 1366, "height": 768}
PHONE = {"width": 390, "height": 844}
LARGE = {"width": 2200, "height": 1300}
# Where `AIOKV_PICTURE=docs/live-page.png pytest --timeout 900 tests/integration/test_live_page.py`
# writes a picture of the page after ten minutes.
PICTURE = os.environ.get("AIOKV_PICTURE", "")

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.loop("asyncio"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: make services"),
]

TOKENS = list(range(7))


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with playwright.async_playwright() as tools:
        made = await tools.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * PATIENCE_SECONDS
        )
        try:
            yield made
        finally:
            await made.close()


class Watched:
    """A page whose complaints and requests are recorded.

    A request for new figures that the page gives up, after 5 s, is no complaint: the next one
    follows, and without any answer a test does not see what it waits for.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        page.set_default_timeout(1000 * PATIENCE_SECONDS)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("requestfailed", lambda request: self._note_failure(request.url))
        page.on("request", lambda request: self.asked.append(request.url))

    def _note_failure(self, url: str) -> None:
        if "/live?" not in url:
            self.complaints.append(url)

    async def becomes(self, condition: str) -> None:
        """Wait until a condition holds; the page's policy forbids ``wait_for_function``."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await self.page.evaluate(condition):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        text: str = await self.page.inner_text(selector)
        return text


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Watched]:
    """Open a page; check that it has complained about nothing in the end."""
    async with browser() as chromium:
        page = await chromium.new_page(**{"viewport": LAPTOP, **options})
        watched = Watched(page)
        await page.goto(url)
        yield watched
        assert watched.complaints == []
        origin = url.split("/")[2]
        assert {asked.split("/")[2] for asked in watched.asked if "://" in asked} == {origin}


def _default_interrupt() -> None:
    """Undo that a shell lets its background processes, such as these tests, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@asynccontextmanager
async def demo(*options: str) -> AsyncIterator[str]:
    """Run ``aiokv demo --live``; yield the URL that it prints."""
    command = [sys.executable, "-m", "aiokv", "demo", "--live", "0", *options]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        preexec_fn=_default_interrupt,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line + (await process.communicate())[1].decode()
        yield found.group(0)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert process.returncode == 130, errors.decode()
    assert errors.decode() == "aiokv: interrupted\n"


@asynccontextmanager
async def served_page(engines: CacheEngine | dict[str, CacheEngine]) -> AsyncIterator[str]:
    """Serve the page of engines on this loop, as below a prefix; yield its URL."""
    config = uvicorn.Config(asgi(engines), port=0, log_config=None, root_path="/ops")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        await task


async def test_the_page_follows_the_running_demo(tmp_path: Path):
    store = Path("/tmp/kv") if PICTURE else tmp_path
    options = ("--pressure-blocks", "116", "--store", f"disk:{store}?bytes=64MiB&{STORE_OPTIONS}")
    async with demo(*options) as url, opened(url) as watched:
        page = watched.page
        await watched.becomes("document.querySelector('#ready').textContent === 'ready'")
        before = [await watched.text(f".tile:nth-child({n})") for n in (1, 2, 3)]
        for number, text in enumerate(before, 1):
            await watched.becomes(
                f"document.querySelector('.tile:nth-child({number})').innerText !== {text!r}"
            )
        await watched.becomes("document.querySelector('#running .state-granted') !== null")
        await watched.becomes("document.querySelectorAll('#prefixes .prefix').length > 1")
        assert await page.locator("#tiers .tier").count() == 2
        assert await page.locator("#hits .legend b").count() == 3
        assert await page.locator("#stores tr").count() == 1
        assert await watched.text("#stores .dot.closed >> nth=0") == "closed"
        await watched.becomes(
            "[...document.querySelector('#timeline').getContext('2d')"
            ".getImageData(100, 0, 900, 40).data].filter(value => value).length > 1000"
        )
        await watched.becomes("/[1-9]\\d* transfers/.test(document.body.innerText)")
        await page.mouse.move(0, 0)
        width = await page.evaluate("document.scrollingElement.scrollWidth")
        assert width == LAPTOP["width"]
        if PICTURE:
            await page.wait_for_timeout(600_000)  # until the charts are full
            await watched.becomes("document.querySelectorAll('#waiting tr').length > 2")
            await page.screenshot(path=ROOT / PICTURE, full_page=True)


async def test_the_page_shows_leases_and_their_owners_as_text():
    name = "<img src=x onerror=alert(1)>"
    async with Served(device_blocks=8) as served, served_page(served.engine) as url:
        await served.to_host(TOKENS)
        loading = await served.engine.match(TOKENS, owner="loading").allocate(7)
        large = served.engine.match(range(100, 114), owner=name)
        task = await begin(served, large.allocate(14))
        async with opened(url) as watched:
            await watched.becomes("document.querySelectorAll('#leases tbody tr').length === 2")
            rows = await watched.page.locator("#leases tbody tr").all_inner_texts()
            assert rows[0].split("\t")[:2] == ["loading", "onload"]
            assert rows[1].split("\t")[:2] == [name, "capacity"]
            assert await watched.text("#running-note") == await watched.text("#waiting-note") == "1"
            assert "1 transfers" in await watched.text("#transfers-note")
            assert await watched.text("#prefixes .prefix .name") == "0\N{EN DASH}6 · 1 in use"
            assert not await watched.page.locator("#stores-card").is_visible()
            box = await watched.page.locator("#timeline").bounding_box()
            assert box is not None
            await watched.page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 10)
            assert "in flight\n3 blocks" in await watched.text("#tip")
            task.cancel()
            await asyncio.wait([task])
            served.device.complete_all()
            await served.settle()
            loading.release()
            large.release()
            await watched.becomes("document.querySelector('#running').innerText === 'no leases'")
            assert not await watched.page.locator("#waiting-list").is_visible()


async def test_the_page_names_failed_checks_and_unavailable_stores():
    store = ScriptedStore()
    async with Served(stores=[store], manual=False) as served, served_page(served.engine) as url:
        await served.engine.sleep(["device"])
        store.fail("lookup")
        async with opened(url, color_scheme="dark") as watched:
            await watched.becomes("document.querySelector('#ready').textContent.includes('asleep')")
            color = "getComputedStyle(document.body).backgroundColor"
            assert await watched.page.evaluate(color) == "rgb(18, 21, 24)"
            await served.engine.wake_up(regions=served.memory.regions)
            for _ in range(3):
                async with served.engine.match(TOKENS) as lease:
                    await lease.allocate(7, wait_store=1)
            await watched.becomes("document.querySelector('#stores .dot.open') !== null")
            assert "unavailable" in await watched.text("#ready")


async def test_the_page_shows_several_engines_with_all_their_pools():
    window = WindowGroup(window_tokens=4, device_blocks=16)
    hybrid = CacheConfig(device_blocks=32, host_blocks=8, state_slots=8, windows={"local": window})
    async with Served() as served, CacheEngine(hybrid) as other:
        engines = {"chat": served.engine, "hybrid": other}
        async with served_page(engines) as url, opened(url) as watched:
            await watched.becomes("document.querySelectorAll('#tiers .tier').length === 2")
            assert await watched.page.locator("#engines button").all_inner_texts() == [*engines]
            lease = await other.match(TOKENS).allocate(7)
            await watched.page.click("#engines button >> nth=1")
            await watched.becomes("document.querySelectorAll('#tiers .tier').length === 4")
            await watched.becomes("document.querySelectorAll('#running tr').length === 1")
            tiers = await watched.page.locator("#tiers .tier").all_inner_texts()
            assert [text.split()[0] for text in tiers] == ["device", "host", "state", "local"]
            assert "leased 1" in tiers[2]
            lease.release()


async def test_the_page_shows_what_was_exchanged_with_peers():
    tokens = prompt(21, 40)
    async with Side() as decode, Side(listen=None) as prefill, served_page(decode.engine) as url:
        lease = decode.engine.match(tokens)
        await lease.allocate(len(tokens))
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            await asyncio.gather(prefill.prefill(tokens, receiving.ticket), receiving.wait())
        lease.release()
        async with opened(url) as watched:
            await watched.becomes("document.querySelectorAll('#peers tr').length === 1")
            assert await watched.text("#peers-note") == "received 21 of 21 tokens; delivered 0"
            cells = await watched.page.locator("#peers td").all_inner_texts()
            (use,) = decode.engine.statistics().peers.ranks
            assert use.received.fragments > 0
            assert cells[2].startswith(f"{use.received.fragments} · ")
            assert cells[3:5] == ["0", f"{use.free_slots} of {use.landing_slots}"]
            assert cells[7:] == ["0", "0", "0"]


async def test_the_page_has_no_peers_without_them():
    async with Served() as served, served_page(served.engine) as url, opened(url) as watched:
        await watched.becomes("document.querySelectorAll('#tiers .tier').length === 2")
        assert await watched.page.locator("#peers-card").is_hidden()


async def test_a_hidden_page_asks_nothing():
    async with (
        Served() as served,
        served_page(served.engine) as url,
        browser() as chromium,
    ):
        page = await chromium.new_page()
        await page.clock.install()
        watched = Watched(page)
        await page.goto(url)
        await watched.becomes("document.querySelector('#ready').textContent === 'ready'")

        def questions() -> int:
            return sum("/live?" in asked for asked in watched.asked)

        async def show(state: str) -> None:
            await page.evaluate(
                "state => { Object.defineProperty(document, 'visibilityState', "
                "{ value: state, configurable: true }); "
                "document.dispatchEvent(new Event('visibilitychange')); }",
                state,
            )

        assert questions() == 1
        async with page.expect_response("**/live?*"):
            await page.clock.run_for(1000)
        assert questions() == 2
        await show("hidden")
        await page.clock.run_for(60_000)
        assert questions() == 2
        async with page.expect_response("**/live?*"):
            await show("visible")
        assert questions() == 3
        assert watched.complaints == []


async def test_a_page_without_its_server_says_so_and_recovers():
    async with Served() as served, served_page(served.engine) as url, browser() as chromium:
        page = await chromium.new_page()
        watched = Watched(page)
        await page.goto(url)
        await watched.becomes("document.querySelector('#ready').textContent === 'ready'")
        await page.context.set_offline(True)
        await watched.becomes("document.querySelector('#ready').textContent.includes('no answer')")
        assert await page.locator("body.stale").count() == 1
        await page.context.set_offline(False)
        await watched.becomes("document.querySelector('#ready').textContent === 'ready'")
        assert await page.locator("body.stale").count() == 0


# --- layout ---------------------------------------------------------------------------------------


# Elements that reach beyond the window or their card. What a box scrolls is not beyond it, and
# neither is text that is cut with an ellipsis.
BEYOND = """() => {
    const found = [];
    for (const card of document.querySelectorAll("header, .card, .tile")) {
        const outer = card.getBoundingClientRect();
        if (outer.left < 0 || outer.right > innerWidth) found.push(`window: ${card.id}`);
        for (const each of card.querySelectorAll("*")) {
            const box = each.getBoundingClientRect();
            const inside = each.closest(".scroll td:first-child, .name, .bar, svg");
            if (!box.width || (inside && inside !== each)) continue;
            if (box.left < outer.left - 1 || box.right > outer.right + 1) {
                found.push(`${card.id}: ${each.tagName} ${each.className} ${each.textContent}`);
            }
        }
    }
    for (const box of document.querySelectorAll(".scroll")) {
        if (box.scrollWidth > box.clientWidth + 1) found.push(`scrolls: ${box.textContent}`);
    }
    return found;
}"""
# Pairs of panels that overlap.
OVERLAPPING = """() => {
    const boxes = [...document.querySelectorAll("header, .card, .tile")]
        .map(each => [each.id, each.getBoundingClientRect()]).filter(([, box]) => box.width);
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
        .filter(([, q]) => p.left < q.right && q.left < p.right)
        .filter(([, q]) => p.top < q.bottom && q.top < p.bottom)
        .map(([b]) => [a, b]));
}"""
# Rows of a table that can be seen without scrolling its box, once the box is in the window.
VISIBLE_ROWS = """id => {
    const rows = [...document.querySelectorAll(`#${id} tr`)];
    const box = rows[0].closest(".scroll");
    box.scrollIntoView();
    const area = box.getBoundingClientRect();
    return rows.filter(row => {
        const at = row.getBoundingClientRect();
        const seen = document.elementFromPoint(at.left + 4, (at.top + at.bottom) / 2);
        return at.bottom <= area.bottom + 1 && row.contains(seen);
    }).length;
}"""


@asynccontextmanager
async def loaded() -> AsyncIterator[Served]:
    """An engine whose 12 running leases let 200 others wait."""
    store = ScriptedStore()
    async with Served(device_blocks=64, host_blocks=64, stores=[store], manual=False) as served:
        match, count = served.engine.match, iter(range(10_000))
        leases = [
            match(
                [next(count) for _ in range(10)], owner=f"chat-{i}/{i % 7}-of-a-long-conversation"
            )
            for i in range(212)
        ]
        tasks = [asyncio.ensure_future(lease.allocate(10)) for lease in leases]
        await asyncio.gather(*tasks[:12])
        for lease in leases[:12]:
            lease.commit(10)
        try:
            yield served
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for lease in leases:
                lease.release()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, LAPTOP, LARGE], ids=lambda size: f"{size['width']}px")
async def test_the_page_fits_its_window_under_load(size, scheme, monkeypatch):
    monkeypatch.setattr("aiokv.observe.asgi.PERIOD_SECONDS", 0.02)
    async with (
        loaded() as served,
        served_page(served.engine) as url,
        opened(url, viewport=size, color_scheme=scheme) as watched,
    ):
        page = watched.page
        await watched.becomes("document.querySelectorAll('#running tr').length === 12")
        await watched.becomes("document.querySelectorAll('#load polyline').length === 2")
        assert await page.evaluate("document.scrollingElement.scrollWidth") == size["width"]
        assert await page.evaluate(BEYOND) == []
        assert await page.evaluate(OVERLAPPING) == []
        # In one call: the page replaces its rows all the time.
        owner = "document.querySelector('#running td').getBoundingClientRect().width"
        assert await page.evaluate(owner) >= 100
        assert await page.evaluate(VISIBLE_ROWS, "running") >= 8
        assert await page.evaluate(VISIBLE_ROWS, "waiting") >= 8
        assert await watched.text("#waiting-note") == "200; the first 48 are listed"
        assert "64 · 12.0 KiB" in await watched.text("#tiers")
        ink, ground = await page.evaluate(
            "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])"
        )
        assert (brightness(ink) < brightness(ground)) == (scheme == "light")
        assert abs(brightness(ink) - brightness(ground)) > 150
        picture = await page.screenshot(full_page=True)
        assert int.from_bytes(picture[16:20], "big") == size["width"]


def brightness(color: str) -> float:
    """Return the mean of the parts of a CSS color."""
    parts = [int(part) for part in re.findall(r"\d+", color)[:3]]
    return sum(parts) / 3


async def test_panels_grow_with_the_window():
    async with loaded() as served, served_page(served.engine) as url, opened(url) as watched:
        await watched.becomes("document.querySelectorAll('#running tr').length === 12")
        panels = {
            "#leases": True, ".scroll:has(#running)": True, "#load": True, "#timeline": False,
        }  # fmt: skip
        boxes = {}
        for size in (LAPTOP, LARGE):
            await watched.page.set_viewport_size(size)
            for panel in panels:
                boxes[panel, size["width"]] = await watched.page.locator(panel).bounding_box()
        for panel, grows_in_height in panels.items():
            small, large = boxes[panel, LAPTOP["width"]], boxes[panel, LARGE["width"]]
            assert large["width"] > 1.4 * small["width"], panel
            assert not grows_in_height or large["height"] > 1.2 * small["height"], panel
        bottom = await watched.page.evaluate("document.scrollingElement.scrollHeight")
        assert bottom == LARGE["height"]  # the panels fill the window


async def test_the_charts_show_the_time_before_the_page_was_opened(monkeypatch):
    monkeypatch.setattr("aiokv.observe.asgi.PERIOD_SECONDS", 0.02)
    async with Served(manual=False) as served, served_page(served.engine) as url:
        await served.serve(TOKENS)
        async with httpx.AsyncClient() as client:
            while True:
                answer = (await client.get(f"{url}live")).json()
                rows = answer["engines"]["default"]["history"]["rows"]
                if len(rows) > 2 and rows[-1][1] == len(TOKENS):
                    break
        await served.serve(TOKENS)
        async with opened(url) as watched:
            await watched.becomes("document.querySelector('#prompts polyline') !== null")
            points = await watched.page.get_attribute("#prompts polyline", "points")
            first = float(points.split(",")[0])
            assert len(points.split()) > 3
            assert first < 600 - (time.time() - rows[0][0]) + 1
            # The pointer reads all charts at one time.
            box = await watched.page.locator("#load .plot").bounding_box()
            await watched.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
            for chart in ("hits", "prompts", "moved", "load"):
                assert "5 min ago" in await watched.text(f"#{chart} .legend")
            await watched.page.mouse.move(0, 0)
            assert "ago" not in await watched.text("#hits .legend")
