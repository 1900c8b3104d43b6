"""Every method goes through one seam: it does nothing unasked, and it is undone exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import engine
import whet
from tiny import arguments, tiny_model
from whet.config.methods import CompileSettings, MethodSettings
from whet.methods import order
from whet.methods.seam import Cost, Method, Stage
from whet.models.packed import packed_model, prepare
from whet.models.view import ModelView

METHODS = pytest.mark.parametrize("method", order.methods(), ids=lambda method: method.CARD.name)
ASKED = {
    "operators": MethodSettings(operators="auto", row_gradients=True),
    "unpad": MethodSettings(unpad="sampled"),
    "torch.compile": MethodSettings(compile=CompileSettings(backend="eager")),
    "checkpointing": MethodSettings(checkpointing="blocks"),
}
"""Settings that ask for one method alone. int8 and offload have tests of their own: they need special hardware."""


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """Return all that is known of each module, and which of its weights are trained."""
    return [
        {name: value for name, value in vars(module).items() if name != "training"}
        | {"trained": [weight.requires_grad for weight in module.parameters(recurse=False)]}
        for module in model.modules()
    ]


def copied(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: copy.copy(value) for name, value in state.items()} for state in states]


@METHODS
def test_a_method_does_nothing_unasked(method: Method) -> None:
    model = tiny_model("bert")
    before = copied(attributes(model))
    assert method.apply(ModelView(model), MethodSettings()) is None
    assert attributes(model) == before


@METHODS
@pytest.mark.usefixtures("operators")
def test_a_method_is_undone_exactly(method: Method) -> None:
    by_name = method.CARD.asked_by == "methods"
    settings = MethodSettings(names=(method.CARD.name,)) if by_name else ASKED.get(method.CARD.name)
    if settings is None:
        pytest.skip("needs hardware of its own")
    model = tiny_model("bert", dropout=0.1)
    assert prepare(model, encoder_only=True) is not None
    before = copied(attributes(model))
    done = method.apply(ModelView(model), settings)
    assert done is not None or method.CARD.name == "operators"  # auto: there may be no native ones
    method.restore(ModelView(model))
    assert attributes(model) == before


@METHODS
def test_a_model_without_the_method_stays_as_it_is(method: Method) -> None:
    model = tiny_model("bert")
    before = copied(attributes(model))
    method.restore(ModelView(model))
    assert attributes(model) == before


@METHODS
def test_what_is_not_asked_for_costs_nothing(method: Method) -> None:
    assert method.cost(ModelView(tiny_model("bert")), MethodSettings()) == Cost()


def test_restore_takes_out_all_that_a_trainer_put_in(tmp_path: Path) -> None:
    """One record holds it, so that whet.restore finds it, whoever applied it."""
    model = tiny_model("bert", dropout=0.1)
    before = copied(attributes(model))
    args = arguments(tmp_path, gradient_checkpointing=True, torch_compile=True, torch_compile_backend="eager")
    engine.Trainer(model=model, args=args)
    assert packed_model(model) is not None
    assert [name for name in vars(model) if name.startswith("whet")] == ["whet"]
    assert whet.restore(model) is model
    assert attributes(model) == before


def test_methods_are_applied_stage_by_stage() -> None:
    stages = [method.STAGE for method in order.methods()]
    assert stages == sorted(stages)
    names = [method.CARD.name for method in order.methods()]
    assert names.index("torch.compile") < names.index("checkpointing"), "a compiled block is what is recomputed"
    assert Stage.OPERATORS in stages
