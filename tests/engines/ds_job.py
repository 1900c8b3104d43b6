"""Trains a tiny model on two ranks several times, by DeepSpeed's engine and without: one rank's process.

    python ds_job.py FOLDER

Rank 0 writes FOLDER/NAME.json for each training.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import engine
from tiny import padded, tiny_model, tiny_rows

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6, "logging_steps": 1,
    "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "learning_rate": 1e-2, "precision": "fp32",
    "use_cpu": True, "report_to": [], "ddp_timeout": 60, "max_grad_norm": 0.5,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 0},
}  # fmt: skip
TRAININGS: dict[str, tuple[int, str | None]] = {
    "ddp": (0, None), "stage-1": (1, None), "stage-2": (2, None), "stage-3": (3, None),
    "ddp-from-stage-3": (0, "stage-3"), "stage-3-from-stage-1": (3, "stage-1"), "stage-2-from-ddp": (2, "ddp"),
    "nan-ddp": (0, None), "nan-stage-2": (2, None), "nan-stage-3": (3, None),
}  # fmt: skip
"""Name -> stage of DeepSpeed (0: without), and the training whose third step it resumes from."""


class NanAtThirdStep(TrainerCallback):
    """Makes the loss of one step not a number."""

    hook: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            self.hook = model.register_forward_hook(_without_loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


def _without_loss(model: Any, given: Any, output: Any) -> Any:
    output["loss"] = output["loss"] * float("nan")
    return output


def train(folder: Path, name: str) -> dict[str, Any]:
    """Run one training, and return what it left."""
    stage, source = TRAININGS[name]
    given = dict(ARGUMENTS)
    if stage:
        given |= {"deepspeed": CONFIG | {"zero_optimization": CONFIG["zero_optimization"] | {"stage": stage}}}
    rows = tiny_rows(19, "bert")
    args = engine.TrainingArguments(str(folder / f"out-{name}"), **given)
    if name.startswith("nan"):
        model, more = tiny_model("bert"), {"data_collator": partial(padded, pad_id=0), "callbacks": [NanAtThirdStep()]}
    else:
        model, more = tiny_model("bert", dropout=0.1), {}
    trainer = engine.Trainer(model, args, train_dataset=rows, eval_dataset=rows, **more)
    trainer.train(resume_from_checkpoint=str(folder / f"out-{source}" / "checkpoint-3") if source else None)
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "after": trainer.evaluate()["eval_loss"],
        "names": sorted(trainer.model.state_dict()),
    }


if __name__ == "__main__":
    for each in TRAININGS:
        found = train(Path(sys.argv[1]), each)
        if os.environ["RANK"] == "0":
            (Path(sys.argv[1]) / f"{each}.json").write_text(json.dumps(found), "utf-8")
