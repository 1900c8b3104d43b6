"""Run the core of the tests with other versions of Python, torch and transformers: `make test-matrix`.

    python tools/versions/matrix.py --list
    python tools/versions/matrix.py --only 3.13 --roots /srv/roots
    python tools/versions/matrix.py --page    # write docs/versions.md from what is on file, run nothing

Each cell is a fresh environment: torch first (its build for CPUs if torch's index answers, else that of the default
index), then the wheel from dist/ and the tools of the tests; the tests come from this checkout, whet from the wheel.
A Python comes from PATH, pyenv, uv, or Debian: `--roots FOLDER` holds a root of each suite, made by debootstrap
where it is missing, in which the cell runs (needs root). Results go to results.json and docs/versions.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from steps import CPU_INDEX, ROOT, copy_tracked, run

RESULTS = Path(__file__).resolve().parent / "results.json"
PAGE = ROOT / "docs" / "versions.md"
SUITES = {"3.13": "trixie", "3.14": "forky"}
"""Python -> the suite of Debian that has it."""
CORE = ("kernels", "families", "equal", "hf", "train", "optim", "parity", "objectives", "data", "config", "qa")
"""Folders of tests: operators, models, Trainer, steps, optimizers, checkpoints, and the commands that train."""
EXTRAS = "completion,peft,tag,tensorboard"
TOOLS = ("pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6.150", "jsonschema>=4.23", "kubeflow-trainer-api>=2.3")
MARKS = "not slow and not reliability and not gate and not night"
SEEN = """
import json, platform, sys
from importlib.metadata import version
import torch, whet
from whet.kernels.library import library
print(json.dumps({
    "python": platform.python_version() + ("t" if not getattr(sys, "_is_gil_enabled", lambda: True)() else ""),
    "torch": torch.__version__, "transformers": version("transformers"), "native": library() is not None,
    "installed": "site-packages" in whet.__file__,
}))
"""


@dataclass(frozen=True)
class Cell:
    """One combination, as it is asked for."""

    python: str
    torch: str = ""
    """A version; empty: the newest that the index has."""
    transformers: str = ""

    @property
    def name(self) -> str:
        """Return the name that `--only` looks for and that results are stored by."""
        return f"python {self.python}, torch {self.torch or 'newest'}, transformers {self.transformers or 'newest'}"


CELLS = (
    Cell("3.11", "2.11.0", "5.16.0"),
    Cell("3.11", "2.11.0", "5.17.0"),
    Cell("3.11", "2.11.0"),
    Cell("3.11", "2.12.1"),
    Cell("3.11", "2.13.0"),
    Cell("3.11", "2.14.1"),
    Cell("3.11", "", "5.17.0"),
    Cell("3.11"),
    Cell("3.12"),
    Cell("3.13", "2.11.0", "5.17.0"),
    Cell("3.13"),
    Cell("3.14"),
    Cell("3.14t"),
)


@dataclass
class Result:
    """What became of a cell."""

    asked: dict[str, str]
    reason: str = ""
    """Why it did not run to its end; empty: it did."""
    python: str = ""
    torch: str = ""
    transformers: str = ""
    system: str = ""
    native: bool = False
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    """Names of the tests."""
    seconds: dict[str, float] = field(default_factory=dict)
    day: str = ""
    commit: str = ""


class UnavailableError(Exception):
    """The cell cannot be had on this machine; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where a cell's processes run: on this machine, or in a root of another Debian."""

    python: str
    root: Path | None = None

    @property
    def system(self) -> str:
        """Return the name of the system."""
        text = ((self.root or Path("/")) / "etc/os-release").read_text("utf-8")
        return re.findall(r'^PRETTY_NAME="?([^"\n]+)', text, re.MULTILINE)[0]

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """Return a new folder that its processes can reach, on this machine's side."""
        return tempfile.TemporaryDirectory(prefix="whet-cell-", dir=self.root / "tmp" if self.root else None)

    def inside(self, path: Path) -> str:
        """Return how a path of this machine is named there."""
        return str(path if self.root is None else Path("/") / path.relative_to(self.root))

    def run(
        self, words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder there, and return what it printed."""
        known = dict(os.environ) | dict(env or {})
        if self.root is None:
            return subprocess.run(words, cwd=folder, env=known, capture_output=True, text=True, check=False)
        known |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "TMPDIR": "/tmp"}
        enter = (
            'for one in proc sys dev; do mount --rbind "/$one" "$0/$one"; done; '
            'for one in /etc/resolv.conf /etc/hosts; do touch "$0$one"; mount --bind "$one" "$0$one"; done; '
            'mount --bind /etc/ssl/certs "$0/etc/ssl/certs"; '  # those of the network at hand
            'cd="$1"; shift; exec chroot "$0" /bin/sh -c \'cd "$0" && exec "$@"\' "$cd" "$@"'
        )
        command = ["unshare", "--mount", "sh", "-ec", enter, str(self.root), self.inside(folder), *words]
        return subprocess.run(command, env=known, capture_output=True, text=True, check=False)


def main(words: Sequence[str] | None = None) -> int:
    """Run the cells that are asked for; 1 if a test failed in one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cells whose names contain one of these")
    parser.add_argument("--roots", type=Path, metavar="FOLDER", help="of roots of Debian's suites, for other Pythons")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="instead of the core of the tests")
    parser.add_argument("--cell", nargs=3, metavar=("PYTHON", "TORCH", "TRANSFORMERS"), help="one that is not listed")
    parser.add_argument("--list", action="store_true", help="print the cells, run nothing")
    parser.add_argument("--page", action="store_true", help="write docs/versions.md from the results, run nothing")
    args = parser.parse_args(words)
    cells = [Cell(*args.cell)] if args.cell else CELLS
    cells = [one for one in cells if not args.only or any(text in one.name for text in args.only)]
    if args.list:
        sys.stdout.write("".join(f"{one.name}\n" for one in cells))
        return 0
    bad = False
    for cell in [] if args.page else cells:
        tell(f"{cell.name}: installing")
        result = measured(cell, args.roots, args.tests)
        tell(f"{cell.name}: {outcome(result)}" + "".join(f"\n  {name}" for name in result.failed[:20]))
        bad = bad or bool(result.failed)
        if not args.tests:
            store(cell, result)
    write_page()
    return int(bad)


def measured(cell: Cell, roots: Path | None, tests: Sequence[str]) -> Result:
    """Install a cell and run its tests."""
    result = Result(
        asdict(cell),
        day=time.strftime("%Y-%m-%d"),
        commit=run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip(),
    )
    try:
        place = place_of(cell.python, roots)
        result.system = place.system
        with place.scratch() as folder:
            fill(result, cell, place, Path(folder), tests)
    except UnavailableError as error:
        result.reason = str(error)
    return result


def place_of(python: str, roots: Path | None) -> Place:
    """Return where this Python runs; raise UnavailableError if no way leads to one."""
    known = [shutil.which(f"python{python}"), *Path.home().glob(f".pyenv/versions/{python}.*/bin/python")]
    for path in filter(None, known):
        if not subprocess.run([path, "-V"], capture_output=True, check=False).returncode:  # pyenv's shims fail
            return Place(str(path))
    if uv := shutil.which("uv"):
        subprocess.run([uv, "python", "install", python], capture_output=True, check=False)
        find = [uv, "python", "find", "--no-project", python]
        done = subprocess.run(find, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Place(done.stdout.strip())
    suite = SUITES.get(python)
    if suite is None or roots is None:
        raise UnavailableError(
            f"no Python {python} on PATH, from pyenv or from uv" + ("; see --roots" if suite else ", nor in Debian")
        )
    root = (roots / suite).resolve()
    if not (root / f"usr/bin/python{python}").exists():
        make_root(suite, root)
    return Place(f"/usr/bin/python{python}", root)


def make_root(suite: str, root: Path) -> None:
    """Make a root of a suite of Debian with its Python and nothing else that whet could miss."""
    packages = "--include=python3,python3-venv,ca-certificates,libgomp1,procps"
    command = ["debootstrap", "--variant=minbase", packages, suite, str(root)]
    if shutil.which(command[0]) is None or os.geteuid():
        raise UnavailableError(f"a root of Debian {suite} needs debootstrap, and root")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"debootstrap {suite} ended with {done.returncode}: {done.stdout[-300:]}")


def fill(result: Result, cell: Cell, place: Place, folder: Path, tests: Sequence[str]) -> None:
    """Install the cell in this folder, run the tests there, and write what became of it to the result."""
    copy_tracked(folder, without="src/")  # which the wheel has
    (wheel,) = (ROOT / "dist").glob(f"whet_train-*_{platform.machine()}.whl")
    shutil.copy2(wheel, folder)
    python = place.inside(folder / "env/bin/python")
    began = time.monotonic()
    check(place.run([place.python, "-m", "venv", place.inside(folder / "env")], folder), "no environment")
    check(place.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv"], folder), "no uv")
    install = [place.inside(folder / "env/bin/uv"), "pip", "install", "-q", "--python", python]
    torch = f"torch=={cell.torch}" if cell.torch else "torch"
    index = ["--index-url", CPU_INDEX] if answers(CPU_INDEX) else []
    check(place.run([*install, *index, torch], folder), f"{torch} cannot be installed")
    others = [f"transformers=={cell.transformers}" if cell.transformers else "transformers"]
    check(
        place.run([*install, f"whet-train[{EXTRAS}] @ {place.inside(folder / wheel.name)}", *others, *TOOLS], folder),
        "whet cannot be installed next to it",
    )
    result.seconds["installing"] = round(time.monotonic() - began, 1)
    seen = place.run([python, "-c", SEEN], folder)
    check(seen, "whet cannot be imported")
    known = json.loads(seen.stdout.splitlines()[-1])
    if not known["installed"]:
        raise UnavailableError("the tests would not run the wheel")
    result.python, result.torch, result.transformers = known["python"], known["torch"], known["transformers"]
    result.native = known["native"]
    began = time.monotonic()
    asked = tests or [f"tests/{name}" for name in CORE]
    test = [python, "-m", "pytest", "-q", "-m", MARKS, "-n", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal"]
    test += ["-o", "filterwarnings="]  # what other versions warn of is no error of whet
    done = place.run([*test, "--junitxml=result.xml", *asked], folder, {"OMP_NUM_THREADS": "1"})
    result.seconds["testing"] = round(time.monotonic() - began, 1)
    if not (folder / "result.xml").exists():
        raise UnavailableError(f"the tests did not begin: {(done.stdout + done.stderr).strip()[-400:]}")
    for case in ElementTree.parse(folder / "result.xml").iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            result.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            result.skipped += 1
        else:
            result.passed += 1
    if result.failed:
        kept = Path(tempfile.gettempdir()) / f"whet-{re.sub(r'[^a-z0-9.]+', '-', cell.name)}.txt"
        kept.write_text(done.stdout + done.stderr, "utf-8")
        tell(f"  the tests' output is in {kept}")


def answers(address: str) -> bool:
    """Return whether an index can be reached."""
    try:
        with urllib.request.urlopen(f"{address}/", timeout=10):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def check(done: subprocess.CompletedProcess[str], what: str) -> None:
    """Raise UnavailableError with the line that says why, if a command has failed."""
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        why = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no output")
        raise UnavailableError(f"{what}: {why[:300]}")


def store(cell: Cell, result: Result) -> None:
    """Keep a result in the place of the cell's last one."""
    on_file: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    on_file[cell.name] = asdict(result)
    RESULTS.write_text(json.dumps(on_file, indent=1) + "\n", "utf-8")


def outcome(result: Result) -> str:
    """Return one phrase about a result."""
    if result.reason:
        return result.reason
    failed = f", {len(result.failed)} failed" if result.failed else ""
    return f"{result.passed} passed{failed}, {result.skipped} skipped"


def write_page() -> None:
    """Write the table of docs/versions.md."""
    on_file = json.loads(RESULTS.read_text("utf-8"))
    rows = ["| Python | torch | transformers | system | tests | measured |", "|---|---|---|---|---|---|"]
    for cell in CELLS:
        if cell.name not in on_file:
            continue
        result = Result(**on_file[cell.name])
        ran = (result.python or cell.python, result.torch or cell.torch or "newest", result.transformers or "newest")
        rows.append(f"| {' | '.join((*ran, result.system, outcome(result), f'{result.day}, {result.commit}'))} |")
    text = PAGE.read_text("utf-8")
    begin, end = "<!-- versions -->\n", "<!-- end of versions -->"
    before, _, rest = text.partition(begin)
    PAGE.write_text(before + begin + "\n".join(rows) + "\n" + end + rest.partition(end)[2], "utf-8")


def tell(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
