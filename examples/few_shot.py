"""A classifier from few examples with SetFit."""

import csv
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments

import whet

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
train, test = rows[:32], rows[32:]

model = SetFitModel.from_pretrained(sys.argv[1], device="cpu", labels=sorted({row["label"] for row in rows}))
whet.optimize(model)

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(folder, batch_size=8, max_steps=20, report_to="none", show_progress_bar=False)
    Trainer(model=model, args=args, train_dataset=Dataset.from_list(train)).train()

found = model.predict([row["text"] for row in test])
right = sum(str(one) == row["label"] for one, row in zip(found, test, strict=True))
print(f"{right} of {len(test)} questions get the right topic")
