"""How many floating point operations the matrix products of one training step on real tokens take.

A product (n, k) x (k, m) counts 2 n k m. Each linear layer has three: its output, the gradient of its input and that of
its weight (embeddings are trained, so the first layer's input has a gradient too). Attention has two per row and layer
forward (scores, and the weighted sum), and two gradients for each. What is recomputed is not counted, nor is anything
that is no product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PRODUCTS_PER_LINEAR = 3
ATTENTION_PRODUCTS = 6


@dataclass(frozen=True)
class Encoder:
    """The sizes of an encoder with a question answering head."""

    width: int
    inner: int
    n_layers: int
    n_outputs: int = 2


@dataclass(frozen=True)
class Linear:
    """A linear layer (k -> m), and how often the model has one of this shape."""

    k: int
    m: int
    count: int


def encoder_of(config: Mapping[str, Any]) -> Encoder:
    """Return the sizes in a BERT's or DistilBERT's config.json."""
    if config["model_type"] == "distilbert":
        return Encoder(config["dim"], config["hidden_dim"], config["n_layers"])
    return Encoder(config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"])


def linears(encoder: Encoder) -> list[Linear]:
    """Return the linear layers; query, key and value joined, the faster way to multiply them."""
    d, f, n = encoder.width, encoder.inner, encoder.n_layers
    layers = [Linear(d, 3 * d, n), Linear(d, d, n), Linear(d, f, n), Linear(f, d, n)]
    return [*layers, Linear(d, encoder.n_outputs, 1)]


def linear_flops(encoder: Encoder, n_tokens: int) -> int:
    """Return the operations of all linear layers, forward and backward, over this many tokens."""
    weights = sum(layer.k * layer.m * layer.count for layer in linears(encoder))
    return PRODUCTS_PER_LINEAR * 2 * n_tokens * weights


def attention_flops(encoder: Encoder, lengths: Sequence[int]) -> int:
    """Return the operations of attention's products, forward and backward, each row over its own tokens only."""
    squares = sum(length * length for length in lengths)
    return ATTENTION_PRODUCTS * 2 * squares * encoder.width * encoder.n_layers


def step_flops(encoder: Encoder, lengths: Sequence[int]) -> int:
    """Return the operations of a whole training step on rows of these lengths."""
    return linear_flops(encoder, sum(lengths)) + attention_flops(encoder, lengths)


def limit_s(encoder: Encoder, lengths: Sequence[int], linear_s: float) -> float:
    """Return the least seconds of a step: its products at the rate at which the linear ones took `linear_s`.

    Attention's products are counted at that rate too. They are smaller, and no library reaches it with them: so this
    limit is below what the products can take.
    """
    rate = linear_flops(encoder, sum(lengths)) / linear_s
    return step_flops(encoder, lengths) / rate
