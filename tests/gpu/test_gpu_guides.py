"""What transformers' guides name for one GPU: each technique trains there, and its curve is transformers' own.

https://huggingface.co/docs/transformers/perf_train_gpu_one. The losses of the first steps are compared, without
dropout: both sides take the same rows in the same order, and whet computes all padding tokens that the head reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import whet
from tiny import Pad, tiny_model, tiny_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Products in half precision over other sizes, for eight steps; in float32 sums in another order.
HALF, EXACT = 3e-2, 2e-3
ROWS: dict[str, tuple[dict[str, Any], float]] = {
    "nothing": ({}, EXACT),
    "batch 256": ({"per_device_train_batch_size": 256}, EXACT),
    "accumulation": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, EXACT),
    "checkpointing": ({"gradient_checkpointing": True}, EXACT),
    "fp16": ({"fp16": True}, HALF),
    "bf16": ({"bf16": True}, HALF),
    "bf16 and checkpointing": ({"bf16": True, "gradient_checkpointing": True}, HALF),
    "bf16 and accumulation": ({"bf16": True, "gradient_accumulation_steps": 4}, HALF),
    "tf32": ({"tf32": True}, HALF),
    "fused AdamW": ({"optim": "adamw_torch_fused"}, EXACT),
    "Adafactor": ({"optim": "adafactor"}, EXACT),
    "AdamW of 8 bits by torchao": ({"optim": "adamw_torch_8bit"}, HALF),
    "AdamW of 8 bits by bitsandbytes": ({"optim": "adamw_bnb_8bit"}, HALF),
    "pinned memory and workers": ({"dataloader_pin_memory": True, "dataloader_num_workers": 2}, EXACT),
    "empty cache": ({"torch_empty_cache_steps": 2}, EXACT),
    "inductor": ({"torch_compile": True}, EXACT),
    "all together": (
        {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "optim": "adamw_torch_fused",
         "dataloader_pin_memory": True, "dataloader_num_workers": 2, "tf32": True},
        HALF,
    ),
}  # fmt: skip
NEEDS = {"adamw_torch_8bit": "torchao", "adamw_bnb_8bit": "bitsandbytes"}


def curve(library: Any, folder: Path, **changes: Any) -> list[float]:
    more = {"padding_in_loss": "all"} if library is whet else {}
    args = library.TrainingArguments(
        output_dir=str(folder), max_steps=8, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        learning_rate=5e-4, seed=3, **({"per_device_train_batch_size": 8} | changes | more),
    )  # fmt: skip
    rows = tiny_rows(512)
    rows = [dict(row, attention_mask=[1] * len(row["input_ids"])) for row in rows]
    trainer = library.Trainer(model=tiny_model("bert"), args=args, train_dataset=rows, data_collator=Pad())
    trainer.train()
    assert trainer.args.device.type == "cuda"
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("technique", ROWS)
def test_a_technique_of_the_guides_trains_as_it_does_in_transformers(tmp_path: Path, technique: str) -> None:
    settings, within = ROWS[technique]
    if (package := NEEDS.get(settings.get("optim", ""))) is not None:
        pytest.importorskip(package)
    found = curve(whet, tmp_path, **settings)
    assert found == pytest.approx(curve(transformers, tmp_path, **settings), rel=within)
    assert len(found) == 8


def test_groups_of_one_length_train(tmp_path: Path) -> None:
    """Which rows come together is drawn as a resumed run draws it again, and not as in transformers."""
    found = curve(whet, tmp_path, train_sampling_strategy="group_by_length", bf16=True)
    assert len(found) == 8
    again = curve(whet, tmp_path, train_sampling_strategy="group_by_length", bf16=True)
    assert found == pytest.approx(again, rel=HALF)
    assert all(0.0 < one < 10.0 for one in found)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_of_transformers_is_what_whets_is_compared_with(tmp_path: Path, attention: str) -> None:
    losses = []
    for library in (whet, transformers):
        made = tiny_model("bert")
        made.set_attn_implementation(attention)
        rows = [dict(row, attention_mask=[1] * len(row["input_ids"])) for row in tiny_rows(64)]
        more = {"padding_in_loss": "all"} if library is whet else {}
        args = library.TrainingArguments(
            output_dir=str(tmp_path), max_steps=8, logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, bf16=True, **more,
        )  # fmt: skip
        trainer = library.Trainer(model=made, args=args, train_dataset=rows, data_collator=Pad())
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=HALF)
