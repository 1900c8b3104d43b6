"""Counts what a run has done and how fast: tokens, padding avoided, losses since the last log, and the time left."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields

from whet.data.batch import Batch
from whet.store import schema
from whet.store.state import State


@dataclass(frozen=True)
class StepResult:
    """The result of one step."""

    loss: float
    """Mean over the targets of all micro-batches of the step."""
    grad_norm: float
    """Euclidean norm of the gradient before clipping."""
    finite: bool
    """Whether loss and gradient are finite on every rank."""
    applied: bool
    """Whether the weights were updated: False for a step that is not finite, or whose loss is a spike."""
    grad_scale: float = 1.0
    """The factor of clipping, which the update applies to the gradient."""
    rescaled: bool = False
    """Not applied, but not a failure: the loss scale of fp16 was too high and has been lowered."""
    loss_parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the loss, averaged as the loss is."""


_KINDS = {
    "loss_total": schema.number,
    "n_losses": schema.count,
    "n_skipped": schema.count,
    "n_rows": schema.count,
    "window": schema.list_of(schema.loss),
}
_LATER_KINDS = {
    "part_windows": schema.object_of(schema.list_of(schema.loss)),
    "n_computed": schema.count,
    "n_padded": schema.count,
    "totals": schema.object_of(lambda value: schema.number(value) and value >= 0),
}
"""Those that some checkpoints lack."""


@dataclass(frozen=True)
class Totals:
    """What the processes of a run have done."""

    n_steps: int = 0
    n_rows: int = 0
    n_tokens: int = 0
    """Real tokens."""
    elapsed_s: float = 0.0
    """Since each process was ready for its first step."""
    training_s: float = 0.0
    """Of the steps alone."""

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second of the steps."""
        return self.n_tokens / max(self.training_s, 1e-9)


def counts_of(batches: Sequence[Batch], padded_length: int | None = None) -> list[int]:
    """Return how many rows, real tokens, computed tokens and tokens of a padded run these batches have.

    A padded run pads each row to `padded_length`, or to the longest of its batch if that is longer or there is none.
    """
    counted = [
        (one.n_rows, one.n_tokens, one.n_computed, max(one.n_padded, one.n_rows * (padded_length or 0)))
        for one in batches
        if not one.is_extra
    ]
    columns = zip(*counted, strict=True)
    return [sum(column) for column in columns] or [0] * 4


@dataclass(frozen=True)
class Ahead:
    """What a run has still to do."""

    n_steps: int
    n_tokens: float | None = None
    """Real tokens of these steps; None if nobody knows the lengths of rows before they are read."""
    pauses: Mapping[str, int] = field(default_factory=dict)
    """Evaluation or saving -> how often it will come; one that is due after the last step counts, until it is done."""
    forward_tokens: Mapping[str, float] = field(default_factory=dict)
    """Kind of a pause -> the tokens that it runs through the model, forward alone."""


class Clock:
    """Seconds that the parts of a run have taken in this process, by the monotonic clock, and so the time that is left.

    The parts are data, forward_backward and update, which make a step, and the pauses between steps: evaluation and
    saving. A mean over steps would mislead: rows that are grouped by length begin with the longest. So steps count by
    their tokens, and one of long ago counts less, as the load of a machine changes.
    """

    def __init__(self, ahead: Callable[[], Ahead] = lambda: Ahead(0)) -> None:
        self.seconds: dict[str, float] = {}
        self.ahead = ahead
        """Returns what is left after the steps that are done; it is asked when somebody asks for the time."""
        self._n_times: Counter[str] = Counter()
        self._since_step: Counter[str] = Counter()
        """How often each part has come since the last step."""
        self._began_s = time.perf_counter()
        self._n_known, self._n_warm = 0, _WARM_STEPS
        self._steps = self._tokens = self._step_s = 0.0

    @contextmanager
    def of(self, part: str, *, n_times: int = 1) -> Iterator[None]:
        """Add the time of the block to this part, also if it raises; 0 times: it is more of the one before."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - began_s, n_times=n_times)

    def add(self, part: str, seconds: float, *, n_times: int = 1) -> None:
        """Add time to this part, as `of` does."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self._n_times[part] += n_times
        self._since_step[part] += n_times

    def begin_step(self) -> None:
        """Note that a step begins now."""
        self._began_s = time.perf_counter()

    def end_step(self, n_tokens: int) -> None:
        """Count the step that began last, of so many real tokens, up to now."""
        self.add_step(time.perf_counter() - self._began_s, n_tokens)

    def add_step(self, seconds: float, n_tokens: int) -> None:
        """Count a step. The first one starts threads and takes memory from the system: the second one replaces it."""
        kept = 0.0 if self._n_warm else _KEPT
        self._n_known, self._n_warm = self._n_known + 1, max(self._n_warm - 1, 0)
        self._steps = kept * self._steps + 1
        self._tokens = kept * self._tokens + n_tokens
        self._step_s = kept * self._step_s + seconds
        self._since_step.clear()

    def forget_pace(self) -> None:
        """Let the next steps replace those so far, which something slowed that is over; the first is slow too."""
        self._n_warm = _WARM_STEPS

    @property
    def training_s(self) -> float:
        """Seconds of the steps, without evaluations and saves."""
        return sum(self.seconds.get(part, 0.0) for part in ("data", "forward_backward", "update"))

    @property
    def left_s(self) -> float:
        """Seconds until the run is done; 0 before the first step.

        A kind of pause that has not come yet counts by its forward passes, at a third of a step's time for each token.
        """
        if not self._n_known:
            return 0.0
        ahead = self.ahead()
        return self._steps_left_s(ahead) + sum(
            max(n - self._since_step[kind], 0) * self._usual_s(kind, ahead) for kind, n in ahead.pauses.items()
        )

    @property
    def steps_left_s(self) -> float:
        """Seconds of the steps that are left, without pauses; 0 before the first step."""
        return self._steps_left_s(self.ahead()) if self._n_known else 0.0

    def _steps_left_s(self, ahead: Ahead) -> float:
        by_tokens = ahead.n_tokens is not None and self._tokens > 0
        done, left = (self._tokens, ahead.n_tokens or 0.0) if by_tokens else (self._steps, float(ahead.n_steps))
        return left * self._step_s / done

    def _usual_s(self, pause: str, ahead: Ahead) -> float:
        if n := self._n_times[pause]:
            return self.seconds[pause] / n
        return ahead.forward_tokens.get(pause, 0.0) * self._step_s / self._tokens / 3 if self._tokens else 0.0


_WARM_STEPS = 2
"""Each of so many steps replaces what is known of the pace."""
_KEPT = 1.0 - 1.0 / 200.0
"""How much a step counts after the next one: steps of the last few hundred make the mean."""


@dataclass
class Meter:
    """Counts of one run in this process, unless they say otherwise; times come from the monotonic clock."""

    before: Totals = field(default_factory=Totals)
    """What earlier processes of the run had done by the checkpoint; nothing if that does not say it."""
    started_s: float = field(default_factory=time.perf_counter)
    """When this process was ready for its first step."""
    n_steps: int = 0
    n_rows: int = 0
    n_rows_before: int = 0
    """Rows that earlier processes of the run trained on."""
    n_tokens: int = 0
    n_computed: int = 0
    """Tokens that the run computed, including those before a resume."""
    n_padded: int = 0
    """What they would be with padding."""
    n_skipped: int = 0
    """Steps not applied because loss or gradient were not finite."""
    loss_total: float = 0.0
    """Sum of the losses of all applied steps of the run, including those before a resume."""
    n_losses: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    """The rate of the last step."""
    last_loss: float = float("nan")
    window: list[float] = field(default_factory=list)
    """Losses of the steps since the last log."""
    part_windows: dict[str, list[float]] = field(default_factory=dict)
    """Name of a part of the loss -> its values since the last log; empty for most losses."""
    clock: Clock = field(default_factory=Clock)
    """Where the time of the run goes, and when it will end."""

    def add(self, counts: Sequence[int], result: StepResult, learning_rate: float) -> None:
        """Count one optimizer step of all ranks, `counts` as `counts_of` returns them, taken at this learning rate."""
        self.learning_rate = learning_rate
        self.n_steps += 1
        self.grad_norm = result.grad_norm
        self.last_loss = result.loss
        n_rows, n_tokens, n_computed, n_padded = counts
        self.n_rows += n_rows
        self.n_tokens += n_tokens
        self.n_computed += n_computed
        self.n_padded += n_padded
        self.window.append(result.loss)
        for name, part in result.loss_parts.items():
            self.part_windows.setdefault(name, []).append(part)
        if result.applied:
            self.loss_total += result.loss
            self.n_losses += 1
        else:
            self.n_skipped += 1

    def take_losses(self) -> dict[str, float]:
        """Return the mean loss of the steps since the last call, and that of its parts, and start the next interval.

        A mean is NaN if one of its values was.
        """
        windows = {"loss": self.window, **self.part_windows}
        self.window, self.part_windows = [], {}
        return {name: sum(losses) / len(losses) if losses else float("nan") for name, losses in windows.items()}

    def state(self) -> State:
        """Return what the figures of the complete run and the next log need."""
        parts = {name: _as_json(losses) for name, losses in self.part_windows.items()}
        return {
            "loss_total": self.loss_total,
            "n_losses": self.n_losses,
            "n_skipped": self.n_skipped,
            "n_rows": self.n_rows_before + self.n_rows,
            "n_computed": self.n_computed,
            "n_padded": self.n_padded,
            "window": _as_json(self.window),
            "totals": asdict(self.totals),
        } | ({"part_windows": parts} if parts else {})

    def load_state(self, saved: State) -> None:
        """Continue from the saved counts."""
        schema.require_all(saved, _KINDS, "meter")
        schema.require_types(saved, _LATER_KINDS, "meter")
        self.loss_total, self.n_losses, self.n_skipped = saved["loss_total"], saved["n_losses"], saved["n_skipped"]
        self.n_rows_before = saved["n_rows"]
        self.before = _totals_of(saved.get("totals", {}))
        self.n_computed, self.n_padded = saved.get("n_computed", 0), saved.get("n_padded", 0)
        self.window = [float(loss) for loss in saved["window"]]
        parts = saved.get("part_windows", {})
        self.part_windows = {name: [float(loss) for loss in losses] for name, losses in parts.items()}

    def start(self) -> None:
        """Count the time from now on: this process is ready for its first step."""
        self.started_s = time.perf_counter()

    @property
    def totals(self) -> Totals:
        """What all processes of the run have done; one that takes no step adds no time."""
        before, elapsed_s = self.before, time.perf_counter() - self.started_s
        return Totals(
            n_steps=before.n_steps + self.n_steps,
            n_rows=before.n_rows + self.n_rows,
            n_tokens=before.n_tokens + self.n_tokens,
            elapsed_s=before.elapsed_s + (elapsed_s if self.n_steps else 0.0),
            training_s=before.training_s + self.clock.training_s,
        )

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second of the steps of this process."""
        return self.n_tokens / max(self.clock.training_s, 1e-9)

    @property
    def padding_avoided_frac(self) -> float:
        """Fraction of the padded tokens that was not computed; 0 if more were, as a batch is filled up."""
        return max(1.0 - self.n_computed / self.n_padded, 0.0) if self.n_padded else 0.0

    @property
    def mean_loss(self) -> float:
        """Mean loss over the steps of the run."""
        return self.loss_total / self.n_losses if self.n_losses else float("nan")


def _totals_of(saved: Mapping[str, float]) -> Totals:
    """Return the saved totals; none at all if one is missing, as their quotients would be of different times."""
    if saved.keys() != {one.name for one in fields(Totals)}:
        return Totals()
    n_steps, n_rows, n_tokens = (int(saved[name]) for name in ("n_steps", "n_rows", "n_tokens"))
    return Totals(n_steps, n_rows, n_tokens, saved["elapsed_s"], saved["training_s"])


def _as_json(losses: Sequence[float]) -> list[float | str]:
    """Return the losses with words for NaN and the infinities, which JSON does not have."""
    return [loss if math.isfinite(loss) else str(loss) for loss in losses]


def speed(prefix: str, seconds: float, n_rows: int, n_steps: int) -> dict[str, float]:
    """Return the run's figures under transformers' names."""
    return {
        f"{prefix}runtime": round(seconds, 4),
        f"{prefix}samples_per_second": round(n_rows / seconds, 3),
        f"{prefix}steps_per_second": round(n_steps / seconds, 3),
    }
