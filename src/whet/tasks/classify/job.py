"""A run of text classification over examples that have been read, and `whet predict` for its models.

The logits of a text become its labels, and are judged: metrics, files of predictions, and the confusion matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import is_set
from whet.console import cell, columns_line
from whet.data.store import RowStore
from whet.errors import ConfigError, DataError
from whet.jobs import metrics
from whet.jobs.fields import Pooling
from whet.jobs.judging import Judged, PredictionJudge, pooled
from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictArguments
from whet.jobs.predict.trained import read_reading
from whet.jobs.splits import SPLITS
from whet.jobs.task_run import (
    Part,
    TaskRun,
    as_trained,
    engine_of,
    require_best_metric,
    require_several,
    require_teacher_reads,
    source_of,
    taught_by,
)
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.encode import check_max_length
from whet.jobs.tokenising.rows import RowMaker, RowOptions, TextRows
from whet.log import logger
from whet.models.finite import require_finite_logits
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import SEQUENCE_CLASSIFICATION
from whet.models.loading.load import Labels, load_config, load_model, load_tokenizer, max_positions, model_folder
from whet.tasks.classify.arguments import METRICS, ClassifyArguments
from whet.tasks.classify.examples import (
    Examples,
    Named,
    Scheme,
    kind_of,
    labels_told_apart,
    read_file,
    require_clear,
    scheme_of,
    scheme_of_config,
)
from whet.watch import printing

_FEW_TEXTS = 10
"""Labels that no number of texts is too small for."""


def prepare(job: ClassifyArguments, args: TrainingArguments, examples: Mapping[str, Examples]) -> TaskRun:
    """Tokenise, load the model and build its engine; raises whatever cannot work, before any training."""
    source = source_of(job)
    scheme = _scheme(job, examples, load_config(source))
    _require_threshold_counts(job, scheme)
    _require_as_many_texts(job, examples)
    flag = "metric_name" if job.metric_name == args.metric_for_best_model else "metric_for_best_model"
    why = f"labels: {_words(scheme)}"
    require_best_metric(args, examples, (*METRICS[scheme.kind], "loss"), why=why, flag=flag)
    tokenizer = load_tokenizer(source, resize=job.resize_token_embeddings if args.do_train else False)
    require_teacher_reads(job, tokenizer, job.max_seq_length)
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
        as_trained(model, job, args, SEQUENCE_CLASSIFICATION, tokenizer),
        args,
        parts,
        tokenizer,
        padded_length=job.max_seq_length if job.pad_to_max_length else None,
        objective=lambda ready: taught_by(ready, job, SEQUENCE_CLASSIFICATION, pairs=in_pairs),
    )
    return TaskRun(
        engine,
        args,
        parts,
        pipeline_tag="text-classification",
        reading=_reading(job, splits["train"]) if "train" in splits else {},
        asked=job,
    )


def tables(job: TaskRun) -> list[str]:
    """Return the lines of the confusion matrices of the splits that were judged."""
    judges = [job.parts[name].judge for name in SPLITS if name in job.parts]
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
    train = examples["train"]
    kind, why = kind_of(train, job.problem_type, job.do_regression)
    scheme = scheme_of(train, kind)
    if kind != "regression":
        require_several(
            labels_told_apart(train, scheme), train.source, train.columns.label, of="examples", kind="label",
            more="examples of other labels",
        )  # fmt: skip
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


def _require_threshold_counts(job: ClassifyArguments, scheme: Scheme) -> None:
    """Raise ConfigError for a threshold that nothing would be compared with."""
    if scheme.kind == "multi_label_classification" or not is_set("threshold", job):
        return
    raise ConfigError(
        what="threshold would change nothing here",
        got=job.threshold,
        why=f"the labels are {_words(scheme)}, and it decides which of several labels a text has",
        fix="leave --threshold out; if a text may have several labels: --problem_type multi_label_classification",
    )


def _require_as_many_texts(job: ClassifyArguments, examples: Mapping[str, Examples]) -> None:
    """Raise DataError if some rows are pairs and others are not, those that the model has learnt from among them."""
    read = {name: found.columns.pair for name, found in examples.items()}
    reading = {} if "train" in examples else read_reading(model_folder(source_of(job)))
    if reading.get("task") == "classify" and reading.get("text_column_names"):
        read = {"training of the model": reading.get("text_pair_column_names") or (), **read}
    if len({bool(pair) for pair in read.values()}) > 1:
        raise DataError(
            what="some rows have one text, and others are pairs",
            got="; ".join(f"{name}: {'a pair' if pair else 'one text'}" for name, pair in read.items()),
            why="a model learns to read either",
            fix="add --text_pair_column_names '' for one text a row, or name the second text and have it in each file",
        )


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
        "text_pair_column_names": ",".join(columns.pair),
        "text_column_delimiter": columns.delimiter,
        "max_seq_length": job.max_seq_length,
        "doc_stride": job.doc_stride,
        "window_pooling": job.window_pooling,
        "threshold": job.threshold,
    }


_USUAL_LENGTH = 128


def predict(asked: PredictArguments, known: Mapping[str, Any]) -> int:
    """Write the labels and scores of every text in the file; return the exit code."""
    pair = outputs.setting_of(asked, known, "text_pair_column_names")
    if pair is None and known.get("text_column_names"):
        pair = ""  # the training read one text
    named = Named(
        text=asked.text_column_names or known.get("text_column_names"),
        pair=pair,
        delimiter=known.get("text_column_delimiter", " "),
        takes_label=False,
    )
    examples = read_file(
        Path(asked.file), named, delimiter=asked.csv_delimiter, need_label=False, limit=asked.max_predict_samples,
        skip_bad=asked.skip_bad,
    )  # fmt: skip
    examples.left_out.log(asked.file, "example")
    columns = examples.columns
    read = {"text": columns.text} | ({"second text": columns.pair} if columns.pair else {})
    outputs.say_read(asked, asked.file, columns_line(read, examples.not_read))
    model, tokenizer = load_trained(asked.model, SEQUENCE_CLASSIFICATION, asked.base_model_name_or_path)
    scheme = scheme_of_config(model.config)
    if scheme.kind == "regression" and is_set("top_k", asked):
        raise ConfigError(
            what="top_k would change nothing here",
            got=asked.top_k,
            why="the model predicts one number for each text",
            fix="leave --top_k out",
        )
    length = outputs.setting_of(asked, known, "max_seq_length", _USUAL_LENGTH)
    check_max_length(length, tokenizer, max_positions(model))
    stride = outputs.setting_of(asked, known, "doc_stride")
    maker = RowMaker(tokenizer, RowOptions(max_seq_length=length, doc_stride=stride), Cache(rows="rows"))
    rows = maker.rows(examples.texts, examples.pairs)
    engine = outputs.engine_of(asked, model, tokenizer)
    pooling = outputs.setting_of(asked, known, "window_pooling", "mean")
    decision = Decision(scheme, known.get("threshold", 0.5), pooling)
    logits = decision.logits(engine.predict(rows.rows).predictions, rows.text_of)
    entries = zip(examples.places, decision.entries(logits, asked.top_k), strict=True)
    outputs.write(asked, engine, ({"row": place, **entry} for place, entry in entries))
    return 0


@dataclass(frozen=True)
class Split:
    """Examples, their rows, and their labels as numbers (texts, ...); None if they have none."""

    examples: Examples
    rows: TextRows
    labels: np.ndarray | None

    @property
    def dataset(self) -> RowStore:
        """The rows with their labels; each window has the label of its text."""
        labels = {} if self.labels is None else {"labels": self.labels[self.rows.text_of]}
        return replace(self.rows.rows, labels=labels)


def tokenised(name: str, examples: Examples, scheme: Scheme, maker: RowMaker) -> Split:
    """Return the split's rows and labels; of a test split without known labels the labels are None."""
    labels = None
    if name != "test" or all(label is not None for label in scheme.known(examples)):
        labels = scheme.encode(examples)
    elif examples.labels is not None:
        logger.warning("test: some labels are missing or unknown to the model, so it gets no metrics")
    rows = maker.rows(examples.texts, examples.pairs)
    split = Split(examples, rows, labels)
    _describe(name, split, maker.options)
    return split


def _describe(name: str, split: Split, options: RowOptions) -> None:
    """Log what the split holds, what was cut, and what padding would have cost."""
    n_rows, n_tokens = len(split.rows.rows), int(split.rows.rows.cu_seqlens[-1])
    logger.info(
        "%s: %d rows, %.0f of %d tokens real: packing computes %.0f %% of what padding would",
        name,
        n_rows,
        n_tokens / n_rows,
        options.max_seq_length,
        100 * n_tokens / (n_rows * options.max_seq_length),
    )
    if not split.rows.n_cut:
        return
    done = f"read in windows of {options.max_seq_length} tokens"
    if options.doc_stride is None:
        done = f"cut at max_seq_length {options.max_seq_length} (--doc_stride reads them in windows)"
    n_cut, n_texts = split.rows.n_cut, len(split.examples)
    logger.warning("%s: %d of %d texts are longer than a row and were %s", name, n_cut, n_texts, done)


@dataclass(frozen=True)
class Decision:
    """How logits become labels."""

    scheme: Scheme
    threshold: float = 0.5
    """With several labels a row: the probability from which a label is predicted."""
    pooling: Pooling = "mean"
    """How the logits of a text's windows become one."""

    def logits(self, predictions: Any, text_of: np.ndarray) -> np.ndarray:
        """Return the logits of the texts, (texts, labels), from those of their windows.

        Some models give more after these. Raises NonFiniteError if one is infinite or no number.
        """
        given = predictions[0] if isinstance(predictions, tuple) else predictions
        found = pooled(given, text_of, self.pooling)
        require_finite_logits([found], "the prediction for a text is made of its logits")
        return found

    def found(self, logits: np.ndarray) -> np.ndarray:
        """Return the predicted classes (texts,), the predicted labels (texts, labels) bool, or numbers (texts,)."""
        if self.scheme.kind == "regression":
            return logits[:, 0]
        if self.scheme.kind == "single_label_classification":
            return logits.argmax(axis=1)
        return self.probabilities(logits) >= self.threshold

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probability of each label, (texts, labels) float64."""
        wide = logits.astype(np.float64)
        if self.scheme.kind == "multi_label_classification":
            return 1 / (1 + np.exp(-np.clip(wide, -700, 700)))
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def cost(self, logits: np.ndarray, expected: Any) -> tuple[float, float | None]:
        """Return the loss of one text, and the probability of exactly the expected labels; None for numbers."""
        wide = logits.astype(np.float64)
        if self.scheme.kind == "regression":
            return float((wide[0] - expected) ** 2), None
        if self.scheme.kind == "single_label_classification":
            loss = float(np.logaddexp.reduce(wide) - wide[expected])
            return loss, math.exp(-loss)
        losses = np.logaddexp(0, np.where(expected > 0, -wide, wide))
        return float(losses.mean()), math.exp(-float(losses.sum()))

    def is_wrong(self, logits: np.ndarray, expected: Any) -> bool | None:
        """Return whether one text's labels are other ones; None for numbers, which are only nearer or farther."""
        if self.scheme.kind == "regression":
            return None
        return bool(np.any(self.found(logits[None])[0] != expected))

    def entries(self, logits: np.ndarray, top_k: int) -> Iterator[dict[str, Any]]:
        """Yield for each text what a line of the predictions says: the label or value, and the best scores."""
        if self.scheme.kind == "regression":
            yield from ({"value": float(value)} for value in logits[:, 0])
            return
        found, scores, names = self.found(logits), self.probabilities(logits), self.scheme.names
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        for row, order in enumerate(best):
            top = {names[n]: round(float(scores[row, n]), 6) for n in order}
            if self.scheme.kind == "single_label_classification":
                chosen = int(found[row])
                yield {"label": names[chosen], "score": round(float(scores[row, chosen]), 6), "scores": top}
            else:
                yield {"labels": [names[n] for n in np.flatnonzero(found[row])], "scores": top}


_MOST_COLUMNS = 8
"""Classes of a matrix that fits the width; with more, the most confused pairs are listed."""
_MOST_PAIRS = 10
_NAME, _CELL = 20, 6


def confusion_table(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return the lines of the matrix, or for many classes the pairs that are confused most."""
    if len(names) <= _MOST_COLUMNS:
        return _matrix_table(counts, names)
    return _pairs_table(counts, names)


def _matrix_table(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return the matrix; columns have numbers, as names do not fit above them."""
    head = " " * (_NAME + 6) + "".join(f"{n:>{_CELL}}" for n in range(1, len(names) + 1))
    rows = [
        f"  {n:>2}  {cell(name, _NAME)}{''.join(f'{count:>{_CELL}}' for count in row)}"
        for n, (name, row) in enumerate(zip(names, counts.tolist(), strict=True), start=1)
    ]
    return ["confusion matrix (rows: expected label, columns: predicted label)", head, *rows]


def _pairs_table(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    n_wrong = int(wrong.sum())
    wrong[counts.sum(axis=1) == 1] = 0  # "1 of 1" says nothing of a label
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_PAIRS]
    pairs = [(int(n) // len(names), int(n) % len(names)) for n in order]
    lines = [
        f"  {cell(names[a], 30)}  {cell(names[b], 30)}{wrong[a, b]:>5} of {counts[a].sum():<5}".rstrip()
        for a, b in pairs
        if wrong[a, b]
    ]
    if not lines:
        alone = f"{n_wrong} texts are given the label of another, and each is the only one of its own label"
        return [alone if n_wrong else "no label is confused with another"]
    return ["most confused labels", f"  {'expected':<30}  {'predicted':<30}", *lines]


_TOP = 3


@dataclass
class ClassifyJudge(PredictionJudge):
    """Judges a model on one split; windows of a text count once."""

    split: Split
    decision: Decision
    folder: Path
    on_error: str
    """What to do if a file cannot be written: "stop", or "continue" without it."""
    tables: list[str] = field(default_factory=list)
    """Lines about the last files written, for the end of the run."""

    @property
    def dataset(self) -> RowStore:
        """The rows of the split, with their labels."""
        return self.split.dataset

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction."""
        expected = self.split.labels
        if expected is None:
            return {}
        found = self.decision.found(self._pooled(prediction.predictions))
        kind = self.decision.scheme.kind
        if kind == "regression":
            return metrics.regression(expected, found)
        if kind == "multi_label_classification":
            return metrics.multi_label(expected.astype(bool), found)
        return metrics.single_label(expected, found, len(self.decision.scheme.names))

    def examples(self, predictions: Any) -> list[Judged]:
        """Return every text with its labels: what the data says, and what the model predicts."""
        logits, decision, given = self._pooled(predictions), self.decision, self.split.examples
        expected = decision.scheme.known(given)
        judged = []
        for n, entry in enumerate(decision.entries(logits, _TOP)):
            shown = {"text": given.texts[n]} | ({} if given.pairs is None else {"text_pair": given.pairs[n]})
            said = None if given.labels is None else given.labels[n]
            loss, probability = (None, None) if expected[n] is None else decision.cost(logits[n], expected[n])
            predicted = next(entry[name] for name in ("label", "labels", "value") if name in entry)
            judged.append(
                Judged(
                    row=given.places[n],
                    shown=shown,
                    expected=decision.scheme.written(said),
                    predicted=predicted,
                    probability=probability,
                    loss=loss,
                    badness=None if loss is None else (loss,),
                    wrong=None if loss is None else decision.is_wrong(logits[n], expected[n]),
                    of_predictions=entry,
                )
            )
        return judged

    def write(self, examples: Sequence[Judged], prefix: str) -> list[str]:
        """Write the predictions of a test split as run_classification.py does, and the confusion matrix."""
        written = []
        if prefix == "predict":
            lines = (f"{n}\t{_shown(one.of_predictions)}\n" for n, one in enumerate(examples))
            written += self.store("predict_results.txt", "index\tprediction\n" + "".join(lines))
        if self.split.labels is not None and self.decision.scheme.kind == "single_label_classification":
            index = {name: n for n, name in enumerate(self.decision.scheme.names)}
            written += self._confusion(np.asarray([index[one.predicted] for one in examples]), prefix)
        return written

    def _pooled(self, predictions: Any) -> np.ndarray:
        return self.decision.logits(predictions, self.split.rows.text_of)

    def _confusion(self, found: np.ndarray, prefix: str) -> list[str]:
        assert self.split.labels is not None
        names = self.decision.scheme.names
        counts = metrics.confusion(self.split.labels, found, len(names))
        self.tables += confusion_table(counts, names)
        return self.store(f"{prefix}_confusion.csv", metrics.confusion_csv(counts, names))


def _shown(entry: Mapping[str, Any]) -> str:
    if "value" in entry:
        return f"{entry['value']:3.3f}"
    return str(entry["label"] if "label" in entry else entry["labels"])
