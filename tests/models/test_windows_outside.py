"""Windows: those of transformers' masks, without a mask too, after changes of the configuration, and in any kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
import whet
from tiny import DECODERS, arguments, plain_torch, tiny_model
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.errors import ConfigError

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


def _model(family: str, **changes: Any) -> Any:
    if family in DECODERS:
        return tiny_decoder(family, use_cache=False, **changes).eval()
    return tiny_model(family, **changes).eval()


def _answers(model: Any) -> Tensor:
    batch = collate(token_rows(4, lengths=(20, 40)))
    real = batch.pop("attention_mask")
    del batch["labels"]
    out = model(**batch, attention_mask=real)
    return (out.logits if "logits" in out else out.start_logits)[real.bool()].detach()


def _narrow(model: Any) -> None:
    """Make the windows of the configuration smaller, as somebody may who tries shorter ones."""
    name = "local_attention" if hasattr(model.config, "local_attention") else "sliding_window"
    setattr(model.config, name, 4)


@pytest.mark.parametrize("family", ["modernbert", "qwen3_moe", "qwen2_moe", "qwen2", "gemma2", "mistral"])
def test_windows_that_the_configuration_gets_later_are_those_of_the_model(family: str) -> None:
    """Mistral reads them in each call; the attention of others has kept what there was, and its masks have not."""
    plain, ours, early = _model(family), whet.optimize(_model(family)), _model(family)
    before = _answers(plain)
    torch.testing.assert_close(_answers(ours), before, rtol=0, atol=1e-5)
    for model in (plain, ours, early):
        _narrow(model)
    wanted = _answers(plain)
    assert float((wanted - before).abs().max()) > 1e-3  # the window matters
    torch.testing.assert_close(_answers(ours), wanted, rtol=0, atol=1e-5)
    if family == "mistral":
        torch.testing.assert_close(_answers(whet.optimize(early)), wanted, rtol=0, atol=1e-5)
    else:
        with pytest.raises(
            ConfigError, match=r"block \d has a window of \d+, and its place in the configuration a wind"
        ):
            whet.optimize(early)


@pytest.mark.parametrize("kernels", ["native", "plain torch"])
@pytest.mark.parametrize(("family", "changes"), [("qwen2_moe", {}), ("olmoe", {"sliding_window": 4})])
def test_windows_are_those_of_the_masks_whatever_attention_is_called_with(
    family: str, changes: dict[str, Any], kernels: str
) -> None:
    """Qwen2-MoE's attention hands on no window, and has some; OLMoE's hands one on that no mask of it has."""
    plain = _answers(_model(family, **changes))
    other = _answers(_model(family, sliding_window=30)) if family == "qwen2_moe" else _answers(_model(family))
    assert torch.allclose(plain, other, rtol=0, atol=1e-4) == (family == "olmoe")
    if kernels == "native":
        found = _answers(whet.optimize(_model(family, **changes)))
    else:
        with plain_torch():
            found = _answers(whet.optimize(_model(family, **changes)))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_modernbert_with_angles_by_the_longest_row_runs_padded(kind: str) -> None:
    model = _model("modernbert")
    for of_kind in model.config.rope_parameters.values():
        of_kind["rope_type"] = kind
    with pytest.raises(ConfigError, match=rf"its rotary embeddings \({kind}\) depend on the longest row"):
        whet.optimize(model)
