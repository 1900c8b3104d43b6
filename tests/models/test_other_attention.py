"""What is said of models whose attention whet does not know."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import engine
import whet
from tiny import arguments, losses, padded, tiny_model, tiny_rows
from tiny_decoders import tiny_decoder
from whet.errors import ConfigError


class BertSelfAttention(nn.Module):
    """Has the name of transformers' class, and computes something else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return self.mix(hidden_states.cumsum(1)), None


def test_an_attention_of_another_package_is_named_with_it() -> None:
    model = tiny_model("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self = BertSelfAttention(model.config.hidden_size)
    with pytest.raises(ConfigError) as found:
        whet.optimize(model)
    said = f"{BertSelfAttention.__module__}.BertSelfAttention in place of BertSelfAttention of transformers.models.bert"
    assert said in str(found.value)


@wraps(sdpa_attention_forward)
def _bent(*given: Any, **options: Any) -> Any:
    """Compute something else than transformers, by a function that looks like its own."""
    found, weights = sdpa_attention_forward(*given, **options)
    return found.sin() * 3, weights


def _narrow(*given: Any, **options: Any) -> Any:
    """Make a mask in which no token sees the second one."""
    found = sdpa_mask(*given, **options | {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False})
    assert found is not None
    found = found.clone()
    found[..., 1] = False
    return found


_OWN = {
    "an attention of a new name": ("mine", {"attention": _bent}),
    "an attention under a name of transformers": ("sdpa", {"attention": _bent}),
    "a mask of a new name": ("mine", {"attention": sdpa_attention_forward, "mask": _narrow}),
    "a mask under a name of transformers": ("sdpa", {"mask": _narrow}),
}


@pytest.mark.parametrize("own", _OWN)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_registered_function_of_a_users_own_is_what_computes(
    family: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, functions = _OWN[own]
    for what, registry in (("attention", AttentionInterface), ("mask", AttentionMaskInterface)):
        if what in functions:
            monkeypatch.setitem(registry._global_mapping, name, functions[what])

    def made() -> Any:
        model = tiny_decoder("llama", use_cache=False) if family == "llama" else tiny_model(family)
        model.set_attn_implementation(name)
        return model

    with pytest.raises(ConfigError, match=f"function of its attention implementation '{name}' is not one of transf"):
        whet.optimize(made())
    rows: Any = [dict(row) for row in tiny_rows(4, "llama" if family == "llama" else family, lengths=(6, 12))]
    if family == "llama":
        rows = [{"input_ids": list(row["input_ids"]), "labels": list(row["input_ids"])} for row in rows]
    trainer = engine.Trainer(made(), arguments(tmp_path, max_steps=1, precision="fp32"), _collate, rows)
    trainer.train()
    with torch.no_grad():
        wanted = float(made().train()(**_collate(rows)).loss)
    assert losses(trainer) == pytest.approx([wanted], rel=1e-5)  # fp32 sums in another order


def _collate(rows: Any) -> dict[str, Tensor]:
    batch = padded([{name: list(v) if not isinstance(v, int) else v for name, v in row.items()} for row in rows], 0)
    if "labels" in batch:
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


class OwnLayer(nn.Module):
    """A block of somebody's own: no module of transformers, and an attention that no pass keeps within a row."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.mix, self.n_heads = nn.Linear(config.hidden_size, config.hidden_size), config.num_attention_heads

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        x = self.mix(hidden_states).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return hidden_states + scaled_dot_product_attention(x, x, x, attn_mask=attention_mask).transpose(1, 2).flatten(
            2
        )


class OwnStack(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OwnLayer(config), OwnLayer(config)])

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        for block in self.blocks:
            hidden_states = block(hidden_states, attention_mask)
        return (hidden_states,)


def _first(model: Any) -> str:
    model.bert.encoder.layer[0] = OwnLayer(model.config)
    return f"it has {OwnLayer.__module__}.OwnLayer in place of BertLayer"


def _last(model: Any) -> str:
    model.bert.encoder.layer[-1] = OwnLayer(model.config)
    return f"it has {OwnLayer.__module__}.OwnLayer in place of BertLayer"


def _all(model: Any) -> str:
    model.bert.encoder.layer = OwnStack(model.config).blocks
    return "it has no block in place of BertLayer"


def _stack(model: Any) -> str:
    model.bert.encoder = OwnStack(model.config)
    return "it has no block in place of BertLayer"


@pytest.mark.parametrize("change", [_first, _last, _all, _stack])
def test_blocks_of_a_users_own_keep_the_padding(change: Any, tmp_path: Path) -> None:
    model = tiny_model("bert")
    why = change(model)
    with pytest.raises(ConfigError) as found:
        whet.optimize(model)
    assert why in str(found.value)
    assert not engine.Trainer(model=model, args=arguments(tmp_path)).objective.packed


class Around(nn.Module):
    """Somebody's module around a block, as checkpoints are."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *given: Any, **options: Any) -> Any:
        return self.block(*given, **options)


def test_a_wrapped_block_is_a_block() -> None:
    plain, model = tiny_model("bert").eval(), tiny_model("bert").eval()
    model.bert.encoder.layer[0] = Around(model.bert.encoder.layer[0])
    model, batch = whet.optimize(model), padded(list(tiny_rows(4)), 0)
    found, wanted = (one(**batch).start_logits[batch["attention_mask"].bool()] for one in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def _moe() -> Any:
    return AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1,
        )
    )  # fmt: skip


def test_a_mixture_of_experts_trains_packed_and_takes_optimize(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 4
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    model = _moe().eval()
    with torch.no_grad():
        before = model(ids, labels=ids).loss
        assert torch.allclose(whet.optimize(model)(ids, labels=ids).loss, before, rtol=1e-5)  # fp32 sums
    trainer = engine.Trainer(_moe(), arguments(tmp_path, precision="auto", max_steps=1), train_dataset=rows)
    assert trainer.objective.packed
    trainer.train()
