"""Methods that are asked for by name: lists and words with commas, and names that are none."""

from __future__ import annotations

import pytest

import engine
import whet
from whet.config.method_names import names_to_ask_for


def test_methods_are_given_as_a_list_or_with_commas() -> None:
    for given in (["freeze_tables"], "freeze_tables", ["freeze_tables,freeze_tables"]):
        assert engine.TrainingArguments(methods=given).methods == ("freeze_tables",)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("frezee_tables", "no file of whet/methods has a card with this name"),
        ("checkpointing", "--gradient_checkpointing"),
        ("unpad", "without being asked for"),
    ],
)
def test_an_unknown_method_is_refused_with_the_list(name: str, hint: str) -> None:
    with pytest.raises(whet.ConfigError) as caught:
        engine.TrainingArguments(methods=[name])
    assert name in str(caught.value)
    assert hint in str(caught.value)
    assert f"use some of {', '.join(names_to_ask_for())}" in str(caught.value)
