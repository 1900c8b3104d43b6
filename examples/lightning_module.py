"""A Lightning module: whet finds the encoder inside."""

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

import whet

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
names = sorted({row["label"] for row in rows})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(sys.argv[1])
        self.head = nn.Linear(self.encoder.config.hidden_size, len(names))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        states = self.encoder(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        loss = nn.functional.cross_entropy(self.head(states[:, 0]), batch["labels"])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def collate(batch: list[dict[str, str]]) -> dict[str, Tensor]:
    inputs = tokenizer([row["text"] for row in batch], padding=True, truncation=True, return_tensors="pt")
    return {**inputs, "labels": torch.tensor([names.index(row["label"]) for row in batch])}


lightning.seed_everything(0)
module = whet.optimize(Classifier())

with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate))
print(f"mean loss of the last epoch: {trainer.callback_metrics['loss_epoch']:.3f}")
