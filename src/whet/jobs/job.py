"""The steps of a task's run once its model is loaded: train, evaluate, predict, and write what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.engine.engine import Trainer
from whet.jobs.fields import OF_TRAINING, JobFields
from whet.jobs.judging import Judge
from whet.jobs.left_out import LeftOut
from whet.jobs.predict.trained import write_reading
from whet.models import adapters
from whet.store import find
from whet.watch import printing, run_log, stop

PREFIX_OF = {"train": "train", "validation": "eval", "test": "predict"}
"""Split -> what its metrics and files begin with."""
SPLIT_OF = {prefix: split for split, prefix in PREFIX_OF.items()}


@dataclass(frozen=True)
class Part:
    """One split of the data: its rows, what judges it, and the examples that were left out."""

    rows: Any
    judge: Judge
    n_samples: int
    left_out: LeftOut
    unit: str = "examples"
    """The word for what `left_out` counts."""


@dataclass
class Job:
    """What a run works on, and what it has measured."""

    trainer: Trainer
    args: TrainingArguments
    parts: Mapping[str, Part]
    card: Mapping[str, Any]
    """What the model card says."""
    reading: Mapping[str, Any]
    """How the trained model reads its input: kept next to it, for `whet predict`."""
    asked: JobFields
    """What the task was asked for."""
    compares_with_start: bool = False
    """Whether an evaluation needs the weights before the training, which the trained model's folder has not."""
    metrics: dict[str, float] = field(default_factory=dict)

    def run(self) -> dict[str, float]:
        """Train, evaluate and predict as asked; write every file; return all metrics."""
        stop.defer_signals()
        with trackers_closed(self.trainer), run_log.written_to(self.args.output_dir), printing.before_a_table():
            if self.args.do_eval:
                self.parts["validation"].judge.follow(self.trainer)
            if self.args.do_train:
                trained = self.trainer.train()
                self._save_training(dict(trained.metrics))
            stop.check(self.trainer.sync.stop_signal)
            if self.args.do_eval:
                self._judge("eval")
            if self.args.do_predict:
                self._judge("predict")
        return self.metrics

    def _save_training(self, metrics: dict[str, Any]) -> None:
        """Save the trained model, its metrics and the trainer's state."""
        self.trainer.save_model()
        self._record("train", metrics)
        self.trainer.save_state()
        self.trainer.create_model_card(**self.card)
        write_reading(Path(self.args.output_dir), self.reading, self.args.save_error_policy)
        folder = self.args.output_dir
        stop.record_progress(f"the trained model is in {folder}", **self._settings_after_training())

    def _settings_after_training(self) -> dict[str, Any]:
        """Return the settings of a command that evaluates the trained model, in which training alone has no settings.

        An adapter, and what is compared with the weights before the training, is read from a checkpoint.
        """
        folder = self.args.output_dir
        if self.compares_with_start or adapters.names_of(self.trainer.model):
            return {} if find.would_resume(Path(folder)) is None else {"resume_from_checkpoint": "auto"}
        usual = {one.name: one.default for one in fields(self.asked) if one.name in OF_TRAINING}
        off = {name: value for name, value in usual.items() if getattr(self.asked, name) != value}
        off |= {"profile": False} if self.args.profile else {}
        return {"do_train": False, "model_name_or_path": folder, **off}

    def _judge(self, prefix: str) -> None:
        self._record(prefix, self.parts[SPLIT_OF[prefix]].judge.judge(self.trainer, prefix))

    def _record(self, prefix: str, metrics: dict[str, Any]) -> None:
        part = self.parts[SPLIT_OF[prefix]]
        metrics = metrics | {f"{prefix}_samples": part.n_samples}
        if part.left_out.n_rows:
            metrics[f"{prefix}_{part.unit}_left_out"] = part.left_out.n_rows
        part.left_out.write(Path(self.args.output_dir) / f"{prefix}_left_out.json", self.args.save_error_policy)
        if self.trainer.state.epoch is not None:
            metrics["epoch"] = self.trainer.state.epoch
        self.trainer.save_metrics(prefix, metrics)
        self.metrics |= metrics


def trainer_of(
    model: Any,
    args: TrainingArguments,
    parts: Mapping[str, Part],
    tokenizer: Any,
    padded_length: int | None,
    **more: Any,
) -> Trainer:
    """Return the Trainer that trains on the split `train` and evaluates on `validation`; `more` is given to it too."""
    rows = {name: part.rows for name, part in parts.items()}
    return Trainer(
        model=model,
        args=args,
        train_dataset=rows.get("train"),
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        padded_length=padded_length,
        **more,
    )


def model_card(job: JobFields, task: str) -> dict[str, Any]:
    """Return what the model card says of where the model comes from; a folder of this machine stays unnamed."""
    base = None if Path(job.model_name_or_path).exists() else job.model_name_or_path
    return {"finetuned_from": base, "tasks": task, "dataset": job.dataset_name}


@contextmanager
def trackers_closed(trainer: Trainer) -> Iterator[None]:
    """Close the runs of the trackers after the block, as failed ones if it raises."""
    try:
        yield
    except BaseException:
        trainer.close(failed=True)
        raise
    finally:
        trainer.close()
