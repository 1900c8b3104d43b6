"""Advice for machines that are not at hand: each finding that is not right gives its command, and only then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.cli.main import run
from whet.doctor import report
from whet.doctor.report import Findings, Machine, Native, Rates, Software, advice_for, as_text, broken_parts

_MACHINE = Machine(
    processor="P", usable_cpus=16, usable_cores=8, quota_cores=None, numa_nodes=1, instruction_sets=["AVX2"],
    lacking=["AVX-512"], load=0.2, memory_bytes=2**35, memory_limit_bytes=None, memory_available_bytes=2**34,
    huge_pages="madvise", folder="/data", disk_free_bytes=2**40, nvidia_gpus=[],
)  # fmt: skip
_SOFTWARE = Software(
    python="3.12.0", whet="1", torch="2.13.0+cpu", torch_error=None, transformers="5.23.0", packages={},
    not_installed=["wandb"], threads=8, settings={}, openmp=["/a/libgomp.so.1"], gpus=[],
)  # fmt: skip
_NATIVE = Native(
    path="/a/_native.so", isa="x86-64-v3", best_isa="x86-64-v3", error=None, asked_isa=None, source_tree=None,
    cmake=None, compiler=None,
)  # fmt: skip


def _findings(**changes: Any) -> Findings:
    """A good machine with these facts changed, whichever record they belong to."""
    parts = []
    for record in (_MACHINE, _SOFTWARE, _NATIVE):
        own = {name: value for name, value in changes.items() if name in record.__dataclass_fields__}
        parts.append(replace(record, **own))
    return Findings(machine=parts[0], software=parts[1], native=parts[2], rates=None)


def test_requirements_that_installed_packages_do_not_meet_are_named() -> None:
    """Of this environment: what is new enough, missing or only an extra's is not named."""
    asked = ["pytest>=9999", "numpy>=2", "no-such-package>=1", "torch>=9999; extra == 'gpu'", "ruff>0"]
    (named,) = report.unsupported(asked)
    assert named == f"pytest {pytest.__version__} (whet needs >=9999)"
    assert report.unsupported(report.requires_of("whet-train")) == []
    assert report.requires_of("no-such-package") == []


def test_a_cuda_build_without_a_gpu_is_named_with_its_size() -> None:
    (problem,) = advice_for(_findings(torch="2.13.0+cu130", cuda="13.0", cuda_bytes=6 * 2**30))
    assert problem.got == "torch 2.13.0+cu130, CUDA 13.0: 6.0 GiB with its packages"


def test_the_size_of_a_cuda_build_is_that_of_torch_and_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = report._size_of_cuda()
    for name, files in {"nvidia_cublas-13.1": "a.so,sha256=x,500\nb.so,,24\nc.py,,\n", "other-1": "d.so,,7\n"}.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        package = name.partition("-")[0].replace("_", "-")
        (tmp_path / f"{name}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (tmp_path / f"{name}.dist-info/RECORD").write_text(files)
    monkeypatch.syspath_prepend(tmp_path)
    assert report._size_of_cuda() - before == 524
    assert before > 10**8  # torch itself


def test_good_machine_gets_no_advice() -> None:
    found = _findings()
    assert broken_parts(found) == advice_for(found) == []
    assert as_text(found, [], []).endswith("nothing to fix")


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"threads": 16}, "export OMP_NUM_THREADS=8"),
        ({"threads": 8, "usable_cores": 2, "quota_cores": 2.0, "settings": {"OMP_WAIT_POLICY": "passive"}},
         "export OMP_NUM_THREADS=2"),
        ({"threads": 2}, "export OMP_NUM_THREADS=8"),
        ({"load": 12.0}, "export OMP_WAIT_POLICY=passive"),
        ({"quota_cores": 8.0}, "export OMP_WAIT_POLICY=passive"),
        ({"openmp": ["/a/libgomp.so.1", "/b/libiomp5.so"]}, "LD_PRELOAD"),
        ({"memory_available_bytes": 2**30}, "--per_device_train_batch_size"),
        ({"disk_free_bytes": 2**31}, "--save_total_limit 2"),
        ({"huge_pages": "never"}, "transparent_hugepage/enabled"),
        ({"numa_nodes": 2}, "numactl"),
        ({"nvidia_gpus": ["NVIDIA A100"]}, "CUDA"),
        ({"torch": "2.13.0+cu130", "cuda": "13.0", "cuda_bytes": 6 * 2**30},
         "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu (uv: uv pip install torch==2.13"),
        ({"torch": "2.14.0", "onednn": "3.12.3", "instruction_sets": ["AMX bf16"]}, "leave --fp16 out"),
        ({"path": None, "isa": None}, "source tree of whet"),
        ({"asked_isa": "avx2"}, "unset WHET_ISA"),
    ],
)  # fmt: skip
def test_one_problem_gives_one_piece_of_advice(changes: dict[str, Any], fix: str) -> None:
    found = _findings(**changes)
    (problem,) = advice_for(found)
    assert fix in problem.fix
    assert broken_parts(found) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"torch_error": "ImportError: x", "threads": None}, "torch cannot compute here"),
        ({"torch_error": "ImportError: x", "threads": None, "isa": None, "error": "no torch"}, "torch cannot compute"),
        ({"path": None, "isa": None, "error": "torch cannot be loaded: x"}, "cannot be loaded"),
        ({"transformers": None}, "transformers is missing"),
        ({"too_old": ["transformers 5.10.0 (whet needs >=5.16)"]}, "not of a version that whet supports"),
        ({"isa": None, "error": "wrong ELF class"}, "cannot be used"),
    ],
)
def test_broken_parts_change_the_exit_code(changes: dict[str, Any], what: str) -> None:
    found = _findings(**changes)
    (problem,) = broken_parts(found)
    assert what in problem.what
    assert advice_for(found) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"load": 12.0, "settings": {"OMP_WAIT_POLICY": "PASSIVE"}},
        {"load": 12.0, "threads": 1, "usable_cores": 1},
        {"nvidia_gpus": ["NVIDIA A100"], "gpus": ["NVIDIA A100, 80 GiB"]},
        {"nvidia_gpus": ["NVIDIA A100"], "gpus": ["NVIDIA A100, 80 GiB"], "cuda": "13.0", "cuda_bytes": 6 * 2**30},
        {"onednn": "3.12.3"},
        {"onednn": "3.12.4", "instruction_sets": ["AMX bf16"]},
        {"load": None, "huge_pages": None, "memory_available_bytes": None, "numa_nodes": 0},
        {"asked_isa": "v4"},
    ],
)
def test_correct_settings_give_no_advice(changes: dict[str, Any]) -> None:
    assert advice_for(_findings(**changes)) == []


@pytest.mark.parametrize(
    ("bf16", "says"), [(120.0, "--bf16 can pay"), (40.0, "leave --bf16 out"), (None, "not possible")]
)
def test_rates_show_whether_bf16_is_faster(bf16: float | None, says: str) -> None:
    rates = Rates(
        shape=(1, 2, 3), fp32_mm_gflops=50.0, fp32_onednn_gflops=80.0, bf16_mm_gflops=bf16, bf16_onednn_gflops=bf16,
        bf16_widened_gflops=None, int8_gops=None, copy_gb_per_s=9.0, seconds=1.0,
    )  # fmt: skip
    assert says in as_text(replace(_findings(), rates=rates), [], [])


def test_rates_show_what_widening_gains() -> None:
    rates = Rates(
        shape=(1, 2, 3), fp32_mm_gflops=50.0, fp32_onednn_gflops=80.0, bf16_mm_gflops=20.0, bf16_onednn_gflops=21.0,
        bf16_widened_gflops=72.0, int8_gops=None, copy_gb_per_s=9.0, seconds=1.0,
    )  # fmt: skip
    text = " ".join(as_text(replace(_findings(), rates=rates), [], []).split())  # lines end where the terminal does
    assert "20 by torch.mm, 21 by oneDNN, 72 by whet in fp32; 0.9x fp32: leave --bf16 out" in text


def test_no_measure_with_kernels_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--kernels", "--no_measure"]) == 78
    assert "no_measure has no effect here" in capsys.readouterr().err
