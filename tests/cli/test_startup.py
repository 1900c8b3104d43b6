"""What a command does before it works: nothing that costs seconds or other programs their time."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_qa import command, save_encoder, squad, write_json

pytestmark = pytest.mark.true_start

_PLAIN = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, "2000"), ({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_idle_threads_sleep_unless_a_user_decides_otherwise(given: dict[str, str], wanted: str) -> None:
    code = "import atexit, os; atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT')))\n"
    code += "from whet.cli.main import main; main(['--version'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_PLAIN | given)
    assert found.stdout.splitlines()[-1] == wanted


@pytest.mark.night  # a training of qa shows it by day, below
@pytest.mark.parametrize("task", ["qa", "classify", "tag"])
def test_library_of_data_sets_is_not_imported_for_files(task: str) -> None:
    code = f"import sys, whet.tasks.{task}.job; print(sorted({{'datasets', 'pyarrow.dataset'}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


_UNUSED = {"bitsandbytes", "datasets", "kubernetes", "pandas", "peft", "pyarrow", "torchao", "transformers.trainer"}


def test_training_imports_no_package_that_it_does_not_use(tmp_path: Path) -> None:
    """And a process that starts with it prints nothing of its own where only errors are asked for."""
    save_encoder(tmp_path / "model")
    write_json(tmp_path / "train.json", squad())
    words = command(
        tmp_path / "model", tmp_path / "out", "--do_train", train_file=tmp_path / "train.json", log_level="error"
    )
    code = (
        "import sys; from whet.delayed_imports import delayed\n"
        "with delayed(): import whet.tasks.qa.job, transformers.modeling_utils, transformers.training_args\n"
        "print('accelerate' in sys.modules)\n"
        f"from whet.cli.main import run; assert run({words!r}) == 0\n"
        f"print(sorted({_UNUSED!r} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n[]\n", "")
    assert "transformers" in (tmp_path / "out" / "README.md").read_text("utf-8")


@pytest.mark.night
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_delayed_names_are_those_of_the_package_when_they_are_used() -> None:
    code = """
import sys
from whet.delayed_imports import delayed

with delayed():
    from transformers import BertConfig, BertModel, trainer_utils

    model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    assert not trainer_utils._is_peft_model(model)
    assert "peft" not in sys.modules
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    assert trainer_utils._is_peft_model(adapted) and not trainer_utils._is_peft_model(model)

    class Mine(trainer_utils.PeftModel):
        pass

    assert issubclass(Mine, peft.PeftModel)
    from transformers.utils import is_peft_available

    assert is_peft_available()
print(sys.modules["peft"].PeftModel is peft.PeftModel, hasattr(peft, "no_such_name"))
"""
    assert _printed(code) == "True False"


@pytest.mark.night
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_a_delayed_function_is_called_as_usual() -> None:
    code = """
import sys
from whet.delayed_imports import delayed

with delayed():
    from transformers.quantizers import quantizer_torchao

    assert "torchao" not in sys.modules
    found = quantizer_torchao.flatten_tensor_state_dict({})
print(found == ({}, {}) or found, "torchao" in sys.modules)
"""
    assert _printed(code).endswith("True")


def _printed(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()[-1]
