"""A question answering run after reading the questions: windows, model, training, evaluation, files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, WhetError
from whet.jobs import left_out
from whet.jobs.sources import source_of
from whet.jobs.tokenising.encode import check_max_length
from whet.models import known
from whet.models.loading.load import load_qa_model, load_tokenizer, max_positions
from whet.models.packable import family_of
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.evaluate.decode import DecodeOptions
from whet.tasks.qa.evaluate.predict import Judge
from whet.tasks.qa.splits import Split, cut, describe
from whet.tasks.qa.types import Questions
from whet.train.control import stop
from whet.train.output import printing, run_log
from whet.train.resume import restore as resume
from whet.train.trainer import Trainer

_SPLIT_OF = {"train": "train", "eval": "validation", "predict": "test"}


@dataclass
class QaJob:
    """The data and the metrics of `whet qa`."""

    qa: QaArguments
    args: TrainingArguments
    splits: Mapping[str, Split]
    trainer: Trainer
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def prepare(cls, qa: QaArguments, args: TrainingArguments, questions: Mapping[str, Questions]) -> QaJob:
        """Cut the windows, load the model and build its Trainer; raises every error before any training."""
        resume.check_early(args)
        source = source_of(qa)
        tokenizer = load_tokenizer(source)
        splits = {name: cut(asked, tokenizer, qa, with_labels=name == "train") for name, asked in questions.items()}
        for name, split in splits.items():
            describe(name, split, qa.max_seq_length)
        set_seed(args.seed)  # the new weights of the head
        model = load_qa_model(source)
        check_max_length(qa.max_seq_length, tokenizer, max_positions(model))
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=splits["train"].rows if "train" in splits else None,
            eval_dataset=splits["validation"].rows if "validation" in splits else None,
            processing_class=tokenizer,
            padded_length=qa.max_seq_length if qa.pad_to_max_length else None,
        )
        _require_works(trainer, next(iter(splits.values())))
        return cls(qa, args, splits, trainer)

    def run(self) -> dict[str, float]:
        """Train, evaluate and predict as requested; write every file; return all metrics."""
        stop.defer_signals()
        with self._trackers_closed(), run_log.written_to(self.args.output_dir), printing.before_a_table():
            if self.args.do_eval:
                self.trainer.evaluation = self.judge("eval")
            if self.args.do_train:
                trained = self.trainer.train()
                self._save_training(dict(trained.metrics))
            stop.check(self.trainer.sync.stop_signal)
            if self.args.do_eval:
                self._record("eval", self.trainer.evaluate())
            if self.args.do_predict:
                self.trainer.evaluation = self.judge("predict")
                self._record("predict", self.trainer.evaluate(self.splits["test"].rows, metric_key_prefix="predict"))
        return self.metrics

    @contextmanager
    def _trackers_closed(self) -> Iterator[None]:
        """Close the runs of the trackers after the block, as failed ones if it raises."""
        try:
            yield
        except BaseException:
            self.trainer.close(failed=True)
            raise
        finally:
            self.trainer.close()

    def judge(self, prefix: str) -> Judge:
        """Return the evaluation of the split; `prefix` begins the names of its files."""
        options = DecodeOptions(
            n_best_size=self.qa.n_best_size,
            max_answer_length=self.qa.max_answer_length,
            null_score_diff_threshold=self.qa.null_score_diff_threshold,
            version_2_with_negative=self.qa.version_2_with_negative,
        )
        return Judge(self.splits[_SPLIT_OF[prefix]], options, Path(self.args.output_dir), prefix)

    def _save_training(self, metrics: dict[str, float]) -> None:
        """Save the trained model, its metrics and the trainer's state."""
        self.trainer.save_model()
        self._record("train", metrics)
        self.trainer.save_state()
        folder = self.args.output_dir
        stop.record_progress(f"the trained model is in {folder}", do_train=False, model_name_or_path=folder)

    def _record(self, prefix: str, metrics: dict[str, Any]) -> None:
        split = self.splits[_SPLIT_OF[prefix]]
        metrics = metrics | {f"{prefix}_samples": len(split.rows)}
        if split.questions.n_left_out:
            metrics[f"{prefix}_questions_left_out"] = split.questions.n_left_out
        left_out.write(split.questions.left_out, Path(self.args.output_dir) / f"{prefix}_left_out.json")
        if self.trainer.state.epoch is not None:
            metrics["epoch"] = self.trainer.state.epoch
        self.trainer.save_metrics(prefix, metrics)
        self.metrics |= metrics


def _require_works(trainer: Trainer, split: Split) -> None:
    """Run a model of an unknown family on one row: some need rows that whet does not make."""
    if family_of(trainer.model) is not None or not len(split.rows):
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            batch = trainer.objective.batch(split.rows, [0], 0).to(trainer.device)
            trainer.objective.forward(batch, seed=0, step=0)
    except WhetError:
        raise
    except Exception as error:
        raise ConfigError(
            what=f"{type(trainer.model).__name__} cannot read rows of a question and its context",
            got=f"{type(error).__name__}: {error}",
            why="the code of this model in transformers refused a row; whet does not know this architecture",
            fix=f"name a model of another family in --model_name_or_path, such as {known.names()}",
        ) from error
