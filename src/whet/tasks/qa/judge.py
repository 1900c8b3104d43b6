"""A model's answers to the questions of a split, and how good they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from numpy import ndarray

from whet.data.batch import Batch
from whet.engine.engine import Engine
from whet.engine.sync import Sync
from whet.objectives.span import SpanObjective
from whet.tasks.qa.decode import DecodeOptions, concat, decode, top_spans, write_predictions
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
    scores = []
    for batch, output in outputs:
        start, end, cu_seqlens = objective.span_logits(output, batch)
        scores.append(top_spans(start.float(), end.float(), cu_seqlens, options.n_best_size))
    return decode(split.questions, split.windows, concat(_in_order(sync, scores)), options)


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

    def judge(self, engine: Engine, prefix: str) -> dict[str, float]:
        """Return the metrics of the engine's model, and write its answers."""
        return engine.evaluate(self.split.rows, prefix, self)

    def __call__(self, engine: Engine) -> dict[str, float]:
        """Write the prediction files, and return the metrics; none for a test set without answers."""
        objective = getattr(engine.objective, "plain", engine.objective)  # a student evaluates what it answers alone
        assert isinstance(objective, SpanObjective)
        outputs = engine.forward_batches(self.split.rows)
        predictions = predict(objective, outputs, self.split, self.options, engine.sync)
        write_predictions(predictions, self.folder, self.prefix, on_error=engine.args.save_error_policy)
        may_be_empty = self.options.version_2_with_negative and self.prefix == "eval"
        if not may_be_empty and not any(answers.texts for answers in self.split.questions.answers):
            return {}
        from whet.tasks.qa.metrics import squad_metrics

        return squad_metrics(self.split.questions, predictions, version_2=self.options.version_2_with_negative)
