"""The page in a real browser: its script runs without an error, its search finds, and it can be read anywhere.

Anywhere is a phone, a desktop, a light and a dark system, and paper.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import browser as browsers
import pytest
from browser import Browser
from pictures import KINDS, Kind, classify, qa, trained
from report_runs import FORECAST, WRONG, record_run, write_confusion, write_errors
from test_forecast_bars import PARTS

from whet import report
from whet.report.runs import UNKNOWN

pytestmark = pytest.mark.skipif(not browsers.PATH, reason=f"no browser is installed ({', '.join(browsers.NAMES)})")
PHONE, DESKTOP = 390, 1280
_ROWS = "[...document.querySelectorAll('.examples tbody tr')]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser of this module's own."""
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with long texts, long names and a matrix of many labels."""
    settings = {"x" * 60: {"value": "y" * 300, "from": "command line"}, "seed": {"value": 1}}
    found = record_run(tmp_path / "out", settings=settings, forecast=FORECAST | PARTS)
    labels = [f"a_rather_long_name_of_label_{n}" for n in range(77)]
    labels[:3] = ["card_arrival", "lost_card", "lost_phone"]
    counts = [[5 if a == b else int(a + b == 3) for b in range(77)] for a in range(77)]
    write_confusion(found, labels, counts)
    long = WRONG[0] | {"text": "word " * 400 + "x" * 900, "probability": None, "loss": 9.0}
    write_errors(found, [*WRONG, long, *(WRONG[1] | {"text": f"text {n}"} for n in range(40))])
    return found


def _open(browser: Browser, folders: Sequence[Path], width: int = DESKTOP, scheme: str = "light") -> Path:
    """Show the page of these runs, which logs nothing and asks for nothing but itself."""
    page = report.write(folders, folders[0].parent / "report.html")
    browser.open(page, width=width, scheme=scheme)
    assert browser.complaints == []
    assert browser.loaded == [page.as_uri()]
    return page


def _others(tmp_path: Path, n_runs: int) -> list[Path]:
    return [record_run(tmp_path / f"another-run-with-a-long-name-{n}", factor=n + 2.0) for n in range(n_runs - 1)]


@pytest.mark.slow
def test_script_searches_filters_and_sorts(browser: Browser, folder: Path) -> None:
    write_errors(folder, [*WRONG, WRONG[0] | {"text": "word " * 400, "probability": None, "loss": 9.0}])
    _open(browser, [folder])
    found = browser.find(f"""() => {{
      const rows = () => {_ROWS}, shown = () => rows().filter((row) => row.offsetHeight).length;
      const set = (selector, value) => {{
        const field = document.querySelector(selector);
        field.value = value;
        field.dispatchEvent(new Event("input", {{ bubbles: true }}));
      }};
      const found = {{ all: shown() }};
      set("input[type=search]", "PHONE stolen"); found.searched = shown();
      found.counted = document.querySelector(".controls output").textContent;
      document.querySelector(".controls .plain").click(); found.again = shown();
      set("select[id$=-expected]", "1"); found.expected = shown();
      set("select[id$=-expected]", "");
      const heads = [...document.querySelectorAll(".examples th button")];
      const head = heads.find((one) => one.textContent === "Probability");
      head.click(); head.click(); found.sorted = rows().map((row) => row.cells[3].textContent);
      document.querySelector(".pairs tbody button").click();
      found.pair = rows().filter((row) => row.offsetHeight).map((row) => row.cells[2].innerText);
      document.querySelector(".matrix td.off").click();
      found.cell = document.querySelector(".cell-words").textContent;
      return found;
    }}""")
    assert found["all"] == found["again"] == 4
    assert (found["searched"], found["counted"]) == (1, "1 of 4")
    assert found["expected"] == 2
    assert found["sorted"] == ["0.300", "0.200", "0.010", UNKNOWN]
    assert found["cell"].startswith("expected card_arrival, predicted a_rather_long_name_of_label_3: 1 of 6")
    assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, PHONE, DESKTOP])
@pytest.mark.parametrize("n_runs", [1, 3])
def test_page_fits_its_window(width: int, n_runs: int, browser: Browser, folder: Path, tmp_path: Path) -> None:
    _open(browser, [folder, *_others(tmp_path, n_runs)], width)
    found = browser.find("""() => ({
      room: window.innerWidth, wide: document.documentElement.scrollWidth,
      charts: [...document.querySelectorAll(".chart")].map((one) => one.getBoundingClientRect().width),
      hidden: [...document.querySelectorAll("main *")].filter((one) => !one.closest(".scroll, svg, .controls")
        && one.getBoundingClientRect().right > window.innerWidth + 1).map((one) => one.outerHTML.slice(0, 80)),
    })""")
    assert found["wide"] <= found["room"] == width
    assert found["hidden"] == []
    assert len(found["charts"]) >= 5
    assert min(found["charts"]) > 250


_CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((n) => top[3] * top[n] + (1 - top[3]) * below[n]);
  const ground = (one) => one
    ? over(rgba(getComputedStyle(one).backgroundColor), ground(one.parentElement)) : [255, 255, 255];
  const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !one.getClientRects().length) continue;
    if (one.closest("script, style, title, desc")) continue;
    const style = getComputedStyle(one), below = ground(one);
    const colour = over(rgba(one.closest("svg") ? style.fill : style.color), below);
    const [x, y] = [light(colour), light(below)].sort((a, b) => b - a);
    found.push([(x + 0.05) / (y + 0.05), one.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("n_runs", [1, 3])
def test_all_text_can_be_told_from_its_ground(
    scheme: str, n_runs: int, browser: Browser, folder: Path, tmp_path: Path
) -> None:
    """WCAG 2, level AA: 4.5 to 1."""
    _open(browser, [folder, *_others(tmp_path, n_runs)], scheme=scheme)
    found = browser.find(_CONTRASTS)
    assert len(found) > 100
    assert [text for contrast, text in found if contrast < 4.5] == []
    paper = browser.find("() => getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 25)"}[scheme]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    pytest.param(kind, id=kind.__name__, marks=[] if kind in (classify, qa) else pytest.mark.night) for kind in KINDS
])  # fmt: skip
def test_page_of_a_real_run_can_be_read_anywhere(
    kind: Kind, browser: Browser, xquad_dir: Path, minilm_dir: Path, tmp_path: Path
) -> None:
    if not (xquad_dir.parent / "banking77").is_dir():
        pytest.skip(f"{xquad_dir.parent} holds no BANKING77")
    folders = trained(kind, xquad_dir.parent, tmp_path, {"max_steps": 4, "max_eval_samples": 48}, n_runs=1)
    page = folders[0] / "report.html"
    for width, scheme in ((PHONE, "dark"), (DESKTOP, "light")):
        browser.open(page, width=width, scheme=scheme)
        assert browser.complaints == []
        assert browser.loaded == [page.as_uri()]
        assert browser.find("() => document.documentElement.scrollWidth") == width
        assert [text for contrast, text in browser.find(_CONTRASTS) if contrast < 4.5] == []
        assert browser.find(f"() => {_ROWS}.filter((row) => row.offsetHeight).length") > 0


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pdftotext"), reason="pdftotext is not installed (poppler-utils)")
@pytest.mark.parametrize("n_runs", [1, 3])
def test_print_has_every_table(n_runs: int, browser: Browser, folder: Path, tmp_path: Path) -> None:
    _open(browser, [folder, *_others(tmp_path, n_runs)], scheme="dark")
    browser.print_to(tmp_path / "page.pdf")
    command = ["pdftotext", "-raw", str(tmp_path / "page.pdf"), "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    printed = "".join(text.split())
    captions = browser.find("""() =>
      [...document.querySelectorAll("caption, figcaption strong")].map((one) => one.textContent)""")
    assert len(captions) >= (5 if n_runs > 1 else 10)
    assert [one for one in captions if "".join(one.split()) not in printed] == []
    if n_runs == 1:
        assert "seed" in printed  # of the settings with their default, which are folded on the screen
        assert "a_rather_long_name_of_label_76" in printed
        assert "25ofthe44examplesareprinted." in printed
