"""Attention that is not exactly the class whose forward whet replaces: such a model runs padded."""

from __future__ import annotations

from pathlib import Path

from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

import whet
from tiny import arguments, tiny_model


class Sharper(MPNetSelfAttention):
    """Somebody's attention: it inherits MPNet's forward, which adds a (T, T) bias."""


def test_mpnet_with_a_subclass_of_its_attention_runs_padded(tmp_path: Path) -> None:
    model = tiny_model("mpnet")
    assert whet.Trainer(model=tiny_model("mpnet"), args=arguments(tmp_path)).objective.packed
    model.mpnet.encoder.layer[1].attention.attn = Sharper(model.config)
    assert not whet.Trainer(model=model, args=arguments(tmp_path)).objective.packed
