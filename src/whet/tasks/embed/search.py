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
from whet.tasks.embed.models import described, library, load, optimized, prompts_of, require_one_score, set_length
from whet.tasks.embed.pairs import Texts, choose_columns, read_texts, without_columns

_CANDIDATES = 50
"""Texts that a reranker orders, found by their vectors."""
_SOON = 4
"""Batches that take no time worth a progress bar."""


def predict_embed(asked: PredictArguments, reading: Mapping[str, Any]) -> int:
    """Write the vector of each row, the score of each pair, or the texts of the corpus that fit best."""
    require_package()
    second = asked.text_pair_column_names or None
    is_vector = asked.corpus_file is None and second is None
    _require_format(asked, vectors=is_vector)
    first_of_training, second_of_training = _trained(reading)
    rows = _rows(asked, second, trained=[*first_of_training, *(second_of_training if is_vector else [])])
    if outputs.is_array(asked):
        _require_every_row(asked, rows)
    corpus = None if asked.corpus_file is None else _corpus(asked, second_of_training)
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
        is_query = rows.column in first_of_training and rows.column not in second_of_training
        query, document, _ = prompts_of(model)
        if query or document:
            outputs.say_read(asked, asked.file, _about_prompt(query if is_query else document, is_query=is_query))
        encode = model.encode_query if is_query else model.encode_document
        vectors = encode([*rows.texts], batch_size=batch)
        if outputs.is_array(asked):
            outputs.write_array(asked, vectors)
            return 0
        _write(asked, model, (
            {"row": place, "text": text, "vector": [float(f"{value:.9g}") for value in vector]}
            for place, text, vector in zip(rows.places, rows.texts, vectors, strict=True)
        ))  # fmt: skip
    return 0


def _about_prompt(prompt: str, *, is_query: bool) -> str:
    kind = "queries, the first texts of the training" if is_query else "documents"
    return f"encoded as {kind}: " + (f"{prompt!r} comes before each" if prompt else "they have no prompt")


def predict_rerank(asked: PredictArguments, reading: Mapping[str, Any]) -> int:
    """Write the score of each pair, or the texts of the corpus that fit each row best."""
    require_package()
    _require_format(asked, vectors=False)
    trained = _trained(reading)
    if asked.corpus_file is None:
        first, second, note = _pair_columns(Path(asked.file), asked, trained)
        rows = _rows(asked, second, first, note=note)
    else:
        rows = _rows(asked, None, trained=trained[0])
    corpus = None if asked.corpus_file is None else _corpus(asked, trained[1])
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


def _trained(reading: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the columns of the first and of the second text in the training; empty if they are not known."""
    first, second = (reading.get(name) for name in ("text_column_names", "text_pair_column_names"))
    return [first] if first else [], [second] if second else []


def _rows(
    asked: PredictArguments, other: str | None, text: str | None = None, *, trained: Sequence[str] = (), note: str = ""
) -> Texts:
    """Return the rows to predict; prints which columns they are read from, with the note."""
    found = read_texts(
        Path(asked.file), text or asked.text_column_names or None, other, trained=trained,
        delimiter=asked.csv_delimiter, skip_bad=asked.skip_bad, limit=asked.max_predict_samples,
    )  # fmt: skip
    found.left_out.log(asked.file, "text" if other is None else "pair")
    outputs.say_read(asked, asked.file, found.read + note)
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


def _corpus(asked: PredictArguments, trained: Sequence[str]) -> Texts:
    """Return the texts of the corpus, each once: those of the training's column, of the only one, or of a usual one."""
    path = str(asked.corpus_file)
    found = read_texts(Path(path), None, None, trained=trained, delimiter=asked.csv_delimiter, skip_bad=asked.skip_bad)
    found.left_out.log("corpus", "text")
    outputs.say_read(asked, path, found.read)
    return _once(found)


def _pair_columns(
    path: Path, asked: PredictArguments, trained: tuple[Sequence[str], Sequence[str]]
) -> tuple[str, str, str]:
    """Return the columns with the two texts of a pair, and a note about them.

    They are those that are named, those of the training, or what a training would take.
    """
    named = asked.text_column_names, asked.text_pair_column_names
    first, second = (name or next(iter(known), None) for name, known in zip(named, trained, strict=True))
    if any(named):
        if first and second:
            return first, second, ""
        missing = "text_pair_column_names" if first else "text_column_names"
        raise ConfigError(
            what="one column of a pair is named, and not the other",
            got=first or second,
            why="a pair has two texts, and it is not known which columns the training read",
            fix=f"add --{missing} NAME",
        )
    no_names: Any = SimpleNamespace(
        anchor_column_name=None, positive_column_name=None, negative_column_names=None, score_column_name=None
    )
    try:
        table = read_table(path, asked.csv_delimiter)
        gone = [name for name in (first, second) if name and name not in map(str, table.columns)]
        if first and second and not gone:
            return first, second, ""
        columns = choose_columns(table, no_names)
    except Rejected as problem:
        flags = "--text_column_names NAME --text_pair_column_names NAME"
        raise Rejected(problem.what, got=problem.got, why=problem.why, fix=f"name them: {flags}").error(
            str(path)
        ) from None
    return columns.anchor, columns.positive, f"; {without_columns(gone)}" if gone else ""


def _require_format(asked: PredictArguments, *, vectors: bool) -> None:
    """Raise ConfigError for a number format without an effect, or for an array of anything but `vectors`."""
    if asked.precision == "auto":
        raise ConfigError(
            what="precision auto would change nothing here",
            got=asked.precision,
            why="a model of sentence-transformers computes a vector or a score of each text, in fp32 or bf16",
            fix="leave --precision out, or use --precision bf16",
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
