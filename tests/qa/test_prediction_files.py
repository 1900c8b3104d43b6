"""The files that predictions are kept in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whet.errors import OutputError
from whet.tasks.qa.decode import write_predictions
from whet.tasks.qa.types import Predictions

_ENTRY = {"start_logit": 2.0, "end_logit": 1.0, "text": "né 🙂", "probability": 1.0}
_V2 = Predictions(best={"q1": "né 🙂", "q0": ""}, nbest={"q1": [_ENTRY], "q0": []}, null_odds={"q1": -6.0, "q0": 0.5})


def test_prediction_files_equal_those_of_run_qa(tmp_path: Path) -> None:
    best, nbest, odds = write_predictions(_V2, tmp_path / "new" / "folder", "eval")
    assert (best.name, nbest.name) == ("eval_predictions.json", "eval_nbest_predictions.json")
    assert odds.name == "eval_null_odds.json"
    # ASCII, four spaces, the order of the questions, a newline at the end.
    assert best.read_bytes() == b'{\n    "q1": "n\\u00e9 \\ud83d\\ude42",\n    "q0": ""\n}\n'
    assert odds.read_bytes() == b'{\n    "q1": -6.0,\n    "q0": 0.5\n}\n'
    text = nbest.read_text(encoding="ascii")
    assert text.startswith(
        '{\n    "q1": [\n        {\n            "start_logit": 2.0,\n            "end_logit": 1.0,\n'
    )
    assert json.loads(text) == _V2.nbest


def test_v1_writes_no_null_odds(tmp_path: Path) -> None:
    paths = write_predictions(Predictions(best=_V2.best, nbest=_V2.nbest), tmp_path, "predict")
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert {path.name for path in paths} == {"predict_predictions.json", "predict_nbest_predictions.json"}


def test_uncreatable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="cannot be written"):
        write_predictions(_V2, tmp_path / "file", "eval")
