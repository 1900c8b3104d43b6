"""Encoders that look like EuroBERT and mix the rows of a packed batch, each in a way of its own."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EuroBertConfig, EuroBertModel, MobileBertConfig, MobileBertModel, OlmoConfig, OlmoModel
from transformers.models.eurobert.modeling_eurobert import EuroBertAttention

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 3,
}


def config(**changes: Any) -> EuroBertConfig:
    return EuroBertConfig(**SIZES, **changes)


def _replace_attention(model: Any, cls: type[nn.Module]) -> None:
    for number, layer in enumerate(model.layers):
        layer.self_attn = cls(model.config, number)


class WindowedAttention(EuroBertAttention):
    """Attends to the four tokens on each side: its mask is of the distances in the batch, not in the row."""

    def forward(self, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        place = torch.arange(hidden_states.shape[1])
        near = ((place[:, None] - place).abs() <= self.config.local_window)[None, None]
        mask = near if attention_mask is None else near & attention_mask
        return super().forward(hidden_states, *args, attention_mask=mask, **options)


class BiasedAttention(EuroBertAttention):
    """Adds a learnt bias of the distance, which is zero in a new model."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.relative_bias = nn.Parameter(torch.zeros(1, 9))

    def forward(self, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        place = torch.arange(hidden_states.shape[1])
        bias = self.relative_bias[0][(place[:, None] - place).clamp(-4, 4) + 4][None, None]
        if attention_mask is not None:
            bias = bias.masked_fill(~attention_mask, -1e9)
        return super().forward(hidden_states, *args, attention_mask=bias, **options)


class Windowed(EuroBertModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        config.local_window = 48
        _replace_attention(self, WindowedAttention)


class Biased(EuroBertModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _replace_attention(self, BiasedAttention)


class Shifted(EuroBertModel):
    """Adds to each token a hundredth of the one before it in the batch."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        words = self.embed_tokens(input_ids)
        words = words + nn.functional.pad(words[:, :-1], (0, 0, 1, 0)) * 0.01
        none: Any = None
        return super().forward(none, attention_mask, position_ids, words, **rest)


class Whispering(EuroBertModel):
    """Adds a millionth of the batch's mean: within any tolerance, but not apart."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        out: Any = super().forward(input_ids, attention_mask, position_ids, **rest)
        out.last_hidden_state = out.last_hidden_state + 1e-6 * out.last_hidden_state.mean()
        return out


class OwnPositions(EuroBertModel):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **rest: Any) -> Any:
        return super().forward(input_ids, attention_mask, None, **rest)


class Noisy(EuroBertModel):
    """Adds noise in training, as some recipes of fine-tuning do."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        out: Any = super().forward(input_ids, attention_mask, position_ids, **rest)
        if self.training:
            out.last_hidden_state = out.last_hidden_state + torch.rand_like(out.last_hidden_state) * 0.1
        return out


class SkipsLayers(EuroBertModel):
    """Draws from Python's generator in training, as layer dropout of transformers did."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        out: Any = super().forward(input_ids, attention_mask, position_ids, **rest)
        if self.training and random.random() < 1e-9:
            out.last_hidden_state = out.last_hidden_state * 0.0
        return out


class Random(EuroBertModel):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        out: Any = super().forward(input_ids, attention_mask, position_ids, **rest)
        out.last_hidden_state = out.last_hidden_state + torch.rand(1) * 1e-7
        return out


class Counting(EuroBertModel):
    """Keeps a running mean of what it has seen."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        out: Any = super().forward(input_ids, attention_mask, position_ids, **rest)
        self.seen += 1.0
        return out


class Experts(EuroBertModel):
    def __init__(self, config: Any) -> None:
        config.num_experts = 4
        super().__init__(config)


class Convolved(EuroBertModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.smooth = nn.Conv1d(32, 32, 3, padding=1)


class Reaching(EuroBertModel):
    """Says that it attends over more tokens than a proof can run."""

    def __init__(self, config: Any) -> None:
        config.sliding_window = 100_000
        super().__init__(config)


def olmo() -> OlmoModel:
    return OlmoModel(OlmoConfig(**SIZES))


def dynamic_rotary() -> EuroBertModel:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return EuroBertModel(config(rope_parameters=rope))


def mobilebert() -> MobileBertModel:
    """As it is in transformers: its embeddings join each token with its neighbours."""
    return MobileBertModel(MobileBertConfig(**SIZES, embedding_size=32, true_hidden_size=32, intra_bottleneck_size=32))
