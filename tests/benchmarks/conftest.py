"""Lets the tests import the benchmark's modules: they are scripts that lie beside each other, not a package."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "cpu"), str(BENCHMARKS / "encoders"), str(BENCHMARKS / "dist")]
