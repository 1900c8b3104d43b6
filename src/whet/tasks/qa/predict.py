"""`whet predict` for question answering."""

from __future__ import annotations

from pathlib import Path

from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictFields
from whet.jobs.tokenising.encode import check_max_length
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import QUESTION_ANSWERING
from whet.models.loading.load import max_positions
from whet.objectives.span import SpanObjective
from whet.tasks.qa.decode import DecodeOptions
from whet.tasks.qa.judge import predict as answers_of
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.splits import Split
from whet.tasks.qa.windows import WindowOptions, cached_windows

_USUAL_LENGTH, _USUAL_STRIDE = 384, 128


def predict(asked: PredictFields) -> int:
    """Write the best answers to every question in the file; return the exit code."""
    questions = read_questions(
        Path(asked.file), limit=asked.max_predict_samples, require_answers=False, skip_bad=asked.skip_bad
    )
    questions.left_out.log(asked.file, "question")
    known = outputs.reading_of(asked, "qa")
    model, tokenizer = load_trained(asked.model, QUESTION_ANSWERING, asked.base_model_name_or_path)
    length = asked.max_seq_length or known.get("max_seq_length", _USUAL_LENGTH)
    check_max_length(length, tokenizer, max_positions(model))
    stride = known.get("doc_stride", _USUAL_STRIDE) if asked.doc_stride is None else asked.doc_stride
    options = WindowOptions(max_seq_length=length, doc_stride=stride, with_labels=False)
    split = Split(questions, cached_windows(questions, tokenizer, options))
    trainer = outputs.trainer_of(asked, model, tokenizer)
    assert isinstance(trainer.objective, SpanObjective)
    decode = DecodeOptions(
        n_best_size=max(20, asked.top_k),
        version_2_with_negative=asked.version_2_with_negative or known.get("version_2_with_negative", False),
    )
    found = answers_of(trainer.objective, trainer.forward_batches(split.rows), split, decode)
    outputs.write(
        asked,
        trainer,
        (
            {"id": name, "answer": found.best[name], "answers": found.nbest[name][: asked.top_k]}
            for name in questions.ids
        ),
    )
    return 0
