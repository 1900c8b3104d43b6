"""A run of causal language modelling over examples that have been read: rows, model, training, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import set_seed

from whet.config.arguments import TrainingArguments
from whet.jobs.job import Job, Part, model_card, trainer_of
from whet.jobs.lora.adapt import prepared
from whet.jobs.sources import source_of
from whet.jobs.teacher import add_teacher, require_reads
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.encode import check_max_length
from whet.models.loading.heads import CAUSAL_LM
from whet.models.loading.load import load_model, load_tokenizer, max_positions
from whet.objectives.preferences import Preference, preferences
from whet.tasks.lm import pairs
from whet.tasks.lm.arguments import LmArguments
from whet.tasks.lm.examples import Examples
from whet.tasks.lm.judge import LmJudge
from whet.tasks.lm.rows import RowMaker, collate
from whet.train.resume import restore as resume
from whet.train.trainer import Trainer

_USUAL_LENGTH = 1024


def prepare(job: LmArguments, args: TrainingArguments, examples: Mapping[str, Examples]) -> Job:
    """Tokenise, load the model and build its Trainer; raises whatever cannot work, before any training."""
    resume.check_early(args)
    source = source_of(job)
    tokenizer = load_tokenizer(source, resize=job.resize_token_embeddings if args.do_train else False)
    set_seed(args.seed)
    model = load_model(source, CAUSAL_LM, trained=not args.do_train)
    length = row_length(job.max_length, tokenizer, model)
    require_reads(job, tokenizer, length, flag="max_length")
    completion_only, cache = job.completion_only_loss is not False, Cache(rows="rows", overwrite=job.overwrite_cache)
    by_preference = job.loss == "dpo"
    maker = RowMaker(tokenizer, length, cache, job.packing, completion_only, group=2 if by_preference else 1)
    parts = {}
    for name, found in examples.items():
        rows = pairs.pair_rows(maker, name, found) if by_preference else maker.rows(name, found)
        parts[name] = Part(rows, LmJudge(rows), len(rows), found.left_out)
    model = prepared(model, job, args, CAUSAL_LM, tokenizer)
    made = pairs.collate if by_preference else collate
    trainer = trainer_of(model, args, parts, tokenizer, None, data_collator=made)
    add_teacher(trainer, job, CAUSAL_LM)
    if by_preference:
        _learn_preferences(trainer, job, [part.rows for part in parts.values()])
    reading: dict[str, Any] = {"task": "lm", "max_length": length}
    card = model_card(job, "text-generation")
    return Job(trainer, args, parts, card=card, reading=reading, asked=job, compares_with_start=by_preference)


def _learn_preferences(trainer: Trainer, job: LmArguments, data: Sequence[pairs.PairRows]) -> None:
    """Give the trainer the DPO loss; before its first step, each pair gets the log-probabilities of the model."""
    preference = Preference(beta=job.beta, label_smoothing=job.label_smoothing)
    trainer.objective = objective = preferences(trainer.objective, preference)

    def add_references() -> None:
        for rows in data:
            pairs.add_reference(trainer, rows)
        objective.preference = replace(preference, reference=pairs.weights_of_reference(trainer.model))

    trainer.before_steps = add_references


def row_length(asked: int | None, tokenizer: Any, model: Any) -> int:
    """Return the longest row in tokens: what was asked for, else what model and tokenizer allow, 1024 at most."""
    limits = [tokenizer.model_max_length, max_positions(model) or _USUAL_LENGTH, _USUAL_LENGTH]
    length = asked or min(limits)
    check_max_length(length, tokenizer, max_positions(model), flag="max_length")
    return length
