"""Weight decay: it shrinks weights, and leaves biases and the parameters of norms alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import engine
from proven_models import proven_config
from tiny import DECODERS, FAMILIES, tiny_config
from whet.config.optimizer_names import names
from whet.errors import ConfigError
from whet.optim import registry
from whet.optim.entry import parameter_groups

_OPTIMIZERS = ["adamw_torch", "adamw_torch_fused"]
_DECOUPLED = [
    name for name, row in names().items() if "decay is added to the gradient" not in row.does and not row.package
]
"""All whose text does not say that the decay is a part of the gradient."""


class Layers(nn.Module):
    """One layer of every kind; its loss is 0 whatever the weights, so that only the decay moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.linear = nn.Linear(8, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.rms_norm = nn.RMSNorm(8)
        self.group_norm = nn.GroupNorm(2, 8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": sum(0.0 * p.sum() for p in self.parameters()) + 0.0 * x.sum()}  # pyright: ignore[reportReturnType]


_DECAYS = {"embedding.weight", "linear.weight", "scale"}


def _args(folder: Path, **changes: Any) -> engine.TrainingArguments:
    return engine.TrainingArguments(output_dir=str(folder), use_cpu=True, save_strategy="no", max_steps=1, **changes)


@pytest.mark.parametrize("optim", _DECOUPLED)
def test_one_step_without_a_gradient_is_the_decay(tmp_path: Path, optim: str) -> None:
    """w <- (1 - rate * decay) w (Loshchilov and Hutter 2019, algorithm 2, line 12), for weights alone."""
    torch.manual_seed(0)
    model = Layers()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    args = _args(tmp_path, optim=optim, weight_decay=0.1, learning_rate=0.5)
    engine.Trainer(model=model, args=args, train_dataset=[{"x": torch.ones(1)}]).train()
    for name, parameter in model.named_parameters():
        wanted = before[name] * (1 - 0.5 * 0.1 if name in _DECAYS else 1.0)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-6, atol=0.0)  # one float32 product


def test_no_decay_is_the_default(tmp_path: Path) -> None:
    assert {group["weight_decay"] for group in parameter_groups(Layers(), _args(tmp_path).weight_decay)} == {0.0}


def test_layer_with_norm_inside_its_name_decays() -> None:
    class NormalHead(nn.Linear):
        """Not a normalisation: the two outputs are a mean and a deviation."""

    model = nn.Sequential(NormalHead(4, 2), nn.LayerNorm(2))
    groups = {group["weight_decay"]: [id(p) for p in group["params"]] for group in parameter_groups(model, 0.1)}
    assert groups[0.1] == [id(model[0].weight)]


def test_frozen_parameters_are_in_no_group() -> None:
    model = Layers()
    model.embedding.requires_grad_(requires_grad=False)
    found = {id(p) for group in parameter_groups(model, 0.1) for p in group["params"]}
    assert found == {id(p) for p in model.parameters() if p.requires_grad}


def test_tied_weights_are_in_one_group_once() -> None:
    model = Layers()
    model.linear.weight = nn.Parameter(torch.ones(4, 8))
    model.embedding.weight = model.linear.weight
    found = [id(p) for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert len(found) == len(set(found))


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
@pytest.mark.parametrize("model_type", ["albert", "bert", "distilbert", "electra", "mpnet", "roberta", "gpt2", "llama"])
def test_decaying_parameters_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    small = {
        "vocab_size": 30, "hidden_size": 16, "dim": 16, "n_embd": 16, "d_model": 16, "embedding_size": 16,
        "num_hidden_layers": 1, "n_layers": 1, "n_layer": 1, "num_layers": 1, "num_attention_heads": 2, "n_heads": 2,
        "n_head": 2, "num_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "hidden_dim": 16, "d_ff": 16,
    }  # fmt: skip
    defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    config = transformers.AutoConfig.for_model(model_type, **{n: v for n, v in small.items() if n in defaults})
    model = transformers.AutoModel.from_config(config)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = set(transformers.Trainer(model=model, args=args).get_decay_parameter_names(model)) & set(names.values())
    groups = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.1)}
    assert groups[0.1] == wanted
    assert groups.get(0.0, set()) == set(names.values()) - wanted


def test_both_names_are_one_optimizer(tmp_path: Path) -> None:
    """Fused or not: the same weights, but for the order of float32 roundings."""
    found = []
    for optim in _OPTIMIZERS:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = registry.build(model, _args(tmp_path, optim=optim, weight_decay=0.1, learning_rate=0.1))
        for _ in range(5):
            model(torch.ones(8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_settings_reach_the_optimizer(tmp_path: Path) -> None:
    args = _args(tmp_path, learning_rate=0.25, adam_beta1=0.5, adam_beta2=0.75, adam_epsilon=0.125, weight_decay=0.0625)
    groups = registry.build(Layers(), args).param_groups
    assert {(g["lr"], g["betas"], g["eps"]) for g in groups} == {(0.25, (0.5, 0.75), 0.125)}
    assert [g["weight_decay"] for g in groups] == [0.0625, 0.0]


def test_unknown_optimizer_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)optim.*got: .*adamw_torch"):
        _args(tmp_path, optim="adamw_tosrch")


class Named(nn.Module):
    """Parameters that transformers tells apart by their names, and by theirs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layernorm_free = nn.Linear(4, 4)
        self.norm = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.q_norm = nn.RMSNorm(4)
        self.unbiased = nn.Linear(4, 4, bias=False)
        self.Bias = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize("family", [*FAMILIES, *DECODERS, "roberta-prelayernorm", None])
def test_what_decays_is_what_decays_in_transformers(family: str | None) -> None:
    if family is None:
        model: Any = Named()
    elif family == "roberta-prelayernorm":
        model = transformers.AutoModel.from_config(proven_config(family))
    else:
        model = transformers.AutoModel.from_config(tiny_config(family))
    wanted = transformers.Trainer.get_decay_parameter_names(None, model)  # pyright: ignore[reportArgumentType]
    decayed = {id(p) for group in parameter_groups(model, 0.1) if group["weight_decay"] for p in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) in decayed} == set(wanted)
