"""A question answering run over questions that have been read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from whet.config.arguments import TrainingArguments
from whet.engine.engine import Engine
from whet.errors import ConfigError, WhetError
from whet.jobs.splits import SPLITS
from whet.jobs.task_run import (
    Part,
    TaskRun,
    as_trained,
    engine_of,
    require_teacher_reads,
    source_of,
    taught_by,
)
from whet.jobs.tokenising.encode import check_max_length
from whet.models import known
from whet.models.loading.heads import QUESTION_ANSWERING
from whet.models.loading.load import load_qa_model, load_tokenizer, max_positions
from whet.models.packable import family_of
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.decode import DecodeOptions
from whet.tasks.qa.judge import Judge
from whet.tasks.qa.splits import Split, cut, describe
from whet.tasks.qa.types import Questions


def prepare(qa: QaArguments, args: TrainingArguments, questions: Mapping[str, Questions]) -> TaskRun:
    """Cut the windows, load the model and build its engine; raises every error before any training."""
    source = source_of(qa)
    tokenizer = load_tokenizer(source, resize=qa.resize_token_embeddings if args.do_train else False)
    require_teacher_reads(qa, tokenizer, qa.max_seq_length)
    splits = {name: cut(asked, tokenizer, qa, with_labels=name == "train") for name, asked in questions.items()}
    for name, split in splits.items():
        describe(name, split, qa.max_seq_length)
    model = load_qa_model(source, trained=not args.do_train)
    check_max_length(qa.max_seq_length, tokenizer, max_positions(model))
    parts = {name: _part(qa, args, name, split) for name, split in splits.items()}
    engine = engine_of(
        as_trained(model, qa, args, QUESTION_ANSWERING, tokenizer),
        args,
        parts,
        tokenizer,
        padded_length=qa.max_seq_length if qa.pad_to_max_length else None,
        objective=lambda ready: taught_by(ready, qa, QUESTION_ANSWERING, pairs=True),
    )
    _require_works(engine, next(iter(splits.values())))
    reading = {"max_seq_length": qa.max_seq_length, "doc_stride": qa.doc_stride, **asdict(DecodeOptions.of(qa))}
    return TaskRun(engine, args, parts, pipeline_tag="question-answering", reading=reading, asked=qa)


def _part(qa: QaArguments, args: TrainingArguments, name: str, split: Split) -> Part:
    judge = Judge(split, DecodeOptions.of(qa), Path(args.output_dir), SPLITS[name].prefix)
    return Part(split.rows, judge, len(split.rows), split.questions.left_out, unit="questions")


def _require_works(engine: Engine, split: Split) -> None:
    """Run a model of an unknown family on one row: some need rows that whet does not make."""
    if family_of(engine.model) is not None or not len(split.rows):
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            batch = engine.objective.batch(split.rows, [0], 0).to(engine.device)
            engine.objective.forward(batch, seed=0, step=0)
    except WhetError:
        raise
    except Exception as error:
        raise ConfigError(
            what=f"{type(engine.model).__name__} cannot read rows of a question and its context",
            got=f"{type(error).__name__}: {error}",
            why="the code of this model in transformers refused a row; whet does not know this architecture",
            fix=f"name a model of another family in --model_name_or_path, such as {known.names()}",
        ) from error
