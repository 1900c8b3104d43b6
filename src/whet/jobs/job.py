"""The steps of a task's run once its model is loaded: train, evaluate, predict, and write what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from whet.config.arguments import TrainingArguments
from whet.errors import Problem
from whet.jobs import left_out
from whet.jobs.fields import JobFields
from whet.jobs.trained import write_reading
from whet.train.control import stop
from whet.train.output import printing, run_log
from whet.train.trainer import Trainer

SPLIT_OF = {"train": "train", "eval": "validation", "predict": "test"}
"""What the files of a split begin with -> the split."""


class Judge(Protocol):
    """Computes a split's metrics from a model's output, and writes its files."""

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction."""
        ...

    def write(self, predictions: Any, prefix: str) -> None:
        """Write the predictions, in files whose names begin with the prefix."""
        ...


@dataclass(frozen=True)
class Part:
    """One split of the data: its rows, what judges it, and the examples that were left out."""

    rows: Any
    judge: Judge
    n_examples: int
    left_out: Sequence[Problem] = ()
    n_left_out: int = 0


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
    metrics: dict[str, float] = field(default_factory=dict)

    def run(self) -> dict[str, float]:
        """Train, evaluate and predict as asked; write every file; return all metrics."""
        stop.defer_signals()
        with trackers_closed(self.trainer), run_log.written_to(self.args.output_dir), printing.before_a_table():
            if self.args.do_eval:
                self.trainer.compute_metrics = self.parts["validation"].judge.metrics
            if self.args.do_train:
                self._train()
            stop.check(self.trainer.sync.stop_signal)
            if self.args.do_eval:
                self._judge("eval")
            if self.args.do_predict:
                self._judge("predict")
        return self.metrics

    def _train(self) -> None:
        result = self.trainer.train()
        self.trainer.save_model()
        self._record("train", dict(result.metrics))
        self.trainer.save_state()
        self.trainer.create_model_card(**self.card)
        write_reading(Path(self.args.output_dir), self.reading)
        folder = self.args.output_dir
        stop.record_progress(f"the trained model is in {folder}", do_train=False, model_name_or_path=folder)

    def _judge(self, prefix: str) -> None:
        part = self.parts[SPLIT_OF[prefix]]
        self.trainer.compute_metrics = part.judge.metrics
        found = self.trainer.predict(part.rows, metric_key_prefix=prefix)
        part.judge.write(found.predictions, prefix)
        metrics = dict(found.metrics or {})
        self.trainer.log(dict(metrics))
        self._record(prefix, metrics)

    def _record(self, prefix: str, metrics: dict[str, Any]) -> None:
        part = self.parts[SPLIT_OF[prefix]]
        metrics = metrics | {f"{prefix}_samples": part.n_examples}
        if part.n_left_out:
            metrics[f"{prefix}_examples_left_out"] = part.n_left_out
        left_out.write(part.left_out, Path(self.args.output_dir) / f"{prefix}_left_out.json")
        if self.trainer.state.epoch is not None:
            metrics["epoch"] = self.trainer.state.epoch
        self.trainer.save_metrics(prefix, metrics)
        self.metrics |= metrics


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
