"""`whet.Trainer` in place of transformers' Trainer, with a loss of your own: rare topics count more."""

import csv
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from whet import Trainer, TrainingArguments

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
names = sorted({row["label"] for row in rows})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
examples = [tokenizer(row["text"]) | {"labels": names.index(row["label"])} for row in rows]
train, test = examples[:40], examples[40:]
counts = Counter(example["labels"] for example in train)
weights = torch.tensor([len(train) / (len(names) * counts[n]) for n in range(len(names))])


class WeightedTrainer(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights)
        return (loss, outputs) if return_outputs else loss


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(1) == prediction.label_ids))}


set_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=len(names))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, per_device_train_batch_size=8, num_train_epochs=3, learning_rate=1e-4, save_strategy="no",
        logging_steps=5, use_cpu=True, report_to="none",
    )  # fmt: skip
    trainer = WeightedTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=test, processing_class=tokenizer,
        compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    print(f"accuracy on unseen questions: {trainer.evaluate()['eval_accuracy']:.2f}")
