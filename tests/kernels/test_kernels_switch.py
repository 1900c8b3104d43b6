"""WHET_KERNELS chooses between native and reference operators, for everything that a process runs."""

import os
import subprocess
import sys

import pytest
from native_support import need_native

need_native()

_PROGRAM = """
import json, sys, tempfile
sys.path.insert(0, "tests")
import engine
import torch
from torch.profiler import profile
import whet
from tiny import tiny_model, tiny_rows
with tempfile.TemporaryDirectory() as folder:
    args = engine.TrainingArguments(output_dir=folder, use_cpu=True, max_steps=2, save_strategy="no", disable_tqdm=True,
                                  report_to="none", precision="fp32", torch_compile={compiled},
                                  torch_compile_backend={backend})
    trainer = engine.Trainer(model=tiny_model("bert"), args=args, train_dataset=tiny_rows(8))
    with profile() as seen:
        trainer.train()
    model = whet.optimize(tiny_model("bert"))
    names = {{event.key for event in seen.key_averages()}}
print(json.dumps([type(trainer.optimizer).__name__, sorted(n for n in names if n.startswith("whet::")),
                  str(whet.changes(model))]))
"""


def _train(kernels: str, *, compiled: bool = False) -> subprocess.CompletedProcess[str]:
    program = _PROGRAM.format(compiled=compiled, backend="'aot_eager'" if compiled else None)
    env = {**os.environ, "WHET_KERNELS": kernels}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gate)])
def test_whet_kernels_reference_runs_no_native_operator(*, compiled: bool) -> None:
    done = _train("reference", compiled=compiled)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "whet::add_norm" not in last
    assert "operators in plain torch" in last


def test_whet_kernels_native_runs_native_operators() -> None:
    done = _train("native")
    assert done.returncode == 0, done.stderr
    assert "whet::add_norm" in done.stdout.splitlines()[-1]


def test_whet_kernels_unknown_value_is_refused() -> None:
    done = _train("fast")
    assert done.returncode != 0
    assert "WHET_KERNELS has an unknown value" in done.stderr
    assert "native or reference" in done.stderr


def test_whet_kernels_reference_is_shown_by_doctor() -> None:
    env = {**os.environ, "WHET_KERNELS": "reference"}
    command = [sys.executable, "-m", "whet", "doctor", "--kernels"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WHET_KERNELS=reference" in done.stdout
    assert "unset WHET_KERNELS" in done.stdout
