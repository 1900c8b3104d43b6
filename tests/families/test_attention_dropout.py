"""The dropout of attention weights: in the mode that transformers reads, and never in place of what does more."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed import batch_of
from torch import Tensor, nn

import engine
import whet
from tiny import DECODERS, arguments, tiny_model
from tiny_decoders import tiny_decoder
from whet.errors import ConfigError
from whet.models.known import known

pytestmark = pytest.mark.usefixtures("operators")

_CALLED = ("deberta-v2", "deberta", "mpnet")
"""Families whose attention calls its dropout; others hand its rate to a function."""
_NAMES = ("dropout", "attention_dropout", "attn_dropout")


def _model(family: str) -> Any:
    return tiny_decoder(family, use_cache=False) if family in DECODERS else tiny_model(family)


def _batch(family: str) -> dict[str, Tensor]:
    batch = {name: value for name, value in batch_of(family).items() if not name.endswith("_positions")}
    return {name: batch[name] for name in ("input_ids", "attention_mask")} if family in DECODERS else batch


def _attentions(model: Any, family: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield each attention module, and the name of its dropout."""
    for module in model.modules():
        if known()[family].is_attention(module):
            yield module, next(name for name in _NAMES if isinstance(getattr(module, name, None), nn.Module))


def _answers(model: Any, family: str) -> Tensor:
    batch = _batch(family)
    with torch.enable_grad():  # short evaluations without gradients run as without whet
        out = model(**batch)
    return (out.logits if family in DECODERS else out.start_logits)[batch["attention_mask"].bool()].detach()


def _all_weights_dropped(model: Any, family: str, *, evaluates: bool) -> None:
    """Let the dropouts drop everything, in another mode than the model: no random number is needed to compare."""
    model.train(not evaluates)
    for module, name in _attentions(model, family):
        dropout = getattr(module, name)
        dropout.p = 1.0
        dropout.train(evaluates)


@pytest.mark.parametrize("evaluates", [True, False], ids=["dropout trains", "dropout evaluates"])
@pytest.mark.parametrize("family", [*_CALLED, "bert"])
def test_a_mode_of_the_dropout_alone_is_what_transformers_reads(family: str, evaluates: bool) -> None:
    """As snippets for Monte Carlo dropout set it."""
    plain, ours = _model(family), whet.optimize(_model(family))
    usual = _answers(plain.eval(), family)
    for model in (plain, ours):
        _all_weights_dropped(model, family, evaluates=evaluates)
    wanted = _answers(plain, family)
    torch.testing.assert_close(_answers(ours, family), wanted, rtol=1e-5, atol=1e-5)
    dropped = not torch.allclose(wanted, usual, rtol=1e-3, atol=1e-3)
    assert dropped == (evaluates if family in _CALLED else not evaluates)


def test_dropouts_are_found_by_the_name_of_their_class() -> None:
    """As the usual snippet for Monte Carlo dropout finds them, to draw several answers of a model in evaluation."""
    model = whet.optimize(tiny_model("bert", dropout=0.3)).eval()
    torch.testing.assert_close(_answers(model, "bert"), _answers(model, "bert"))
    for module in model.modules():
        if module.__class__.__name__.startswith("Dropout"):
            module.train()
    assert not torch.allclose(_answers(model, "bert"), _answers(model, "bert"), rtol=1e-3, atol=1e-3)
    assert "Dropout(p=0.3, inplace=False, site=" in repr(model)
    torch.save(model, io.BytesIO())  # a class is pickled by its full name


@pytest.mark.parametrize("family", [*_CALLED, "bert", "albert", "distilbert", "gpt2"])
def test_an_identity_in_place_of_the_dropout_drops_nothing(family: str) -> None:
    plain, ours = _model(family), _model(family)
    for model in (plain, ours):
        for module, name in list(_attentions(model, family)):
            setattr(module, name, nn.Identity())
    ours = whet.optimize(ours)
    trains = (False, True) if family in _CALLED else (False,)  # there transformers reads a rate in training
    for training in trains:
        wanted = _answers(plain.train(training), family)
        torch.testing.assert_close(_answers(ours.train(training), family), wanted, rtol=1e-5, atol=1e-5)


class _Halving(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def _hooked(module: nn.Module) -> None:
    module.dropout.register_forward_hook(lambda _, given, result: result / 2)  # type: ignore[union-attr]


def _replaced(module: nn.Module) -> None:
    module.dropout = _Halving(0.0)


def _bound(module: nn.Module) -> None:
    module.dropout.forward = lambda weights: weights / 2  # type: ignore[union-attr, method-assign, assignment]


@pytest.mark.parametrize(
    ("change", "why"),
    [(_hooked, "has hooks"), (_replaced, "is a _Halving"), (_bound, "has a forward of its own")],
    ids=["hook", "class", "forward"],
)
@pytest.mark.parametrize("family", _CALLED)
def test_a_dropout_that_does_more_keeps_the_padding_or_is_refused(
    family: str, change: Callable[[nn.Module], None], why: str, tmp_path: Path
) -> None:
    early, late = _model(family), whet.optimize(_model(family))
    for model in (early, late):
        for module, _ in list(_attentions(model, family)):
            change(module)
    with pytest.raises(ConfigError, match=why):
        whet.optimize(early)
    assert not engine.Trainer(model=early, args=arguments(tmp_path)).objective.packed
    with pytest.raises(ConfigError, match=f"the dropout of its attention {why}"):
        _answers(late.train(), family)
