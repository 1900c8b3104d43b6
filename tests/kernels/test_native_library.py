"""Finding, loading and building the native library."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_support import need_native, position_of

from whet.doctor.report import Findings, broken_parts, examine_native
from whet.errors import ConfigError
from whet.kernels import build, library, native_file, operator
from whet.kernels.activation import bias_act, bias_act_reference
from whet.kernels.batch_position import Drop
from whet.kernels.dropout import dropout, dropout_reference

pytestmark = pytest.mark.true_start

need_native()

_PROBE = """
import json, torch
from whet.kernels.library import library
from whet.kernels.activation import bias_act, bias_act_reference
from whet.kernels.norm import Norm, add_norm, add_norm_reference
x = torch.linspace(-3, 3, 1000).view(10, 100)
norm = Norm(torch.linspace(0, 1, 100), None, 1e-5)
results = [bias_act(x, None, "gelu"), add_norm(x, None, norm)[0]]
exact = [bias_act_reference(x.double(), None, "gelu"), add_norm_reference(x.double(), None, norm)[0]]
error = max(float((a - b).abs().max()) for a, b in zip(results, exact))
maps = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/", 1)[-1]}
print(json.dumps({"isa": library().isa, "error": error, "openmp": sorted(maps)}))
"""


def probe(**environment):
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_torch_and_whet_share_one_openmp():
    assert len([name for name in probe()["openmp"] if "libgomp" in name or "libomp" in name]) == 1


@pytest.mark.parametrize("level", ["baseline", "v3"])
def test_smaller_instruction_set_gives_correct_results(level):
    found = probe(WHET_ISA=level)
    assert found["isa"] in {"baseline", "x86-64", "x86-64-v3"}
    assert found["error"] < 2e-6


def test_plain_torch_runs_without_the_library(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native_file, "_candidates", lambda: iter([tmp_path / "none.so"]))
    library.library.cache_clear()
    position = position_of([4])
    try:
        with caplog.at_level(logging.WARNING):
            found = dropout(torch.ones(4, 8), Drop(0.5, position, 0))
            dropout(torch.ones(4, 8), Drop(0.5, position, 1))
    finally:
        library.library.cache_clear()
    assert torch.equal(found, dropout_reference(torch.ones(4, 8), Drop(0.5, position, 0)))
    (line,) = caplog.messages
    assert f"about {library.TIMES_AS_LONG} times as long" in line


def test_library_needs_no_newer_glibc_than_torch():
    versions = re.findall(rb"GLIBC_2\.(\d+)\0", library.library().path.read_bytes())
    assert versions
    assert max(map(int, versions)) <= 28  # torch's own wheels are manylinux_2_28


def test_reported_cost_equals_the_measured_one():
    report = Path(__file__).resolve().parents[2] / "benchmarks/cpu/plain_torch.json"
    assert round(json.loads(report.read_text("utf-8"))["ratio"], 1) == library.TIMES_AS_LONG


def test_invalid_library_file_is_not_used(monkeypatch, tmp_path, caplog):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setattr(native_file, "_candidates", lambda: iter([tmp_path / "broken.so"]))
    library.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert library.library() is None
    finally:
        library.library.cache_clear()
    assert "broken.so" in caplog.text


@pytest.mark.skipif(not Path(library.__file__).with_name("native").exists(), reason="an installation has no sources")
def test_library_of_other_sources_is_not_used(monkeypatch, tmp_path, caplog):
    ours, other = library.library(), tmp_path / "other.so"
    other.write_bytes(ours.path.read_bytes().replace(ours.sources.encode(), b"0" * len(ours.sources)))
    monkeypatch.setattr(native_file, "_candidates", lambda: iter([other]))
    library.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert library.library() is None
    finally:
        library.library.cache_clear()
    (line,) = caplog.messages
    assert "built from other sources" in line
    assert "python -m whet.kernels.build" in line


def test_argument_that_is_not_declared_is_refused():
    with pytest.raises(KeyError, match="widht"):
        operator.call("dropout", rows=1, widht=8)


def test_build_without_a_source_tree_names_a_fix(tmp_path):
    with pytest.raises(ConfigError, match="no source tree"):
        build.build(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_stale_library_is_reported_once_with_a_fix(monkeypatch, caplog):
    """A library of another version has not all operators: here one that has none."""
    stale = Path(
        next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    )
    monkeypatch.setattr(native_file, "_candidates", lambda: iter([stale]))
    library.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            found = bias_act(torch.ones(4, 8), None, "gelu")
            bias_act(torch.ones(4, 8), None, "gelu")
            seen = examine_native()
    finally:
        library.library.cache_clear()
    assert torch.equal(found, bias_act_reference(torch.ones(4, 8), None, "gelu"))
    (line,) = [text for text in caplog.messages if str(stale) in text]
    in_checkout = (Path(library.__file__).parents[3] / "CMakeLists.txt").exists()
    assert (
        "python -m whet.kernels.build" if in_checkout else "pip install --force-reinstall --no-deps whet-train"
    ) in line
    (problem,) = broken_parts(Findings(machine=None, software=None, native=seen, rates=None))
    assert str(stale) in problem.what
    assert "python -m whet.kernels.build" in problem.fix or "install a C++ compiler" in problem.fix
