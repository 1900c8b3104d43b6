"""The steps of a task's run once its model is loaded: train, evaluate, predict, and write what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from whet.config import deepspeed, recipes
from whet.config.arguments import TrainingArguments
from whet.config.settings import options_of, printable
from whet.data.store import RowStore
from whet.engine.engine import Engine, RunSpec
from whet.jobs import judging
from whet.jobs.fields import OF_TRAINING, JobFields
from whet.jobs.judging import Judge
from whet.jobs.left_out import LeftOut
from whet.jobs.predict.trained import write_reading
from whet.models import adapters
from whet.models.loading.load import ModelSource
from whet.store import find
from whet.watch import printing, record, run_log, stop

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
    """The word for what `left_out` and the counts of errors count."""


@dataclass
class Job:
    """What a run works on, and what it has measured."""

    engine: Engine
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
    worst: list[str] = field(default_factory=list)
    """Lines for the end of the run: the worst errors of each split, and the file that has all of them."""

    def run(self) -> dict[str, float]:
        """Train, evaluate and predict as asked; write every file; return all metrics."""
        stop.defer_signals()
        logged, recorded = run_log.written_to(self.args.output_dir), self._recorded()
        with trackers_closed(self.engine), logged, recorded, printing.before_a_table():
            if self.args.do_train:
                trained = self.engine.train()
                self._save_training(dict(trained.metrics))
            stop.check(self.engine.sync.stop_signal)
            if self.args.do_eval:
                self._judge("eval")
            if self.args.do_predict:
                self._judge("predict")
        return self.metrics

    def _recorded(self) -> AbstractContextManager[None]:
        """Record the run in run.jsonl within the block."""
        engine, args = self.engine, self.args
        if not args.should_save:
            return nullcontext()
        command, weights = record.running_command(), list(engine.model.parameters())
        rows = engine.spec.train_dataset if args.do_train else engine.spec.eval_dataset
        facts = {
            "command": None if command is None else command.text,
            "task": self.reading.get("task"),
            "settings": _settings(self.asked, args, {} if command is None else command.sources),
            "machine": record.machine(),
            "model": {
                "name": self.asked.model_name_or_path,
                "parameters": sum(one.numel() for one in weights),
                "trainable": sum(one.numel() for one in weights if one.requires_grad),
            },
            "data": None if rows is None else {
                "rows": len(rows), "tokens": int(rows.cu_seqlens[-1]) if isinstance(rows, RowStore) else None
            },
        }  # fmt: skip
        recorder = record.Recorder(args.output_dir, facts)
        engine.events.add_callback(record.RunRecorder(recorder, on_cpu=engine.device.type == "cpu"))
        return recorder.ends(self.metrics)

    def _save_training(self, metrics: dict[str, Any]) -> None:
        """Save the trained model, its metrics and the counters."""
        self.engine.save_model()
        self._record("train", metrics)
        self.engine.save_state()
        self.engine.create_model_card(**self.card)
        write_reading(Path(self.args.output_dir), self.reading, self.args.save_error_policy)
        folder = self.args.output_dir
        stop.record_progress(f"the trained model is in {folder}", **self._settings_after_training())

    def _settings_after_training(self) -> dict[str, Any]:
        """Return the settings of a command that evaluates the trained model, in which training alone has no settings.

        An adapter, and what is compared with the weights before the training, is read from a checkpoint.
        """
        folder = self.args.output_dir
        if self.compares_with_start or adapters.names_of(self.engine.model):
            return {} if find.would_resume(Path(folder)) is None else {"resume_from_checkpoint": "auto"}
        usual = {one.name: one.default for one in fields(self.asked) if one.name in OF_TRAINING}
        off = {name: value for name, value in usual.items() if getattr(self.asked, name) != value}
        off |= {"profile": False} if self.args.profile else {}
        return {"do_train": False, "model_name_or_path": folder, **off}

    def _judge(self, prefix: str) -> None:
        part = self.parts[SPLIT_OF[prefix]]
        found = part.judge.judge(self.engine, prefix)
        folder, on_error = Path(self.args.output_dir), self.args.save_error_policy
        counts, lines = judging.write(found.examples, prefix, part.unit, folder, on_error)
        self.worst += lines
        self._record(prefix, {**found.metrics, **counts})

    def _record(self, prefix: str, metrics: dict[str, Any]) -> None:
        part = self.parts[SPLIT_OF[prefix]]
        metrics = metrics | {f"{prefix}_samples": part.n_samples}
        if part.left_out.n_rows:
            metrics[f"{prefix}_{part.unit}_left_out"] = part.left_out.n_rows
        part.left_out.write(Path(self.args.output_dir) / f"{prefix}_left_out.json", self.args.save_error_policy)
        if self.engine.state.epoch is not None:
            metrics["epoch"] = self.engine.state.epoch
        self.engine.save_metrics(prefix, metrics)
        self.metrics |= metrics


def _settings(asked: JobFields, args: TrainingArguments, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return every setting: its value, secrets masked, and where that came from if it is not the default."""
    set_by_file = {} if args.deepspeed is None else deepspeed.values_for({"deepspeed": args.deepspeed})

    def source(name: str, value: Any, default: Any) -> str | None:
        if name in sources:
            return sources[name]
        if value == default:
            return None
        if recipes.sets(args, name):
            return "recipe"
        if name in set_by_file:
            return "deepspeed file"
        return "other settings"

    found = {}
    for one in (asked, args):
        values = printable(one)
        for name, option in options_of(type(one)).items():
            where = source(name, getattr(one, name), option.default)
            found[name] = {"value": values[name]} | ({} if where is None else {"from": where})
    return found


def engine_of(model: Any, args: TrainingArguments, parts: Mapping[str, Part], tokenizer: Any, **more: Any) -> Engine:
    """Return the engine that trains on `train` and evaluates on `validation`; `more` goes into its RunSpec."""
    judged = parts["validation"].judge.while_training() if "validation" in parts else {}
    rows = {name: part.rows for name, part in parts.items()}
    spec = RunSpec(
        model=model, args=args, train_dataset=rows.get("train"), eval_dataset=rows.get("validation"),
        processing_class=tokenizer, **(judged | more),
    )  # fmt: skip
    return Engine(spec)


def model_card(job: JobFields, task: str) -> dict[str, Any]:
    """Return what the model card says of where the model comes from; a folder of this machine stays unnamed."""
    base = None if Path(job.model_name_or_path).exists() else job.model_name_or_path
    return {"finetuned_from": base, "tasks": task, "dataset": job.dataset_name}


@contextmanager
def trackers_closed(engine: Engine) -> Iterator[None]:
    """Close the runs of the trackers after the block, as failed ones if it raises."""
    try:
        yield
    except BaseException:
        engine.close(failed=True)
        raise
    finally:
        engine.close()


def source_of(job: JobFields) -> ModelSource:
    """Return where the run's model comes from."""
    return ModelSource(
        model=job.model_name_or_path,
        config=job.config_name,
        tokenizer=job.tokenizer_name,
        cache_dir=job.cache_dir,
        revision=job.model_revision,
        token=job.token,
    )
