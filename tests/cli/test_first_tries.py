"""What a new user types first, and what whet answers: real processes of the program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.true_start


def _whet(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "whet", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("qa", "--bf16", "maybe"), "error: --bf16 takes true or false\n  got: maybe\n"),
        (("qa", "--do-train", "enabled"), "error: --do-train takes true or false\n  got: enabled\n"),
        (("qa", "--no_bf16", "yes"), "error: --no_bf16 takes no value\n  got: yes\n"),
        (("qa", "--bf16=maybe"), "error: --bf16 does not fit\n  got: maybe\n"),
        (("ask", "--version_2_with_negative", "perhaps"), "error: --version_2_with_negative takes true or false\n"),
        (("doctor", "--kernels", "please"), "error: --kernels takes true or false\n  got: please\n"),
        (("demo", "again"), "error: a word belongs to no flag\n  got: again\n"),
        (("qa", "out"), "error: a word belongs to no flag\n  got: out\n"),
        (("qa", "--seed", "1", "2"), "error: a word belongs to no flag\n  got: 2\n"),
    ],
)
def test_a_word_that_no_flag_takes_is_reported_with_its_flag(words: tuple[str, ...], what: str) -> None:
    done = _whet(*words)
    assert done.returncode == 78
    assert what in done.stderr
    assert "config file cannot be read" not in done.stderr


def test_false_words_and_files_after_a_flag_still_work() -> None:
    done = _whet("qa", "--do_train", "no", "--bf16", "gone.yaml", "--print_config")
    assert "gone.yaml" in done.stderr, "a config file may follow a flag that is true or false"
    assert "takes true or false" not in done.stderr


@pytest.mark.parametrize("words", [("help", "qa"), ("qa", "help"), ("qa", "--help")])
def test_help_of_a_command_is_found_by_any_word_order(words: tuple[str, ...]) -> None:
    done = _whet(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--per_device_train_batch_size" in done.stdout


def test_a_command_alone_names_what_it_needs_and_its_help() -> None:
    done = _whet("qa")
    assert done.returncode == 78
    assert done.stderr.count("error: ") == 3
    assert done.stderr.endswith("its options, with examples: whet qa --help\n")


def test_the_help_fits_80_columns() -> None:
    for words in (("--help",), ("qa", "--help"), ("ask", "--help"), ("demo", "--help"), ("doctor", "--help")):
        shown = _whet(*words, COLUMNS="80").stdout
        assert max(map(len, shown.splitlines())) <= 80, words


def test_unknown_values_of_whets_variables_are_refused_together() -> None:
    done = _whet("demo", WHET_PRODUCTS="fast", WHET_ISA="v5", WHET_KEEP_MEMORY="maybe")
    assert done.returncode == 78
    assert "WHET_PRODUCTS to mkl or onednn" in done.stderr
    assert "WHET_ISA to v4 or v3 or baseline" in done.stderr
    assert "WHET_KEEP_MEMORY to 0 or 1" in done.stderr


@pytest.mark.slow
def test_a_misspelled_variable_is_reported_once() -> None:
    done = _whet("ask", "gone", "--context", "gone", "--question", "Who?", WHET_KERNLES="reference")
    told = "note: the environment variable WHET_KERNLES has no effect: did you mean WHET_KERNELS?"
    assert done.stderr.count(told) == 1
    assert "WHET_TEST" not in done.stderr
