"""The command that a stopped run prints names each thing once."""

from __future__ import annotations

import pytest

from whet.cli.main import resuming_command

_PATH = "out/checkpoint-8"


@pytest.mark.parametrize(
    "asked",
    [[], [_PATH], ["true"]],
    ids=["bare", "path", "switch"],
)
@pytest.mark.parametrize("flag", ["--resume_from_checkpoint", "--resume-from-checkpoint"])
def test_command_to_go_on_drops_the_checkpoint_it_began_from(flag: str, asked: list[str]) -> None:
    words = ["qa", flag, *asked, "--seed", "3"]
    again = resuming_command(words, {"resume_from_checkpoint": "auto"})
    assert again == "whet qa --seed 3 --resume_from_checkpoint auto"


def test_command_to_go_on_drops_every_form_of_the_flag_and_no_other_word() -> None:
    words = ["qa", f"--resume_from_checkpoint={_PATH}", "run.yaml", "--resume_from_checkpoint", "no", "--do_train"]
    told = resuming_command(words, {"resume_from_checkpoint": _PATH})
    assert told == f"whet qa run.yaml --do_train --resume_from_checkpoint {_PATH}"


def test_command_to_go_on_keeps_a_config_file_behind_a_switch() -> None:
    words = ["classify", "--output_dir", "out", "--do_train", "run.yaml", "--no-fp16", "--do_train", "yes", "more.yaml"]
    again = resuming_command(words, {"do_train": False, "model_name_or_path": "out"})
    assert again == (
        "whet classify --output_dir out run.yaml --no-fp16 more.yaml --do_train false --model_name_or_path out"
    )
