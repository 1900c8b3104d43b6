"""`whet predict` for token classification."""

from __future__ import annotations

from pathlib import Path

from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictFields
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.words import WordRowMaker
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import TOKEN_CLASSIFICATION
from whet.tasks.tag.job import row_length
from whet.tasks.tag.judge import best_tags, entries_of, only_logits, words_of
from whet.tasks.tag.labels import tags_of_config
from whet.tasks.tag.read import read_file
from whet.tasks.tag.rows import Split
from whet.tasks.tag.sentences import Named


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
    trainer = outputs.trainer_of(asked, model, tokenizer, preprocess_logits_for_metrics=keep)
    pooling = asked.window_pooling or known.get("window_pooling", "mean")
    found = words_of(split, trainer.predict(rows.rows).predictions, pooling)
    outputs.write(asked, trainer, entries_of(sentences, tags_of_config(model.config), found))
    return 0
