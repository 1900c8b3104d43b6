"""An export next to the model that it came from: outputs, the task's metric, and rows per second, all measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from whet.errors import ConfigError

N_ROWS = 50
_SIZES = (1, 1, 2, 4, 8, 16, 18)
"""Rows of the batches that outputs are compared on: a graph that holds for one size alone gives itself away."""
_ROUNDS = 5
_ROUND_S = 1.0
"""A round of a measurement of speed takes at least about this long."""
Columns = Mapping[str, Tensor]
Forward = Callable[[Columns], Mapping[str, Any]]


Kind = Literal["rows", "tokens", "vectors", "scores"]
"""What a model gives: logits of each row or token, of which the largest counts, a vector of each row, or a score."""
WORDS: Mapping[Kind, str] = {"rows": "logits", "tokens": "logits", "vectors": "vectors", "scores": "scores"}


@dataclass(frozen=True)
class Outputs:
    """How the outputs of an export differ from torch's."""

    kind: Kind
    rows: int
    batches: int
    shortest_tokens: int
    longest_tokens: int
    largest_difference: float
    largest_value: float
    """Of torch's, without sign."""
    same_choice_frac: float | None
    """Of all rows, or tokens, how many have the same largest logit; None for vectors and scores."""
    cosine: tuple[float, float] | None
    """Of vectors: the smallest cosine of the two of a row, and the mean."""

    def require_close(self, within: float) -> None:
        """Raise ConfigError for an export that does not compute what the model computes."""
        allowed = within * max(1.0, self.largest_value)
        turned = 0.0 if self.cosine is None else 1 - self.cosine[0]
        if not (self.largest_difference <= allowed and turned <= within):  # NaN is not close
            words = WORDS[self.kind]
            cosine = f"; a cosine of {self.cosine[0]:.6f}" if self.cosine else ""
            raise ConfigError(
                what="the export does not compute what the model computes",
                got=f"{words} off by {self.largest_difference:.3g}, the largest is {self.largest_value:.3g}{cosine}",
                why=f"on {self.rows} rows they may differ by {allowed:.3g}; nothing was kept",
                fix="try the other format of --to; if a larger difference is fine for you, say so in --max_difference",
            )


@dataclass(frozen=True)
class Metric:
    """The task's metric of both, on the same examples."""

    name: str
    examples: int
    file: str
    torch: float
    exported: float
    drop_points: float
    """By how many points of 100 the export is worse; negative if it is better."""
    unit: str = "rows"
    """What `examples` counts: a long text has several rows."""

    def require_kept(self, most_points: float, others: str) -> None:
        """Raise ConfigError for an int8 export that has lost too much; `others` are ways to lose less."""
        if not self.drop_points <= most_points:
            raise ConfigError(
                what=f"the int8 export loses {self.drop_points:.2f} points of {self.name}",
                got=f"{self.exported:.4f}, torch {self.torch:.4f}, on {self.examples:,} {self.unit} of {self.file}",
                why=f"it may lose {most_points:g} (--max_metric_drop); nothing was kept",
                fix=f"{others}, export without --int8, or allow more in --max_metric_drop",
            )


@dataclass(frozen=True)
class Speed:
    """Rows per second of both on the same padded batches: the median of some rounds, with the slowest and fastest."""

    batch_rows: int
    threads: int
    rounds: int
    torch_rows_per_s: tuple[float, float, float]
    """Median, slowest, fastest."""
    exported_rows_per_s: tuple[float, float, float]

    @property
    def times_torch(self) -> float:
        """How many times the rows per second of torch."""
        return self.exported_rows_per_s[0] / self.torch_rows_per_s[0]

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        found: dict[str, Any] = asdict(self)
        for side in ("torch", "exported"):
            values = found.pop(f"{side}_rows_per_s")
            found[f"{side}_rows_per_s"] = dict(zip(("median", "slowest", "fastest"), values, strict=True))
        return found | {"times_torch": self.times_torch}


def spread(n: int, most: int, longest: int) -> list[int]:
    """Return the indices of `most` of n rows, evenly spread, the longest row among them; rows repeat if n is less."""
    chosen = [*np.linspace(0, n - 1, min(most, n)).astype(int).tolist()]
    if longest not in chosen:
        chosen[len(chosen) // 2] = longest
    return [chosen[place % len(chosen)] for place in range(most)]


def compared(
    rows: Sequence[Any], pad: Callable[..., Columns], length: int, one: Forward, other: Forward, kind: Kind
) -> Outputs:
    """Return how the outputs of `other` differ from those of `one`, on these rows in batches of many sizes.

    `pad` makes a batch of rows, padded to its longest, or to `full` tokens: the last batch has `length`. Of tokens,
    those of the padding do not count.
    """
    off, largest = [0.0], [0.0]
    n_batches = 0
    widths: list[int] = []
    same: list[Tensor] = []
    cosines: list[Tensor] = []
    for columns in _batches(rows, pad, length):
        wanted, found = one(columns), other(columns)
        real = columns["attention_mask"].bool()
        widths.append(real.shape[1])
        n_batches += 1
        for name, value in wanted.items():
            sides = [side[real] if kind == "tokens" else side for side in (value.float(), found[name].float())]
            off.append(_largest(sides[0] - sides[1]))
            largest.append(_largest(sides[0]))
            if kind == "vectors":
                cosines.append(functional.cosine_similarity(sides[0].double(), sides[1].double(), dim=-1))
            elif kind == "tokens" and value.ndim == 2:  # scores of the tokens of a row: where an answer begins, or ends
                masked = [side.masked_fill(~real, -torch.inf).argmax(-1) for side in (value, found[name])]
                same.append(masked[0] == masked[1])
            elif kind != "scores":
                same.append(sides[0].argmax(-1) == sides[1].argmax(-1))
    return Outputs(
        kind, len(rows), n_batches, min(widths), max(widths),
        float(np.max(off)), float(np.max(largest)),  # NaN if one is NaN, which max of Python drops
        same_choice_frac=float(torch.cat(same).float().mean()) if same else None,
        cosine=(float(torch.cat(cosines).min()), float(torch.cat(cosines).mean())) if cosines else None,
    )  # fmt: skip


def _batches(rows: Sequence[Any], pad: Callable[..., Columns], length: int) -> Iterator[Columns]:
    begin = 0
    for size in _SIZES:
        if chosen := rows[begin : begin + size]:
            yield pad(chosen)
        begin += size
    yield pad(rows[:3], full=length)


def _largest(values: Tensor) -> float:
    """Return the largest size of these numbers; NaN if one is no number."""
    size = values.abs().max() if values.numel() else values.new_zeros(())
    return float("nan") if bool(values.isnan().any()) else float(size)


def rows_per_s(batches: Sequence[Columns], forward: Forward) -> tuple[float, float, float]:
    """Return the rows of a second over these batches: the median of some rounds, the slowest, the fastest."""
    began = time.perf_counter()
    forward(batches[0])  # which also allocates, and chooses kernels
    forward(batches[-1])
    once_s = (time.perf_counter() - began) / 2
    n_passes = max(1, round(_ROUND_S / max(once_s * len(batches), 1e-4)))
    n_rows = n_passes * sum(len(one["input_ids"]) for one in batches)
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(n_passes):
            for columns in batches:
                forward(columns)
        found.append(n_rows / (time.perf_counter() - began))
    return median(found), min(found), max(found)


def speed(batches: Sequence[Columns], torch_s: tuple[float, float, float], forward: Forward) -> Speed:
    """Return the speed of the export next to torch's, which was measured before the runtime had any threads."""
    return Speed(len(batches[0]["input_ids"]), torch.get_num_threads(), _ROUNDS, torch_s, rows_per_s(batches, forward))
