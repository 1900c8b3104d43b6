"""The options of `whet predict`: which model predicts what, and where the predictions go."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from whet.config.rules.ranges import Rule, at_least, broken_if, excludes, is_given
from whet.config.settings import checked
from whet.errors import Problem
from whet.jobs.fields import Pooling
from whet.jobs.rules import delimiter_is_a_character

_READ = {
    "file": ("output is the file to predict", "the predictions would replace the data"),
    "corpus_file": ("output is the corpus_file", "the predictions would replace the texts that are searched"),
}
"""The files that are read, and what is wrong with predictions that go to one of them."""


def output_is_another_file(asked: "PredictArguments") -> Problem | None:
    """Predictions never replace what is read."""
    target = os.path.realpath(asked.output) if asked.output.strip() else None
    for name, (what, why) in _READ.items():
        path = getattr(asked, name)
        if path and os.path.realpath(path) == target:
            return Problem(what=what, got=asked.output, why=why, fix="name another file in --output")
    return None


def output_has_a_folder(asked: "PredictArguments") -> Problem | None:
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


_OTHER_FORMATS = (".csv", ".tsv", ".xlsx", ".xls", ".parquet", ".arrow", ".conll", ".conllu")
RULES: tuple[Rule, ...] = (
    is_given(
        "names_a_model",
        "model",
        what="no model is named",
        why="a trained model predicts",
        fix="name the output folder of a training: whet predict out --file FILE",
    ),
    is_given(
        "names_a_file",
        "file",
        what="no file is named",
        why="its rows are what is predicted",
        fix="name it: --file FILE",
    ),
    output_is_another_file,
    output_has_a_folder,
    broken_if(
        "output_is_json_lines",
        ("output",),
        lambda asked: Path(asked.output).suffix.lower() in _OTHER_FORMATS or asked.output.strip() == "-",
        what="output is a file of JSON lines",
        why="a prediction has parts, such as scores for several labels, for which a cell has no room",
        fix="name it so, such as predictions.jsonl; pandas.read_json makes a table of such lines",
    ),
    excludes(
        "a_row_is_a_query_or_a_pair",
        "corpus_file",
        ("text_pair_column_names",),
        why="a row is a query, or a pair that gets a score",
    ),
    delimiter_is_a_character,
    at_least("max_predict_samples", 1, "predicting for no row gives nothing"),
    at_least("per_device_eval_batch_size", 1, "a batch has a row"),
    at_least("top_k", 1, "at least one must be written"),
    at_least("max_seq_length", 3, "a row holds a word and special tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
)


@checked(headings={"model": "Prediction", "max_seq_length": "Length"}, rules=RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class PredictArguments:
    """Which model predicts which file."""

    model: str = field(default="", metadata={"required": True})
    """Trained model: the output folder of a training, with all weights or an adapter, or a name on the hub. Comes
    first, with or without its flag."""
    base_model_name_or_path: str | None = None
    """For the folder of an adapter: the model that it was trained on. null: the one that the adapter names."""
    file: str = field(default="", metadata={"required": True})
    """File to predict, in any format that the model's training takes. Labels are not needed and not read."""
    corpus_file: str | None = None
    """Embedding models and rerankers: search the texts of this file for each row of the other, and write the top_k.
    null: the vector of each row, or the score of each pair."""
    output: str = "predictions.jsonl"
    """File for the predictions, one JSON object a line; vectors alone if it ends with .npy. A file of this name is
    replaced; a pipe or a device, such as /dev/stdout, is written to."""
    text_column_names: str | None = None
    """Columns that hold the text, or the words to tag; several names are separated by commas. null: those of the
    training, else a usual name."""
    text_pair_column_names: str | None = None
    """Columns that hold the second text of a pair; '': each row has one text. null: those of the training, else a usual
    name; embedding models score pairs only if this is given."""
    csv_delimiter: str | None = None
    """Character between the columns of CSV files. null: the one that cuts the header into most columns."""
    skip_bad: bool = False
    """Leave bad rows out instead of ending at them; the log names the first."""
    max_predict_samples: int | None = None
    """Predict only this many of the first rows. null: all."""
    per_device_eval_batch_size: int = 8
    """Rows at once. More rows take more memory."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Number format of the matrix products. bf16 is faster on CPUs with AMX or AVX512-BF16, with 2 to 3 decimal digits.
    auto: the faster one, measured on the first rows."""
    top_k: int = 3
    """Labels, answers or texts to write for each row, best first."""

    max_seq_length: int | None = None
    """Longest row in tokens. null: as in the training, else 384 for questions and 128 for texts."""
    doc_stride: int | None = None
    """Tokens that two windows of a long text share. null: as in the training, else 128 for questions."""
    window_pooling: Pooling | None = None
    """How the windows of a long text become one prediction: mean or max of their logits. null: as in the training,
    else mean."""
    version_2_with_negative: bool | None = None
    """Question answering: allow "no answer" as the answer. null: as in the training, else false."""
