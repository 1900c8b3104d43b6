"""`whet.Trainer` resumed otherwise than its checkpoint was written: other ranks, other settings, by nobody's wish."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import arguments, classifier, forked, output, pad, rows, same

import whet

_PLAIN: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapter_is_not_saved_over_the_model_that_it_needs(tmp_path: Path) -> None:
    """Neither after its training nor by hand; its base stays."""
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    classifier().save_pretrained(base)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS"))
    trainer = whet.Trainer(model, arguments(base, max_steps=1), pad, rows())
    for act in (trainer.train, trainer.save_model):
        with pytest.raises(whet.ConfigError, match=r"(?s)would replace the model.*another output_dir"):
            act()
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    elsewhere = whet.Trainer(model, arguments(tmp_path / "adapter", max_steps=1), pad, rows())
    elsewhere.train()
    elsewhere.save_model()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
