"""Trains a tiny model on two workers of Ray Train, with `whet.Trainer` in the loop of each.

    python ray_job.py FOLDER NAME=KILLED_AT ...

Each rank of a training writes what it found to FOLDER/NAME-R.json. Rank 1 is killed after step KILLED_AT, once; 0:
never.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import AutoModelForSequenceClassification, TrainerCallback

import whet
from tiny import tiny_config

ARGUMENTS: dict[str, Any] = {
    "learning_rate": 1e-3, "max_steps": 8, "logging_steps": 1, "save_steps": 3, "precision": "fp32", "report_to": [],
    "use_cpu": True,
}  # fmt: skip
_UNTIL_SEEN_S = 6.0
"""Ray's controller looks for new reports about once a second; what it has not seen is lost with the worker."""


class Killed(TrainerCallback):
    """Ends the process of rank 1 after a step, the first time."""

    def __init__(self, step: int, mark: Path) -> None:
        self.step, self.mark = step, mark

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and not state.is_world_process_zero and not self.mark.exists():
            self.mark.touch()
            time.sleep(_UNTIL_SEEN_S)
            os._exit(1)


def trainer_of(args: whet.TrainingArguments, *callbacks: TrainerCallback) -> whet.Trainer:
    """Return a Trainer of a tiny classifier; without dropout, whose masks each rank draws for its own rows."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(tiny_config("bert"))
    ids = np.random.default_rng(3).integers(10, 190, (24, 12)).tolist()
    rows = [{"input_ids": one, "labels": int(one[0] >= 100)} for one in ids]
    return whet.Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=[*callbacks])


def train(config: dict[str, Any]) -> None:
    """Train one rank."""
    folder, name = Path(config["folder"]), config["name"]
    args = whet.TrainingArguments(str(folder / f"out-{name}"), per_device_train_batch_size=4, **ARGUMENTS)
    trainer = trainer_of(args, whet.RayReport())
    if config["killed_at"]:
        trainer.add_callback(Killed(config["killed_at"], folder / f"{name}.killed"))
    resumed_from = whet.RayReport.last_checkpoint()
    trainer.train(resume_from_checkpoint=resumed_from)
    trainer.evaluate()
    found = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "threads": torch.get_num_threads(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "resumed_from": resumed_from,
    }
    (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found), "utf-8")


def fit(folder: Path, name: str, killed_at: int) -> None:
    """Run one training, and write what Ray reports of it to FOLDER/NAME.json."""
    result = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "name": name, "killed_at": killed_at},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=f"{folder}/store", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    reported = {"metrics": result.metrics, "checkpoint": result.checkpoint and result.checkpoint.path}
    (folder / f"{name}.json").write_text(json.dumps(reported, default=float), "utf-8")


if __name__ == "__main__":
    ray.init()
    for word in sys.argv[2:]:
        called, _, step = word.partition("=")
        fit(Path(sys.argv[1]), called, int(step))
