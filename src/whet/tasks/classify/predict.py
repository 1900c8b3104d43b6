"""`whet predict` for text classification."""

from __future__ import annotations

from pathlib import Path

from whet.jobs.judging import pooled
from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictFields
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.encode import check_max_length
from whet.jobs.tokenising.rows import RowMaker, RowOptions
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import SEQUENCE_CLASSIFICATION
from whet.models.loading.load import max_positions
from whet.tasks.classify.examples import Named, read_file
from whet.tasks.classify.judge import Decision, logits_of
from whet.tasks.classify.labels import scheme_of_config

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
    trainer = outputs.trainer_of(asked, model, tokenizer)
    pooling = asked.window_pooling or known.get("window_pooling", "mean")
    decision = Decision(scheme_of_config(model.config), known.get("threshold", 0.5), pooling)
    logits = pooled(logits_of(trainer.predict(rows.rows).predictions), rows.text_of, pooling)
    entries = zip(examples.places, decision.entries(logits, asked.top_k), strict=True)
    outputs.write(asked, trainer, ({"row": place, **entry} for place, entry in entries))
    return 0
