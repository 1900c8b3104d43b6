"""What a command does before it works: nothing that costs seconds or other programs their time."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_qa import command, save_encoder, squad, write_json

from whet import tasks

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
@pytest.mark.parametrize("task", sorted({tasks.entries()[one.name].folder for one in tasks.tasks() if one.by_engine}))
def test_library_of_data_sets_is_not_imported_for_files(task: str) -> None:
    code = f"import sys, whet.tasks.{task}.job; print(sorted({{'datasets', 'pyarrow.dataset'}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


_BAD = "import sys\nfrom whet.cli.main import run\nprint(run(sys.argv[1:]), 'torch' in sys.modules)"


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(one.name for one in tasks.tasks() if one.by_engine))
def test_bad_data_is_refused_before_torch_is_imported(task: str, tmp_path: Path) -> None:
    """The message comes within half a second, and the next one as soon as that place is corrected."""
    (tmp_path / "model").mkdir()
    (tmp_path / "bad.json").write_text('[{"a": 1}, ', "utf-8")
    words = [task, "--do_train", "--model_name_or_path", "model", "--train_file", "bad.json", "--output_dir", "out"]
    code = [sys.executable, "-c", _BAD, *words]
    found = subprocess.run(code, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.splitlines()[-1] == "65 False", found.stderr


_UNUSED = {
    *("accelerate", "bitsandbytes", "datasets", "kubernetes", "pandas", "peft", "pyarrow", "torch._dynamo"),
    *("torch._inductor", "torch.distributed.fsdp", "torchao", "transformers.trainer"),
}
_UNUSED_BEFORE_STEPS = _UNUSED | {"sympy", "torch.distributed.checkpoint", "torch.distributed.tensor"}
_EXTRAS = (
    *(f"whet.{name}" for name in ("dist", "hf", "kubernetes", "launch", "own_loop", "config.deepspeed")),
    *(f"whet.engine.{name}" for name in ("frozen_trunk", "many_ranks", "own_losses", "routing", "zero")),
    *(f"whet.jobs.{name}" for name in ("hub_data", "lora", "predict.outputs", "teacher")),
    *(f"whet.methods.{name}" for name in ("capture", "checkpoint_blocks", "compile_blocks", "offload", "unpad")),
    *(f"whet.models.{name}" for name in ("bad_batch", "captured", "experts.layer", "loading.adapter", "proof")),
    *(f"whet.models.families.{name}" for name in ("albert", "deberta", "llama", "modernbert")),
    *(f"whet.objectives.{name}" for name in ("distilled", "own_loss", "packed_head", "preferences")),
    *(f"whet.optim.optimizers.{name}" for name in ("adafactor", "adamw_packages", "lion", "muon", "plain")),
    *(f"whet.watch.{name}" for name in ("empty_cache", "profile", "ray_train", "trackers", "trainjob")),
)  # fmt: skip
"""Modules of whet, with those inside, that a plain training has not asked for."""


@pytest.mark.slow
def test_training_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    """No package, and no part of whet; and it prints nothing of its own where only errors are asked for."""
    code = f"""
import sys
from whet.cli.main import run
from whet.delayed_imports import delayed

with delayed():
    from whet.engine.loop import TrainingLoop
take_step, before_steps = TrainingLoop.take_step, []

def watched(loop):
    before_steps.append(sorted({_UNUSED_BEFORE_STEPS!r} & sys.modules.keys()))
    take_step(loop)

TrainingLoop.take_step = watched
assert run({_training(tmp_path)!r}) == 0
print(before_steps[0], sorted({_UNUSED!r} & sys.modules.keys()))
print([one for one in sys.modules if any(f"{{one}}.".startswith(f"{{extra}}.") for extra in {_EXTRAS!r})])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] []\n[]\n", "")
    assert "transformers" in (tmp_path / "out" / "README.md").read_text("utf-8")


@pytest.mark.night
def test_eager_imports_train_the_same_model(tmp_path: Path) -> None:
    code = f"import sys; from whet.cli.main import run; assert run({_training(tmp_path)!r}) == 0\n"
    code += "import torch, transformers.distributed.utils as utils\n"
    code += "print(torch._check_with.__module__, utils.is_dtensor.__module__, 'torch._dynamo' in sys.modules)"
    weights = tmp_path / "out" / "model.safetensors"
    assert _printed(code).split()[-1] == "False"
    delayed = weights.read_bytes()
    assert _printed(code, WHET_IMPORTS="eager").split() == ["torch", "transformers.distributed.utils", "True"]
    assert weights.read_bytes() == delayed


def _training(folder: Path) -> list[str]:
    save_encoder(folder / "model")
    write_json(folder / "train.json", squad())
    words = command(folder / "model", folder / "out", "--do_train", train_file=folder / "train.json", log_level="error")
    return [*words, "--overwrite_output_dir"]


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


_CALLED_LATE = """
import sys
from whet.delayed_imports import delayed

with delayed():
    import torch
    from transformers.distributed import utils
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed import tensor_parallel
    from transformers.integrations import deepgemm

    assert not utils.is_dtensor(torch.ones(2))
    layout = ALL_PARALLEL_STYLES["rowwise"].input_layouts
    assert not {{"torch._dynamo", "torch.distributed.tensor"}} & sys.modules.keys()
    {code}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "assert layout.dim == -1 and layout.is_shard(); print('torch.distributed.tensor' in sys.modules)",
        pytest.param(
            "print(not deepgemm.is_deepgemm_loadable() and 'torch._dynamo' in sys.modules)", marks=pytest.mark.night
        ),
        pytest.param(
            "from torch.distributed.tensor import Shard; print(isinstance(Shard(0), tensor_parallel.Shard))",
            marks=pytest.mark.night,
        ),
    ],
)
def test_calls_of_torch_wait_as_well(code: str) -> None:
    assert _printed(_CALLED_LATE.format(code=code)) == "True"


@pytest.mark.night
def test_transformers_finds_the_same_names_in_its_sources() -> None:
    code = """
import os
from whet.delayed_imports import delayed

with delayed():
    import transformers
    from transformers.utils import import_utils
folder = os.path.join(os.path.dirname(transformers.__file__), "models")
found = import_utils.create_import_structure_from_path(folder)
print(import_utils.fetch__all__.__qualname__, sorted(map(repr, found.items())))
"""
    replaced, found = _printed(code, PYTHONHASHSEED="0").split(maxsplit=1)
    plain, wanted = _printed(code, PYTHONHASHSEED="0", WHET_IMPORTS="eager").split(maxsplit=1)
    assert (plain, found) == ("fetch__all__", wanted)
    assert replaced != plain


@pytest.mark.night
def test_importing_leaves_the_search_for_garbage_as_it_was() -> None:
    code = "import gc; from whet.delayed_imports import delayed\nwith delayed(): from transformers import BertModel\n"
    code += "print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    assert _printed(code) == "True True"
    assert _printed("import gc; gc.disable()\n" + code) == "False True"


@pytest.mark.slow
def test_optimizers_need_no_compiler_before_somebody_compiles() -> None:
    code = """
import sys
from whet.delayed_imports import delayed

with delayed():
    import torch

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def clear(value):
        optimizer.zero_grad()
        return value * 2

    (weight * 2).sum().backward()
    clear(weight)
    assert weight.grad is None and "torch._dynamo" not in sys.modules
    (weight * 2).sum().backward()
    graphs = []
    compiled = torch.compile(clear, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    found = compiled(weight)
print(weight.grad, found.tolist(), ["zero" in graph.code for graph in graphs])
"""
    assert _printed(code) == "None [2.0, 2.0, 2.0] [False]"


def _printed(code: str, **variables: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | variables
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()[-1]
