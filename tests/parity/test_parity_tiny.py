"""Without dropout, packed training by whet is padded training by others, step for step."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from padded_peers import (
    HAS_ACCELERATE,
    SETTINGS,
    Curve,
    own_loss,
    textbook_run,
    transformers_run,
    whet_run,
)
from torch import Tensor

from tiny import FAMILIES, assert_same_weights, masked_loss, tiny_model, tiny_rows, weights_of

# A run is one long sum in float32 done in another order; seen: 3e-7 relative after 50 steps. A wrong mask, position,
# schedule, decay or clip moves the loss of the second step by more than 1e-4.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4  # the norm is not an average: it feels the rounding of single large terms more
WEIGHT_TOLERANCE = 2e-6  # seen: 2e-7; one AdamW step at the highest rate is 5e-4

_needs_accelerate = pytest.mark.skipif(not HAS_ACCELERATE, reason="transformers' Trainer needs accelerate")
PEERS = [
    pytest.param(textbook_run, id="textbook-loop"),
    pytest.param(transformers_run, id="transformers-trainer", marks=_needs_accelerate),
]


def assert_same_curve(ours: Curve, theirs: Curve) -> None:
    """Loss and gradient norm of every step agree, and the run has learnt something."""
    assert len(ours.losses) == SETTINGS["max_steps"]
    assert ours.losses == pytest.approx(theirs.losses, rel=LOSS_TOLERANCE)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=NORM_TOLERANCE)
    assert min(ours.losses[-5:]) < 0.8 * ours.losses[0]


@pytest.mark.each_value
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_losses_are_the_padded_ones(tmp_path: Path, family: str, peer: Any) -> None:
    """50 steps over rows of 6 to 40 tokens, the last step of an epoch shorter than the others.

    transformers' own head would let the logits of padding take part in the softmax; whet's loss knows no padding. So
    the peer's logits of padding are masked before the same cross entropy; everything else of the peer is untouched.
    """
    theirs_model = tiny_model(family)
    theirs = peer(theirs_model, tiny_rows(92, family), tmp_path, masked_loss)
    ours, weights = _ours(family)
    assert_same_curve(ours, theirs)
    assert_same_weights(weights, weights_of(theirs_model), WEIGHT_TOLERANCE)


@cache
def _ours(family: str) -> tuple[Curve, dict[str, Tensor]]:
    """Return whet's run, which both peers are compared with, and the weights at its end."""
    model = tiny_model(family)
    with tempfile.TemporaryDirectory() as folder:
        return whet_run(model, tiny_rows(92, family), Path(folder)), weights_of(model)


@pytest.mark.each_value
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_without_padding_the_peers_own_loss_agrees(tmp_path: Path, family: str, peer: Any) -> None:
    """Rows of one length need no padding, so nothing of the peer has to be masked: its head computes the loss."""
    rows = tiny_rows(80, family, lengths=(24, 24))
    theirs = peer(tiny_model(family), rows, tmp_path, own_loss)
    assert_same_curve(whet_run(tiny_model(family), rows, tmp_path), theirs)


@pytest.mark.parametrize("family", ["bert", pytest.param("distilbert", marks=pytest.mark.night)])
def test_accumulated_steps_are_the_peers_whole_ones(tmp_path: Path, family: str) -> None:
    """Four micro-batches of 2 rows are one batch of 8; in the last step of an epoch, two of them are one of 4."""
    rows = tiny_rows(92, family)
    theirs = textbook_run(tiny_model(family), rows, tmp_path, masked_loss)
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert_same_curve(whet_run(tiny_model(family), rows, tmp_path, **split), theirs)
