"""A loop of your own with `whet.Accelerator`, in the words of accelerate: a language model learns to answer."""

import csv
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet import Accelerator

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    texts = [f"{row['text']} -> {row['label']}" for row in csv.DictReader(file)]
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])


def collate(rows: list[str]) -> dict[str, torch.Tensor]:
    batch = tokenizer(rows, padding=True, padding_side="right", return_tensors="pt")
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


accelerator = Accelerator(gradient_accumulation_steps=2, gradient_checkpointing=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
for epoch in range(3):
    total = 0.0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
    accelerator.print(f"epoch {epoch + 1}: mean loss {total / len(loader):.3f}")
