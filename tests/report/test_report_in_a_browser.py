"""The page in a real browser: its script runs without an error, its search finds, and it fits a phone."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from report_runs import WRONG, record_run, write_confusion, write_errors

from whet import report
from whet.report.runs import UNKNOWN

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_BROWSER = next((found for name in _NAMES if (found := shutil.which(name))), "")
_QUIET = ("--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
          "--disable-sync", "--disable-quic", "--enable-logging=stderr", "--virtual-time-budget=20000")  # fmt: skip
pytestmark = pytest.mark.skipif(not _BROWSER, reason=f"no browser is installed ({', '.join(_NAMES)})")

_FRAME = """<!doctype html><link rel="icon" href="data:,"><iframe width="%d" height="800" src="%s"></iframe><pre></pre>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const shown = () => [...page.querySelectorAll(".examples tbody tr")].filter((row) => row.offsetHeight).length;
  const column = (n) => [...page.querySelectorAll(".examples tbody tr")].map((row) => row.cells[n].textContent);
  const set = (selector, value) => {
    const field = page.querySelector(selector);
    field.value = value;
    field.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const found = (%s)(page, root, shown, column, set);
  document.querySelector("pre").textContent = JSON.stringify(found);
};
</script>
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, ThreadingHTTPServer]]:
    """A folder, and a server of its files on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, server
        server.shutdown()
        thread.join()


def _see(served: tuple[Path, ThreadingHTTPServer], folders: Sequence[Path], width: int, script: str) -> Any:
    """Return what the script finds on the page of these runs, in a window of this width; no error was logged."""
    place, server = served
    report.write(folders, place / "report.html")
    (place / "frame.html").write_text(_FRAME % (width, "report.html", script), "utf-8")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    address = f"http://127.0.0.1:{server.server_address[1]}/frame.html"
    line = [
        _BROWSER,
        "--headless",
        *as_root,
        *_QUIET,
        f"--user-data-dir={place.parent / 'profile'}",
        "--dump-dom",
        address,
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert {*server.asked} == {"/frame.html", "/report.html"}  # type: ignore[attr-defined]
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with long texts, long names and a matrix of many labels."""
    found = record_run(tmp_path / "out", settings={"x" * 60: {"value": "y" * 300, "from": "command line"}})
    labels = [f"a_rather_long_name_of_label_{n}" for n in range(40)]
    labels[:3] = ["card_arrival", "lost_card", "lost_phone"]
    counts = [[5 if a == b else int(a + b == 3) for b in range(40)] for a in range(40)]
    write_confusion(found, labels, counts)
    write_errors(found, [*WRONG, WRONG[0] | {"text": "word " * 400 + "x" * 900, "probability": None, "loss": 9.0}])
    return found


def test_script_searches_filters_and_sorts(served: tuple[Path, ThreadingHTTPServer], folder: Path) -> None:
    found = _see(served, [folder], 1280, """(page, root, shown, column, set) => {
      const found = { all: shown() };
      set("input[type=search]", "PHONE stolen"); found.searched = shown();
      found.counted = page.querySelector(".controls output").textContent;
      page.querySelector(".controls .plain").click(); found.again = shown();
      set("select[id$=-expected]", "1"); found.expected = shown();
      set("select[id$=-expected]", "");
      const head = [...page.querySelectorAll(".examples th button")].find((one) => one.textContent === "Probability");
      head.click(); head.click(); found.sorted = column(3);
      page.querySelector(".pairs tbody button").click(); found.pair = column(1).filter((_, n) =>
        page.querySelectorAll(".examples tbody tr")[n].offsetHeight);
      const cell = [...page.querySelectorAll(".matrix td.off")][0];
      cell.click(); found.cell = page.querySelector(".cell-words").textContent;
      return found;
    }""")  # fmt: skip
    assert found["all"] == found["again"] == 4
    assert (found["searched"], found["counted"]) == (1, "1 of 4")
    assert found["expected"] == 2
    assert found["sorted"] == ["0.300", "0.200", "0.010", UNKNOWN]
    assert found["cell"].startswith("expected card_arrival, predicted a_rather_long_name_of_label_3: 1 of 6")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("n_runs", [1, 3])
def test_page_fits_its_window(
    width: int, n_runs: int, served: tuple[Path, ThreadingHTTPServer], folder: Path, tmp_path: Path
) -> None:
    others = [record_run(tmp_path / f"another-run-with-a-long-name-{n}", factor=n + 2.0) for n in range(n_runs - 1)]
    found = _see(served, [folder, *others], width, """(page, root) => ({
      room: root.clientWidth, wide: root.scrollWidth,
      charts: [...page.querySelectorAll(".chart")].map((one) => one.getBoundingClientRect().width),
    })""")  # fmt: skip
    assert found["wide"] <= found["room"] <= width
    assert len(found["charts"]) >= 5
    assert min(found["charts"]) > 250
