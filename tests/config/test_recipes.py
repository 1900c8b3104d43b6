"""A recipe sets what the user leaves open, and nothing else; the run shows what it set."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import engine
import whet
from tiny import tiny_model, tiny_rows
from whet.cli.main import run
from whet.config.command_line import load
from whet.config.recipes import RECIPES
from whet.tasks.qa.task import QA as COMMAND

FEW = dict(RECIPES["few_samples"])


def made(**given: Any) -> engine.TrainingArguments:
    return engine.TrainingArguments(recipe="few_samples", **given)


def values(args: engine.TrainingArguments) -> dict[str, Any]:
    return {name: getattr(args, name) for name in FEW}


def test_a_recipe_sets_what_is_not_given() -> None:
    assert values(made()) == FEW
    assert values(engine.TrainingArguments()) != FEW


def test_a_given_setting_wins_even_with_its_default() -> None:
    assert values(made(min_steps=7)) == FEW | {"min_steps": 7}
    assert values(made(min_steps=None)) == FEW | {"min_steps": None}
    assert values(made(warmup_steps=0)) == FEW | {"warmup_steps": 0}


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({"max_steps": 10}, {"min_steps": None}),
        ({"warmup_ratio": 0.2}, {"warmup_steps": 0}),
        ({"lr_scheduler_type": "constant"}, {"warmup_steps": 0}),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, {"warmup_steps": 0}),
    ],
    ids=lambda found: next(iter(found)),
)
def test_a_setting_that_decides_the_same_wins(given: dict[str, Any], left_out: dict[str, Any]) -> None:
    assert values(made(**given)) == FEW | {name: value for name, value in given.items() if name in FEW} | left_out


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"zero_stage": 0}, 0.5),
        ({"zero_stage": 1}, 0.5),
        ({"zero_stage": 3}, None),
        ({"fsdp": ""}, 0.5),
        ({"fsdp": False}, 0.5),
        ({"fsdp": "shard_grad_op"}, None),
        ({"fsdp": True}, None),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}, "precision": "fp32"}, None),
    ],
    ids=str,
)
def test_the_average_is_left_out_only_where_ranks_share_weights(given: dict[str, Any], start: float | None) -> None:
    assert made(**given).weight_averaging_start == start


def test_flags_and_files_win_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("recipe: few_samples\nwarmup_steps: 5\n", "utf-8")
    words = ["--model_name_or_path", "m", "--train_file", __file__, "--do_train", "--output_dir", str(tmp_path / "out")]
    (_, args) = load(COMMAND, [str(file), *words]).settings
    assert values(args) == FEW | {"warmup_steps": 5}
    (_, args) = load(COMMAND, [*words, "--recipe", "few_samples", "--min_steps", "null"]).settings
    assert values(args) == FEW | {"min_steps": None}


def test_printed_settings_are_read_back_as_they_are(tmp_path: Path) -> None:
    """--print_config writes every setting; a run from that file must be the same run."""
    words = ["--model_name_or_path", "m", "--train_file", __file__, "--do_train", "--recipe", "few_samples"]
    printed = load(COMMAND, [*words, "--warmup_steps", "0", "--print_config"]).text
    file = tmp_path / "run.yaml"
    file.write_text(printed or "", "utf-8")
    (_, args) = load(COMMAND, [str(file)]).settings
    assert values(args) == FEW | {"warmup_steps": 0}


def test_copies_keep_the_values() -> None:
    args = made(warmup_steps=0)
    assert dataclasses.replace(args, seed=3) == dataclasses.replace(args, seed=3, recipe="few_samples")
    assert values(dataclasses.replace(args, seed=3)) == values(args)
    assert engine.TrainingArguments(**args.to_dict()) == args


def test_a_recipe_that_would_set_nothing_is_refused() -> None:
    """dataclasses.replace gives every field, so a recipe cannot take hold there: that must not be silent."""
    with pytest.raises(whet.ConfigError, match="recipe few_samples sets nothing"):
        dataclasses.replace(engine.TrainingArguments(), recipe="few_samples")


def test_an_unknown_recipe_is_refused_with_the_list() -> None:
    with pytest.raises(whet.ConfigError, match="one of few_samples"):
        engine.TrainingArguments(recipe="few_shots")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_steps": 0}, "min_steps is below 1"),
        ({"min_steps": 5, "max_steps": 10}, "min_steps has no effect next to max_steps"),
        ({"layerwise_lr_decay": 0.0}, "layerwise_lr_decay is not above 0, up to 1"),
        ({"layerwise_lr_decay": 1.5}, "layerwise_lr_decay is not above 0, up to 1"),
        ({"reinit_layers": -1}, "reinit_layers is below 0"),
        ({"weight_averaging_start": 1.0}, "weight_averaging_start is not from 0, below 1"),
    ],
    ids=lambda found: str(found)[:30],
)
def test_values_without_a_meaning_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(whet.ConfigError, match=message):
        engine.TrainingArguments(**given)


@pytest.mark.parametrize(("epochs", "min_steps", "n_steps"), [(1, 9, 9), (1, None, 3), (4, 9, 12)])
def test_min_steps_lengthens_a_short_run(epochs: int, min_steps: int | None, n_steps: int, tmp_path: Path) -> None:
    args = engine.TrainingArguments(
        str(tmp_path), num_train_epochs=epochs, min_steps=min_steps, per_device_train_batch_size=4, use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = engine.Trainer(tiny_model("bert"), args, train_dataset=tiny_rows(12))
    assert trainer.train().global_step == n_steps
    assert trainer.state.max_steps == n_steps


def test_the_first_lines_and_the_log_show_what_the_recipe_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = made(
        output_dir=str(tmp_path),
        min_steps=2,
        num_train_epochs=1,
        use_cpu=True,
        save_strategy="epoch",
        disable_tqdm=True,
    )
    engine.Trainer(tiny_model("bert"), args, train_dataset=tiny_rows(12)).train()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("recipe "))
    assert "few_samples: warmup_steps 0.1" in line
    logged = (tmp_path / "run.log").read_text("utf-8")
    assert "recipe few_samples: warmup_steps 0.1" in logged
    assert "as given: min_steps 2" in logged
    saved = json.loads(next(tmp_path.glob("checkpoint-*/training_args.json")).read_text("utf-8"))
    assert (saved["recipe"], saved["min_steps"], saved["warmup_steps"]) == ("few_samples", 2, 0.1)


@pytest.mark.parametrize("command", ["classify", "tag"])
def test_a_span_loss_is_refused_by_commands_without_answers(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model_name_or_path", "m", "--train_file", __file__, "--do_train", "--output_dir", str(tmp_path / "out")]
    assert run([command, *words, "--span_loss", "compound"]) == 78
    assert "span_loss would change nothing here" in capsys.readouterr().err
