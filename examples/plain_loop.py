"""A plain PyTorch loop, and the model afterwards as transformers knows it."""

import csv
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import whet

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
names = sorted({row["label"] for row in rows})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])


def collate(batch: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    inputs = tokenizer([row["text"] for row in batch], padding=True, truncation=True, return_tensors="pt")
    return {**inputs, "labels": torch.tensor([names.index(row["label"]) for row in batch])}


torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=len(names))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = whet.optimize(model, optimizer=optimizer)

loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)
model.train()
for epoch in range(3):
    total = 0.0
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    print(f"epoch {epoch + 1}: mean loss {total / len(loader):.3f}")

whet.restore(model)  # exactly the classes that transformers made
