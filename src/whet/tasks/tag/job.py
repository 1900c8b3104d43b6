"""A run of token classification over sentences that have been read, and `whet predict` for its models.

Tags become the labels of tokens, for the first piece of each word or for all; the logits of tokens become the tags of
words, and are judged: entities by seqeval, plain tags by F1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForTokenClassification

from whet.config.arguments import TrainingArguments
from whet.console import columns_line
from whet.data.files.bad_rows import MAX_SHOWN
from whet.data.store import RowStore
from whet.errors import ConfigError, DataError, Problem
from whet.jobs import metrics
from whet.jobs.fields import Pooling
from whet.jobs.judging import Judged, PredictionJudge, pooled
from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictArguments
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
from whet.jobs.tokenising.encode import row_length
from whet.jobs.tokenising.words import NO_WORD, WordRowMaker, WordRows
from whet.log import logger
from whet.models.finite import require_finite_logits
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import TOKEN_CLASSIFICATION
from whet.models.loading.load import Labels, load_config, load_model, load_tokenizer
from whet.optional import extra, require
from whet.tasks.tag.arguments import OF_ENTITIES, TagArguments
from whet.tasks.tag.read import read_file
from whet.tasks.tag.sentences import ENTITY, IGNORED, Named, Sentences
from whet.watch import printing


def prepare(job: TagArguments, args: TrainingArguments, sentences: Mapping[str, Sentences]) -> TaskRun:
    """Tokenise, load the model and build its engine; raises whatever cannot work, before any training."""
    source = source_of(job)
    tags = _tags(sentences, load_config(source))
    _require_best_metric(args, sentences, tags)
    _require_entities(job, tags)
    tokenizer = load_tokenizer(source, resize=job.resize_token_embeddings if args.do_train else False)
    labels = Labels(names=tags.names, may_replace=job.ignore_mismatched_sizes)
    model = load_model(source, TOKEN_CLASSIFICATION, trained=not args.do_train, labels=labels)
    length = row_length(job.max_seq_length, tokenizer, model)
    require_teacher_reads(job, tokenizer, length)
    cache, n_threads = Cache(rows="rows", overwrite=job.overwrite_cache), job.preprocessing_num_workers
    maker = WordRowMaker(tokenizer, length, cache, job.doc_stride, n_threads)
    splits = {
        name: tokenised(name, found, tags, maker, all_pieces=job.label_all_tokens) for name, found in sentences.items()
    }
    parts = {name: _part(job, split, tags, args) for name, split in splits.items()}
    engine = engine_of(
        as_trained(model, job, args, TOKEN_CLASSIFICATION, tokenizer),
        args,
        parts,
        tokenizer,
        padded_length=length if job.pad_to_max_length else None,
        objective=lambda ready: taught_by(ready, job, TOKEN_CLASSIFICATION),
        data_collator=DataCollatorForTokenClassification(tokenizer),
        preprocess_logits=best_tags if job.doc_stride is None else only_logits,
    )
    reading: dict[str, Any] = {"max_seq_length": length, "text_column_name": job.text_column_name}
    reading |= {"doc_stride": job.doc_stride, "window_pooling": job.window_pooling}
    return TaskRun(engine, args, parts, pipeline_tag="token-classification", reading=reading, asked=job)


def _require_best_metric(args: TrainingArguments, sentences: Mapping[str, Sentences], tags: Tags) -> None:
    """Raise ConfigError before the training if its evaluations do not compute what the best model is chosen by."""
    known = (*OF_ENTITIES, "accuracy", "loss") if tags.are_entities else ("accuracy", "f1_macro", "loss")
    why = f"tags: {'those of entities' if tags.are_entities else 'plain ones, not those of entities (B-PER, O)'}"
    require_best_metric(args, sentences, known, why=why, flag="metric_for_best_model")
    wanted = (args.metric_for_best_model or "").removeprefix("eval_")
    if wanted in OF_ENTITIES and {"train", "validation"} <= sentences.keys():
        require("seqeval.metrics", needed_for=f"--metric_for_best_model {wanted}", install=INSTALL)


def _require_entities(job: TagArguments, tags: Tags) -> None:
    """Raise ConfigError for metrics of each kind of entity where the tags mark none."""
    if not job.return_entity_level_metrics or tags.are_entities:
        return
    raise ConfigError(
        what="return_entity_level_metrics would change nothing here",
        got=f"plain tags: {', '.join(tags.names[:_SHOWN_TAGS])}",
        why="it adds the metrics of each kind of entity, and these tags mark none (B-PER, I-PER, O)",
        fix="leave --return_entity_level_metrics out; or name the column of entities: --label_column_name NAME",
    )


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
        train = sentences["train"]
        several = tags.names if train.tag_order else sorted({tag for one in train.tags or () for tag in one})
        require_several(
            several, train.source, train.tag_column, of="words", kind="tag", more="sentences with other tags"
        )  # fmt: skip
        if set(tags.names) == set(known.names):
            tags = known  # the head of a trained model keeps its own order
    kind = "entities (judged by seqeval)" if tags.are_entities else "plain tags (judged by accuracy and macro F1)"
    printing.show_wrapped(f"tags: {len(tags.names)}, {why}; {kind}")
    if (odd := tags.almost_entity()) is not None:
        logger.warning("the tag %s looks like an entity's: for F1 of entities write B-PER, I-PER and O", odd)
    return tags


def predict(asked: PredictArguments, known: Mapping[str, Any]) -> int:
    """Write the tags and scores of every word in the file; return the exit code."""
    named = Named(
        words=asked.text_column_names or known.get("text_column_name"),
        words_flag="--text_column_names",
        tags_flag=None,
    )
    sentences = read_file(
        Path(asked.file), named, need_tags=False, limit=asked.max_predict_samples, skip_bad=asked.skip_bad,
        delimiter=asked.csv_delimiter,
    )  # fmt: skip
    sentences.left_out.log(asked.file, "sentence")
    outputs.say_read(asked, asked.file, columns_line({"words": sentences.word_column}, sentences.not_read))
    model, tokenizer = load_trained(asked.model, TOKEN_CLASSIFICATION, asked.base_model_name_or_path)
    length = row_length(outputs.setting_of(asked, known, "max_seq_length"), tokenizer, model)
    stride = outputs.setting_of(asked, known, "doc_stride")
    rows = WordRowMaker(tokenizer, length, Cache(rows="rows"), stride).rows(sentences.words)
    split = Split(sentences, rows, None, None)
    keep = best_tags if stride is None else only_logits
    engine = outputs.engine_of(asked, model, tokenizer, preprocess_logits=keep)
    pooling = outputs.setting_of(asked, known, "window_pooling", "mean")
    found = words_of(split, engine.predict(rows.rows).predictions, pooling)
    outputs.write(asked, engine, entries_of(sentences, tags_of_config(model.config), found))
    return 0


_ALMOST = re.compile(r"[bi][-_].+|[BI]_.+|.+[-_][BIbi]", re.DOTALL)
_SHOWN_TAGS = 12


@dataclass(frozen=True)
class Tags:
    """The tags in the order of the model's logits."""

    names: tuple[str, ...]

    @property
    def are_entities(self) -> bool:
        """Whether they mark entities (B-PER, I-PER, O); else each word has a plain tag, such as its part of speech."""
        return all(ENTITY.fullmatch(name) for name in self.names) and any(name != "O" for name in self.names)

    def almost_entity(self) -> str | None:
        """Return a tag that marks an entity in another way than `are_entities` knows; None if there is none."""
        names = [name for name in self.names if name not in ("O", "o")]
        is_almost = not self.are_entities and all(_ALMOST.fullmatch(name) for name in names)
        return names[0] if names and is_almost else None

    def encode(self, sentences: Sentences) -> list[np.ndarray]:
        """Return the number of each word's tag; raises DataError that names unknown tags with line and word."""
        assert sentences.tags is not None
        index = {name: n for n, name in enumerate(self.names)}
        unknown = [
            (row, n, tag) for row, tags in enumerate(sentences.tags) for n, tag in enumerate(tags) if tag not in index
        ]
        if unknown:
            raise DataError.of([self._problem(sentences, *one, n=n) for n, one in enumerate(unknown[:MAX_SHOWN])])
        return [np.asarray([index[tag] for tag in tags], dtype=np.int64) for tags in sentences.tags]

    def knows_all(self, sentences: Sentences) -> bool:
        """Return whether every word has a tag of these."""
        known = set(self.names)
        return sentences.tags is not None and all(tag in known for tags in sentences.tags for tag in tags)

    def inside(self) -> np.ndarray:
        """Return for each tag what the later pieces of its word have: I-PER for B-PER, if there is such a tag."""
        index = {name: n for n, name in enumerate(self.names)}
        later = [re.sub("^B-", "I-", name) for name in self.names]
        return np.asarray([index.get(name, n) for n, name in enumerate(later)], dtype=np.int64)

    def _problem(self, sentences: Sentences, row: int, word: int, tag: str, *, n: int) -> Problem:
        shown = ", ".join(self.names[:_SHOWN_TAGS]) + (", ..." if len(self.names) > _SHOWN_TAGS else "")
        return Problem(
            what=f"{sentences.source}: {sentences.places[row]}, word {word + 1} ({sentences.words[row][word]!r}): "
            f"{sentences.tag_column} has a tag that the model does not know",
            got=tag,
            why=f"the model knows {len(self.names)} tags" + (f": {shown}" if n == 0 else ""),
            fix="correct the tag, or train with it",
        )


def tags_of(sentences: Sentences) -> Tags:
    """Return the tags of the training data, sorted as run_ner.py sorts them, or in the data set's own order."""
    assert sentences.tags is not None
    found = {tag for tags in (*sentences.tags, *sentences.every_tags) for tag in tags}
    ordered = sentences.tag_order if found <= set(sentences.tag_order) else sorted(found)
    return Tags(tuple(ordered))


def tags_of_config(config: Any) -> Tags:
    """Return the tags that a trained model's configuration names."""
    return Tags(tuple(str(config.id2label[n]) for n in range(config.num_labels)))


def token_labels(rows: WordRows, numbers: list[np.ndarray], tags: Tags, *, all_pieces: bool) -> np.ndarray:
    """Return the label of each token (tokens,) int64: its word's tag at first pieces, -100 elsewhere.

    With `all_pieces` later pieces have a label too, I- in place of B-.
    """
    flat = np.concatenate(numbers)
    begins = np.concatenate([[0], np.cumsum([len(one) for one in numbers])])[:-1]
    text_of = np.repeat(rows.text_of, rows.rows.lengths)
    of_word = flat[np.minimum(begins[text_of] + np.maximum(rows.word_of, 0), len(flat) - 1)]
    first = rows.is_first
    labels = np.where(first, of_word, IGNORED)
    if all_pieces:
        labels = np.where((rows.word_of != NO_WORD) & ~first, tags.inside()[of_word], labels)
    return labels


@dataclass(frozen=True)
class Split:
    """Sentences, their rows, and the number of each word's tag; None if they have none."""

    sentences: Sentences
    rows: WordRows
    numbers: list[np.ndarray] | None
    labels: np.ndarray | None
    """(tokens,) int64."""

    @property
    def dataset(self) -> RowStore:
        """The rows with the labels of their tokens."""
        if self.labels is None:
            return self.rows.rows
        return replace(self.rows.rows, tokens={**self.rows.rows.tokens, "labels": self.labels})


def tokenised(name: str, sentences: Sentences, tags: Tags, maker: WordRowMaker, *, all_pieces: bool) -> Split:
    """Return the split's rows and labels; of a test split without known tags the labels are None."""
    numbers = None
    if name != "test" or tags.knows_all(sentences):
        numbers = tags.encode(sentences)
    elif sentences.tags is not None:
        logger.warning("test: some tags are unknown to the model, so it gets no metrics")
    rows = maker.rows(sentences.words)
    labels = None if numbers is None else token_labels(rows, numbers, tags, all_pieces=all_pieces)
    n_lost = sum(map(len, sentences.words)) - rows.n_words
    if n_lost:
        logger.warning(
            "%s: %d words are not read: %sthe tokenizer knows no piece of them",
            name,
            n_lost,
            ""
            if maker.doc_stride is not None
            else f"they stand after max_seq_length {maker.max_seq_length} (--doc_stride reads them in windows), or ",
        )
    return Split(sentences, rows, numbers, labels)


@dataclass(frozen=True)
class Found:
    """The words of each sentence that were read, with their tags as numbers and the probabilities of these."""

    words: list[np.ndarray]
    tags: list[np.ndarray]
    scores: list[np.ndarray]
    losses: list[np.ndarray]
    """The negative log-probabilities of the expected tags; empty if these are not known."""


def best_tags(logits: Any, labels: Any) -> tuple[torch.Tensor, ...]:
    """Return the best tag of each token, its probability, and with labels their losses, each (rows, T).

    That is all that is kept of the logits.
    """
    shares = only_logits(logits, labels).float().log_softmax(-1)
    best = shares.max(-1)
    if labels is None:
        return best.indices, best.values.exp()
    losses = -shares.gather(-1, labels.to(shares.device).clamp(min=0)[..., None])[..., 0]
    return best.indices, best.values.exp(), losses


def only_logits(logits: Any, labels: Any) -> torch.Tensor:
    """Return the logits of a model that gives more after them."""
    del labels
    return logits[0] if isinstance(logits, tuple) else logits


def words_of(split: Split, predictions: Any, pooling: Pooling) -> Found:
    """Return the tags of the words from what `best_tags`, or with windows `only_logits`, has kept of all rows.

    Raises NonFiniteError if the probability of one is no number, as the logits are not.
    """
    is_best = isinstance(predictions, tuple)
    found = of_tokens(split, *predictions) if is_best else of_windows(split, predictions, pooling)
    require_finite_logits(found.scores, "the tag of a word is that of its largest logit", "words")
    return found


def of_tokens(split: Split, best: np.ndarray, scores: np.ndarray, losses: np.ndarray | None = None) -> Found:
    """Return the tags of the words from those of the tokens (rows, T), for one row a sentence."""
    places = [split.rows.first_pieces(row) for row in range(len(split.sentences))]
    return Found(
        words=[index for index, _ in places],
        tags=[best[row][place].astype(np.int64) for row, (_, place) in enumerate(places)],
        scores=[scores[row][place] for row, (_, place) in enumerate(places)],
        losses=[] if losses is None else [losses[row][place] for row, (_, place) in enumerate(places)],
    )


def of_windows(split: Split, logits: np.ndarray, pooling: Pooling) -> Found:
    """Return the tags of the words from the logits of the tokens (rows, T, labels), pooled over windows."""
    words, values = [], []
    for row in range(len(split.rows.rows)):
        index, places = split.rows.first_pieces(row)
        words.append(index)
        values.append(logits[row][places])
    found = Found([], [], [], [])
    last = np.searchsorted(split.rows.text_of, np.arange(len(split.sentences)), side="right")
    for n, (begin, end) in enumerate(zip([0, *last[:-1]], last, strict=True)):
        numbers = None if split.numbers is None else split.numbers[n]
        _add(found, np.concatenate(words[begin:end]), np.concatenate(values[begin:end]), numbers, pooling)
    return found


def _add(found: Found, words: np.ndarray, logits: np.ndarray, numbers: np.ndarray | None, pooling: Pooling) -> None:
    """Add the words of one sentence, whose windows follow each other; `numbers` are the expected tags of all words."""
    order = np.argsort(words, kind="stable")
    if len(words):
        logits = pooled(logits[order], words[order], pooling)
    read = np.unique(words)
    expected = None if numbers is None else torch.from_numpy(numbers[read])
    best, scores, *losses = best_tags(torch.from_numpy(np.asarray(logits, dtype=np.float64)), expected)
    found.words.append(read)
    found.tags.append(best.numpy().astype(np.int64))
    found.scores.append(scores.numpy())
    found.losses.extend(one.numpy() for one in losses)


INSTALL = extra("tag")
_BIOES = {"L-": "E-", "U-": "S-"}
"""The last word of an entity, and a word alone, as BILOU writes them -> as seqeval reads them."""


def as_bioes(tag: str) -> str:
    """Return a tag of BILOU as seqeval reads it; other tags stay as they are."""
    return re.sub("^[LU]-", lambda mark: _BIOES[mark[0]], tag)


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return kind, begin and end (one past the last word) of each entity, as seqeval finds them."""
    found: list[tuple[str, int, int]] = []
    before, kind, begin = "O", "", 0
    for n, tag in enumerate([*map(as_bioes, tags), "O"]):
        mark, _, own = tag.partition("-")
        if mark in "IE" and before in "BI" and own == kind:
            before = mark
            continue
        if before != "O":
            found.append((kind, begin, n))
        before, kind, begin = mark, own, n
    return found


def metrics_of_tags(
    expected: Sequence[np.ndarray], found: Sequence[np.ndarray], tags: Tags, *, each_entity: bool
) -> dict[str, float]:
    """Return the metrics of the words' tags, given as numbers, sentence by sentence."""
    flat_expected, flat_found = np.concatenate(expected), np.concatenate(found)
    accuracy = float((flat_expected == flat_found).mean())
    if not tags.are_entities:
        counts = metrics.confusion(flat_expected, flat_found, len(tags.names))
        return {"accuracy": accuracy, "f1_macro": metrics.macro_f1(counts)}
    try:
        seqeval = require("seqeval.metrics", needed_for="F1 of entities", install=INSTALL)
    except ConfigError:
        logger.warning("accuracy of words alone: precision, recall and F1 of entities need: pip install %s", INSTALL)
        return {"accuracy": accuracy}
    known = [as_bioes(name) for name in tags.names]
    names = [[known[n] for n in one] for one in expected], [[known[n] for n in one] for one in found]
    values = {
        "precision": float(seqeval.precision_score(*names, zero_division=0)),
        "recall": float(seqeval.recall_score(*names, zero_division=0)),
        "f1": float(seqeval.f1_score(*names, zero_division=0)),
        "accuracy": accuracy,
    }
    return values | (_of_each_entity(seqeval, names) if each_entity else {})


def _of_each_entity(seqeval: Any, names: Any) -> dict[str, float]:
    report = seqeval.classification_report(*names, output_dict=True, zero_division=0)
    words = {"precision": "precision", "recall": "recall", "f1": "f1-score", "number": "support"}
    return {
        f"{entity}_{word}": float(values[theirs])
        for entity, values in report.items()
        if not entity.endswith(" avg")
        for word, theirs in words.items()
    }


@dataclass(frozen=True)
class _Read:
    """The words of a sentence that were read, by which its tags are counted."""

    tokens: Sequence[str]
    """All words of the sentence."""
    words: Sequence[int]
    """Those that were read."""

    def named(self, begin: int, end: int, kind: str) -> str:
        """Return these words with their kind."""
        return f"{' '.join(self.tokens[self.words[begin] : self.words[end - 1] + 1])} ({kind})"

    def apart(
        self, expected: Sequence[str], predicted: Sequence[str], doubts: np.ndarray, *, of_entities: bool
    ) -> tuple[list[str], list[str]]:
        """Return what is expected and what is predicted, where they differ: entities, or words, the worst first."""
        both = [entities(tags) if of_entities else [] for tags in (expected, predicted)]
        found = [[one for one in own if one not in other] for own, other in (both, both[::-1])]
        if not any(found):  # the same entities, marked in another way
            order = map(int, np.argsort(-doubts, kind="stable"))
            wrong = [at for at in order if expected[at] != predicted[at]]
            found = [[(tags[at], at, at + 1) for at in wrong] for tags in (expected, predicted)]
        missed, made_up = ([self.named(begin, end, kind) for kind, begin, end in one] for one in found)
        return missed, made_up


@dataclass(frozen=True)
class TagJudge(PredictionJudge):
    """Judges a model on one split, by the first piece of each word."""

    split: Split
    tags: Tags
    folder: Path
    on_error: str
    """What to do if a file cannot be written: "stop", or "continue" without it."""
    each_entity: bool = False
    pooling: Pooling = "mean"
    """How the logits of a word in several windows become one."""

    @property
    def dataset(self) -> RowStore:
        """The rows of the split, with their labels."""
        return self.split.dataset

    def metrics(self, prediction: Any) -> dict[str, float]:
        """Return the metrics of transformers' EvalPrediction; its predictions are logits, or those of `best_tags`."""
        if self.split.numbers is None:
            return {}
        found = self._of_words(prediction.predictions)
        expected = [numbers[index] for numbers, index in zip(self.split.numbers, found.words, strict=True)]
        return metrics_of_tags(expected, found.tags, self.tags, each_entity=self.each_entity)

    def examples(self, predictions: Any) -> list[Judged]:
        """Return every sentence with its tags: what the data says, and what the model predicts."""
        found = self._of_words(predictions)
        entries = entries_of(self.split.sentences, self.tags, found)
        return [self._example(n, entry, found) for n, entry in enumerate(entries)]

    def _example(self, n: int, entry: dict[str, Any], found: Found) -> Judged:
        given, words = self.split.sentences.tags_of(n), [int(word) for word in found.words[n]]
        one = Judged(
            row=entry["row"],
            shown={"text": " ".join(entry["tokens"])},
            expected=None if given is None else list(given),
            predicted=entry["tags"],
            of_predictions={name: entry[name] for name in ("tokens", "tags", "scores")},
        )
        if given is None or not words or not set(given) <= set(self.tags.names):
            return one
        expected, predicted = ([tags[word] for word in words] for tags in (given, entry["tags"]))
        wrong = np.asarray([tag != other for tag, other in zip(expected, predicted, strict=True)])
        asked = np.flatnonzero(wrong if wrong.any() else ~wrong)
        shares = np.exp(-found.losses[n].astype(np.float64)) if found.losses else None
        doubts = np.where(wrong, found.scores[n], -found.scores[n]) if shares is None else -shares
        at = int(asked[np.argmax(doubts[asked])])
        read = _Read(entry["tokens"], words)
        if wrong.any():
            missed, made_up = read.apart(expected, predicted, doubts, of_entities=self.tags.are_entities)
        else:
            missed = made_up = [read.named(at, at + 1, expected[at])]
        wrong_words = [
            {
                "word": words[place],
                "token": entry["tokens"][words[place]],
                "expected": expected[place],
                "predicted": predicted[place],
                "probability": None if shares is None else float(shares[place]),
            }
            for place in np.flatnonzero(wrong).tolist()
        ]
        return replace(
            one,
            probability=None if shares is None else float(shares[at]),
            loss=None if shares is None else float(found.losses[n].mean()),
            badness=(float(doubts[at]),),
            wrong=bool(wrong.any()),
            of_errors={"expected": missed, "predicted": made_up, "wrong_words": wrong_words},
        )

    def write(self, examples: Sequence[Judged], prefix: str) -> list[str]:
        """Write the tags of a test split as run_ner.py does, a sentence a line, and which plain tags are confused."""
        written = [] if self.tags.are_entities else self._confusion(examples, prefix)
        if prefix != "predict":
            return written
        lines = (" ".join(tag for tag in one.predicted if tag is not None) for one in examples)
        return [*written, *self.store("predictions.txt", "".join(f"{line}\n" for line in lines))]

    def _confusion(self, examples: Sequence[Judged], prefix: str) -> list[str]:
        """Write the matrix of the words that have a tag in the data and were read; nothing if there are none."""
        number = {name: n for n, name in enumerate(self.tags.names)}
        labelled = (zip(one.expected, one.predicted, strict=True) for one in examples if one.expected is not None)
        pairs = [(number.get(tag), number.get(other)) for one in labelled for tag, other in one]
        known = np.asarray([pair for pair in pairs if None not in pair], dtype=np.int64).reshape(-1, 2)
        if not len(known):
            return []
        counts = metrics.confusion(known[:, 0], known[:, 1], len(self.tags.names))
        return self.store(f"{prefix}_confusion.csv", metrics.confusion_csv(counts, self.tags.names))

    def _of_words(self, predictions: Any) -> Found:
        return words_of(self.split, predictions, self.pooling)


def entries_of(sentences: Sentences, tags: Tags, found: Found) -> Iterator[dict[str, Any]]:
    """Yield what is written of each sentence."""
    for row, place in enumerate(sentences.places):
        given = list(sentences.words[row])
        chosen: list[str | None] = [None] * len(given)
        shares: list[float | None] = [None] * len(given)
        for word, tag, score in zip(found.words[row], found.tags[row], found.scores[row], strict=True):
            chosen[word], shares[word] = tags.names[tag], round(float(score), 6)
        yield {"row": place, "tokens": given, "tags": chosen, "scores": shares}
