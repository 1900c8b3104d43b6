"""`whet predict` for question answering."""

from __future__ import annotations

from pathlib import Path

from whet.jobs import left_out, predicting
from whet.jobs.predict_fields import PredictFields
from whet.jobs.tokenising.encode import check_max_length
from whet.models.loading.load import load_qa_model, load_tokenizer, max_positions
from whet.objectives.choose import choose
from whet.objectives.span import SpanObjective
from whet.precision.policy import Float32
from whet.tasks.qa.evaluate.decode import DecodeOptions
from whet.tasks.qa.evaluate.predict import predict as answers_of
from whet.tasks.qa.read.squad import read_questions
from whet.tasks.qa.splits import Split
from whet.tasks.qa.windows.cache import cached_windows
from whet.tasks.qa.windows.cut import WindowOptions
from whet.train.compat.collate import default_collator
from whet.train.evaluate import forward_batches

_USUAL_LENGTH, _USUAL_STRIDE = 384, 128


def predict(asked: PredictFields) -> int:
    """Write the best answers to every question in the file; return the exit code."""
    questions = read_questions(
        Path(asked.file), limit=asked.max_predict_samples, require_answers=False, skip_bad=asked.skip_bad
    )
    left_out.log(asked.file, questions.left_out, questions.n_left_out, "questions")
    source = predicting.source_of(asked)
    tokenizer = load_tokenizer(source)
    model = load_qa_model(source, trained=True)
    length = asked.max_seq_length or _USUAL_LENGTH
    check_max_length(length, tokenizer, max_positions(model))
    stride = _USUAL_STRIDE if asked.doc_stride is None else asked.doc_stride
    options = WindowOptions(max_seq_length=length, doc_stride=stride, with_labels=False)
    split = Split(questions, cached_windows(questions, tokenizer, options))
    objective = choose(model, None, default_collator(tokenizer))
    assert isinstance(objective, SpanObjective)
    outputs = forward_batches(model, objective, split.rows, asked.per_device_eval_batch_size, Float32())
    decode = DecodeOptions(n_best_size=max(20, asked.top_k), version_2_with_negative=asked.version_2_with_negative)
    found = answers_of(objective, outputs, split, decode)
    predicting.write(
        asked,
        (
            {"id": name, "answer": found.best[name], "answers": found.nbest[name][: asked.top_k]}
            for name in questions.ids
        ),
    )
    return 0
