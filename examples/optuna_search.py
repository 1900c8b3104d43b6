"""A search over learning rates and batch sizes with Optuna, by the method of transformers' Trainer."""

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from whet import Trainer, TrainingArguments

optuna.logging.set_verbosity(optuna.logging.WARNING)
with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
names = sorted({row["label"] for row in rows})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
examples = [tokenizer(row["text"]) | {"labels": names.index(row["label"])} for row in rows]


def new_model(_: Any = None) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=len(names))


def space(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8]),
    }


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(1) == prediction.label_ids))}


with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, num_train_epochs=2, eval_strategy="epoch", save_strategy="no", logging_strategy="no", use_cpu=True,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model_init=new_model, args=args, train_dataset=examples[:36], eval_dataset=examples[36:],
        processing_class=tokenizer, compute_metrics=accuracy,
    )  # fmt: skip
    best = trainer.hyperparameter_search(
        space, compute_objective=lambda metrics: metrics["eval_accuracy"], n_trials=4, direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
    )  # fmt: skip
print(f"best of 4 trials: accuracy {best.objective:.2f} with learning rate {best.hyperparameters['learning_rate']:.1e}")
