"""What a switch of the configuration changes in a model, the fused parts change too, or they leave the model alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from changed import batch_of
from torch import Tensor
from transformers import AutoConfig

import whet
from tiny import FAMILIES, tiny_model
from whet.errors import ConfigError

_OF_ALL = {"return_dict", "output_hidden_states", "output_attentions", "use_cache"}
"""Switches of the form of an output, which tests of their own turn."""


def _switches(family: str) -> dict[str, bool]:
    values = AutoConfig.for_model(family).to_dict()
    return {name: value for name, value in values.items() if isinstance(value, bool) and name not in _OF_ALL}


_CASES = [(family, name) for family in FAMILIES for name in _switches(family)]


@pytest.mark.usefixtures("operators")
@pytest.mark.each_value
@pytest.mark.parametrize(("family", "switch"), _CASES, ids=map(" ".join, _CASES))
def test_a_turned_switch_changes_the_fused_model_as_the_untouched_one(family: str, switch: str) -> None:
    """ERNIE's use_task_id adds a table to its embeddings, which a fused sum of three tables would leave out."""
    batch = batch_of(family)
    try:
        model: Any = tiny_model(family, **{switch: not _switches(family)[switch]}).eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():  # what begins as zero or one counts as well
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        wanted = _logits(model, batch)
    except Exception as error:
        pytest.skip(f"transformers has no such model: {type(error).__name__}")
    try:
        found = _logits(whet.optimize(copy.deepcopy(model)), batch)
    except ConfigError:
        return  # it runs as it is, without whet
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def _logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).start_logits[batch["attention_mask"].bool()]
