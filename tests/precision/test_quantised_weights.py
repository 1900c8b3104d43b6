"""Models with weights that are not floating point: they train as without whet, or are refused."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import engine
import whet
from tiny import arguments, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
ROWS = [{"input_ids": [5, 6, 7, n], "label": n % 2} for n in range(10, 18)]
BATCH = {"input_ids": torch.tensor([row["input_ids"] for row in ROWS])}


def new() -> Any:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(tiny_config("bert"))


def with_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def whole_numbers(weight: torch.nn.Parameter) -> None:
    weight.requires_grad_(False)
    weight.data = (weight.data * 10).round().to(torch.int8)


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_plain_layers_with_integer_weights_are_refused(name: str, tmp_path: Path) -> None:
    model = with_adapter(new())
    part = {"base": "key.weight", "adapter": "lora_B.default.weight"}[name]
    for found, weight in model.named_parameters():
        if found.endswith(part):
            whole_numbers(weight)
    with pytest.raises(whet.ConfigError, match=r"are integers(.|\n)*torch\.int8"):
        engine.Trainer(model, arguments(tmp_path), train_dataset=ROWS)
    with pytest.raises(RuntimeError, match="dtype"):  # torch's own, as of the untouched model
        whet.optimize(model)(**BATCH)


@pytest.mark.filterwarnings("ignore")  # torchao warns of its own parts
def test_adapters_train_on_a_base_quantised_by_torchao(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = new()
    quantization.quantize_(model.bert.encoder, quantization.Int8WeightOnlyConfig())
    model = with_adapter(model)
    wanted = model(**BATCH).logits
    torch.testing.assert_close(whet.optimize(deepcopy(model))(**BATCH).logits, wanted, rtol=0, atol=5e-6)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    engine.Trainer(model, arguments(tmp_path), train_dataset=ROWS).train()
    after = dict(model.named_parameters())
    assert any("lora_" in name for name in before)
    assert [name for name, weight in before.items() if torch.equal(weight, after[name])] == []
