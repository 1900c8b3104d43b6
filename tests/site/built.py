"""The built site as readers see it: `make test-docs` builds it and runs this; pages in a browser need chromium.

Pictures of the pages for people: `SITE_PICTURES=FOLDER make test-docs ARGS="-k pictures"`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
sys.path.append(str(ROOT / "tests" / "report"))

from browser import PATH, Browser  # noqa: E402

PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
LOOKED_AT = [page for page in PAGES if not page.startswith("decisions/0")]
"""Pages of decisions are alike: their list stands for them."""
in_browser = pytest.mark.skipif(not PATH, reason="there is no chromium here")


class _Parts(HTMLParser):
    """The ids of a page, and what it links or shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.links += [given[name] for name in ("href", "src") if name in given]


def test_no_link_of_the_site_is_dead() -> None:
    parts = {page: _Parts((SITE / page).read_text("utf-8")) for page in PAGES}
    dead = []
    for page, found in parts.items():
        for link in found.links:
            to = urlsplit(link)
            if to.scheme or to.netloc or page == "404.html":
                continue
            path = ((SITE / page).parent / unquote(to.path)).resolve() if to.path else SITE / page
            path = path / "index.html" if path.is_dir() else path
            ids = parts[path.relative_to(SITE).as_posix()].ids if path.suffix == ".html" and path.exists() else set()
            if not path.exists() or (to.fragment and path.suffix == ".html" and unquote(to.fragment) not in ids):
                dead.append(f"{page}: {link}")
    assert dead == []
    assert sum(len(found.links) for found in parts.values()) > 1000


def test_the_reference_has_every_public_name() -> None:
    import whet

    ids = _Parts((SITE / "reference.html").read_text("utf-8")).ids
    names = {name for name in whet.__all__ if not name.startswith("_")}
    assert {name for name in names if not any(one.endswith(f".{name}") for one in ids)} == set()


def test_what_would_load_from_the_network_is_found() -> None:
    texts = [
        "<script src=https://cdn.example.org/a.js></script>", "<img alt='x' src=\"//example.org/a.png\">",
        "<link rel='stylesheet' href='https://example.org/a.css'>", "@import 'https://example.org/a.css'",
        "src: url(https://example.org/a.woff2)", "<a href='https://example.org'>", "<img src='a.png'>",
        "<link rel='canonical' href='https://example.org/a.html'>", "<script src=a.js></script>",
    ]  # fmt: skip
    code = f"import pages; print([len(pages.loads_from_elsewhere(text)) for text in {texts}])"
    python = ROOT / ".venv-docs/bin/python"
    done = subprocess.run([python, "-c", code], cwd=ROOT / "tools/site", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([1] * 5 + [0] * 4)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site as `python -m http.server` serves it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def from_elsewhere(browser: Browser, address: str) -> list[str]:
    """Return what the page asked the network for, apart from the site; the browser's own parts are chrome://."""
    return [url for url in browser.loaded if not url.startswith((f"{address}/", "chrome:", "blob:"))]


def _eventually(browser: Browser, script: str) -> Any:
    """Return what the script finds, as soon as it finds something."""
    until_s = time.monotonic() + 60
    while not (found := browser.find(script)):
        assert time.monotonic() < until_s, script
        time.sleep(0.1)
    return found


@in_browser
@pytest.mark.parametrize("page", LOOKED_AT)
def test_a_page_fits_and_loads_nothing_from_elsewhere(browser: Browser, address: str, page: str) -> None:
    """On a desktop in light and on a phone in dark; tables and code scroll in their own frame."""
    for width, scheme in ((1280, "light"), (390, "dark")):
        browser.open(f"{address}/{page}", width=width, scheme=scheme)
        assert browser.complaints == []
        assert from_elsewhere(browser, address) == []
        assert browser.find("() => document.documentElement.scrollWidth") <= width
        dark = browser.find("() => document.body.getAttribute('data-md-color-scheme')") == "slate"
        assert dark == (scheme == "dark")


@in_browser
@pytest.mark.parametrize(
    ("words", "page"), [("bitwise resume", "reliability"), ("int8 export", "export"), ("cuda", "faq")]
)
def test_search_finds_pages_without_network(browser: Browser, address: str, words: str, page: str) -> None:
    browser.open(f"{address}/index.html?q={words.replace(' ', '+')}", width=1280)
    found = _eventually(
        browser, "() => [...document.querySelectorAll('.md-search-result__link')].map(one => one.href).slice(0, 12)"
    )
    assert any(f"/{page}.html" in link for link in found), found
    assert from_elsewhere(browser, address) == []


@in_browser
def test_prices_and_examples_of_the_cost_page_change_its_tables(browser: Browser, address: str) -> None:
    browser.open(f"{address}/cost.html", width=1280)
    row = "[...document.querySelectorAll('article tr')].find(one => one.cells[0].textContent === 'answers, MiniLM')"
    cells = f"() => [...{row}.cells].slice(5).map(one => one.textContent)"
    before = browser.find(cells)
    written = next(
        line for line in (ROOT / "docs/cost.md").read_text().splitlines() if line.startswith("| answers, MiniLM | Zen")
    )
    assert before == [cell.strip() for cell in written.split("|")[6:10]]
    change = """() => {
      const set = (label, value) => {
        const input = document.querySelector(`input[aria-label="${label}"]`);
        input.value = value;
        input.dispatchEvent(new Event("input", { bubbles: true }));
      };
      set("examples", "100000");
      set("$ an hour of Zen 5", "1");
    }"""
    browser.find(change)
    minutes, others, usd, _ = (float(cell.replace(",", "")) for cell in browser.find(cells))
    assert minutes == pytest.approx(10 * float(before[0]), rel=0.1)  # the written one is rounded
    assert others > minutes
    assert usd == pytest.approx(minutes / 60, rel=0.05)


@in_browser
@pytest.mark.skipif("SITE_PICTURES" not in os.environ, reason="SITE_PICTURES names no folder")
@pytest.mark.parametrize(
    "page", ["index", "start", "choose", "cost", "faq", "reference", "methods", "run", "kubernetes", "decisions/index"]
)
def test_pictures(browser: Browser, address: str, page: str) -> None:
    folder = Path(os.environ["SITE_PICTURES"])
    folder.mkdir(parents=True, exist_ok=True)
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            browser.open(f"{address}/{page}.html", width=width, scheme=scheme)
            browser.picture(folder / f"{page.replace('/', '-')}-{width}-{scheme}.png", height=2000)
