"""Frozen weights of 8 bits: their size, their error, their gradients, and training with them in every family."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

import engine
import whet
from tiny import (
    DECODERS_WITH_OWN_CODE,
    FAMILIES_WITH_OWN_CODE,
    arguments,
    lora_targets,
    losses,
    operators,
    qa_head,
    tiny_model,
    tiny_rows,
)
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.errors import ConfigError
from whet.kernels import weight_only
from whet.models.quantised import QuantisedLinear, quantise
from whet.models.view import ModelView

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
__all__ = ["operators"]

SPARSE = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Families with experts."""
ROUNDING = 1e-5
"""Relative, of a loss: the same products in another order of summation, in float32."""
HALF_ROUNDING = 2e-2
"""The same in bf16, whose numbers have 8 bits: fused and called layers round at other places."""


def adapted(model: Any, targets: Any, **more: Any) -> Any:
    """Put an adapter into the model that changes what it computes from the first step on."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian", **more)
    return peft.get_peft_model(model, config)


def model_of(family: str, dropout: float = 0.0) -> Any:
    """Return the family's tiny model with an adapter."""
    if family in DECODERS_WITH_OWN_CODE:
        targets = ["c_attn", "c_fc"] if family == "gpt2" else ["q_proj", "v_proj"] if family in SPARSE else "all-linear"
        model = tiny_decoder(family, dropout=dropout)
        return adapted(model, targets, task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2")
    model = tiny_model(family, dropout=dropout)
    return adapted(model, lora_targets(family), modules_to_save=qa_head(family), task_type="QUESTION_ANS")


def trained(folder: Path, model: Any, family: str, **settings: Any) -> Any:
    """Train for three steps, and return the trainer."""
    usual: dict[str, Any] = {"max_steps": 3, "learning_rate": 5e-3, "warmup_steps": 0}
    args = arguments(folder, **(usual | settings))
    causal = family in DECODERS_WITH_OWN_CODE
    rows = token_rows(12) if causal else tiny_rows(12, family)
    made = engine.Trainer(model=model, args=args, train_dataset=rows, data_collator=collate if causal else None)
    made.train()
    return made


def with_plain_layers(model: Any) -> Any:
    """Return a copy whose layers of 8 bits are torch's own, with the same weights in float32."""
    model = deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantisedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight.data, plain.bias = module.weight, module.bias
            model.set_submodule(name, plain.requires_grad_(False))
    return model


def test_no_weight_moves_by_more_than_half_a_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 300) * torch.tensor([1e-20, 1.0, 1e20, 0.0, 1e-38])[:, None]
    stored = weight_only.rounded(weight)
    assert stored.codes.dtype is torch.int8
    again = stored.rows(0, 5, torch.float32)
    ulp = 2.0**-22  # of the largest of a row: a quotient and a product are rounded
    assert ((again - weight).abs() <= (stored.scales / 2 + weight.abs().amax(1) * ulp + 1e-30)[:, None]).all()
    torch.testing.assert_close(again[:3].abs().amax(1), weight[:3].abs().amax(1), rtol=1e-6, atol=0)
    assert not again[3].any()


def test_codes_of_4_bits_are_the_nearest_of_normal_float() -> None:
    """At the ends of the range too, and where a row does not fill its last block."""
    torch.manual_seed(0)
    weight = torch.randn(5, 150) * torch.tensor([1e-20, 1.0, 1e20, 0.0, 1.0])[:, None]
    stored = weight_only.rounded_4(weight)
    assert (stored.codes.dtype, tuple(stored.codes.shape), tuple(stored.scales.shape)) == (torch.uint8, (5, 96), (5, 3))
    scales = stored.scales.repeat_interleave(64, 1)[:, :150]
    levels = torch.tensor(weight_only.NF4)
    distances = (weight[..., None] - levels * scales[..., None]).abs()
    again = stored.rows(0, 5, torch.float32)
    torch.testing.assert_close((weight - again).abs(), distances.amin(-1), rtol=1e-5, atol=0)
    assert not again[3].any()


def test_normal_float_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    torch.testing.assert_close(
        torch.tensor(weight_only.NF4), functional.get_4bit_type("nf4", device="cpu"), rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("n_bits", [8, 4])
@pytest.mark.parametrize("piece", [1 << 22, 24, 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_and_gradients_are_those_of_the_dequantised_weight(
    piece: int, has_bias: bool, n_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_only, "PIECE", piece)
    torch.manual_seed(0)
    x, weight = torch.randn(3, 7, 8, requires_grad=True), torch.randn(10, 8)
    bias = torch.randn(10, requires_grad=True) if has_bias else None
    layer = QuantisedLinear(weight, None if bias is None else nn.Parameter(bias.detach().clone()), n_bits)
    wanted = nn.functional.linear(x, layer.weight, bias)
    found = layer(x)
    torch.testing.assert_close(found, wanted)
    direction = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, direction, retain_graph=True)[0] for y in (found, wanted)))
    if bias is not None:
        torch.testing.assert_close(
            torch.autograd.grad(found, layer.bias, direction)[0], torch.autograd.grad(wanted, bias, direction)[0]
        )


def test_nothing_of_the_layers_input_is_kept_for_backward() -> None:
    layer, kept = QuantisedLinear(torch.randn(16, 8), nn.Parameter(torch.zeros(16), requires_grad=False)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one), lambda one: one):
        layer(torch.randn(50, 8, requires_grad=True))
    assert kept == []


def test_codes_take_a_byte_for_each_weight() -> None:
    model = model_of("bert")
    wanted: list[Any] = [one for name, one in ModelView(model).linears() if not name.startswith("qa_outputs")]
    n_weights, n_rows = (sum(count(one.weight) for one in wanted) for count in (torch.numel, len))
    before = sum(one.numel() * one.element_size() for one in model.parameters())
    done = quantise(model)
    held = [one for module in model.modules() for one in (*module._parameters.values(), *module._buffers.values())]
    after = sum(one.numel() * one.element_size() for one in held if one is not None and one.dtype != torch.int64)
    assert (done.n_layers, done.before_bytes, done.after_bytes) == (12, 4 * n_weights, n_weights + 4 * n_rows)
    assert before - after == done.before_bytes - done.after_bytes


def test_layers_that_are_not_frozen_weights_alone_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head, pairs, weights that train or are shared, and layers with hooks."""
    model = model_of("bert")
    first, second = model.base_model.model.bert.encoder.layer
    second.intermediate.dense.weight = first.intermediate.dense.weight
    first.output.dense.weight.requires_grad_(True)
    second.output.dense.register_forward_hook(lambda *_: None)
    quantise(model)
    kept = {name for name, module in ModelView(model).linears() if type(module) is nn.Linear}
    layers = {f"bert.encoder.layer.{n}.{part}.dense" for n in (0, 1) for part in ("intermediate", "output")}
    assert kept == {*layers, "qa_outputs.modules_to_save.default"}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("family", "n_bits"),
    [
        *((family, 8) for family in FAMILIES_WITH_OWN_CODE + DECODERS_WITH_OWN_CODE),
        ("bert", 4),
        ("gpt2", 4),
        ("llama", 4),
    ],
)
def test_training_is_that_of_the_dequantised_weights(family: str, n_bits: int, tmp_path: Path, operators: None) -> None:
    model = model_of(family)
    if family in SPARSE:
        with pytest.raises(ConfigError, match="experts"):
            quantise(model)
        return
    assert quantise(model, n_bits).n_layers >= 7  # of ALBERT, whose blocks are one
    plain = with_plain_layers(model)
    assert not any(type(one) is Conv1D for one in plain.modules())
    codes = {name: one.clone() for name, one in model.named_parameters() if name.endswith(".codes")}
    found, wanted = (losses(trained(tmp_path, one, family)) for one in (model, plain))
    assert found == pytest.approx(wanted, rel=ROUNDING)
    assert all(torch.equal(one, codes[name]) for name, one in model.named_parameters() if name in codes)
    adapters = [dict(one.named_parameters()) for one in (model, plain)]
    for name, weight in adapters[0].items():
        if "lora_" in name:
            torch.testing.assert_close(weight, adapters[1][name], rtol=1e-3, atol=1e-5)  # Adam divides small gradients


WAYS: dict[str, dict[str, Any]] = {
    "blocks": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
    "accumulated": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1},
    "padded": {"attn_implementation": "sdpa"},
    "in backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize(
    ("family", "n_bits", "way"),
    [
        (family, n_bits, way)
        for family, n_bits in (("bert", 8), ("llama", 8), ("llama", 4))
        for way in WAYS
        if (family, way) != ("bert", "padded")
    ],
)
def test_ways_to_train_have_one_curve(family: str, n_bits: int, way: str, tmp_path: Path) -> None:
    """With dropout on, but for padded batches, whose masks are torch's; BERT's own loss of these counts padding."""
    model = model_of(family, dropout=0.0 if way == "padded" else 0.1)
    quantise(model, n_bits)
    usual = {"precision": "fp32", "max_grad_norm": 0.0 if way == "in backward" else 1.0}
    wanted = losses(trained(tmp_path, deepcopy(model), family, **usual))
    found = losses(trained(tmp_path, model, family, **(usual | WAYS[way])))
    assert found == pytest.approx(wanted, rel=HALF_ROUNDING if way == "bf16" else ROUNDING)


def test_loss_moves_by_no_more_than_the_rounding_of_its_weights() -> None:
    """To first order a loss moves by the gradient times the rounding, which is uniform within half a scale.

    Its standard deviation is sqrt(sum (g s)^2 / 12). Six of these, and a tenth for the second order, hold it.
    """
    model = model_of("llama").eval()
    batch = {"input_ids": torch.arange(10, 70).view(2, 30), "labels": torch.arange(11, 71).view(2, 30)}
    layers: dict[str, Any] = {n: one for n, one in ModelView(model).linears() if not n.startswith("lm_head")}
    for one in layers.values():
        one.weight.requires_grad_(True)
    loss = model(**batch).loss
    gradients = dict(zip(layers, torch.autograd.grad(loss, [one.weight for one in layers.values()]), strict=True))
    for one in layers.values():
        one.weight.requires_grad_(False)
    quantise(model)
    small: dict[str, Any] = dict(ModelView(model).linears())
    variance = sum(float((gradients[n] * small[n].scales[:, None]).square().sum()) / 12 for n in gradients)
    with torch.no_grad():
        moved = abs(float(model(**batch).loss - loss))
    assert 0 < moved < 1.1 * 6 * variance**0.5
    assert 6 * variance**0.5 < 0.05 * float(loss.detach())  # a bound that says something


def test_loss_with_4_bits_moves_by_no_more_than_the_rounding_of_its_weights() -> None:
    """As with 8 bits; codes lie at unequal distances, so that the rounding is measured: g times it, with any signs."""
    model = model_of("llama").eval()
    batch = {"input_ids": torch.arange(10, 70).view(2, 30), "labels": torch.arange(11, 71).view(2, 30)}
    layers: dict[str, Any] = {n: one for n, one in ModelView(model).linears() if not n.startswith("lm_head")}
    exact = {name: one.weight.detach().clone() for name, one in layers.items()}
    for one in layers.values():
        one.weight.requires_grad_(True)
    loss = model(**batch).loss
    gradients = dict(zip(layers, torch.autograd.grad(loss, [one.weight for one in layers.values()]), strict=True))
    for one in layers.values():
        one.weight.requires_grad_(False)
    quantise(model, 4)
    small: dict[str, Any] = dict(ModelView(model).linears())
    variance = sum(float((gradients[n] * (small[n].weight - exact[n])).square().sum()) for n in exact)
    with torch.no_grad():
        moved = abs(float(model(**batch).loss - loss))
    assert 0 < moved < 1.1 * 6 * variance**0.5
    assert 6 * variance**0.5 < 0.05 * float(loss.detach())  # a bound that says something


def test_a_loop_of_ones_own_trains_the_adapter() -> None:
    model = model_of("bert").train()
    quantise(model)
    model = whet.optimize(model)
    ids: Tensor = torch.arange(10, 40).view(2, 15)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    cross_entropy(output.start_logits, torch.tensor([1, 2])).backward()
    assert all(one.grad is not None for name, one in model.named_parameters() if "lora_" in name)


def test_model_without_a_frozen_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no frozen linear layers"):
        quantise(tiny_model("bert"))
