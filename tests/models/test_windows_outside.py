"""Models with windows, called as usual after whet has prepared them: a call without a mask keeps its windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import engine
from tiny import arguments, tiny_model

LOCAL, LENGTH = 8, 60


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_modernbert_without_a_mask_keeps_its_windows(tmp_path: Path, implementation: str) -> None:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) + 10
    plain, model = (tiny_model("modernbert", local_attention=LOCAL).eval() for _ in range(2))
    for one in (plain, model):
        one.set_attn_implementation(implementation)
    engine.Trainer(model=model, args=arguments(tmp_path))
    with torch.no_grad():
        found, expected = (one.eval()(input_ids=ids).start_logits for one in (model, plain))
        everywhere = tiny_model("modernbert", local_attention=2 * LENGTH).eval()(input_ids=ids).start_logits
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)  # sums in another order at most
    assert float((everywhere - expected).abs().max()) > 1e-3  # the window matters
