"""`whet run` and scripts of other libraries: the examples without their lines about whet, and what they learn."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPTS = {
    "accelerate_loop": ("accelerate", "accelerate"),
    "bi_encoder": ("sentence_transformers", "transformers' Trainer"),
    "cross_encoder": ("sentence_transformers", "transformers' Trainer"),
    "few_shot": ("setfit", "transformers' Trainer"),
    "lightning_module": ("lightning", "Lightning's Trainer"),
    "reward_model": ("trl", "transformers' Trainer"),
    "spacy_textcat": ("spacy_curated_transformers", "spaCy"),
}
"""Script -> the library that it needs, and what its model is given to."""
_NO_DROPOUT = "attention_probs_dropout_prob = 0.0\nhidden_dropout_prob = 0.0\n"
"""Of spaCy's configuration; the others have that of the encoder's folder."""
_CLOCK = _ROOT / "benchmarks" / "run" / "clock"
_TOLERANCE = 1e-4
"""Relative, of a loss: sums run in another order without padding."""


def without_whet(script: str) -> str:
    """Return an example as it would be without whet."""
    text = (_ROOT / "examples" / f"{script}.py").read_text("utf-8")
    text = re.sub(r"^\"\"\".*", '"""A script."""\nimport torch; torch.manual_seed(0)', text)
    text = re.sub(r"^(import whet|whet\.optimize\(\w+\).*)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"whet\.optimize\((.*)\)$", r"\1", text, flags=re.MULTILINE)
    text = text.replace("intermediate_width =", f"{_NO_DROPOUT}intermediate_width =")
    return text.replace("Path(__file__).parent", f"Path({str(_ROOT / 'examples')!r})")


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.true_start
@pytest.mark.parametrize("script", sorted(_SCRIPTS))
def test_script_learns_by_whet_run_what_it_learns_by_python(encoder_folder: Path, tmp_path: Path, script: str) -> None:
    """Also the steps of SetFit and TRL; of spaCy, whose gradients thinc makes, what it prints."""
    library, by = _SCRIPTS[script]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make test-libraries installs it")
    (tmp_path / "script.py").write_text(without_whet(script), "utf-8")
    assert "whet" not in (tmp_path / "script.py").read_text("utf-8").replace(str(_ROOT), "")
    losses, lines, said = {}, {}, ""
    for switch in ("off", "on"):
        clock = tmp_path / f"{switch}.json"
        variables = {
            **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "WHET_RUN": switch,
            "PYTHONPATH": str(_CLOCK), "STEP_CLOCK": str(clock), "STEP_CLOCK_STEPS": "0",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "whet", "run", "script.py", str(encoder_folder)],
            cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        losses[switch] = json.loads(clock.read_text("utf-8"))["losses"] if clock.exists() else []
        lines[switch], said = done.stdout.splitlines()[-1], done.stderr.splitlines()[-1]
    assert losses["on"] == pytest.approx(losses["off"], rel=_TOLERANCE)
    assert bool(losses["on"]) == (script != "spacy_textcat")
    assert lines["on"] == lines["off"]
    assert said.startswith("whet run: ")
    put_back = f" of {by} (steps took longer: "  # the encoder is tiny
    assert f" of {by}, " in said.partition("changed: ")[2] or put_back in said
    assert "times as fast" in said


_REFUSED = """
import spacy

nlp = spacy.blank("en")
for given in (([("the river", {"cats": {"A": 1.0}})],), (["the river"], [{"cats": {"A": 1.0}}]), (None,), ([],)):
    try:
        print(nlp.update(*given))
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.true_start
def test_spacy_says_itself_what_it_does_not_take(tmp_path: Path) -> None:
    """Texts with annotations are what its guides had before version 3."""
    pytest.importorskip("spacy", reason="needs spacy: make test-libraries installs it")
    (tmp_path / "script.py").write_text(_REFUSED, "utf-8")
    said = []
    for switch in ("off", "on"):
        done = subprocess.run(
            [sys.executable, "-m", "whet", "run", "script.py"], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "WHET_RUN": switch}, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert "AttributeError" not in done.stderr
        said.append(done.stdout.splitlines())
    assert said[0] == said[1]
    assert [line.partition(" ")[0] for line in said[0]] == ["TypeError", "ValueError", "TypeError", "{}"]
