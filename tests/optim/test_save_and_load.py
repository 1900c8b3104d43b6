"""Six steps are three steps, a state that was written and read, and three more: bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from optimizer_runs import Layers, arguments, cases, take_steps
from safetensors.torch import load_file

from whet.config.optimizer_names import names
from whet.optim import registry
from whet.store import find, state
from whet.store.optimizer import OptimizerState, names_in

OPTIM_ARGS = {
    "sgd": "momentum=0.9,nesterov=true",
    "rmsprop": "momentum=0.9,centered=true",
    "adamw_anyprecision": "use_kahan_summation=true,momentum_dtype=bfloat16",
    "adafactor": "beta1=0.9",
}
_NAMES = [name for name in names() if name != "adamw_apex_fused"]


def save_optimizer(optimizer, model, folder):
    """As a checkpoint does it."""
    text, tensors = state.split_parts({"optimizer": OptimizerState(optimizer, names_in(optimizer, model)).state()})
    state.write_tensors(tensors, folder)
    (folder / find.STATE).write_text(text, "utf-8")


def load_optimizer(optimizer, model, folder):
    """As a resumed run does it."""
    OptimizerState(optimizer, names_in(optimizer, model)).load_state(state.read_parts(folder)["optimizer"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plainly", [True, False])
@pytest.mark.parametrize("optim", cases(_NAMES))
def test_optimizer_state_is_saved_and_loaded(tmp_path: Path, optim: str, plainly: bool, dtype: torch.dtype) -> None:
    args = arguments(optim, optim_args=None if plainly else OPTIM_ARGS.get(optim))
    whole, stopped = Layers(dtype), Layers(dtype)
    take_steps(whole, registry.build(whole, args), range(6))
    first = registry.build(stopped, args)
    take_steps(stopped, first, range(3))
    save_optimizer(first, stopped, tmp_path)
    second = registry.build(stopped, args)
    load_optimizer(second, stopped, tmp_path)
    take_steps(stopped, second, range(3, 6))
    for one, other in zip(whole.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(one, other)


def test_state_files_contain_plain_tensors(tmp_path: Path) -> None:
    """Codes stay codes: a checkpoint of 8-bit moments is as small as the state."""
    model = Layers()
    optimizer = registry.build(model, arguments("adamw_whet_8bit"))
    take_steps(model, optimizer, range(2))
    save_optimizer(optimizer, model, tmp_path)
    tensors = load_file(tmp_path / "optimizer.safetensors")
    assert {t.dtype for name, t in tensors.items() if name.endswith(("exp_avg", "exp_avg_sq"))} == {torch.uint8}
    saved = sum(t.numel() * t.element_size() for t in tensors.values())
    assert saved == registry.model_state_bytes(model, arguments("adamw_whet_8bit"))
    state = json.loads((tmp_path / find.STATE).read_text())["optimizer"]["state"]
    assert {values["step"] for values in state.values()} == {2}


def test_loading_does_not_change_the_given_state(tmp_path: Path) -> None:
    model, args = Layers(), arguments("adamw_whet")
    first, second = registry.build(model, args), registry.build(model, args)
    take_steps(model, first, range(2))
    kept = first.state_dict()
    before = kept["state"][0]["exp_avg"].clone()
    second.load_state_dict(kept)
    take_steps(model, second, range(2, 4))
    assert torch.equal(kept["state"][0]["exp_avg"], before)
