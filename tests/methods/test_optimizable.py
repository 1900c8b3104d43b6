"""What `whet.optimize` refuses before it changes anything: no model, wrapped models, optimizers of other models."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

import whet
from tiny import tiny_model


class Tagger(nn.Module):
    """Somebody's own model around an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = tiny_model("bert").bert
        self.head = nn.Linear(self.encoder.config.hidden_size, 3)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.head(self.encoder(**batch).last_hidden_state)


def fix_of(call: Callable[[], Any]) -> str:
    with pytest.raises(whet.ConfigError) as caught:
        call()
    return str(caught.value.problems[0].fix)


def test_an_optimizer_of_another_model_is_refused_and_changes_nothing() -> None:
    model, other = tiny_model("bert"), tiny_model("bert", seed=5)
    with pytest.raises(whet.ConfigError, match="belongs to another model"):
        whet.optimize(model, optimizer=torch.optim.AdamW(other.parameters()))
    assert whet.changes(model) is None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, "adamw"])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    fix = fix_of(lambda: whet.optimize(tiny_model("bert"), optimizer=optimizer))
    assert "torch.optim.AdamW(model.parameters())" in fix


def test_an_optimizer_of_some_parameters_is_taken() -> None:
    model = tiny_model("bert")
    optimizer = torch.optim.SGD(model.bert.encoder.layer[0].parameters(), lr=0.1)
    assert whet.optimize(model, optimizer=optimizer) == (model, optimizer)


def test_an_encoder_is_taken_with_the_optimizer_of_the_model_around_it() -> None:
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert whet.optimize(model.encoder, optimizer=optimizer) == (model.encoder, optimizer)


@pytest.mark.parametrize("model", ["x", None, Tagger])
def test_what_is_no_model_is_refused(model: Any) -> None:
    assert "from_pretrained" in fix_of(lambda: whet.optimize(model))


def test_a_compiled_model_is_refused_and_the_one_inside_is_taken() -> None:
    compiled: Any = torch.compile(tiny_model("bert"), backend="eager")
    fix = fix_of(lambda: whet.optimize(compiled))
    assert "whet.optimize(model._orig_mod)" in fix
    assert whet.changes(whet.optimize(compiled._orig_mod)) is not None


def test_a_model_in_data_parallel_is_refused_and_the_one_inside_is_taken() -> None:
    wrapped = nn.DataParallel(tiny_model("bert"))
    assert "whet.optimize(model.module)" in fix_of(lambda: whet.optimize(wrapped))
    assert whet.changes(whet.optimize(wrapped.module)) is not None


def encoders_of(model: Any) -> tuple[str, ...]:
    found = whet.changes(whet.optimize(model))
    assert found is not None
    return found.encoders


def test_an_own_module_around_an_encoder_has_it_changed() -> None:
    assert encoders_of(Tagger()) == ("encoder",)


def test_encoders_in_a_list_are_named_as_torch_finds_them() -> None:
    assert encoders_of(nn.Sequential(tiny_model("bert").bert, nn.Identity(), tiny_model("bert").bert)) == ("0", "2")


def test_an_object_that_holds_a_model_has_it_changed() -> None:
    assert encoders_of(SimpleNamespace(model=tiny_model("bert"), threshold=0.5)) == ("model",)


def test_a_module_without_an_encoder_is_refused_by_what_it_holds() -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = nn.Sequential(AutoModel.from_config(AutoConfig.for_model("olmo", **sizes)))
    with pytest.raises(whet.ConfigError, match=r"OlmoModel: its attention \(OlmoAttention\) is causal"):
        whet.optimize(model)
    with pytest.raises(whet.ConfigError, match="no model of transformers inside"):
        whet.optimize(nn.Linear(2, 2))


def test_a_compiled_model_inside_another_is_refused_by_name() -> None:
    model = nn.ModuleDict({"tower": torch.compile(tiny_model("bert"), backend="eager")})  # pyright: ignore
    with pytest.raises(whet.ConfigError, match=r"tower, the result of torch\.compile"):
        whet.optimize(model)
