"""What `whet.optimize` refuses before it changes anything: no model, wrapped models, optimizers of other models."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

import whet
from proven_models import PROVEN, proven_config
from tiny import padded, tiny_config, tiny_model, tiny_rows


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


def test_a_list_of_models_is_refused_in_both_directions() -> None:
    models = [whet.optimize(tiny_model("bert"))]
    for function in (whet.optimize, whet.restore):
        assert "call it for each" in fix_of(lambda call=function: call(models))
    assert whet.changes(models[0]) is not None
    assert whet.changes(whet.restore(models[0])) is None


def test_what_padding_gets_is_said_where_a_head_may_read_it() -> None:
    said = {padding: str(whet.changes(whet.optimize(Tagger(), padding=padding))) for padding in ("auto", "none", "all")}
    assert said["auto"].startswith(
        'no padding (hidden states of padding tokens are approximate: padding="all" computes them), '
    )
    assert said["none"].startswith("no padding, ")
    assert said["all"].startswith('padding tokens computed (padding="all"), ')
    config = tiny_config("bert")
    classifier = whet.optimize(AutoModelForSequenceClassification.from_config(config))  # it reads first tokens
    assert str(whet.changes(classifier)).startswith("no padding, ")


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


@pytest.mark.parametrize("model_type", PROVEN)
def test_an_encoder_of_one_layer_is_taken(model_type: str) -> None:
    """A stack of one is no list of blocks, and nobody asked for their recomputation; the switch may come later."""
    config = proven_config(model_type)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    torch.manual_seed(0)
    untouched = AutoModel.from_config(config).train()
    model = whet.optimize(deepcopy(untouched), padding="all")
    batch = padded([{"input_ids": row["input_ids"]} for row in tiny_rows(4, "bert")], config.pad_token_id or 0)
    wanted = untouched(**batch).last_hidden_state
    assert torch.allclose(model(**batch).last_hidden_state, wanted, rtol=0, atol=1e-5)  # states of size 1
    if model.supports_gradient_checkpointing:
        gradients = []
        for one in (untouched, model):
            getattr(one, "activation_checkpointing_enable", one.gradient_checkpointing_enable)()
            one(**batch).last_hidden_state.square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]))
        assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_a_table_that_does_not_lie_in_one_piece_is_read_as_it_is() -> None:
    untouched = tiny_model("bert").bert.eval()
    table = untouched.embeddings.word_embeddings.weight
    table.data = table.data.t().contiguous().t()
    model = whet.optimize(deepcopy(untouched))
    batch = {"input_ids": torch.randint(10, 50, (2, 6))}
    wanted = untouched(**batch).last_hidden_state
    found = model(**batch).last_hidden_state
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    found.square().sum().backward()
    wanted.square().sum().backward()
    gradients = [one.embeddings.word_embeddings.weight.grad for one in (model, untouched)]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)
