"""Settings that operators take next to their tensors: the native ones, those of compiled graphs and the plain ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from whet.errors import ConfigError
from whet.kernels.batch_position import BatchPosition, Kernel, Site

Kind = Literal["gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class Drop:
    """Dropout with probability p at one site of a model; `at` makes it."""

    p: float
    position: BatchPosition
    site: int

    @classmethod
    def at(cls, site: Site, p: float, position: BatchPosition) -> Drop | None:
        """Return the dropout of this use of the site; None if p is 0.

        Raises ConfigError unless 0 <= p <= 1, as torch's own dropout does: the operators compute with any number.
        """
        if not 0.0 <= p <= 1.0:
            raise ConfigError(
                what="a dropout of the model is not a probability",
                got=p,
                why="it is the share of numbers that are set to zero",
                fix="use 0 to 1: config.json has one for each kind, such as attention_dropout or hidden_dropout_prob",
            )
        return cls(p, position, site.use()) if p else None

    @property
    def key(self) -> tuple[int, int]:
        """The key words of this site's stream in this step."""
        return self.position.key(self.site)

    @property
    def keep_scale(self) -> float:
        """The factor of kept values. With p = 1 every value becomes zero, as in torch."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0


@dataclass(frozen=True)
class Norm:
    """The parameters (D,) of a LayerNorm (Ba et al. 2016) or, without mean, an RMSNorm (Zhang and Sennrich 2019)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    rms: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """How attention runs: sequence r has the tokens cu_seqlens[r] to cu_seqlens[r + 1] and attends only to itself.

    `cu_seqlens` (rows + 1,) is int32. `max_seqlen` (), the tokens of the longest sequence, stays on the CPU, so that
    nothing waits for a GPU; None: it is computed from `cu_seqlens`. `key_counts` (rows,) int32, on the CPU: only the
    first key_counts[r] tokens of sequence r are keys; the others are padding tokens, which are queries alone. None: all
    tokens are keys. A causal mask requires None. `window`: a token attends only to keys at most this far from it; a
    token without any gives 0, as in torch's own attention. None: no such limit.
    """

    cu_seqlens: Tensor
    scale: float
    causal: bool = False
    drop: Drop | None = None
    max_seqlen: Tensor | None = None
    kernel: Kernel = "auto"
    key_counts: Tensor | None = None
    window: int | None = None


def window_of(sliding_window: int | None) -> int | None:
    """Return `AttentionSpec.window` for the number of keys that a token sees on one side, itself included.

    Raises ConfigError for less than one key: a negative window would mean none to the operators.
    """
    if sliding_window is not None and sliding_window < 1:
        raise ConfigError(
            what="a window of the model's attention holds no token",
            got=sliding_window,
            why="each token sees itself",
            fix="set sliding_window in config.json to 1 or more, or to null for none",
        )
    return None if sliding_window is None else sliding_window - 1


@dataclass(frozen=True)
class Relative:
    """Vectors by distance, for disentangled attention (He et al. 2021, arXiv:2006.03654, equation 4).

    With p = places[j - i + R], scale * (q_i . keys[p] + k_j . queries[p]) is added to the score of key j and query i.
    `keys` and `queries` (P, H, K) may be views whose last dimension is contiguous; None: without this term. `places`
    (2 R + 1,) is int32. No sequence is longer than R + 1.
    """

    keys: Tensor | None
    queries: Tensor | None
    places: Tensor


Bias = Tensor | Relative
"""What attention adds to its scores: numbers (H, 2 R + 1) by distance, or products with vectors by distance."""


@dataclass(frozen=True)
class Tables:
    """Embedding tables (entries, D) to sum. The row `padding_ids[i]` of table i, None: no row, gets no gradient."""

    tables: tuple[Tensor, ...]
    padding_ids: tuple[int | None, ...]


@dataclass(frozen=True)
class AdamWStep:
    """One step's constants: `step` counts from 1, and gradients are multiplied by `grad_scale` first (clipping)."""

    beta1: float
    beta2: float
    eps: float
    step: int
    grad_scale: float = 1.0
