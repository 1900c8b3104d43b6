"""Ray Train's TorchTrainer with `whet.Trainer` in the loop of each worker."""

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

import whet

DATA = Path(__file__).resolve().parent / "data" / "requests.csv"


def train_loop_per_worker(config: dict[str, Any]) -> None:
    with DATA.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["label"] for row in rows})
    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    examples = [tokenizer(row["text"]) | {"labels": names.index(row["label"])} for row in rows]
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(config["model"], num_labels=len(names))
    args = whet.TrainingArguments(
        config["output_dir"], per_device_train_batch_size=4, max_steps=10, save_steps=5, logging_steps=5, use_cpu=True,
        report_to="none",
    )  # fmt: skip
    trainer = whet.Trainer(
        model, args, train_dataset=examples, processing_class=tokenizer, callbacks=[whet.RayReport()]
    )
    trainer.train(resume_from_checkpoint=whet.RayReport.last_checkpoint())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train_loop_per_worker,
            train_loop_config={"model": sys.argv[1], "output_dir": f"{folder}/out"},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=f"{folder}/store"),
        ).fit()
    print(f"loss after {result.metrics['step']} steps: {result.metrics['loss']:.2f}")
