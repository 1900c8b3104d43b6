"""Plant each fault of faults.py in a copy of the package, and see that the tests named for it turn red.

    python tests/reliability/planted/run.py
    python tests/reliability/planted/run.py --only no-fsync torch-load

Before that the same tests run on the copy as it is, and have to be green. A test that does not even start counts as
neither. Ends with 1 unless every fault is seen by all the tests that are named for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faults import PLANTED, Planted

ROOT = Path(__file__).resolve().parents[3]
_TIMES = "0.1"
"""A tenth of the trials: every fault here is seen by nearly each of them."""
_LONGEST_S = 600
_OWN_FINDER = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "Redirecting" not in type(one).__name__]
"""
"""An editable install would put the checkout's package before the copy."""


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
    """The package and its tests in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        ignored = shutil.ignore_patterns("__pycache__", "shared")
        for name in ("src", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / "start").mkdir()
        (folder / "start" / "sitecustomize.py").write_text(_OWN_FINDER, "utf-8")
        paths = os.pathsep.join([str(folder / "start"), str(folder / "src")])
        quick = {"WHET_RELIABILITY_TIMES": _TIMES, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._environment = os.environ | quick | {"PYTHONPATH": paths, "COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": "1"}
        self._require_own()

    def restore(self) -> None:
        """Put the package back as it is in the checkout."""
        for path in (ROOT / "src").rglob("*.py"):
            shutil.copy(path, self.root / path.relative_to(ROOT))

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


def is_red(copy: Copy, fault: Planted) -> bool:
    """Plant the fault, run its tests, tell; return whether each of them saw it."""
    began_s = time.monotonic()
    try:
        for edit in fault.edits:
            edit.apply(copy.root / "src" / "whet")
        outcome = copy.run(fault.tests)
    finally:
        copy.restore()
    unseen = [test for test in fault.tests if not outcome.sees(test)]
    red = outcome.code == 1 and not unseen
    print(f"{'red' if red else 'NOT SEEN'}: {fault.name}, {fault.what} ({time.monotonic() - began_s:.0f} s)")
    if red:
        told = [line for line in outcome.lines if "AssertionError" in line or "Failed: " in line] or outcome.lines
        print(f"    {told[0][:200]}", flush=True)
    else:
        print(f"    exit {outcome.code}, not seen by {unseen}\n{outcome.text[-2000:]}", flush=True)
    return red


def main() -> int:
    """Show that the tests are green, then that each fault turns them red."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [fault.name for fault in PLANTED]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--no_green", action="store_true", help="leave out the run without a fault")
    given = parser.parse_args()
    wanted = [fault for fault in PLANTED if fault.name in given.only]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        if not given.no_green:
            began_s = time.monotonic()
            outcome = copy.run([test for fault in wanted for test in fault.tests])
            if outcome.code:
                print(f"the tests are not green without a fault:\n{outcome.text[-4000:]}")
                return 1
            last = outcome.text.strip().splitlines()[-1]
            print(f"green without a fault: {last} ({time.monotonic() - began_s:.0f} s)", flush=True)
        n_red = sum([is_red(copy, fault) for fault in wanted])
    print(f"planted faults that turn the tests red: {n_red}/{len(wanted)}")
    return int(n_red < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
