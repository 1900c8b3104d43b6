"""The benchmark's count of floating point operations is the one that torch's own counter finds in a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flops import Encoder, attention_flops, encoder_of, limit_s, linear_flops, linears, step_flops
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForQuestionAnswering

SIZES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56},
    "distilbert": {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 56},
}


def counted(model: torch.nn.Module, lengths: list[int]) -> int:
    """Return what torch counts while the model takes a step over these rows, each alone and so without padding."""
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            ids = torch.arange(length)[None]
            model(input_ids=ids, start_positions=torch.tensor([1]), end_positions=torch.tensor([2])).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", SIZES)
def test_the_count_is_what_a_step_does(family: str) -> None:
    config = AutoConfig.for_model(family, vocab_size=50, **SIZES[family])
    model = AutoModelForQuestionAnswering.from_config(config, attn_implementation="eager").train()
    lengths = [7, 19, 30]
    assert step_flops(encoder_of(config.to_dict()), lengths) == counted(model, lengths)


def test_the_products_that_are_measured_are_all_that_is_counted() -> None:
    """The seconds of the linear layers come from `linears`: they must do what `linear_flops` counts."""
    encoder = Encoder(width=384, inner=1536, n_layers=6)
    measured = sum(3 * 2 * 100 * layer.k * layer.m * layer.count for layer in linears(encoder))
    assert measured == linear_flops(encoder, 100)
    assert linear_flops(encoder, 100) == pytest.approx(6 * 10.65e6 * 100, rel=0.01)  # 10.65 M weights in the blocks


def test_the_limit_takes_attention_at_the_rate_of_the_linear_layers() -> None:
    encoder, lengths = Encoder(width=64, inner=256, n_layers=2), [100, 300]
    share = attention_flops(encoder, lengths) / linear_flops(encoder, 400)
    assert limit_s(encoder, lengths, linear_s=2.0) == pytest.approx(2.0 * (1 + share))


def test_attention_grows_with_the_square_of_each_row_not_of_the_batch() -> None:
    encoder = Encoder(width=64, inner=256, n_layers=1)
    assert attention_flops(encoder, [200, 200]) == 2 * attention_flops(encoder, [200])
    assert attention_flops(encoder, [400]) == 4 * attention_flops(encoder, [200])
