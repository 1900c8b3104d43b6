"""Lets the tests import the benchmark's modules: they are scripts that lie beside each other, not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "cpu"))
