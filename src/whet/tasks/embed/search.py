"""What a trained model gives: `whet predict` writes vectors, scores or what was found; `whet search` shows it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from whet import console, json_output, log
from whet.data.files.bad_rows import Rejected
from whet.data.files.table import read_table
from whet.errors import ConfigError, DataError, escape_controls
from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictArguments
from whet.log import logger
from whet.own_loop.changes import changes
from whet.tasks.embed.arguments import SearchArguments, require_package
from whet.tasks.embed.models import described, library, load, optimized, require_one_score, set_length
from whet.tasks.embed.pairs import Texts, choose_columns, read_texts

_OF_OTHER_TASKS = ("base_model_name_or_path", "doc_stride", "window_pooling", "version_2_with_negative")
"""Options of `whet predict` that say how other models predict."""
_CANDIDATES = 50
"""Texts that a reranker orders, found by their vectors."""
_SOON = 4
"""Batches that take no time worth a progress bar."""


def predict_embed(asked: PredictArguments, reading: Mapping[str, Any]) -> int:
    """Write the vector of each row, the score of each pair, or the texts of the corpus that fit best."""
    require_package()
    _require_honoured(asked, vectors=asked.corpus_file is None and asked.text_pair_column_names is None)
    rows = _rows(asked, asked.text_pair_column_names)
    if outputs.is_array(asked):
        _require_every_row(asked, rows)
    corpus = None if asked.corpus_file is None else _once(_corpus(Path(asked.corpus_file), asked))
    if corpus is not None and rows.others is not None:
        raise ConfigError(
            what="text_pair_column_names does not go with corpus_file",
            got=asked.text_pair_column_names,
            why="a row is a query, or a pair that gets a score",
            fix="leave one of the two out",
        )
    model = _embedder(asked.model, asked.max_seq_length, asked.precision)
    batch = asked.per_device_eval_batch_size
    if corpus is not None:
        hits = _found(model, rows.texts, corpus.texts, asked.top_k, batch)
        _write(asked, model, _matches(rows, corpus, hits))
    elif rows.others is not None:
        pairs = zip((model.encode_query, model.encode_document), (rows.texts, rows.others), strict=True)
        vectors = [encode([*texts], batch_size=batch, convert_to_tensor=True) for encode, texts in pairs]
        _write(asked, model, _scores(rows, model.similarity_pairwise(*vectors).tolist()))
    else:
        vectors = model.encode_document([*rows.texts], batch_size=batch)
        if outputs.is_array(asked):
            outputs.write_array(asked, vectors)
            return 0
        _write(asked, model, (
            {"row": place, "text": text, "vector": [float(f"{value:.9g}") for value in vector]}
            for place, text, vector in zip(rows.places, rows.texts, vectors, strict=True)
        ))  # fmt: skip
    return 0


def predict_rerank(asked: PredictArguments, reading: Mapping[str, Any]) -> int:
    """Write the score of each pair, or the texts of the corpus that fit each row best."""
    require_package()
    _require_honoured(asked, vectors=False)
    if asked.corpus_file is None:
        first, second = _pair_columns(Path(asked.file), asked)
        rows = _rows(asked, second, first)
    else:
        rows = _rows(asked, None)
    corpus = None if asked.corpus_file is None else _once(_corpus(Path(asked.corpus_file), asked))
    model = load("CrossEncoder", asked.model, "--model")
    if corpus is not None:
        require_one_score(model, asked.model, "--model")
    set_length(model, asked.max_seq_length)
    optimized(model, asked.precision)
    batch = asked.per_device_eval_batch_size
    if corpus is not None:
        hits = [_ranked(model, query, corpus.texts, asked.top_k, batch) for query in rows.texts]
        _write(asked, model, _matches(rows, corpus, hits))
        return 0
    assert rows.others is not None
    scores = model.predict([*zip(rows.texts, rows.others, strict=True)], batch_size=batch, show_progress_bar=False)
    _write(asked, model, _scores(rows, np.asarray(scores, dtype=np.float64).tolist()))
    return 0


def run_search(asked: SearchArguments) -> int:
    """Show the texts of the corpus that fit each query best."""
    log.set_up(logging.WARNING)
    require_package()
    queries = [one for one in asked.query if one.strip()]
    corpus = _once(read_texts(Path(asked.corpus), asked.text_column_names, None))
    model = _embedder(asked.model, None, "fp32")
    judge = None if asked.reranker is None else load("CrossEncoder", asked.reranker, "--reranker")
    if judge is not None:
        require_one_score(judge, str(asked.reranker), "--reranker")
        set_length(judge, None)
        judge = optimized(judge)
    n_found = max(_CANDIDATES, asked.top_k) if asked.reranker else asked.top_k
    found = _found(model, queries, corpus.texts, n_found, asked.per_device_eval_batch_size)
    if judge is not None:
        found = [
            [(hits[n][0], score) for n, score in
             _ranked(judge, query, [corpus.texts[at] for at, _ in hits], asked.top_k, asked.per_device_eval_batch_size)]
            for query, hits in zip(queries, found, strict=True)
        ]  # fmt: skip
    for query, hits in zip(queries, found, strict=True):
        hits_in_json = [{"score": score, "place": corpus.places[at], "text": corpus.texts[at]} for at, score in hits]
        json_output.append("results", {"query": query, "hits": hits_in_json})
        print(console.paragraph(escape_controls(query), "  "))
        for at, score in hits:
            text = " ".join(escape_controls(corpus.texts[at]).split())
            room = console.width() - len(corpus.places[at]) - 14
            print(f"  {score:8.4f}  {corpus.places[at]}  {console.cell(text, room).rstrip()}")
    return 0


def _once(corpus: Texts) -> Texts:
    """Return the corpus with each text once, at its first place: a file of pairs repeats the better half of them."""
    first: dict[str, int] = {}
    for number, text in enumerate(corpus.texts):
        first.setdefault(text, number)
    if len(first) == len(corpus.texts):
        return corpus
    logger.warning(
        "the corpus has %s, %d of them different: equal ones are found once, at their first place",
        console.plural(len(corpus.texts), "text"), len(first),
    )  # fmt: skip
    return replace(corpus, texts=[*first], places=[corpus.places[number] for number in first.values()])


def _embedder(name: str, length: int | None, precision: str) -> Any:
    model = load("SentenceTransformer", name, "--model")
    set_length(model, length)
    return optimized(model, precision)


Hits = list[tuple[int, float]]
"""Texts of a corpus by their number, with their scores, the best first."""


def _found(model: Any, queries: Sequence[str], corpus: Sequence[str], top_k: int, batch: int) -> list[Hits]:
    """Return the texts nearest to each query, by the model's own similarity."""
    options = {"batch_size": batch, "convert_to_tensor": True, "show_progress_bar": False}
    shown = options | {"show_progress_bar": console.can_be_drawn_over(sys.stderr) and len(corpus) > _SOON * batch}
    texts = model.encode_document([*corpus], **shown)
    hits = library("util").semantic_search(
        model.encode_query([*queries], **options), texts, top_k=top_k, score_function=model.similarity
    )
    return [[(one["corpus_id"], float(one["score"])) for one in of_query] for of_query in hits]


def _ranked(model: Any, query: str, texts: Sequence[str], top_k: int, batch: int) -> Hits:
    ranked = model.rank(query, [*texts], top_k=top_k, batch_size=batch, show_progress_bar=False)
    return [(int(one["corpus_id"]), float(one["score"])) for one in ranked]


def _rows(asked: PredictArguments, other: str | None, text: str | None = None) -> Texts:
    found = read_texts(
        Path(asked.file), text or asked.text_column_names, other, delimiter=asked.csv_delimiter,
        skip_bad=asked.skip_bad, limit=asked.max_predict_samples,
    )  # fmt: skip
    found.left_out.log(asked.file, "text" if other is None else "pair")
    return found


def _require_every_row(asked: PredictArguments, rows: Texts) -> None:
    """Raise DataError if vectors alone would no longer say which row of the file each belongs to."""
    n_bad, n_blank = rows.left_out.n_rows, rows.n_blank
    if n_bad or n_blank:
        found = [f"{console.plural(n_bad, 'bad row')} left out"] * bool(n_bad)
        found += [f"{console.plural(n_blank, 'blank line')} between the texts"] * bool(n_blank)
        raise DataError(
            what=f"the vectors of {asked.output} would not match the rows of {asked.file}",
            got=" and ".join(found),
            why="an array names no rows, so each vector after the first gap would stand at the place of another text",
            fix="write JSON lines, whose entries name their row: --output vectors.jsonl; or correct the file",
        )


def _corpus(path: Path, asked: PredictArguments) -> Texts:
    """Return the texts that are searched: those of the only column of texts, or of one with a usual name."""
    found = read_texts(path, None, None, delimiter=asked.csv_delimiter, skip_bad=asked.skip_bad)
    found.left_out.log("corpus", "text")
    return found


def _pair_columns(path: Path, asked: PredictArguments) -> tuple[str, str]:
    """Return the columns with the two texts of a pair: those that are named, or what training would take."""
    if asked.text_column_names and asked.text_pair_column_names:
        return asked.text_column_names, asked.text_pair_column_names
    named: Any = SimpleNamespace(
        anchor_column_name=asked.text_column_names, positive_column_name=asked.text_pair_column_names,
        negative_column_names=None, score_column_name=None,
    )  # fmt: skip
    try:
        columns = choose_columns(read_table(path, asked.csv_delimiter), named)
    except Rejected as problem:
        flags = "--text_column_names NAME --text_pair_column_names NAME"
        raise Rejected(problem.what, got=problem.got, why=problem.why, fix=f"name them: {flags}").error(
            str(path)
        ) from None
    return columns.anchor, columns.positive


def _require_honoured(asked: PredictArguments, *, vectors: bool) -> None:
    """Raise ConfigError for options without an effect, or for an array of anything but `vectors`."""
    given = {name: getattr(asked, name) for name in _OF_OTHER_TASKS if getattr(asked, name)}
    given |= {"precision": asked.precision} if asked.precision == "auto" else {}
    if given:
        flags = " and ".join(f"--{name}" for name in given)
        raise ConfigError(
            what=f"{' and '.join(given)} would change nothing here",
            got=given,
            why="a model of sentence-transformers computes a vector or a score of each text, in fp32 or bf16",
            fix=f"leave {flags} out",
        )
    if outputs.is_array(asked) and not vectors:
        raise ConfigError(
            what="an array holds vectors alone",
            got=asked.output,
            why="a score belongs to two texts, which a .npy file does not name",
            fix="name a file of JSON lines in --output, such as predictions.jsonl",
        )


def _matches(rows: Texts, corpus: Texts, hits: Sequence[Hits]) -> Iterator[dict[str, Any]]:
    for place, query, found in zip(rows.places, rows.texts, hits, strict=True):
        matches = [{"row": corpus.places[at], "text": corpus.texts[at], "score": score} for at, score in found]
        yield {"row": place, "text": query, "matches": matches}


def _scores(rows: Texts, scores: Sequence[float]) -> Iterator[dict[str, Any]]:
    for place, one, other, score in zip(rows.places, rows.texts, rows.others or (), scores, strict=True):
        yield {"row": place, "texts": [one, other], "score": score}


def _write(asked: PredictArguments, model: Any, entries: Iterator[dict[str, Any]]) -> None:
    padding = "with" if changes(model) is None else "without"
    outputs.write_lines(asked, entries, precision=described(model) or asked.precision, padding=padding)
