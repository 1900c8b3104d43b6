"""The table: medians compared with the plain run's, and whether losses that must be equal are equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from whet.bench.runs import Row
from whet.strict_json import number_or_null

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2, "int8": 5e-2}
"""Relative difference allowed between losses that must be equal. Sums in another order differ by 1e-7 (fp32) or 4e-3
(half precision) in a product, and by 1e-2 in 8 bits because of stochastic rounding. AdamW divides by gradients that are
near 0 at the start, so the difference grows over the steps."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table; None for a value that was not measured."""

    name: str
    claim: str
    error: str | None = None
    skipped: str | None = None
    steps_per_s: float | None = None
    speed_ratio: float | None = None
    """Steps per second, divided by those of the plain run in the same round."""
    peak_bytes: int | None = None
    """Peak memory of model and training, above what the process held before the model was loaded."""
    peak_ratio: float | None = None
    loss: float | None = None
    """The loss of the last step."""
    losses: tuple[float, ...] = ()
    equal_to: str | None = None
    equal: bool | None = None
    """Whether the losses equal those of `equal_to`, to rounding."""
    largest_difference: float | None = None
    """Largest relative difference of a loss from that of `equal_to`."""
    precision: str | None = None
    runs: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return every field, ready for JSON; NaN and infinities become null."""
        fields = asdict(self)
        fields["losses"] = [number_or_null(loss) for loss in self.losses]
        fields["loss"] = number_or_null(self.loss)
        fields["largest_difference"] = number_or_null(self.largest_difference)
        fields["runs"] = [{**run, "losses": [number_or_null(loss) for loss in run["losses"]]} for run in self.runs]
        return fields


def lines(rows: Sequence[Row]) -> list[Line]:
    """Return the table; the first row is the plain run."""
    by_name = {row.technique.name: row for row in rows}
    return [_line(row, rows[0], by_name) for row in rows]


def _line(row: Row, plain: Row, by_name: Mapping[str, Row]) -> Line:
    one = row.technique
    if not row.works or not row.runs:
        return Line(name=one.name, claim=one.claim, error=row.error, skipped=row.skipped, equal_to=one.equal_to)
    pairs = list(zip(row.runs, plain.runs, strict=False))
    losses = tuple(row.runs[0]["losses"])
    other = by_name[one.equal_to] if one.equal_to else None
    differs = largest_difference(losses, other.runs[0]["losses"]) if other is not None and other.runs else None
    allowed = TOLERANCE.get(row.runs[0]["precision"], TOLERANCE["fp32"])
    equal = None if differs is None else differs <= allowed
    peaks = [run["peak_bytes"] for run in row.runs if run["peak_bytes"] is not None]
    return Line(
        name=one.name,
        claim=one.claim,
        error=None if equal in (None, True) else _unequal(one.equal_to, differs),
        steps_per_s=median(steps_per_s(run) for run in row.runs),
        speed_ratio=median(steps_per_s(run) / steps_per_s(plain_run) for run, plain_run in pairs),
        peak_bytes=int(median(peaks)) if peaks else None,
        peak_ratio=_peak_ratio(pairs),
        loss=losses[-1] if losses else None,
        losses=losses,
        equal_to=one.equal_to,
        equal=equal,
        largest_difference=differs,
        precision=row.runs[0]["precision"],
        runs=tuple(row.runs),
    )


def steps_per_s(run: Mapping[str, Any]) -> float:
    """Return the speed of one run: all timed steps together, because some techniques act only at some steps."""
    return len(run["step_s"]) / max(sum(run["step_s"]), 1e-9)


def largest_difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference of a loss from the loss it must be equal to; infinite for NaN."""
    if len(losses) != len(wanted) or not losses:
        return math.inf
    gaps = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(losses, wanted, strict=True)]
    return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)


def _peak_ratio(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float | None:
    known = [
        run["peak_bytes"] / plain_run["peak_bytes"]
        for run, plain_run in pairs
        if run["peak_bytes"] is not None and plain_run["peak_bytes"]
    ]
    return median(known) if known else None


def _unequal(name: str | None, differs: float | None) -> str:
    return f"its losses must equal those of {name}, and differ by up to {differs or 0:.2g} of them"
