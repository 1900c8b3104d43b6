"""Attention that is not exactly what whet replaces: such a model runs padded, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

import engine
import whet
from tiny import Pad, arguments, tiny_model, tiny_rows


class Sharper(MPNetSelfAttention):
    """Somebody's attention: it inherits MPNet's forward, which adds a (T, T) bias."""


def test_mpnet_with_a_subclass_of_its_attention_runs_padded(tmp_path: Path) -> None:
    model = tiny_model("mpnet")
    assert engine.Trainer(model=tiny_model("mpnet"), args=arguments(tmp_path)).objective.packed
    model.mpnet.encoder.layer[1].attention.attn = Sharper(model.config)
    assert not engine.Trainer(model=model, args=arguments(tmp_path)).objective.packed


@pytest.mark.parametrize(
    ("family", "option"),
    [("bert", "attention_mask"), ("bert", "softcap"), ("bert", "is_causal"), ("deberta-v2", "attention_mask")],
)
def test_a_hook_that_changes_how_attention_is_called_is_refused(family: str, option: str) -> None:
    """A packed pass would ignore it: the hook gives its option to each call of the second layer."""
    model = tiny_model(family).eval()
    values: dict[str, Any] = {"attention_mask": torch.zeros(1, 1, 1, 1), "softcap": 30.0, "is_causal": True}

    def give(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return args[:1], options | {option: values[option]}

    whet.optimize(model)
    model.base_model.encoder.layer[1].attention.self.register_forward_pre_hook(give, with_kwargs=True)
    with pytest.raises(whet.WhetError, match=rf"(?s)SelfAttention computes attention with {option}.*whet.restore"):
        model(**Pad()([dict(row) for row in tiny_rows(3, family)]))
    whet.restore(model)
