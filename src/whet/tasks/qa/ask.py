"""What a trained model answers: `whet ask` about one text, `whet predict` for a file; `whet demo` ends with some."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet import console, json_output, log
from whet.engine.collate import default_collator
from whet.engine.evaluate import forward_batches
from whet.errors import ConfigError, escape_controls
from whet.jobs.demo import DATA
from whet.jobs.predict import outputs
from whet.jobs.predict.arguments import PredictArguments
from whet.jobs.predict.trained import folder_of, read_reading
from whet.jobs.task_run import TaskRun
from whet.jobs.tokenising.encode import check_max_length
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import QUESTION_ANSWERING
from whet.models.loading.load import max_positions
from whet.objectives.choose import choose
from whet.objectives.span import SpanObjective
from whet.precision.policy import Float32
from whet.tasks.qa.arguments import AskArguments, QaArguments
from whet.tasks.qa.decode import DecodeOptions
from whet.tasks.qa.judge import predict as answers_of
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.splits import Split
from whet.tasks.qa.types import Answers, Questions
from whet.tasks.qa.windows import WindowOptions, cached_windows, make_windows

ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class Answer:
    """One answer of a model."""

    text: str
    """Empty: the text has no answer."""
    probability: float
    """Probability among the considered answers, 0 to 1."""
    span: tuple[int, int]
    """First character in the context, and one past the last."""


@dataclass(frozen=True)
class Reader:
    """A model that answers questions, with its tokenizer and its options for windows and answers."""

    model: Any
    tokenizer: Any
    windows: WindowOptions
    decode: DecodeOptions

    def answers(self, context: str, questions: Sequence[str]) -> list[list[Answer]]:
        """Return the best answers to each question about the text, the chosen one first."""
        asked = Questions(
            ids=[str(number) for number in range(len(questions))],
            questions=list(questions),
            answers=[Answers()] * len(questions),
            context_of=np.zeros(len(questions), dtype=np.int64),
            contexts=[context],
        )
        split = Split(asked, make_windows(asked, self.tokenizer, self.windows))
        objective = choose(self.model, None, default_collator(self.tokenizer))
        assert isinstance(objective, SpanObjective)
        outputs = forward_batches(self.model, objective, split.rows, ROWS_AT_ONCE, Float32())
        found = answers_of(objective, outputs, split, self.decode)
        return [_in_order(found.nbest[name], found.spans[name], found.best[name]) for name in asked.ids]


def run_ask(asked: AskArguments) -> int:
    """Run the command; return its exit code."""
    log.set_up()
    context = asked.read_context()
    questions = [asked.question] if isinstance(asked.question, str) else list(asked.question)
    for question, answers in zip(questions, _reader(asked).answers(context, questions), strict=True):
        show(question, answers[: asked.n_best])
    return 0


def show(question: str, answers: Sequence[Answer]) -> None:
    """Print a question and its answers: probability, text, and position."""
    json_output.append("answers", {"question": question, "answers": [asdict(answer) for answer in answers]})
    asked = escape_controls(question)
    print(console.paragraph(asked, indent="  ") if console.is_terminal(sys.stdout) else asked)
    for answer in answers:
        place = f"  (characters {answer.span[0]} to {answer.span[1]})" if answer.text else ""
        text = f"{answer.probability:6.1%}  {escape_controls(answer.text) or '(no answer in the text)'}{place}"
        print(console.paragraph(f"  {text}", indent=" " * 10) if console.is_terminal(sys.stdout) else f"  {text}")


def _reader(asked: AskArguments) -> Reader:
    found = read_reading(folder_of(asked.model))
    known = found if found.get("task") == "qa" else {}
    decode = DecodeOptions.trained(
        known,
        n_best=asked.n_best,
        max_answer_length=asked.max_answer_length,
        null_score_diff_threshold=asked.null_score_diff_threshold,
        version_2_with_negative=asked.version_2_with_negative,
    )
    if asked.null_score_diff_threshold is not None and not decode.version_2_with_negative:
        raise ConfigError(
            what="null_score_diff_threshold has no effect here",
            got=f"--null_score_diff_threshold {asked.null_score_diff_threshold}, for a model that always answers",
            why="it decides when to answer nothing, and the model was trained without such questions",
            fix="add --version_2_with_negative true, or leave --null_score_diff_threshold out",
        )
    model, tokenizer = load_trained(asked.model, QUESTION_ANSWERING, asked.base_model_name_or_path)
    windows = _windows(asked, known, model, tokenizer)
    return Reader(model=model, tokenizer=tokenizer, windows=windows, decode=decode)


_USUAL_LENGTH, _USUAL_STRIDE = 384, 128


def _windows(
    asked: AskArguments | PredictArguments, known: Mapping[str, Any], model: Any, tokenizer: Any
) -> WindowOptions:
    """Return how texts are cut: as asked for, else as in the training (`known`); ConfigError if rows are too long."""
    length = outputs.setting_of(asked, known, "max_seq_length", _USUAL_LENGTH)
    check_max_length(length, tokenizer, max_positions(model))
    stride = outputs.setting_of(asked, known, "doc_stride", _USUAL_STRIDE)
    return WindowOptions(max_seq_length=length, doc_stride=stride, with_labels=False)


def _in_order(nbest: list[dict[str, Any]], spans: list[tuple[int, int]], best: str) -> list[Answer]:
    """Return the answers with the chosen one first: if "no answer" won by the threshold, it comes first."""
    found = [Answer(str(e["text"]), float(e["probability"]), span) for e, span in zip(nbest, spans, strict=True)]
    return sorted(found, key=lambda answer: answer.text != best)


def show_demo(qa: QaArguments, job: TaskRun, metrics: Mapping[str, float]) -> None:
    """Show what the model of `whet demo` has learnt, and its answers about texts that it has never seen."""
    before = next(entry["eval_f1"] for entry in job.engine.state.log_history if "eval_f1" in entry)
    print(f"\nF1 before training {before:.1f}, after training {metrics['eval_f1']:.1f}\n")
    windows, decode = WindowOptions(with_labels=False), DecodeOptions.of(qa)
    reader = Reader(job.engine.model, job.engine.spec.processing_class, windows, decode)
    for item in json.loads((DATA / "unseen.json").read_text("utf-8")):
        print(f"\n{console.paragraph(item['context'])}")
        show(item["question"], reader.answers(item["context"], [item["question"]])[0][:3])
    folder = job.args.output_dir
    print(f'\nAsk more:\n  {console.own_program()} ask {folder} --context FILE --question "..."')


def predict(asked: PredictArguments, known: Mapping[str, Any]) -> int:
    """Write the best answers to every question in the file; return the exit code."""
    questions = read_questions(
        Path(asked.file),
        limit=asked.max_predict_samples,
        require_answers=False,
        takes_answers=False,
        skip_bad=asked.skip_bad,
    )
    questions.left_out.log(asked.file, "question")
    model, tokenizer = load_trained(asked.model, QUESTION_ANSWERING, asked.base_model_name_or_path)
    split = Split(questions, cached_windows(questions, tokenizer, _windows(asked, known, model, tokenizer)))
    engine = outputs.engine_of(asked, model, tokenizer)
    assert isinstance(engine.objective, SpanObjective)
    decode = DecodeOptions.trained(
        known,
        n_best=asked.top_k,
        version_2_with_negative=outputs.setting_of(asked, known, "version_2_with_negative", False),
    )
    found = answers_of(engine.objective, engine.forward_batches(split.rows), split, decode)
    outputs.write(
        asked,
        engine,
        (
            {"id": name, "answer": found.best[name], "answers": found.nbest[name][: asked.top_k]}
            for name in questions.ids
        ),
    )
    return 0
