"""docs/encoders.md says of each encoder of transformers what whet does with it."""

from __future__ import annotations

import pytest
from encoders_page import PAGE, model_types, verdict_on

from proven_models import PROVEN
from whet.models.known import known


def table() -> dict[str, str]:
    """Return how each model type runs, by the page."""
    lines = [line.split("|") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    return {cells[1].strip(): cells[2].strip() for cells in lines[1:]}


def test_the_page_lists_every_encoder_and_family() -> None:
    """After a new family or version of transformers: python tests/proof/encoders_page.py."""
    page = table()
    assert sorted(page) == model_types()
    assert {name for name, runs in page.items() if runs == "family"} == known().keys() & page.keys()


@pytest.mark.parametrize("model_type", [*PROVEN, "mobilebert", "roformer", "deberta-v2"])
def test_the_page_says_what_the_proof_finds(model_type: str) -> None:
    assert table()[model_type] == verdict_on(model_type)[0]
