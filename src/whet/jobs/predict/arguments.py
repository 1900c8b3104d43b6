"""The options of `whet predict`."""

import os
from dataclasses import dataclass
from pathlib import Path

from whet.config.rules.ranges import Rule, at_least
from whet.config.settings import checked
from whet.errors import Problem
from whet.jobs.predict.fields import PredictFields


def names_a_model(asked: PredictFields) -> Problem | None:
    """The model comes first on the command line."""
    if asked.model.strip():
        return None
    return Problem(
        what="no model is named",
        got="no model",
        why="a trained model predicts",
        fix="name the output folder of a training: whet predict out --file FILE",
    )


def names_a_file(asked: PredictFields) -> Problem | None:
    """There is nothing to predict otherwise."""
    if asked.file.strip():
        return None
    return Problem(
        what="no file is named", got="no file", why="its rows are what is predicted", fix="name it: --file FILE"
    )


def output_is_another_file(asked: PredictFields) -> Problem | None:
    """Predictions never replace the data."""
    same = os.path.realpath(asked.output) == os.path.realpath(asked.file)
    if not asked.output.strip() or not asked.file or not same:
        return None
    return Problem(
        what="output is the file to predict",
        got=asked.output,
        why="the predictions would replace the data",
        fix="name another file in --output",
    )


def output_has_a_folder(asked: PredictFields) -> Problem | None:
    """Reported before the model is loaded."""
    target, got = Path(os.path.realpath(asked.output)), asked.output  # of a link, what it leads to
    try:
        if asked.output.strip() and target.parent.is_dir() and not target.is_dir():
            return None
    except OSError as error:  # a folder that this user may not enter, or too long a name
        got = str(error)
    return Problem(
        what="output cannot be written",
        got=got,
        why="it has to be a file in a folder that exists",
        fix="name a file in --output, such as predictions.jsonl, and make its folder first",
    )


def output_is_json_lines(asked: PredictFields) -> Problem | None:
    """A name that promises another format would mislead whoever reads the file."""
    suffix = Path(asked.output).suffix.lower()
    if suffix not in _OTHER_FORMATS and asked.output.strip() != "-":
        return None
    return Problem(
        what="output is a file of JSON lines",
        got=asked.output,
        why="a prediction has parts, such as scores for several labels, for which a cell has no room",
        fix="name it so, such as predictions.jsonl; pandas.read_json makes a table of such lines",
    )


_OTHER_FORMATS = (".csv", ".tsv", ".xlsx", ".xls", ".parquet", ".arrow", ".conll", ".conllu")
RULES: tuple[Rule, ...] = (
    names_a_model,
    names_a_file,
    output_is_another_file,
    output_has_a_folder,
    output_is_json_lines,
    at_least("max_predict_samples", 1, "predicting for no row gives nothing"),
    at_least("per_device_eval_batch_size", 1, "a batch has a row"),
    at_least("top_k", 1, "at least one must be written"),
    at_least("max_seq_length", 3, "a row holds a word and special tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
)


@checked(headings={"model": "Prediction", "max_seq_length": "Length"}, rules=RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class PredictArguments(PredictFields):
    """Which model predicts which file."""
