"""A script that knows nothing of whet, to be started by it: `whet run examples/unmodified.py MODEL`."""

import csv
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
names = sorted({row["label"] for row in rows})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
examples = [tokenizer(row["text"]) | {"labels": names.index(row["label"])} for row in rows]

set_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=len(names))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, per_device_train_batch_size=8, num_train_epochs=3, learning_rate=1e-4, save_strategy="no",
        logging_steps=5, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=examples, processing_class=tokenizer)
    print(f"mean loss: {trainer.train().training_loss:.3f}")
