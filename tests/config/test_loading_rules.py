"""The rules about how batches are loaded: what breaks each, and what lies just inside."""

from __future__ import annotations

from typing import Any

import pytest

from engine import TrainingArguments
from whet import ConfigError
from whet.config.rules.memory import LOADING_RULES

_BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "dataloader_num_workers_at_least_0": ({"dataloader_num_workers": -1}, "dataloader_num_workers is below 0"),
    "dataloader_prefetch_factor_at_least_1": (
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 0},
        "dataloader_prefetch_factor is below 1",
    ),
    "workers_make_ahead": (
        {"dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True},
        "dataloader_prefetch_factor and dataloader_persistent_workers would change nothing without "
        "dataloader_num_workers",
    ),
    "found_size_may_accumulate": (
        {"auto_find_batch_size": True, "optimizer_in_backward": True, "max_grad_norm": 0},
        "auto_find_batch_size does not go with optimizer_in_backward",
    ),
}


@pytest.mark.parametrize("rule", LOADING_RULES, ids=lambda rule: rule.__name__)
def test_each_broken_loading_rule_is_an_error(rule: Any) -> None:
    given, what = _BROKEN[rule.__name__]
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(**given)
    assert [problem.what for problem in caught.value.problems] == [what]


@pytest.mark.parametrize(
    "given",
    [
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1, "dataloader_persistent_workers": True},
        {"dataloader_pin_memory": True, "dataloader_num_workers": 4},
        {"dataloader_pin_memory": False},
        {"auto_find_batch_size": True, "max_tokens_per_batch": 100},
    ],
    ids=str,
)
def test_values_at_the_loading_limits_are_accepted(given: dict[str, Any]) -> None:
    TrainingArguments(**given)
