"""Every script in examples/ runs from start to end and prints what its last line promises."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from saved_decoder import save_decoder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_ANSWER = r"Can I bring my book back on Sunday\? -> \w.+\."
_EXPECTED = {
    "bi_encoder": ("sentence_transformers", _ANSWER),
    "cross_encoder": ("sentence_transformers", _ANSWER),
    "few_shot": ("setfit", r"\d+ of 16 questions get the right topic"),
    "accelerate_loop": ("accelerate", r"epoch 3: mean loss \d\.\d+"),
    "spacy_textcat": ("spacy_curated_transformers", r"\d+ of 16 questions get the right topic"),
    "reward_model": ("trl", r"share of pairs in the right order, last steps: \d\.\d+"),
    "lightning_module": ("lightning", r"mean loss of the last epoch: \d\.\d+"),
    "own_loop": ("accelerate", r"epoch 3: mean loss \d\.\d+"),
    "own_loop_accelerate": ("accelerate", r"epoch 3: mean loss \d\.\d+"),
    "supervised_tuning": ("trl", r"loss at first \d\.\d+, at last \d\.\d+"),
    "preference_tuning": ("trl", r"share of pairs in the right order, last steps: \d\.\d+"),
    "lora_adapter": (
        "peft",
        r"adapter_config.json, adapter_model.safetensors: [\d,]+ of [\d,]+ weights, mean loss .+",
    ),
    "optuna_search": ("optuna", r"best of 4 trials: accuracy \d\.\d+ with learning rate \d\.\de-\d+"),
    "export_onnx": ("onnxruntime", r"Can I bring my book back on Sunday\? -> \w+ \(logits within \de-\d+ of torch's\)"),
    "unmodified": ("torch", r"mean loss: \d\.\d+"),
    "ray_train": ("ray", r"loss after 10 steps: \d\.\d+"),
    "plain_loop": ("torch", r"epoch 3: mean loss \d\.\d+"),
    "trainer_subclass": ("torch", r"accuracy on unseen questions: \d\.\d+"),
}
"""Script -> the library that it needs, and the last line that it prints."""
_WITH_DECODER = ("own_loop", "own_loop_accelerate", "supervised_tuning", "preference_tuning")
_STARTED_BY = {"unmodified": ("-m", "whet", "run")}
"""Scripts that whet starts."""
_LONGEST_S = 300


def test_every_example_is_tried_and_listed() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == _EXPECTED.keys()
    listed = set(re.findall(r"`(\w+)\.py`", (EXAMPLES / "README.md").read_text("utf-8")))
    assert listed == scripts


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.parametrize("script", sorted(_EXPECTED))
def test_example_runs_and_prints_its_result(encoder_folder: Path, tmp_path: Path, script: str) -> None:
    library, last = _EXPECTED[script]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make test-libraries installs it")
    model = encoder_folder
    if script in _WITH_DECODER:
        model = tmp_path / "decoder"
        save_decoder(model)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        [sys.executable, *_STARTED_BY.get(script, ()), str(EXAMPLES / f"{script}.py"), str(model)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=_LONGEST_S, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    # Ray hands on what its workers print, some of it after the script's last line
    own = [line for line in found.stdout.splitlines() if line.strip() and "(RayTrainWorker" not in line]
    assert re.fullmatch(last, own[-1]), found.stdout
    if script in _STARTED_BY:
        assert re.search(r"^whet run: BertForSequenceClassification: \d\.\d+ times as fast", found.stderr, re.MULTILINE)
