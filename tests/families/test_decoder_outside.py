"""Calls of a changed decoder outside of whet's packed passes: generation, and outputs that need their padding."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

import whet
from tiny import DECODERS
from tiny_decoders import tiny_decoder

pytestmark = pytest.mark.usefixtures("operators")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", DECODERS)
def test_rows_without_padding_see_no_later_tokens(family: str, attention: Literal["eager", "sdpa"]) -> None:
    """transformers makes no mask for such rows where SDPA needs none; Gemma 2 has eager attention by default."""
    model = tiny_decoder(family).eval()
    if attention == "sdpa" and not model._supports_sdpa:
        attention = "eager"
    model.set_attn_implementation(attention)
    ids = torch.randint(10, 190, (2, 19), generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

    def answers() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return model(ids, output_hidden_states=True).logits, model.generate(ids, **given)

    logits, tokens = answers()
    whet.optimize(model)
    found = answers()
    torch.testing.assert_close(found[0], logits, rtol=1e-5, atol=1e-5)  # the sums of SDPA in another order
    assert torch.equal(found[1], tokens)
