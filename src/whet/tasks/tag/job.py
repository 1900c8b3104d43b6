"""A run of token classification over sentences that have been read, and `whet predict` for its models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import DataCollatorForTokenClassification

from whet.config.arguments import TrainingArguments
from whet.jobs.job import Job, Part, engine_of, model_card
from whet.jobs.lora.adapt import prepared
from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictFields
from whet.jobs.sources import source_of
from whet.jobs.teacher import require_reads, taught
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.encode import check_max_length
from whet.jobs.tokenising.words import WordRowMaker
from whet.log import logger
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import TOKEN_CLASSIFICATION
from whet.models.loading.load import Labels, load_config, load_model, load_tokenizer, max_positions
from whet.tasks.tag.arguments import TagArguments
from whet.tasks.tag.judge import TagJudge, best_tags, entries_of, only_logits, words_of
from whet.tasks.tag.labels import Tags, require_several, tags_of, tags_of_config
from whet.tasks.tag.read import read_file
from whet.tasks.tag.rows import Split, tokenised
from whet.tasks.tag.sentences import Named, Sentences
from whet.watch import printing

_LONGEST_UNSAID = 10_000
"""Lengths that tokenizers give where they know none are above it."""
_USUAL_LENGTH = 512


def prepare(job: TagArguments, args: TrainingArguments, sentences: Mapping[str, Sentences]) -> Job:
    """Tokenise, load the model and build its engine; raises whatever cannot work, before any training."""
    source = source_of(job)
    tags = _tags(sentences, load_config(source))
    tokenizer = load_tokenizer(source, resize=job.resize_token_embeddings if args.do_train else False)
    labels = Labels(names=tags.names, may_replace=job.ignore_mismatched_sizes)
    model = load_model(source, TOKEN_CLASSIFICATION, trained=not args.do_train, labels=labels)
    length = row_length(job.max_seq_length, tokenizer, model)
    require_reads(job, tokenizer, length)
    maker = WordRowMaker(tokenizer, length, Cache(rows="rows", overwrite=job.overwrite_cache), job.doc_stride)
    splits = {
        name: tokenised(name, found, tags, maker, all_pieces=job.label_all_tokens) for name, found in sentences.items()
    }
    parts = {name: _part(job, split, tags, args) for name, split in splits.items()}
    engine = engine_of(
        prepared(model, job, args, TOKEN_CLASSIFICATION, tokenizer),
        args,
        parts,
        tokenizer,
        padded_length=length if job.pad_to_max_length else None,
        objective=lambda ready: taught(ready, job, TOKEN_CLASSIFICATION),
        data_collator=DataCollatorForTokenClassification(tokenizer),
        preprocess_logits=best_tags if job.doc_stride is None else only_logits,
    )
    reading: dict[str, Any] = {"task": "tag", "max_seq_length": length, "text_column_name": job.text_column_name}
    reading |= {"doc_stride": job.doc_stride, "window_pooling": job.window_pooling}
    return Job(engine, args, parts, card=model_card(job, "token-classification"), reading=reading, asked=job)


def row_length(asked: int | None, tokenizer: Any, model: Any) -> int:
    """Return the longest row in tokens: what was asked for, else what the model and its tokenizer allow."""
    limits = [
        limit for limit in (tokenizer.model_max_length, max_positions(model)) if limit and limit < _LONGEST_UNSAID
    ]
    length = asked or min(limits, default=_USUAL_LENGTH)
    check_max_length(length, tokenizer, max_positions(model))
    return length


def _part(job: TagArguments, split: Split, tags: Tags, args: TrainingArguments) -> Part:
    sentences = split.sentences
    folder, on_error = Path(args.output_dir), args.save_error_policy
    judge = TagJudge(split, tags, folder, on_error, job.return_entity_level_metrics, job.window_pooling)
    return Part(split.dataset, judge, len(sentences), sentences.left_out)


def _tags(sentences: Mapping[str, Sentences], config: Any) -> Tags:
    """Return the tags: those of the training data, or without training those of the model."""
    known = tags_of_config(config)
    if "train" not in sentences:
        tags, why = known, "from the model's configuration"
    else:
        tags, why = tags_of(sentences["train"]), "from the training data"
        require_several(sentences["train"], tags)
        if set(tags.names) == set(known.names):
            tags = known  # the head of a trained model keeps its own order
    kind = "entities (judged by seqeval)" if tags.are_entities else "plain tags (judged by accuracy and macro F1)"
    printing.show_wrapped(f"tags: {len(tags.names)}, {why}; {kind}")
    if (odd := tags.almost_entity()) is not None:
        logger.warning("the tag %s looks like an entity's: for F1 of entities write B-PER, I-PER and O", odd)
    return tags


def predict(asked: PredictFields) -> int:
    """Write the tags and scores of every word in the file; return the exit code."""
    known = outputs.reading_of(asked, "tag")
    named = Named(
        words=asked.text_column_names or known.get("text_column_name"),
        words_flag="--text_column_names",
        tags_flag=None,
    )
    sentences = read_file(
        Path(asked.file), named, need_tags=False, limit=asked.max_predict_samples, skip_bad=asked.skip_bad
    )
    sentences.left_out.log(asked.file, "sentence")
    model, tokenizer = load_trained(asked.model, TOKEN_CLASSIFICATION, asked.base_model_name_or_path)
    length = row_length(asked.max_seq_length or known.get("max_seq_length"), tokenizer, model)
    stride = known.get("doc_stride") if asked.doc_stride is None else asked.doc_stride
    rows = WordRowMaker(tokenizer, length, Cache(rows="rows"), stride).rows(sentences.words)
    split = Split(sentences, rows, None, None)
    keep = best_tags if stride is None else only_logits
    engine = outputs.engine_of(asked, model, tokenizer, preprocess_logits=keep)
    pooling = asked.window_pooling or known.get("window_pooling", "mean")
    found = words_of(split, engine.predict(rows.rows).predictions, pooling)
    outputs.write(asked, engine, entries_of(sentences, tags_of_config(model.config), found))
    return 0
