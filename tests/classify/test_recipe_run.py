"""`--recipe few_samples` and every setting for little data, from the command line to the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from saved_decoder import save_decoder
from text_tasks import load, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.engine.description import block

_SETTINGS = {
    "min_steps": 8, "weight_averaging_start": 0.5, "layerwise_lr_decay": 0.9, "reinit_layers": 1, "logging_steps": 1,
}  # fmt: skip


def _files(command: str, folder: Path) -> dict[str, Any]:
    if command == "classify":
        return {"train_file": write_csv(folder / "train.csv", topic_rows())}
    rows = [{"tokens": row["text"].split(), "tags": ["O"] * len(row["text"].split())} for row in topic_rows()]
    rows[0]["tags"][1] = "B-THING"
    return {"train_file": write_lines(folder / "train.jsonl", rows)}


@pytest.mark.parametrize("command", ["classify", "tag"])
def test_commands_take_the_recipe_and_its_settings(
    command: str, sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = _files(command, tmp_path) | {"num_train_epochs": 1, "recipe": "few_samples"} | _SETTINGS
    assert run(words(command, sentence_encoder, tmp_path / "out", "--do_train", **options)) == 0
    shown = capsys.readouterr().out
    assert "recipe     few_samples: warmup_steps 0.1" in shown
    assert "8 steps (min_steps)" in shown
    assert load(tmp_path / "out", "trainer_state.json")["global_step"] == 8
    log = (tmp_path / "out" / "run.log").read_text("utf-8")
    assert "new weights in the last 1 of 2 blocks" in log
    assert "the mean of its weights after the last 4 steps" in log
    assert load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("command", ["classify", "tag"])
def test_the_recipe_leaves_new_layers_out_for_a_decoder(command: str, tmp_path: Path) -> None:
    save_decoder(tmp_path / "decoder")
    options = _files(command, tmp_path) | {"recipe": "few_samples", "max_steps": 1}
    assert run(words(command, tmp_path / "decoder", tmp_path / "out", "--do_train", **options)) == 0
    log = (tmp_path / "out" / "run.log").read_text("utf-8")
    assert "reinit_layers 1 is left out: it was measured for encoders alone" in log
    assert "new weights" not in log


def test_seeds_share_the_recipe(sentence_encoder: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "train.csv", topic_rows())
    options = {"train_file": file, "validation_file": file, "num_train_epochs": 1, "recipe": "few_samples"} | _SETTINGS
    code = run(words("classify", sentence_encoder, tmp_path / "out", "--do_train", "--do_eval", seeds=2, **options))
    assert code == 0
    saved = [load(tmp_path / "out" / f"seed-{seed}", "training_args.json") for seed in (42, 43)]
    assert [(one["seed"], one["warmup_steps"], one["min_steps"]) for one in saved] == [(42, 0.1, 8), (43, 0.1, 8)]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_terminal_shows_every_setting_of_a_recipe(width: int) -> None:
    parts = [
        "few_samples: warmup_steps 0.1",
        "reinit_layers 1",
        "weight_averaging_start 0.5",
        "as given: min_steps null",
    ]
    lines = block({"recipe": parts, "memory": ["1 GB", "2 GB free"]}, width)
    assert all(sum(part in line for line in lines) == 1 for part in parts)
    assert max(map(len, lines)) <= width
    assert [line.split(" ")[0] for line in lines if not line.startswith(" ")] == ["recipe", "memory"]
