"""`whet doctor` on the machine as it is: what it says changes with what it looks at."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import whet
from whet.cli.main import run
from whet.kernels import library, native_file

pytestmark = pytest.mark.true_start

_NATIVE = library.find()
native = pytest.mark.skipif(_NATIVE is None, reason="the native operators are not built here")


# The finder of an editable installation comes before PYTHONPATH, and would find that one again.
_PROGRAM = """
import runpy, sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__ + getattr(f, "__name__", "")]
runpy.run_module("whet", run_name="__main__", alter_sys=True)
"""


def _doctor(*words: str, package: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command, as of another copy of the package where one is given."""
    here = {name: value for name, value in os.environ.items() if name not in ("WHET_ISA", "OMP_NUM_THREADS")}
    path = str(package or Path(whet.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, "doctor", *words], env=here | {"PYTHONPATH": path} | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def _json(*words: str, **rest: Any) -> dict[str, Any]:
    done = _doctor("--json", *words, **rest)
    assert done.stdout.startswith("{"), done.stderr
    return json.loads(done.stdout) | {"exit": done.returncode}


def _advice(found: dict[str, Any]) -> dict[str, str]:
    return {one["what"]: one["fix"] for one in found["advice"]}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Everything, measured."""
    return _json()


@pytest.mark.slow
def test_doctor_reports_this_machine(found: dict[str, Any]) -> None:
    machine = found["machine"]
    flags = Path("/proc/cpuinfo").read_text()
    assert machine["processor"] in flags
    assert ("AVX-512" in machine["instruction_sets"]) == (" avx512f " in flags)
    assert ("AVX2" in machine["instruction_sets"]) == (" avx2 " in flags)
    assert machine["usable_cpus"] == len(os.sched_getaffinity(0))
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert machine["memory_bytes"] == int(total.split()[1]) * 1024
    assert machine["disk_free_bytes"] == pytest.approx(shutil.disk_usage(Path.cwd()).free, rel=0.05)


@pytest.mark.slow
def test_doctor_reports_versions_and_packages(found: dict[str, Any]) -> None:
    software = found["software"]
    code = """
import torch
print(torch.__version__, torch.get_num_threads(), torch.version.cuda, torch.__config__.show())
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    torch, threads, cuda, *build = said.stdout.split()
    assert (software["torch"], software["threads"]) == (torch, int(threads))
    assert software["transformers"] == version("transformers")
    assert f"v{software['onednn']}" in build
    assert (str(software["cuda"]), software["cuda_bytes"] > 0) == (cuda, cuda != "None")
    assert software["too_old"] == []
    assert "tensorboard" in [*software["packages"], *software["not_installed"]]
    assert len(software["openmp"]) <= 1


@pytest.mark.slow
def test_doctor_measures_rates(found: dict[str, Any]) -> None:
    rates = found["rates"]
    assert rates["fp32_mm_gflops"] > 0.5  # one core of any machine of this century does more
    assert rates["copy_gb_per_s"] > 0.1
    assert found["exit"] == 0
    assert found["ok"]


def test_doctor_text_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert run(["doctor", "--no_measure"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) < 45
    assert max(map(len, lines[: lines.index("")])) <= 110
    for label in (
        "processor",
        "cores",
        "instructions",
        "memory",
        "disk",
        "software",
        "packages",
        "threads",
        "operators",
    ):
        assert any(line.startswith(f"{label} ") for line in lines), label
    assert "memory copy" not in out


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """The part about the native operators."""
    return _json("--kernels")


@pytest.mark.slow
@native
@pytest.mark.parametrize(
    ("asked", "isa"), [("baseline", "x86-64"), pytest.param("v3", "x86-64-v3", marks=pytest.mark.night)]
)
def test_doctor_reports_the_instruction_set_of_the_environment(kernels: dict[str, Any], asked: str, isa: str) -> None:
    if kernels["native"]["best_isa"] in ("baseline", isa):
        pytest.skip("this processor has no better one")
    assert kernels["native"]["isa"] == kernels["native"]["best_isa"]
    limited = _json("--kernels", WHET_ISA=asked)
    assert limited["native"]["isa"] == isa
    assert _advice(limited) == {f"the native operators use {isa}": "run: unset WHET_ISA"}
    assert limited["exit"] == 0


@native
def test_unknown_instruction_set_in_the_environment_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WHET_ISA", "avx512")
    assert run(["doctor", "--kernels"]) == 0
    assert "WHET_ISA names no instruction set" in capsys.readouterr().out


@native
def test_kernels_option_reports_only_the_operators(kernels: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--kernels"]) == 0
    shown = capsys.readouterr().out
    assert str(_NATIVE) in shown
    assert not {"processor", "memory", "software"} & {line.partition(" ")[0] for line in shown.splitlines()}
    assert set(kernels) >= {"native", "ok", "advice"}
    assert not {"machine", "software", "rates"} & set(kernels)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package without the library, as a folder for PYTHONPATH; installed copies are out of sight."""
    shutil.copytree(
        Path(whet.__file__).parent, tmp_path / "src/whet", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (tmp_path / "src/whet_train-9.dist-info").mkdir()  # so that no other installation is found instead
    (tmp_path / "src/whet_train-9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: whet-train\nVersion: 9\n"
    )
    return tmp_path / "src"


@pytest.mark.slow
def test_missing_library_is_only_advice(copied: Path) -> None:
    found = _json("--kernels", package=copied)
    assert (found["native"]["path"], found["native"]["isa"], found["exit"]) == (None, None, 0)
    assert "source tree of whet" in _advice(found)["there are no native operators"]


@pytest.mark.night
def test_with_a_source_tree_the_advice_is_to_build(copied: Path) -> None:
    (copied.parent / "CMakeLists.txt").touch()
    found = _json("--kernels", package=copied)
    assert found["native"]["source_tree"] == str(copied.parent)
    assert "python -m whet.kernels.build" in _advice(found)["there are no native operators"]


def test_missing_build_tools_are_named_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_file, "_candidates", lambda: iter([tmp_path / "none.so"]))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert run(["doctor", "--kernels", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    if found["native"]["source_tree"] is None:
        pytest.skip("whet is not run from a source tree")
    assert _advice(found)["there are no native operators"] == (
        "install a C++ compiler (apt install g++) and cmake (pip install cmake), then run: python -m whet.kernels.build"
    )


@pytest.mark.slow
def test_broken_library_is_an_error(copied: Path) -> None:
    (copied / "whet/kernels/_native.so").write_bytes(b"not a library")
    done = _doctor("--kernels", package=copied)
    assert done.returncode == 1
    assert "broken: the native operators in" in done.stdout
    assert "file too short" in done.stdout or "invalid ELF" in done.stdout
    assert "plain torch (the native ones: cannot be used)" in done.stdout


@pytest.mark.parametrize("words", [("--no_measure",), pytest.param(("--kernels",), marks=pytest.mark.night)])
def test_doctor_works_without_torch(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open')")
    source = Path(whet.__file__).parents[1]
    found = _json(*words, PYTHONPATH=f"{tmp_path}{os.pathsep}{source}")
    assert found["exit"] == 1
    assert "cannot open" in json.dumps(found["advice"])


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_more_threads_than_cores_are_reported() -> None:
    taskset = shutil.which("taskset")
    if taskset is None:
        pytest.skip("there is no taskset here")
    one = str(min(os.sched_getaffinity(0)))
    words = [taskset, "-c", one, sys.executable, "-m", "whet", "doctor", "--json", "--no_measure"]
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "3"}, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["machine"]["usable_cores"] == 1
    assert found["software"]["threads"] > 1  # torch takes less than 3 where the whole machine has less
    assert _advice(found)["torch starts more threads than it has cores"] == "run: export OMP_NUM_THREADS=1"


def test_doctor_help_is_quick() -> None:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        done = _doctor("--help")
        times.append(time.perf_counter() - began)
    assert "whet doctor --kernels" in done.stdout
    assert "The exit code is 1" in " ".join(done.stdout.split())
    assert min(times) < 1.0  # 0.1 s on an idle machine; with torch it would be several seconds
