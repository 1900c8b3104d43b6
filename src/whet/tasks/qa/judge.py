"""A model's answers to the questions of a split, and how good they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from numpy import ndarray

from whet.console import plural
from whet.data.batch import Batch
from whet.engine.engine import Engine
from whet.engine.sync import Sync
from whet.jobs.judging import Judged, Judgement
from whet.log import logger
from whet.objectives.span import SpanObjective
from whet.tasks.qa.decode import DecodeOptions, concat, decode, top_spans, write_predictions
from whet.tasks.qa.metrics import normalise, scores, squad_metrics, word_f1
from whet.tasks.qa.splits import Split
from whet.tasks.qa.types import Predictions, SpanScores

ONE_RANK = Sync()


def predict(
    objective: SpanObjective,
    outputs: Iterable[tuple[Batch, Any]],
    split: Split,
    options: DecodeOptions,
    sync: Sync = ONE_RANK,
) -> Predictions:
    """Return the answers from the model's outputs over the split's rows.

    The outputs are those of this rank's batches; every rank returns all answers. Of the logits only the best starts and
    ends of each window are ever kept.
    """
    best = []
    for batch, output in outputs:
        start, end, cu_seqlens = objective.span_logits(output, batch)
        best.append(top_spans(start.float(), end.float(), cu_seqlens, options.n_best_size))
    return decode(split.questions, split.windows, concat(_in_order(sync, best)), options)


def _in_order(sync: Sync, own: Sequence[SpanScores]) -> list[SpanScores]:
    """Return the scores of all ranks' batches, as one rank has them."""
    names = {column.name for column in fields(SpanScores)}

    def valid(one: Any) -> bool:
        return isinstance(one, dict) and one.keys() == names and all(isinstance(each, ndarray) for each in one.values())

    columns = [{name: getattr(one, name) for name in names} for one in own]
    return [SpanScores(**one) for one in sync.in_order(columns, valid)]


@dataclass(frozen=True)
class Judge:
    """Evaluates an engine's model on a split: answers, prediction files, SQuAD's metrics."""

    split: Split
    options: DecodeOptions
    folder: Path
    prefix: str
    """Prefix of the files' names: eval, predict."""

    def while_training(self) -> dict[str, Any]:
        """Return the fields of a RunSpec by which this judge evaluates in a training."""
        return {"evaluation": self}

    def judge(self, engine: Engine, prefix: str) -> Judgement:
        """Return the metrics of the engine's model and every question, and write the files of run_qa.py."""
        found: list[tuple[Predictions, list[Path]]] = []

        def metrics(engine: Engine) -> dict[str, float]:
            found.append(self._predictions(engine))
            return self._metrics(found[0][0])

        measured = engine.evaluate(self.split.rows, prefix, metrics)
        predictions, paths = found[0]
        return Judgement(measured, self._examples(predictions), [path.name for path in paths])

    def __call__(self, engine: Engine) -> dict[str, float]:
        """Write the prediction files, and return the metrics; none for a test set without answers."""
        return self._metrics(self._predictions(engine)[0])

    def _predictions(self, engine: Engine) -> tuple[Predictions, list[Path]]:
        objective = getattr(engine.objective, "plain", engine.objective)  # a student evaluates what it answers alone
        assert isinstance(objective, SpanObjective)
        outputs = engine.forward_batches(self.split.rows)
        predictions = predict(objective, outputs, self.split, self.options, engine.sync)
        on_error = engine.args.save_error_policy
        return predictions, write_predictions(predictions, self.folder, self.prefix, on_error=on_error)

    def _metrics(self, predictions: Predictions) -> dict[str, float]:
        questions, version_2 = self.split.questions, self.options.version_2_with_negative
        n_without = sum(not answers.texts for answers in questions.answers)
        if not self._knows_answers or (n_without and not version_2):
            if self._knows_answers:
                logger.warning("test: %s without an answer, so it gets no metrics", plural(n_without, "question"))
            return {}
        return squad_metrics(questions, predictions, version_2=version_2)

    @property
    def _knows_answers(self) -> bool:
        """Whether the data says what is right: of a test set, each question may be without an answer."""
        may_be_empty = self.options.version_2_with_negative and self.prefix == "eval"
        return may_be_empty or any(answers.texts for answers in self.split.questions.answers)

    def _examples(self, predictions: Predictions) -> list[Judged]:
        """Return every question with its answer, in the order of the data."""
        questions = self.split.questions
        known: Sequence[tuple[float, float] | None] = [None] * len(questions)
        if self._knows_answers:
            known = scores(questions, predictions, version_2=self.options.version_2_with_negative)
        return [self._example(n, predictions, score) for n, score in enumerate(known)]

    def _example(self, n: int, predictions: Predictions, score: tuple[float, float] | None) -> Judged:
        """Return one question; its score is None if it is not known what is right."""
        questions, name = self.split.questions, self.split.questions.ids[n]
        answers, text, context = questions.answers[n], predictions.best[name], questions.context(n)
        entries, said = predictions.nbest[name], normalise(text)
        shares = [(normalise(str(one["text"])), float(one["probability"])) for one in entries]
        share = min(sum(part for other, part in shares if other == said), 1.0)
        spans = [span for span, one in zip(predictions.spans[name], entries, strict=True) if one["text"] == text][:1]
        shown: dict[str, Any] = {"question": questions.questions[n]}
        if score is None:
            return Judged(
                row=name,
                shown=shown | {"context": around(context, spans)},
                predicted=text,
                of_predictions={"score": share},
            )
        nearest = max(answers.texts, key=lambda one: word_f1(said, normalise(one)), default="")
        spans += [(at, at + len(one)) for one, at in zip(answers.texts, answers.starts, strict=True) if one == nearest]
        references = {normalise(one) for one in answers.texts} or {""}
        right = [part for other, part in shares if other in references]
        exact, f1 = score
        others = [one for one in dict.fromkeys(answers.texts) if one != nearest]
        more = {"exact": bool(exact), "f1": 100 * f1, "score": share} | ({"other_answers": others} if others else {})
        return Judged(
            row=name,
            shown=shown | {"context": around(context, spans)},
            expected=nearest,
            predicted=text,
            probability=min(sum(right), 1.0) if right else None,
            badness=(1 - f1, share) if not exact else (0.0, -share),
            wrong=not exact,
            of_predictions=more,
            of_errors=more,
        )


_MARGIN = 160
"""Characters of the context on both sides of an answer."""


def around(context: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return what stands around these spans of the context, "…" for what is left out; without any, its beginning."""
    pieces: list[list[int]] = []
    for begin, end in sorted((begin, end) for begin, end in spans if 0 <= begin < end) or [(0, 0)]:
        first, last = max(begin - _MARGIN, 0), min(end + _MARGIN, len(context))
        if first and (space := context.find(" ", first, begin)) >= 0:
            first = space + 1
        if last < len(context) and (space := context.rfind(" ", end, last)) >= 0:
            last = space
        if pieces and first <= pieces[-1][1]:
            pieces[-1][1] = max(pieces[-1][1], last)
        else:
            pieces.append([first, last])
    text = " … ".join(context[first:last] for first, last in pieces)
    return ("… " if pieces[0][0] else "") + text + (" …" if pieces[-1][1] < len(context) else "")
