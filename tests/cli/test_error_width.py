"""Errors on a terminal: folded between words at its width, with whatever a reader copies on one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from terminal import on_terminal
from whet.console import folded_message

_WORDS = ["qa", "--model_name_or_path", "m", "--dataset_name", "squad", "--do_train", "--eval_strategy", "steps",
          "--save_strategy", "no", "--load_best_model_at_end", "--output_dir", "out", "--past_index", "2"]  # fmt: skip


@pytest.mark.parametrize("columns", [60, 80])
def test_errors_are_folded_at_the_width_of_the_terminal(columns: int) -> None:
    lines = on_terminal(_WORDS, columns, code=78)
    assert len(lines) > 4
    assert max(map(len, lines)) <= columns, [line for line in lines if len(line) > columns]
    file = subprocess.run([sys.executable, "-m", "whet", *_WORDS], capture_output=True, text=True, check=False)
    assert " ".join(" ".join(lines).split()) == " ".join(file.stderr.split())
    assert max(map(len, file.stderr.splitlines())) > columns  # a file gets each part on one line


@pytest.mark.parametrize(
    "whole",
    [
        "run: pip install --force-reinstall torch, then python -m whet.kernels.build",
        "--resume_from_checkpoint '/a folder/with a long name/checkpoint-1',",
        "whet.optimize(AutoModelForQuestionAnswering.from_pretrained('bert-base-uncased'))",
        "/a/path/that/is/much/longer/than/any/line/of/this/terminal/could/ever/hold/checkpoint-1",
    ],
)
def test_a_folded_error_keeps_what_is_copied_on_one_line(whole: str) -> None:
    lines = folded_message(
        f"  fix: look at the folder that it names first; {whole}; and then try it again", 50, " " * 7
    )
    assert any(whole in line for line in lines)
    assert all(len(line) <= 50 for line in lines if whole not in line)
