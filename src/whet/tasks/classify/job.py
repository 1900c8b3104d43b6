"""A run of text classification over examples that have been read, and `whet predict` for its models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.jobs.job import PREFIX_OF, Job, Part, engine_of, model_card
from whet.jobs.judging import pooled
from whet.jobs.lora.adapt import prepared
from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictFields
from whet.jobs.sources import source_of
from whet.jobs.teacher import require_reads, taught
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.encode import check_max_length
from whet.jobs.tokenising.rows import RowMaker, RowOptions
from whet.log import logger
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import SEQUENCE_CLASSIFICATION
from whet.models.loading.load import Labels, load_config, load_model, load_tokenizer, max_positions
from whet.tasks.classify.arguments import ClassifyArguments
from whet.tasks.classify.examples import Examples, Named, read_file
from whet.tasks.classify.judge import ClassifyJudge, Decision, logits_of
from whet.tasks.classify.labels import Scheme, kind_of, require_clear, require_several, scheme_of, scheme_of_config
from whet.tasks.classify.rows import Split, tokenised
from whet.watch import printing

_FEW_TEXTS = 10
"""Labels that no number of texts is too small for."""


def prepare(job: ClassifyArguments, args: TrainingArguments, examples: Mapping[str, Examples]) -> Job:
    """Tokenise, load the model and build its engine; raises whatever cannot work, before any training."""
    source = source_of(job)
    scheme = _scheme(job, examples, load_config(source))
    tokenizer = load_tokenizer(source, resize=job.resize_token_embeddings if args.do_train else False)
    require_reads(job, tokenizer, job.max_seq_length)
    options = RowOptions(max_seq_length=job.max_seq_length, doc_stride=job.doc_stride)
    maker = RowMaker(
        tokenizer, options, Cache(rows="rows", overwrite=job.overwrite_cache), job.preprocessing_num_workers
    )
    splits = {name: tokenised(name, found, scheme, maker) for name, found in examples.items()}
    names = scheme.names or ("LABEL_0",)
    labels = Labels(names=names, problem_type=scheme.kind, may_replace=job.ignore_mismatched_sizes)
    model = load_model(source, SEQUENCE_CLASSIFICATION, trained=not args.do_train, labels=labels)
    check_max_length(job.max_seq_length, tokenizer, max_positions(model))
    decision = Decision(scheme, job.threshold, job.window_pooling)
    parts = {name: _part(split, decision, args) for name, split in splits.items()}
    in_pairs = any(split.examples.columns.pair for split in splits.values())
    engine = engine_of(
        prepared(model, job, args, SEQUENCE_CLASSIFICATION, tokenizer),
        args,
        parts,
        tokenizer,
        padded_length=job.max_seq_length if job.pad_to_max_length else None,
        objective=lambda ready: taught(ready, job, SEQUENCE_CLASSIFICATION, pairs=in_pairs),
    )
    return Job(
        engine,
        args,
        parts,
        card=model_card(job, "text-classification"),
        reading={"task": "classify"} | (_reading(job, splits["train"]) if "train" in splits else {}),
        asked=job,
    )


def tables(job: Job) -> list[str]:
    """Return the lines of the confusion matrices of the splits that were judged."""
    judges = [job.parts[name].judge for name in PREFIX_OF if name in job.parts]
    return [line for judge in judges if isinstance(judge, ClassifyJudge) for line in judge.tables]


def _part(split: Split, decision: Decision, args: TrainingArguments) -> Part:
    examples = split.examples
    judge = ClassifyJudge(split, decision, Path(args.output_dir), args.save_error_policy)
    return Part(split.dataset, judge, len(examples), examples.left_out)


def _scheme(job: ClassifyArguments, examples: Mapping[str, Examples], config: Any) -> Scheme:
    """Return what labels are: from the training examples, or without training from the model."""
    known = scheme_of_config(config)
    if "train" not in examples:
        printing.show_wrapped(f"labels: {_words(known)}, from the model's configuration")
        return known
    if job.problem_type is None and job.do_regression is None:
        require_clear(examples["train"])
    kind, why = kind_of(examples["train"], job.problem_type, job.do_regression)
    scheme = scheme_of(examples["train"], kind)
    require_several(examples["train"], scheme)
    if set(scheme.names) == set(known.names) and kind == known.kind:
        scheme = known  # the head of a trained model keeps its own order
    printing.show_wrapped(f"labels: {_words(scheme)} ({why})")
    n_texts, column = len(examples["train"].every_label or examples["train"]), examples["train"].columns.label
    if len(scheme.names) > max(_FEW_TEXTS, n_texts // 2):
        logger.warning(
            "%d texts, %d labels, such as %s: most have one text. Is the column %s an id? --label_column_name names "
            "another; numbers need a decimal point (0.5)",
            n_texts, len(scheme.names), scheme.names[0], column,
        )  # fmt: skip
    return scheme


def _words(scheme: Scheme) -> str:
    if scheme.kind == "regression":
        return "numbers (regression)"
    many = "any number" if scheme.kind == "multi_label_classification" else "one"
    return f"{many} of {len(scheme.names)} for each text"


def _reading(job: ClassifyArguments, split: Split) -> dict[str, Any]:
    """Return how the model reads a text, for `whet predict`."""
    columns = split.examples.columns
    return {
        "text_column_names": ",".join(columns.text),
        "text_pair_column_names": ",".join(columns.pair) or None,
        "text_column_delimiter": columns.delimiter,
        "max_seq_length": job.max_seq_length,
        "doc_stride": job.doc_stride,
        "window_pooling": job.window_pooling,
        "threshold": job.threshold,
    }


_USUAL_LENGTH = 128


def predict(asked: PredictFields) -> int:
    """Write the labels and scores of every text in the file; return the exit code."""
    known = outputs.reading_of(asked, "classify")
    named = Named(
        text=asked.text_column_names or known.get("text_column_names"),
        pair=asked.text_pair_column_names or known.get("text_pair_column_names"),
        delimiter=known.get("text_column_delimiter", " "),
    )
    examples = read_file(
        Path(asked.file), named, delimiter=asked.csv_delimiter, need_label=False, limit=asked.max_predict_samples,
        skip_bad=asked.skip_bad,
    )  # fmt: skip
    examples.left_out.log(asked.file, "example")
    model, tokenizer = load_trained(asked.model, SEQUENCE_CLASSIFICATION, asked.base_model_name_or_path)
    length = asked.max_seq_length or known.get("max_seq_length", _USUAL_LENGTH)
    check_max_length(length, tokenizer, max_positions(model))
    stride = known.get("doc_stride") if asked.doc_stride is None else asked.doc_stride
    maker = RowMaker(tokenizer, RowOptions(max_seq_length=length, doc_stride=stride), Cache(rows="rows"))
    rows = maker.rows(examples.texts, examples.pairs)
    engine = outputs.engine_of(asked, model, tokenizer)
    pooling = asked.window_pooling or known.get("window_pooling", "mean")
    decision = Decision(scheme_of_config(model.config), known.get("threshold", 0.5), pooling)
    logits = pooled(logits_of(engine.predict(rows.rows).predictions), rows.text_of, pooling)
    entries = zip(examples.places, decision.entries(logits, asked.top_k), strict=True)
    outputs.write(asked, engine, ({"row": place, **entry} for place, entry in entries))
    return 0
