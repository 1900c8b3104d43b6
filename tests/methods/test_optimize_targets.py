"""Targets at padding tokens under `whet.optimize`: their own states are computed, whatever `padding` says."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from optimized import Inputs, inputs
from transformers import AutoModelForMaskedLM, AutoModelForQuestionAnswering, AutoModelForTokenClassification

import whet
from tiny import FAMILIES, tiny_config

BATCH = inputs(9, 30, 3)
PLACES = BATCH["attention_mask"].shape
EXACT = 1e-5  # relative: float32 sums in another order
CLASSES = torch.randint(0, 5, PLACES, generator=torch.Generator().manual_seed(1))


def new(head: Any, family: str = "bert", **changes: Any) -> Any:
    torch.manual_seed(0)
    return head.from_config(tiny_config(family, **changes)).eval()


def losses(model: Any, padding: Any, batch: Inputs) -> tuple[float, float]:
    """Return the loss of the untouched model and of the optimised one."""
    found = whet.optimize(deepcopy(model), padding=padding)(**batch).loss
    return float(model(**batch).loss.detach()), float(found.detach())


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("padding", ["sampled", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_optimize_counts_token_labels_in_padding_exactly(
    family: str, padding: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = new(AutoModelForTokenClassification, family, num_labels=5)
    wanted, found = losses(model, padding, BATCH | {"labels": CLASSES})
    assert found == pytest.approx(wanted, rel=EXACT)
    assert len([text for text in caplog.messages if "labels at padding tokens" in text]) == 1


@pytest.mark.parametrize("padding", ["sampled", "none"])
def test_optimize_counts_answers_in_padding_exactly(padding: str) -> None:
    model = new(AutoModelForQuestionAnswering)
    answers = {"start_positions": torch.tensor([3, 4, 20]), "end_positions": torch.tensor([12, 4, 29])}
    wanted, found = losses(model, padding, BATCH | answers)
    assert found == pytest.approx(wanted, rel=EXACT)


def test_optimize_counts_masked_words_in_padding_exactly() -> None:
    model = new(AutoModelForMaskedLM)
    wanted, found = losses(model, "sampled", BATCH | {"labels": CLASSES})
    assert found == pytest.approx(wanted, rel=EXACT)


def test_gradients_of_targets_in_padding_are_exact() -> None:
    model = new(AutoModelForTokenClassification, num_labels=5)
    changed = whet.optimize(deepcopy(model))
    for one in (model, changed):
        one(**BATCH, labels=CLASSES).loss.backward()
    for wanted, found in zip(model.parameters(), changed.parameters(), strict=True):
        assert (wanted.grad is None) == (found.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("outside", [-100, "answers behind the last column"])
def test_targets_outside_of_padding_compute_no_more_than_asked(outside: Any, caplog: pytest.LogCaptureFixture) -> None:
    if outside == -100:
        model = new(AutoModelForTokenClassification, num_labels=5)
        targets = {"labels": torch.where(BATCH["attention_mask"].bool(), CLASSES, outside)}
    else:  # transformers' heads ignore those
        model = new(AutoModelForQuestionAnswering)
        targets = {"start_positions": torch.tensor([3, 4, 30]), "end_positions": torch.tensor([8, 4, 99])}
    wanted, found = losses(model, "sampled", BATCH | targets)
    assert found == pytest.approx(wanted, rel=3e-2)  # the span loss of new tables of positions
    assert not [text for text in caplog.messages if "padding tokens" in text]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
def test_targets_by_position_in_an_adapter_are_seen() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="TOKEN_CLS", target_modules=["query"])
    model = peft.get_peft_model(new(AutoModelForTokenClassification, num_labels=5), config).eval()
    batch = (BATCH["input_ids"], BATCH["attention_mask"])
    wanted = model(*batch, labels=CLASSES).loss
    found = whet.optimize(deepcopy(model))(*batch, labels=CLASSES).loss
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=EXACT)


def test_restore_takes_the_look_at_targets_out_again() -> None:
    model = new(AutoModelForTokenClassification)
    before = {name: dict(value) for name, value in vars(model).items() if name.endswith(("hooks", "kwargs"))}
    whet.restore(whet.optimize(model))
    assert {name: dict(value) for name, value in vars(model).items() if name.endswith(("hooks", "kwargs"))} == before
