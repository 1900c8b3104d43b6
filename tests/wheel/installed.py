"""The built x86-64 wheel in a fresh environment without a compiler: `make test-wheel`.

`make test` does not collect this file: it needs a wheel in dist/ and installs torch. The last test runs the library on
processors of earlier generations, by user-mode emulation.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = "qemu-x86_64-static"
OPERATOR_TESTS = ("norm", "attention", "loss")

_TRAINING = """
import json
import torch
from transformers import BertConfig, BertForQuestionAnswering
from engine import Trainer, TrainingArguments
from whet.kernels.library import library

torch.manual_seed(1)
model = BertForQuestionAnswering(BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64))
rows = [{"input_ids": [2, 10 + i, 20, 30, 3], "start_positions": 1, "end_positions": 2} for i in range(24)]
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=12, num_train_epochs=10, learning_rate=1e-3, logging_steps=1,
    use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no")
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(json.dumps({"optimizer": type(trainer.optimizer).__name__, "losses": losses, "library": str(library().path)}))
"""

_EARLIER_PROCESSOR = """
import sys
import pytest
import torch
from whet.kernels.library import library
print("instruction set:", library().isa)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0", *sys.argv[1:]]))
"""
EARLIER_PROCESSOR_TESTS = (
    "tests/kernels/test_native_norm.py",
    "tests/kernels/test_native_int8.py::test_product_is_the_textbook_one",  # VNNI is newer than these processors
)


class Installation:
    """A fresh environment with the wheel in it. Its programs find nothing on PATH but the environment's own."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "env", with_pip=True)
        self.folder = folder
        self.bin = folder / "env" / "bin"
        outside = ("PYTHON", "WHET_", "CXX")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        self.env |= {"PATH": str(self.bin), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}

    def install(self, *packages: str) -> None:
        """Install by pip; nothing may be built."""
        self.run("python", "-m", "pip", "install", "--quiet", "--only-binary=:all:", *packages)

    def run(self, program: str, *words: str, cwd: Path | None = None) -> str:
        """Return the standard output of one of the environment's programs; fail with all output if it fails."""
        return output([str(self.bin / program), *words], env=self.env, cwd=cwd or self.folder)


def output(command: list[str], **options: Any) -> str:
    """Return the standard output of the command; fail the test with all output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        pytest.fail(f"{command} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The x86-64 wheel in dist/."""
    found = sorted((ROOT / "dist").glob("whet_train-*-manylinux_*_x86_64.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.fail("there is no x86-64 wheel in dist/: run make wheel")
    return found[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A fresh environment with torch, then the wheel and what it requires."""
    installation = Installation(tmp_path_factory.mktemp("wheel"))
    installation.install(f"torch=={version('torch').split('+')[0]}")  # the release that all other tests run on
    installation.install(str(wheel))
    installation.install(*(f"{name}=={version(name)}" for name in ("pytest", "hypothesis")))
    return installation


def test_doctor_finds_the_library_of_the_wheel_and_no_compiler(installed: Installation) -> None:
    native = json.loads(installed.run("whet", "doctor", "--kernels", "--json"))["native"]
    assert Path(native["path"]).is_relative_to(installed.folder)
    assert native["error"] is None
    assert native["isa"] == native["best_isa"] != "baseline"
    assert (native["compiler"], native["cmake"], native["source_tree"]) == (None, None, None)


def test_training_runs_by_the_native_operators(installed: Installation) -> None:
    found = json.loads(installed.run("python", "-c", _TRAINING).splitlines()[-1])
    assert Path(found["library"]).is_relative_to(installed.folder)
    assert found["optimizer"] == "WhetAdamW"
    assert found["losses"][-1] < 0.7 * found["losses"][0]  # 20 steps on one answer: it is learned by heart


def test_operators_of_the_wheel_give_right_results(installed: Installation) -> None:
    files = [f"tests/kernels/test_native_{name}.py" for name in OPERATOR_TESTS]
    report = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=ROOT).splitlines()
    assert " passed" in report[-1]
    assert "skipped" not in report[-1]


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"needs {EMULATOR} (apt-get install qemu-user-static)")
@pytest.mark.parametrize(("processor", "isa"), [("Nehalem", "x86-64"), ("Haswell", "x86-64-v3")])
def test_library_runs_on_an_earlier_processor(installed: Installation, processor: str, isa: str) -> None:
    """An instruction that the processor lacks would end the process."""
    packages = installed.run("python", "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip()
    python = str(Path(sys.executable).resolve())
    env = installed.env | {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    words = [str(shutil.which(EMULATOR)), "-cpu", processor, python, "-S", "-c", _EARLIER_PROCESSOR]
    report = output([*words, *EARLIER_PROCESSOR_TESTS], env=env, cwd=ROOT).splitlines()
    assert report[0] == f"instruction set: {isa}"
    assert " passed" in report[-1]
    assert "skipped" not in report[-1]
