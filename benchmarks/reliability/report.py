"""Run the tests of docs/reliability.md row by row, record what they print, and fill the page.

    python benchmarks/reliability/report.py
    python benchmarks/reliability/report.py --only R4 S6
    python benchmarks/reliability/report.py --only

Each row is written to results.json in this folder when it ends and replaces the earlier one. `--only` without a name
fills the page from the stored results, including those of peer.py and `tests/reliability/planted/run.py --record`.
A row is green if every test of it passed. `--times` multiplies the number of trials; the page then says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rows import ROWS, Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, PEER, FAULTS = HERE / "results.json", HERE / "peer.json", HERE / "planted.json"
PAGE = ROOT / "docs" / "reliability.md"
_END = "<!-- end of the table -->"
_LONGEST_S = 1800
_MOST_WORDS = 160


def measure(row: Row, times: float) -> dict[str, Any]:
    """Run the row's tests; return counts, what they printed, seconds."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = [sys.executable, "-m", "pytest", "-q", "-o", "junit_logging=system-out", f"--junitxml={report}"]
        words += ["-n", "2", "--dist", "worksteal"]
        words += [f"tests/{test}" for test in row.tests] + (["-k", row.chosen] if row.chosen else [])
        own = {"WHET_RELIABILITY_TIMES": str(times), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        subprocess.run(words, cwd=ROOT, env=os.environ | own, timeout=_LONGEST_S, check=False)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = sorted(case.get("name", "") for case in cases if any(case.find(kind) is not None for kind in _BAD))
    skipped = sorted(case.get("name", "") for case in cases if case.find("skipped") is not None)
    return {
        "tests": len(cases), "passed": len(cases) - len(bad) - len(skipped), "failed": bad, "skipped": skipped,
        "figures": [line for case in cases for line in figures(case.findtext("system-out") or "")]
        + [*counted(row, [case.get("name", "") for case in cases], {*bad, *skipped})],
        "seconds": round(time.monotonic() - began_s, 1), "times": times, "load": round(os.getloadavg()[0], 1),
        "at": datetime.now(UTC).isoformat(timespec="minutes"),
    }  # fmt: skip


_BAD = ("failure", "error")


def counted(row: Row, names: list[str], not_passed: set[str]) -> Iterator[str]:
    """Yield how many of the row's counted cases passed, of all."""
    said, pattern = row.counted
    if said:
        found = [name for name in names if re.search(pattern, name)]
        yield f"{said}: {sum(name not in not_passed for name in found)}/{len(found)}"


def figures(printed: str) -> Iterator[str]:
    """Yield the lines that state a figure of a test; a run inside the test prints other lines."""
    for line in printed.splitlines():
        said = line.strip()
        if re.match(r"[^{}:/]+(: | alone loads ).*\d", said) and len(said) < _MOST_WORDS:
            yield said


def table(results: dict[str, Any], peer: dict[str, Any]) -> str:
    """Return the page's table with the files that hold every figure, and what transformers' Trainer reached."""
    lines = ["| # | what is tested | passed |", "|---|---|---|"]
    for row in ROWS:
        found = results.get(row.name)
        said = "not run" if row.missing else "not recorded yet"
        if found:
            passed = f"{found['passed']}/{found['tests']}"
            said = trials(found["figures"]) or passed
            said += f", {passed} tests" if found["passed"] != found["tests"] else ""
            said += f" ({found['times']:g} times the trials)" if found["times"] != 1 else ""
        lines.append(f"| {row.name} | {row.what} | {said} |")
    return "\n".join([*lines, *_recorded(results, peer)])


_COUNT = re.compile(r"(\d+)/(\d+)")


def trials(figures: list[str]) -> str:
    """Return how many trials of the row passed, of all: the sum over its figures; empty if it counts none."""
    counts = [(int(n), int(of)) for line in figures for n, of in _COUNT.findall(line)[-1:]]
    return f"{sum(n for n, _ in counts)}/{sum(of for _, of in counts)}" if counts else ""


def strictest(lines: list[str]) -> str:
    """Return the lowest count of the lines; without counts, the first thing that a line says."""
    counts = [found for line in lines for found in _COUNT.finditer(line)]
    if not counts:
        return lines[0].partition(": ")[2].partition(",")[0] or lines[0]
    return min(counts, key=lambda found: int(found[1]) / int(found[2]))[0]


def _link(text: str, file: Path) -> str:
    return f"[{text}](../{file.relative_to(ROOT).as_posix()})"


def _recorded(results: dict[str, Any], peer: dict[str, Any]) -> Iterator[str]:
    """Yield lines about when the figures were recorded, and those of the peer."""
    if results:
        days = sorted({found["at"][:10] for found in results.values()})
        minutes = sum(found["seconds"] for found in results.values()) / 60
        when = " to ".join(dict.fromkeys([days[0], days[-1]]))
        yield f"\n{_link('Every figure', RESULTS)} of whet was recorded {when}, in {minutes:.0f} minutes."
    if peer:
        used = ", ".join(f"{name} {version}" for name, version in peer["versions"].items())
        rows = [row.name for row in ROWS if row.name in peer["rows"]]
        reached = ", ".join(f"{name} {strictest(peer['rows'][name])}" for name in rows)
        yield f"{_link('The Trainer', PEER)} ({used}, {peer.get('at', 'earlier')[:10]}) reached: {reached}."


def planted(recorded: dict[str, Any]) -> str:
    """Return how many planted faults were found, and the names of the others."""
    faults = recorded.get("faults", [])
    unseen = [one["name"] for one in faults if not one["red"]]
    day = recorded.get("at", "never")[:10]
    said = f"{len(faults) - len(unseen)} of {_link(f'{len(faults)} faults', FAULTS)} were found, recorded {day}."
    return f"{said} NOT FOUND: {', '.join(unseen)}." if unseen else said


def fill(page: Path, name: str, text: str) -> None:
    """Replace a part of the page: what is between its mark and the next end mark."""
    begin = f"<!-- {name}: benchmarks/reliability/report.py -->"
    before, found, rest = page.read_text("utf-8").partition(begin)
    if not found:
        raise ValueError(f"{page} has no line {begin}")
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{_END}{after}", "utf-8")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def main() -> int:
    """Run the rows, store them, fill the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--times", type=float, default=1.0, help="share of the gate's number of trials")
    given = parser.parse_args()
    results = _read(RESULTS)
    for row in ROWS:
        if row.name in given.only and row.tests:
            results[row.name] = measure(row, given.times)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    fill(PAGE, "table", table(results, _read(PEER)))
    fill(PAGE, "faults", planted(_read(FAULTS)))
    bad = [name for name in given.only if name in results and results[name]["failed"]]
    print(f"{len(results)} rows are in {RESULTS.name}; not green of those run now: {', '.join(bad) or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
