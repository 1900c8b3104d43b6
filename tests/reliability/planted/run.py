"""Plant each fault of faults.py in a copy of the package, and check that the tests named for it fail.

    python tests/reliability/planted/run.py
    python tests/reliability/planted/run.py --only no-fsync torch-load
    python tests/reliability/planted/run.py --record benchmarks/reliability/planted.json

Before that, the same tests run on an unchanged copy and must pass. Each fault is planted alone, in its own copy, two
at a time. A test that does not start counts as neither failed nor passed. Ends with 1 unless all tests named for each
fault fail. benchmarks/reliability/report.py fills docs/reliability.md from the record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faults import PLANTED, Planted

ROOT = Path(__file__).resolve().parents[3]
_TIMES = "0.1"
"""A tenth of the trials: nearly every trial detects the fault."""
_LONGEST_S = 600
_AT_ONCE = 2
_OWN_FINDER = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "Redirecting" not in type(one).__name__]
"""
"""An editable install would import the checkout's package instead of the copy."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said: pytest's exit code, the failed tests with their last line, where each of them failed."""

    code: int
    failed: dict[str, str]
    lines: list[str]
    text: str

    def sees(self, test: str) -> bool:
        """Return whether the test of this name failed, or a case of it."""
        return any(name.removeprefix("tests/").startswith(test) for name in self.failed)


class Copy:
    """The package and its tests, as `source` holds them, in a folder of their own."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.root = folder
        ignored = shutil.ignore_patterns("__pycache__", "shared")
        for name in ("src", "tests", "benchmarks"):
            shutil.copytree(source / name, folder / name, ignore=ignored)
        shutil.copy(source / "pyproject.toml", folder)
        (folder / "start").mkdir(exist_ok=True)
        (folder / "start" / "sitecustomize.py").write_text(_OWN_FINDER, "utf-8")
        paths = os.pathsep.join([str(folder / "start"), str(folder / "src")])
        quick = {"WHET_RELIABILITY_TIMES": _TIMES, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._environment = os.environ | quick | {"PYTHONPATH": paths, "COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": "1"}
        self._require_own()

    def run(self, tests: Sequence[str]) -> Outcome:
        """Run these tests, and all cases of those that have several."""
        names = [f"tests/{test}" for test in dict.fromkeys(tests)]
        words = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rf", "-p", "no:cacheprovider", *names]
        done = subprocess.run(
            words, cwd=self.root, env=self._environment, capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
        failed = dict(re.findall(r"^FAILED (.+?) - (.*)$", done.stdout, re.MULTILINE))
        lines = [line.replace(f"{self.root}/", "") for line in re.findall(r"^/\S+:\d+: .*$", done.stdout, re.MULTILINE)]
        return Outcome(done.returncode, failed, lines, done.stdout + done.stderr)

    def _require_own(self) -> None:
        ask = "import importlib.util as u; print(u.find_spec('whet').origin)"
        words = [sys.executable, "-c", ask]
        found = subprocess.run(words, env=self._environment, capture_output=True, text=True, check=True, cwd=self.root)
        if not Path(found.stdout.strip()).is_relative_to(self.root):
            sys.exit(f"the tests would run {found.stdout.strip()}, not the copy in {self.root}: nothing is shown so")


def seen(fault: Planted, source: Path) -> dict[str, Any]:
    """Plant the fault in a copy and run its tests; return whether each of them saw it, and what the first one said."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), source)
        for edit in fault.edits:
            edit.apply(copy.root / "src" / "whet")
        outcome = copy.run(fault.tests)
    unseen = [test for test in fault.tests if not outcome.sees(test)]
    red = outcome.code == 1 and not unseen
    lines = [line for line in outcome.lines if "AssertionError" in line or "Failed: " in line] or outcome.lines
    said = lines[0][:200] if red else f"exit {outcome.code}, not seen by {unseen}\n{outcome.text[-2000:]}"
    seconds = round(time.monotonic() - began_s)
    return {"name": fault.name, "what": fault.what, "tests": fault.tests, "red": red, "said": said, "seconds": seconds}


def is_green(faults: Sequence[Planted], copy: Copy) -> bool:
    """Run the tests of these faults without a fault, and tell."""
    began_s = time.monotonic()
    outcome = copy.run([test for fault in faults for test in fault.tests])
    if outcome.code:
        print(f"the tests are not green without a fault:\n{outcome.text[-4000:]}")
        return False
    last = outcome.text.strip().splitlines()[-1]
    print(f"green without a fault: {last} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [fault.name for fault in PLANTED]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--no_green", action="store_true", help="leave out the run without a fault")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was seen, as JSON")
    return parser.parse_args()


def main() -> int:
    """Show that the tests are green, then that each fault turns them red."""
    given = _arguments()
    wanted = [fault for fault in PLANTED if fault.name in given.only]
    results = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        good = Copy(Path(folder), ROOT)  # what is changed in the checkout meanwhile takes no part
        if not given.no_green and not is_green(wanted, good):
            return 1
        for found in pool.map(lambda fault: seen(fault, good.root), wanted):
            results.append(found)
            print(f"{'red' if found['red'] else 'NOT SEEN'}: {found['name']}, {found['what']} ({found['seconds']} s)")
            print(f"    {found['said']}", flush=True)
    n_red = sum(found["red"] for found in results)
    print(f"planted faults that turn the tests red, each alone: {n_red}/{len(wanted)}")
    if given.record:
        at = datetime.now(UTC).isoformat(timespec="minutes")
        given.record.write_text(json.dumps({"at": at, "faults": results}, indent=1) + "\n", "utf-8")
    return int(n_red < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
