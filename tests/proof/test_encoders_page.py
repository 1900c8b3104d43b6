"""docs/families.md says of each encoder of transformers what whet does with it."""

from __future__ import annotations

import pytest
from encoders_page import listed, model_types, table, verdict_on

from proven_models import PROVEN
from whet.models.known import known


def test_the_page_lists_every_encoder_and_family() -> None:
    """After a new family or version of transformers: python tests/proof/encoders_page.py."""
    page = listed()
    assert sorted(page) == model_types()
    assert {name for name, runs in page.items() if runs == "family"} == known().keys() & page.keys()


@pytest.mark.parametrize("model_type", [*PROVEN, "mobilebert", "roformer", "deberta-v2"])
def test_the_page_says_what_the_proof_finds(model_type: str) -> None:
    assert listed()[model_type] == verdict_on(model_type)[0]


def test_types_that_run_alike_stand_in_one_row() -> None:
    joins = "it joins tokens"
    verdicts = [("a", "padded", joins), ("b", "family", ""), ("c", "padded", joins), ("d", "proof", "")]
    rows = ["| family | `b` |", "| proof | `d` |", f"| padded: {joins} | `a`, `c` |"]
    assert table(verdicts).splitlines()[2:] == rows
