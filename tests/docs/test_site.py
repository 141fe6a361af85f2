"""The site: navigation, pages of the API, links of roles, and the page for language models."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs import llms
from tests.harness.browser import CHROMIUM
from tests.harness.patience import PROGRAM_SECONDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = DOCS / "reference/api"

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="`make docs` installs mkdocs"
)


def nav_pages(entries) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entries, str):
        return [entries]
    children = entries if isinstance(entries, list) else entries.values()
    return [page for child in children for page in nav_pages(child)]


def test_the_navigation_has_each_page_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(nav_pages(nav)) == pages


def test_the_overview_of_the_api_links_each_name():
    named = {
        path.name: re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
        for path in API.glob("*.md")
    }
    assert named.pop("index.md") == []
    rows = re.findall(
        r"^\| \[.*\]\(([\w-]+\.md)\) \| (.*) \|$", (API / "index.md").read_text(), re.MULTILINE
    )
    assert {page: re.findall(r"\]\[([\w.]+)\]", names) for page, names in rows} == named


def test_the_page_for_language_models_is_up_to_date():
    assert llms.PAGE.read_text() == llms.text(), "run python -m tests.docs.llms"


@needs_mkdocs
def test_roles_become_links_to_the_names_that_they_mean(tmp_path):
    import griffe

    (tmp_path / "cache.py").write_text(
        '"""Has :class:`Lease`, and :func:`unknown`."""\n\n'
        "class Lease:\n"
        '    """See :meth:`~Lease.release`."""\n\n'
        "    def release(self):\n"
        '        """Ends :attr:`ids`."""\n\n'
        "    ids = ()\n"
    )
    extensions = griffe.load_extensions(str(DOCS / "site_roles.py"))
    module = griffe.load("cache", search_paths=[tmp_path], extensions=extensions)

    def link(path: str, name: str) -> str:
        return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'

    assert module.docstring.value == (
        f"Has {link('cache.Lease', 'Lease')}, and {link('unknown', 'unknown')}."
    )
    assert module["Lease"].docstring.value == f"See {link('cache.Lease.release', 'release')}."
    assert module["Lease.release"].docstring.value == f"Ends {link('cache.Lease.ids', 'ids')}."


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        check=True,
        cwd=ROOT,
        timeout=PROGRAM_SECONDS,
    )
    return folder


@needs_mkdocs
@pytest.mark.slow
def test_the_site_has_no_raw_roles_and_no_broken_links(site):
    pages = list((site / "reference/api").rglob("*.html"))
    assert len(pages) > 10
    assert [
        page for page in pages if re.search(r":(class|meth|func|attr):", page.read_text())
    ] == []
    assert (site / "llms.txt").exists()
    assert not (site / "site_roles.py").exists()


@needs_mkdocs
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: make services")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_of_the_site_is_wider_than_the_window(site, width):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    wide = {}
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        pages = sorted(site.rglob("index.html"))
        assert len(pages) > 40
        for path in pages:
            page.goto(path.as_uri())
            if (found := page.evaluate("document.scrollingElement.scrollWidth")) > width:
                wide[path.relative_to(site).as_posix()] = found
        browser.close()
    assert wide == {}
