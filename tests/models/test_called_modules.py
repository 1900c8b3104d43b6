"""Modules that are more than their class says are called, wherever an operator could stand in for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.models.bert import modeling_bert

import engine
import whet
from tiny import Pad, arguments, losses, tiny_model, tiny_rows
from whet.kernels.library import library

pytestmark = pytest.mark.usefixtures("operators")

LAYER = {"bert": "bert.encoder.layer.0", "distilbert": "distilbert.transformer.layer.0"}
PARTS: dict[str, list[str]] = {
    "bert": [
        "attention.self.query", "attention.self.value", "attention.output.dense", "attention.output.LayerNorm",
        "attention.output", "attention.self", "intermediate.dense", "intermediate.intermediate_act_fn", "intermediate",
        "output.dense", "output.LayerNorm", "output.dropout", "output", "",
    ],
    "distilbert": [
        "attention.k_lin", "attention.out_lin", "attention", "ffn", "ffn.lin1", "ffn.activation", "ffn.lin2",
        "sa_layer_norm", "output_layer_norm", "ffn.dropout", "",
    ],
}  # fmt: skip
FAST = ("attention.self.query", "attention.output.LayerNorm", "output", "ffn", "")
PLACES = [
    pytest.param(family, part, marks=() if part in FAST else pytest.mark.slow)
    for family, parts in PARTS.items()
    for part in parts
]
LINEARS = [
    pytest.param(family, part, marks=() if part in FAST else pytest.mark.slow)
    for family, parts in PARTS.items()
    for part in parts
    if part.endswith(("dense", "lin", "query"))
]


def batch_of(family: str = "bert") -> dict[str, Tensor]:
    return Pad(0)([tiny_rows(4, family)[n] for n in range(4)])


def results(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of real tokens, and the gradients of a loss of them alone."""
    model.zero_grad()
    inputs = {name: value for name, value in batch.items() if "positions" not in name}
    output, real = model(**inputs), batch["attention_mask"].bool()
    logits = torch.stack([output.start_logits[real], output.end_logits[real]])
    (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Any, wanted: Any) -> None:
    """Sums in another order; what a door changes is of the order of the logits themselves."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def part_of(model: Any, family: str, part: str) -> nn.Module:
    return model.get_submodule(f"{LAYER[family]}.{part}".rstrip("."))


def bent(value: Any) -> Any:
    """Return something else; not a multiple, which a norm would undo."""
    return (value[0] + value[0].sin(), *value[1:]) if isinstance(value, tuple) else value + value.sin()


def _forward_hook(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda _, given, output: bent(output))


def _pre_hook(module: nn.Module) -> Any:
    return module.register_forward_pre_hook(lambda _, given: bent(given))


def _backward_hook(module: nn.Module) -> Any:
    return module.register_full_backward_hook(lambda _, grads, out: bent(grads))


def _own_forward(module: nn.Module) -> None:
    before = module.forward
    module.forward = lambda *args, **options: bent(before(*args, **options))


def _subclass(module: nn.Module) -> None:
    before = type(module)

    class Mine(before):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **options: Any) -> Any:
            return bent(super().forward(*args, **options))

    module.__class__ = Mine


DOORS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": _forward_hook,
    "pre hook": _pre_hook,
    "backward hook": _backward_hook,
    "own forward": _own_forward,
    "subclass": _subclass,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("family", "part"), PLACES)
def test_what_is_put_on_a_module_counts(family: str, part: str, door: str, when: str) -> None:
    forwards = door == "subclass" or (door == "own forward" and when == "before")
    if part in ("attention.self", "attention") and forwards:
        pytest.skip("an attention with a forward of its own is refused")
    batch, plain, ours = batch_of(family), tiny_model(family).train(), tiny_model(family).train()
    without, _ = results(plain, batch)
    DOORS[door](part_of(plain, family, part))
    wanted = results(plain, batch)
    if when == "before":
        DOORS[door](part_of(ours, family, part))
        whet.optimize(ours)
    else:
        whet.optimize(ours)
        results(ours, batch)
        DOORS[door](part_of(ours, family, part))
    assert_same(results(ours, batch), wanted)
    assert door == "backward hook" or part == "" or not torch.allclose(wanted[0], without)
    if when == "before" and door != "subclass":
        whet.restore(ours)
        assert_same(results(ours, batch), wanted)


def _pruned(module: Any) -> None:
    prune.l1_unstructured(module, "weight", amount=0.5)


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "parametrized": lambda module: parametrize.register_parametrization(module, "weight", _Twice()),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "pruned": _pruned,
    "without bias": lambda module: setattr(module, "bias", None),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("family", "part"), LINEARS)
def test_what_is_done_to_a_weight_counts(family: str, part: str, kind: str, when: str) -> None:
    def changed(model: Any) -> Any:
        torch.manual_seed(4)
        WEIGHTS[kind](part_of(model, family, part))
        return model

    batch = batch_of(family)
    wanted = results(changed(tiny_model(family).eval()), batch)
    if when == "before":
        ours = whet.optimize(changed(tiny_model(family).eval()))
    else:
        ours = whet.optimize(tiny_model(family).eval())
        changed(ours)
    assert_same(results(ours, batch), wanted)


def test_hooks_for_all_modules_are_run() -> None:
    batch, model = batch_of(), whet.optimize(tiny_model("bert").eval())
    seen: set[str] = set()
    names = {id(module): name for name, module in model.named_modules()}
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(names[id(module)]))
    try:
        results(model, batch)
    finally:
        hook.remove()
    uncalled = {name for name in names.values() if name not in seen}
    assert not {name for name in uncalled if not name.endswith(("self.dropout", "encoder.layer"))}


@pytest.mark.parametrize("cls", [nn.Linear, nn.LayerNorm, modeling_bert.BertSelfOutput, modeling_bert.BertLayer])
def test_a_forward_that_is_patched_in_the_class_counts(cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, plain = batch_of(), tiny_model("bert").eval()
    ours = whet.optimize(tiny_model("bert").eval())
    results(ours, batch)
    original = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *given, **named: bent(original(self, *given, **named)))
    assert_same(results(ours, batch), results(plain, batch))


def test_dynamically_quantized_layers_are_called() -> None:
    batch = batch_of()
    inputs = {name: value for name, value in batch.items() if "positions" not in name}
    plain = tiny_model("bert").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have torchao's
        quantized = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        wanted = quantized(**inputs).start_logits
        found = whet.optimize(quantized)(**inputs).start_logits
    real = batch["attention_mask"].bool()
    # int8: a token's scale depends on the other tokens of the product, which are not the same without padding
    torch.testing.assert_close(found[real], wanted[real], rtol=0.05, atol=0.05)
    changes = whet.changes(quantized)
    assert not changes.fused or "is a Linear of torch" in changes.called.values()


def test_weights_of_another_tensor_class_are_called() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    batch = batch_of()
    inputs = {name: value for name, value in batch.items() if "positions" not in name}

    def quantized() -> Any:
        model = tiny_model("bert").eval()
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return model

    with torch.no_grad():
        wanted = quantized()(**inputs).start_logits
        found = whet.optimize(quantized())(**inputs).start_logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-3, atol=1e-4)


def test_a_dropout_of_ones_own_is_called() -> None:
    class Half(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            return input / 2

    def changed() -> Any:
        model = tiny_model("bert").train()
        model.bert.embeddings.dropout = Half(0.1)
        model.bert.encoder.layer[0].output.dropout = Half(0.1)
        return model

    batch = batch_of()
    assert_same(results(whet.optimize(changed()), batch), results(changed(), batch))


def test_dropouts_stay_dropouts_that_a_user_can_switch() -> None:
    model = whet.optimize(tiny_model("bert", dropout=0.5).train())
    kept = model.bert.encoder.layer[0].output.dropout
    batch, plain = batch_of(), tiny_model("bert").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert_same(results(model, batch), results(plain, batch))
    assert whet.restore(model).bert.encoder.layer[0].output.dropout is kept
    assert type(kept) is nn.Dropout


@pytest.mark.parametrize("family", ["bert", "distilbert", "albert"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_chunked_feed_forward_is_right(family: str, dropout: float, tmp_path: Path) -> None:
    rows = tiny_rows(12, family)

    def curve(chunk: int) -> list[float]:
        model = tiny_model(family, dropout=dropout, chunk_size_feed_forward=chunk)
        trainer = engine.Trainer(model=model, args=arguments(tmp_path, max_steps=3), train_dataset=rows)
        assert trainer.objective.packed
        trainer.train()
        return losses(trainer)

    assert curve(7) == curve(0)
    batch = Pad(0, 48)([rows[n] for n in range(4)])
    model = tiny_model(family, chunk_size_feed_forward=8).eval()
    wanted = results(model, batch)
    assert_same(results(whet.optimize(model), batch), wanted)
    blocks = [m for m in whet.restore(model).modules() if hasattr(m, "chunk_size_feed_forward")]
    assert [block.chunk_size_feed_forward for block in blocks] == [8] * len(blocks)


class _OwnAttention(modeling_bert.BertSelfAttention):
    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return hidden_states.mean(1, keepdim=True).expand_as(hidden_states), None


class _SameAttention(modeling_bert.BertSelfAttention):
    """Another name for the same."""


def _with_attention(cls: Any) -> Any:
    model = tiny_model("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.__class__ = cls
    return model


def _with_convolution(_: Any) -> Any:
    model = tiny_model("bert")
    model.bert.encoder.layer[0].output.dense = nn.Sequential(
        model.bert.encoder.layer[0].output.dense, nn.Conv1d(1, 1, 1)
    )
    return model


@pytest.mark.parametrize("make", [_with_attention, _with_convolution])
def test_what_may_mix_the_tokens_of_rows_keeps_its_padding(make: Any, tmp_path: Path) -> None:
    with pytest.raises(whet.WhetError, match="mix the tokens of different rows"):
        whet.optimize(make(_OwnAttention))
    assert not engine.Trainer(
        model=make(_OwnAttention), args=arguments(tmp_path), train_dataset=tiny_rows(4)
    ).objective.packed


def test_an_attention_by_another_name_sees_its_own_row_alone() -> None:
    batch = batch_of()
    wanted = results(_with_attention(_SameAttention).eval(), batch)
    assert_same(results(whet.optimize(_with_attention(_SameAttention).eval()), batch), wanted)


def test_an_attention_that_comes_later_is_refused() -> None:
    model = whet.optimize(tiny_model("bert").eval())
    model.bert.encoder.layer[0].attention.self = tiny_model("bert", seed=2).bert.encoder.layer[0].attention.self
    model.bert.encoder.layer[0].attention.self.config = model.config
    with pytest.raises(whet.WhetError, match="came into the model after"):
        results(model, batch_of())


def test_a_hook_on_the_word_tables_gradient_is_run(tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("without the native operators the gradient is autograd's")
    seen: list[str] = []
    model = tiny_model("bert")
    trainer = engine.Trainer(model=model, args=arguments(tmp_path, max_steps=2), train_dataset=tiny_rows(8))
    weight = model.bert.embeddings.word_embeddings.weight
    before = weight.detach().clone()
    weight.register_hook(lambda gradient: seen.append("gradient") or torch.zeros_like(gradient))
    trainer.train()
    assert seen == ["gradient"] * 2
    decayed = [g["weight_decay"] for g in trainer.optimizer.param_groups if any(p is weight for p in g["params"])]
    assert decayed == [0.0]
    assert torch.equal(weight, before)
