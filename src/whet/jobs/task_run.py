"""The steps of a task's run once its model is loaded: train, evaluate, predict, and write what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from whet.config import recipes
from whet.config.arguments import TrainingArguments
from whet.config.settings import options_of, printable
from whet.data.store import RowStore
from whet.engine.engine import Engine, RunSpec
from whet.engine.forked_forecast import ForkedForecast
from whet.engine.prepare import Ready
from whet.errors import ConfigError, DataError
from whet.jobs import hub_upload, judging, model_card
from whet.jobs.fields import JobFields
from whet.jobs.judging import Judge
from whet.jobs.left_out import LeftOut
from whet.jobs.predict.trained import NAME as READING
from whet.jobs.predict.trained import as_text, write_reading
from whet.jobs.rules import require_goes_with_saved_experts
from whet.jobs.splits import SPLITS
from whet.jobs.used_again import UsedAgain
from whet.models import adapters
from whet.models.experts.settings import settings_of
from whet.models.loading.heads import Head
from whet.models.loading.load import ModelSource, n_tokens
from whet.models.loading.special_tokens import set_padding
from whet.objectives.base import Objective
from whet.store import find
from whet.store.weights import count_weights
from whet.watch import printing, record, results, run_log, stop

_OF_TRAINING = (
    "auto", "auto_budget_s", "auto_ranks", "auto_again",
    "resize_token_embeddings",
    "moe_experts", "moe_top_k", "moe_every", "moe_capacity_factor", "moe_aux_loss_coef", "moe_z_loss_coef",
    "teacher_model", "distillation_temperature", "distillation_alpha",
)  # fmt: skip
"""Fields that a run without training must not set."""


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
class TaskRun:
    """What a run works on, and what it has measured."""

    engine: Engine
    args: TrainingArguments
    parts: Mapping[str, Part]
    pipeline_tag: str
    """The hub's name of the task, for the model card."""
    reading: Mapping[str, Any]
    """How the trained model reads its input: kept next to it under the name of the task, for `whet predict`."""
    asked: JobFields
    """What the task was asked for."""
    compares_with_start: bool = False
    """Whether an evaluation needs the weights before the training, which the trained model's folder has not."""
    metrics: dict[str, float] = field(default_factory=dict)
    chosen: Mapping[str, Any] | None = None
    """What --auto has chosen, for the record of the run."""
    upload: hub_upload.Upload | None = None
    """What uploads its checkpoints, and the trained model after it."""
    worst: list[str] = field(default_factory=list)
    """Lines for the end of the run: the worst errors of each split, and the file that has all of them."""

    def run(self) -> dict[str, float]:
        """Train, evaluate and predict as asked; write every file; return all metrics."""
        stop.defer_signals()
        logged = run_log.written_to(self.args.output_dir)
        with trackers_closed(self.engine), logged, self._recorded(), printing.before_a_table():
            if self.args.do_train:
                self.engine.events.add_callback(self._before.after_first_step())
                self.engine.files[READING] = as_text(self.reading)
                trained = self.engine.train()
                self._save_training(dict(trained.metrics))
            stop.check(self.engine.sync.stop_signal)
            for split in ("validation", "test"):
                if getattr(self.args, SPLITS[split].asked_by):
                    self._judge(split)
            if self.args.do_train:
                self._write_card()
        return self.metrics

    @cached_property
    def _before(self) -> UsedAgain:
        return UsedAgain(self.args.output_dir)

    def uploads_by(self, upload: hub_upload.Upload) -> None:
        """Have each checkpoint handed to this Upload."""
        self.upload = upload
        self.engine.events.add_callback(upload)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What the record of the run and the model card say of it."""
        engine, args = self.engine, self.args
        command = record.running_command()
        is_demo = command is not None and command.text.startswith("whet demo")
        rows = engine.spec.train_dataset if args.do_train else engine.spec.eval_dataset
        return {
            "command": None if command is None else command.text,
            "task": self.reading.get("task"),
            "auto": self.chosen,
            "settings": settings_with_sources(
                self.asked, args, {} if command is None else command.sources, "demo" if is_demo else "other settings"
            ),
            "machine": record.machine(),
            "model": {
                "name": self.asked.model_name_or_path,
                "parameters": count_weights(engine.model),
                "trainable": count_weights(engine.model, trained=True),
            },
            "data": None if rows is None else {
                "rows": len(rows), "tokens": int(rows.cu_seqlens[-1]) if isinstance(rows, RowStore) else None
            },
        }  # fmt: skip

    def _recorded(self) -> AbstractContextManager[None]:
        """Record the run in run.jsonl within the block."""
        engine, args = self.engine, self.args
        if not args.should_save:
            return nullcontext()
        is_other = not args.do_train and self._before.judging(self.asked)
        more = {record.OTHER_MODEL: True} if is_other else {}
        recorder = record.Recorder(args.output_dir, {**self._facts, **more})
        engine.events.add_callback(record.RunRecorder(recorder, on_cpu=engine.device.type == "cpu"))
        tested = self.parts["test"].rows if args.do_predict and "test" in self.parts else None
        engine.events.add_callback(ForkedForecast(engine, recorder.forecast, tested))
        return recorder.ends(self.metrics)

    def _save_training(self, metrics: dict[str, Any]) -> None:
        """Save the trained model, its metrics and the counters."""
        with self._before.saving_model():
            self.engine.save_model()
        if self._before.is_as_before:
            metrics |= results.read(Path(self.args.output_dir), "train")
        self._record("train", metrics)
        self.engine.save_state()
        self._write_card()
        write_reading(Path(self.args.output_dir), self.reading, self.args.save_error_policy)
        again = self._settings_after_training()
        uploads_itself = "resume_from_checkpoint" in again
        where = hub_upload.trained_in(self.args.output_dir, None if uploads_itself else self.upload)
        stop.record_progress(where, **again)
        self.engine.sync.wait()  # for a slow disk

    def _write_card(self) -> None:
        """Write the model card: after the training, and again with the scores of the evaluations."""
        history, precision = self.engine.state.log_history, self.engine.precision.name
        if self.args.should_save:
            model_card.write(self.args, self.asked, self.pipeline_tag, self._facts, self.metrics, history, precision)

    def _settings_after_training(self) -> dict[str, Any]:
        """Return the settings of a command that evaluates the trained model, in which training alone has no settings.

        An adapter, and what is compared with the weights before the training, is read from a checkpoint. Empty if
        nothing is left to do.
        """
        folder = self.args.output_dir
        if self.compares_with_start or adapters.names_of(self.engine.model):
            return {} if find.newest_complete(Path(folder)) is None else {"resume_from_checkpoint": "auto"}
        if not (self.args.do_eval or self.args.do_predict):
            return {}
        usual = {one.name: one.default for one in fields(self.asked) if one.name in _OF_TRAINING}
        off = {name: value for name, value in usual.items() if getattr(self.asked, name) != value}
        off |= {"profile": False} if self.args.profile else {}
        off |= hub_upload.switched_off(self.args)
        return {"do_train": False, "model_name_or_path": folder, **off}

    def _judge(self, split: str) -> None:
        part, prefix = self.parts[split], SPLITS[split].prefix
        found = part.judge.judge(self.engine, prefix)
        folder, on_error = Path(self.args.output_dir), self.args.save_error_policy
        written = judging.write(found.examples, prefix, part.unit, folder, on_error)
        self.worst += written.lines
        self._record(split, {**found.metrics, **written.counts}, [*found.files, *written.files])

    def _record(self, split: str, metrics: dict[str, Any], files: Sequence[str] = ()) -> None:
        part, prefix = self.parts[split], SPLITS[split].prefix
        metrics = metrics | {f"{prefix}_samples": part.n_samples}
        if part.left_out.n_rows:
            metrics[f"{prefix}_{part.unit}_left_out"] = part.left_out.n_rows
        path = Path(self.args.output_dir) / f"{prefix}_left_out.json"
        left_out = part.left_out.write(path, self.args.save_error_policy)
        if self.engine.state.epoch is not None:
            metrics["epoch"] = self.engine.state.epoch
        self.engine.save_metrics(prefix, metrics, [*files, *left_out])
        self.metrics |= metrics


def settings_with_sources(
    asked: JobFields, args: TrainingArguments, sources: Mapping[str, str], others: str = "other settings"
) -> dict[str, Any]:
    """Return every setting: its value, secrets masked, and where that came from if it is not the default.

    `others` sets what no other source has.
    """
    set_by_file: Mapping[str, Any] = {}
    if args.deepspeed is not None:
        from whet.config import deepspeed

        set_by_file = deepspeed.values_for({"deepspeed": args.deepspeed})

    def source(name: str, value: Any, default: Any) -> str | None:
        if name in sources:
            return sources[name]
        if value == default:
            return None
        if recipes.sets(args, name):
            return "recipe"
        if name in set_by_file:
            return "deepspeed file"
        return others

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


def as_trained(model: Any, job: JobFields, args: TrainingArguments, head: Head, tokenizer: Any) -> Any:
    """Return the loaded model as the run trains it: with rows for new tokens, new experts, and its adapter.

    The tokenizer pads as the head reads rows.
    """
    set_padding(model, tokenizer, head)
    if settings_of(model.config) is not None:
        require_goes_with_saved_experts(job, args)
    grows = n_tokens(tokenizer) > model.get_input_embeddings().weight.shape[0]
    is_frozen = args.freeze_layers is not None or "freeze_tables" in args.methods  # new tokens need rows that learn
    is_changed = job.resize_token_embeddings or job.lora_r is not None or job.moe_experts is not None
    if not (grows or is_frozen or is_changed):
        return model
    from whet.jobs.lora.adapt import adapted

    return adapted(model, job, args, head, tokenizer)


def require_teacher_reads(job: JobFields, tokenizer: Any, length: int, *, flag: str = "max_seq_length") -> None:
    """Raise ConfigError if the teacher that the run names cannot read its rows of up to `length` tokens."""
    if job.teacher_model is not None:
        from whet.jobs.teacher import require_reads

        require_reads(job, tokenizer, length, flag=flag)


def taught_by(ready: Ready, job: JobFields, head: Head, *, pairs: bool = False) -> Objective:
    """Return the objective by which a model learns from the teacher that the run names; without one, its own.

    `pairs`: rows hold two texts, which models with token types tell apart.
    """
    if job.teacher_model is None:
        return ready.objective
    from whet.jobs.teacher import taught

    return taught(ready, job, head, pairs=pairs)


def require_several(found: Sequence[str], where: str, column: str | None, *, of: str, kind: str, more: str) -> None:
    """Raise DataError if all that the data says (`kind`) of its examples or words (`of`) is the same.

    Any model would be right then, and none would learn. `more` is what to add.
    """
    if len(found) > 1:
        return
    raise DataError(
        what=f"{where}: all {of} have the same {kind}",
        got=f"{column}: {found[0]}" if found else f"no {kind}",
        why=f"the model learns to tell {of} apart by their {kind}s",
        fix=f"add {more}, or name another column: --label_column_name NAME",
    )


def require_best_metric(
    args: TrainingArguments, examples: Mapping[str, Any], known: Sequence[str], *, why: str, flag: str
) -> None:
    """Raise ConfigError if evaluations in this training do not compute what the best model is chosen by.

    `known` are the metrics that the data allows, which its labels say (`why`). `flag` is the option that names one.
    """
    wanted = args.metric_for_best_model
    if wanted is None or not {"train", "validation"} <= examples.keys() or wanted.removeprefix("eval_") in known:
        return
    raise ConfigError(
        what=f"{flag} names no metric of this data",
        got=wanted,
        why=f"{why}; an evaluation then computes {', '.join(known)}",
        fix=f"use one of these in --{flag}",
    )
