"""What importing costs and does: the light modules stay light, and nothing is used that is not declared."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.true_start

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
LIGHT = [
    "errors.py",
    "log.py",
    "optional.py",
    "units.py",
    "__main__.py",
    "config/**/*.py",
    "cli/**/*.py",
    "hardware/**/*.py",
    "doctor/**/*.py",
    "launch/**/*.py",
    "kubernetes/**/*.py",
    "migrate/**/*.py",
    "report/**/*.py",
    "run/arguments.py",
    "run/entry_points.py",
    "run/reports.py",
    "run/script.py",
    "tasks/__init__.py",
    "tasks/*/task.py",
    "jobs/run.py",
    "jobs/command.py",
    "watch/lock.py",
    "watch/stop.py",
]
"""What is imported before torch is needed: for help texts, and to refuse a bad command or bad data at once."""

_PROBE = """
import os, sys
from importlib import import_module
environment = dict(os.environ)
for name in sys.argv[1:]:
    import_module(name)
    heavy = {"torch", "transformers", "datasets"} & set(sys.modules)
    if heavy:
        sys.exit(f"importing {name} imports {sorted(heavy)}: import it where it is used")
    if dict(os.environ) != environment:
        sys.exit(f"importing {name} writes to the environment")
"""


def module_name(path: Path) -> str:
    """Return the dotted name of a file below src."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def test_light_modules_import_nothing_heavy() -> None:
    files = sorted({path for pattern in LIGHT for path in (SRC / "whet").glob(pattern)})
    names = [name for path in files if (name := module_name(path)) != "whet.__main__"]  # importing it runs the program
    done = subprocess.run([sys.executable, "-c", _PROBE, *names], capture_output=True, text=True, check=False)
    assert len(names) > 10
    assert done.returncode == 0, done.stderr


def test_the_probe_sees_a_heavy_import() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE, "torch.version"], capture_output=True, text=True, check=False)
    assert "imports ['torch']" in done.stderr


def imported(source: str) -> set[str]:
    """Return the top-level names of all modules that the source imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.fixture(scope="module")
def declared() -> set[str]:
    """The packages that pyproject.toml says whet needs, in normal form."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {_normal(re.split(r"[^\w.-]", need)[0]) for need in project["dependencies"]}


@pytest.fixture(scope="module")
def used() -> set[str]:
    """The packages whose modules the code of whet imports, in normal form."""
    names = {name for path in SRC.rglob("*.py") for name in imported(path.read_text("utf-8"))}
    others = names - set(sys.stdlib_module_names) - {"whet", "whet_train"}
    owners = packages_distributions()
    return {_normal(owners.get(name, [name])[0]) for name in others}


def test_every_package_in_use_is_declared(declared: set[str], used: set[str]) -> None:
    """An optional package is not imported by name, but through `whet.optional.require`, which says how to get it."""
    assert used - declared == set()


def test_every_declared_package_is_in_use(declared: set[str], used: set[str]) -> None:
    assert declared - used == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
