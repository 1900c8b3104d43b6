"""Command line words: which belongs to which name."""

from typing import Any

import pytest

from whet.config.command_line import split

_KINDS: dict[str, Any] = {
    "bf16": bool,
    "better": bool | None,
    "rate": float,
    "question": tuple[str, ...],
    "no_cuda": bool,
    "config": str,
}


def _flags(*argv: str) -> dict[str, object]:
    words = split(argv, _KINDS, "config")
    assert not words.problems
    return words.flags


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["--bf16"], {"bf16": "true"}),
        (["--bf16", "true"], {"bf16": "true"}),
        (["--bf16=false"], {"bf16": "false"}),
        (["--bf16", "False", "--rate", "2"], {"bf16": "False", "rate": "2"}),
        (["--no_bf16"], {"bf16": "false"}),
        (["--no-bf16"], {"bf16": "false"}),
        (["--no_cuda"], {"no_cuda": "true"}),
        (["--better", "null"], {"better": "null"}),
        (["--rate", "-1e-5"], {"rate": "-1e-5"}),
        (["--rate=--1"], {"rate": "--1"}),
        (["--rate", "1", "--rate", "2"], {"rate": "2"}),
        (["--question", "a b", "--question", "c"], {"question": ["a b", "c"]}),
        (["--unknown"], {"unknown": ""}),
        (["--unknown", "5", "--bf16"], {"unknown": "5", "bf16": "true"}),
        (["--un-known=5"], {"un_known": "5"}),
        (["--no_rate"], {"no_rate": ""}),
        (["--no_bf16=x"], {"no_bf16": "x"}),
        (["--rate", "-fast"], {"rate": "-fast"}),
        (["--bf16", "--unknown", "a b"], {"bf16": "true", "unknown": "a b"}),
        (["-rate=3", "--rat", "-2"], {"rate": "3", "rat": "-2"}),
        (["--rate="], {"rate": ""}),
    ],
)
def test_flags_are_parsed_to_named_texts(argv: list[str], flags: dict[str, object]) -> None:
    assert _flags(*argv) == flags


def test_value_of_a_repeated_flag_that_does_not_count_is_named() -> None:
    argv = ["--rate", "1", "--rate", "2", "--bf16", "--bf16", "--question", "a", "--question", "b"]
    words = split(argv, _KINDS, "config")
    assert words.notes == ["--rate is given more than once: only its last value counts"]


def test_switch_does_not_take_a_following_file_as_value() -> None:
    words = split(["--bf16", "run.json", "--config", "b.yaml"], _KINDS, "config")
    assert (words.flags, words.config_files) == ({"bf16": "true"}, ["run.json", "b.yaml"])


def test_help_flag_is_found_anywhere() -> None:
    assert split(["--rate", "1", "-h"], _KINDS).wants == {"help"}
    assert split(["--print-config", "--help"], _KINDS).wants == {"help", "print_config"}


def test_missing_values_and_stray_words_are_reported_together() -> None:
    words = split(["--rate", "--question", "who", "is", "it"], _KINDS, None)
    assert [problem.got for problem in words.problems] == ["--rate", "is", "it"]


def test_second_lone_word_does_not_replace_the_first() -> None:
    words = split(["a", "b"], _KINDS, "rate")
    assert words.flags == {"rate": "a"}
    assert [problem.got for problem in words.problems] == ["b"]
