"""`whet predict` for token classification."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.jobs import left_out, predicting
from whet.jobs.predict_fields import PredictFields
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.words import WordRowMaker
from whet.models.loading.heads import TOKEN_CLASSIFICATION
from whet.models.loading.load import load_model, load_tokenizer
from whet.tasks.tag.job import row_length
from whet.tasks.tag.judge import best_tags, entries_of
from whet.tasks.tag.labels import tags_of_config
from whet.tasks.tag.rows import Split
from whet.tasks.tag.sentences import Named
from whet.tasks.tag.splits import read_file


def predict(asked: PredictFields) -> int:
    """Write the tags and scores of every word in the file; return the exit code."""
    known = predicting.reading_of(asked, "tag")
    named = Named(words=asked.text_column_names or known.get("text_column_name"))
    sentences = read_file(
        Path(asked.file), named, need_tags=False, limit=asked.max_predict_samples, skip_bad=asked.skip_bad
    )
    left_out.log(asked.file, sentences.left_out, sentences.n_left_out, "sentences")
    source = predicting.source_of(asked)
    tokenizer = load_tokenizer(source)
    model = load_model(source, TOKEN_CLASSIFICATION, trained=True)
    length = row_length(asked.max_seq_length or known.get("max_seq_length"), tokenizer, model)
    rows = WordRowMaker(tokenizer, length, Cache(rows="rows")).rows(sentences.words)
    split = Split(sentences, rows, None, None)
    words, found, scores = [], [], []
    batches = predicting.logits_of(model, tokenizer, rows.rows, asked.per_device_eval_batch_size)
    for row, (best, share) in enumerate(_rows(batches)):
        index, places = split.rows.first_pieces(row)
        words.append(index)
        found.append(best[places].numpy())
        scores.append(share[places].numpy())
    predicting.write(asked, entries_of(sentences, tags_of_config(model.config), words, found, scores))
    return 0


def _rows(batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the best tag and its probability of each row's tokens."""
    for logits in batches:
        best, scores = best_tags(logits, None)
        yield from zip(best, scores, strict=True)
