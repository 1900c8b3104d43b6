"""How long a step and a run will take, by part, from the rates of a machine and the sizes of model and rows.

A pass is the sum of its blocks (by weights and tokens), their attention (by the length of each row), the head (by
targets) and what surrounds them; each part's seconds come from `rates.py`. Steps are forecast one by one over the run's
own rows, so their lengths count as they are. What is not measured, the forecast says in `doubts` and widens its range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from whet import console
from whet.plan.anatomy import Anatomy, MicroBatch, Reading, Workload
from whet.plan.rates import FORMATS, Kind, Part, Rates
from whet.plan.show import TIME
from whet.precision.compare import MARGIN, is_worth_timing, n_timed_rows

StepPart = Literal["data", "forward", "backward", "exchange", "optimizer"]
RunPart = Literal["start", "trial", "data", "forward", "backward", "exchange", "optimizer", "evaluation", "saving"]
STEP_PARTS: tuple[StepPart, ...] = ("data", "forward", "backward", "exchange", "optimizer")

_TRIAL_ROUNDS = 3
"""Tokens of the passes that compare two formats before the first step, and how often both run, about."""
_NARROW_HEAD = 64
"""A head with fewer outputs for each number of the width is one of those that were timed around the blocks."""
_USUAL_ERROR = 0.15
_WORDS_EXPONENT = 0.715
"""A text of n tokens uses about n to this power of a vocabulary's rows (Heaps' law)."""
_LOAD_FACTOR = 4.0
"""Reading a weight file, checking it and copying it takes so many copies in memory."""
_READS_ALL = "ForQuestionAnswering"
"""The end of the names of heads that read every token, whatever the targets of their loss."""
_EXCHANGE_COPIES = (32.0, 76.0, 101.0, 112.0)
"""By stage of ZeRO, in how many times the time of a copy in memory ranks of one machine exchange a byte of the trained
weights, times (n - 1) / n: from `benchmarks/plan/run.py --only ranks`, two ranks of one thread on a Zen 5, where gloo
goes through the loopback interface. 0: gradients are summed; 1: and weights given to all; 2: weights are collected once
a step, 3: twice."""
_SELECTIVE = 0.15
"""The share of a block's forward pass that lies between its products."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """A forecast of the time, in seconds. A step is the mean of the run's steps."""

    precision: str
    """The number format: that of the settings, or what `auto` should choose."""
    step: Mapping[StepPart, float]
    run: Mapping[RunPart, float]
    error_frac: float
    """The forecast is off by at most this share, most of the time."""
    evaluation_s: float = 0.0
    """One evaluation."""
    save_s: float = 0.0
    """One checkpoint."""
    doubts: tuple[str, ...] = ()
    """Why the range is wider than usual."""

    @property
    def step_s(self) -> float:
        """One optimizer step."""
        return sum(self.step.values())

    @property
    def train_s(self) -> float:
        """The training, with its trial of a number format, evaluations and checkpoints; that of all seeds."""
        return sum(seconds for part, seconds in self.run.items() if part != "start")

    @property
    def total_s(self) -> float:
        """From the command to its end."""
        return sum(self.run.values())

    @property
    def range_s(self) -> tuple[float, float]:
        """The shortest and the longest time from the command to its end that are likely."""
        return self.total_s / (1 + self.error_frac), self.total_s * (1 + self.error_frac)

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        low_s, high_s = self.range_s
        return {
            "precision": self.precision, "step_s": self.step_s, "step": dict(self.step), "train_s": self.train_s,
            "total_s": self.total_s, "run": dict(self.run), "low_s": low_s, "high_s": high_s,
            "doubts": list(self.doubts),
        }  # fmt: skip


def forecast(rates: Rates, anatomy: Anatomy, work: Workload) -> Seconds:
    """Return how long the run will take on the machine that has these rates."""
    precision = chosen_precision(rates, anatomy, work)
    clock = _Passes(rates, anatomy, precision)
    steps = [clock.step(step, work) for step in work.steps]
    by_rows = {"data", "forward", "backward"}
    step: dict[StepPart, float] = {
        part: float(np.mean([one[part] for one in steps])) * (_usual_rows(work) if part in by_rows else 1.0)
        for part in STEP_PARTS
    }
    evaluation_s = 0.0 if work.evaluation is None else clock.read(work.evaluation)
    save_s = work.save_bytes * (rates.numbers["save_byte"] + 2 * rates.numbers["copy_byte"])
    seed: dict[RunPart, float] = {
        **{part: seconds * work.n_steps for part, seconds in step.items()},
        "evaluation": work.n_evaluations * evaluation_s + sum(map(clock.read, work.readings)),
    }
    n_saves = work.n_saves if work.save_interval_s is None else 1 + int(sum(seed.values()) / work.save_interval_s)
    seed["saving"] = n_saves * save_s
    load_s = _LOAD_FACTOR * sum(one.weight_bytes for one in _models(anatomy)) * rates.numbers["copy_byte"]
    n_trials = 1 if anatomy.precision == "auto" else work.n_seeds  # other seeds take the format of the first
    run: dict[RunPart, float] = {
        "start": rates.numbers["start"] + work.n_seeds * load_s,
        "trial": n_trials * _trial_s(rates, anatomy, work, precision),
        **{part: seconds * work.n_seeds for part, seconds in seed.items()},
    }
    doubts = tuple(_doubts(rates, anatomy, work, precision))
    error = math.hypot(_USUAL_ERROR, rates.noise, *(width for _, width in doubts))
    return Seconds(
        precision=precision, step=step, run=run, error_frac=error, evaluation_s=evaluation_s, save_s=save_s,
        doubts=tuple(text for text, _ in doubts),
    )  # fmt: skip


def _models(anatomy: Anatomy) -> list[Anatomy]:
    """Return the model and its teacher."""
    return [anatomy, *([] if anatomy.teacher is None else [anatomy.teacher])]


def _usual_rows(work: Workload) -> float:
    """Return how many times as many tokens a step of the run has as those that were looked at."""
    looked_at = sum(batch.n_tokens for step in work.steps for batch in step) / len(work.steps)
    return 1.0 if work.n_tokens is None or not looked_at else work.n_tokens / max(work.n_steps, 1) / looked_at


def chosen_precision(rates: Rates, anatomy: Anatomy, work: Workload) -> str:
    """Return the number format of the run: for `auto` the one that its trial before the first step would choose."""
    if anatomy.precision != "auto":
        return anatomy.precision
    if not _is_tried(anatomy):
        return "fp32"
    fp32_s, bf16_s = (_pass_of_trial_s(rates, anatomy, work, form) for form in FORMATS)
    return "bf16" if fp32_s >= MARGIN * bf16_s else "fp32"


def _is_tried(anatomy: Anatomy) -> bool:
    """Return whether a training times passes in two formats before its first step: to choose one, or to warn of it."""
    n_weights = sum(one.n_weights * one.times for one in anatomy.products)
    return anatomy.precision != "fp32" and is_worth_timing(n_weights)


def _trial_s(rates: Rates, anatomy: Anatomy, work: Workload, precision: str) -> float:
    if not _is_tried(anatomy):
        return 0.0
    other = "bf16" if anatomy.precision == "auto" else precision
    return _TRIAL_ROUNDS * sum(_pass_of_trial_s(rates, anatomy, work, form) for form in ("fp32", other))


def _pass_of_trial_s(rates: Rates, anatomy: Anatomy, work: Workload, form: str) -> float:
    batch = work.steps[0][0]
    n_rows = n_timed_rows(batch.n_rows, batch.n_computed, torch.device("cpu"))
    lengths = batch.lengths[:n_rows]
    n_computed = n_rows * batch.padded_to if batch.padded_to else int(lengths.sum())
    n_targets = max(1, round(batch.n_targets * n_computed / max(batch.n_computed, 1)))
    few = replace(batch, lengths=lengths, n_computed=n_computed, n_targets=n_targets)
    return sum(_Passes(rates, anatomy, form).trained(few).values())


@dataclass(frozen=True)
class _Passes:
    """The passes of one model on one machine in one format."""

    rates: Rates
    anatomy: Anatomy
    precision: str

    @property
    def kind(self) -> Kind:
        return "decoder" if self.anatomy.causal else "encoder"

    @property
    def block_weights(self) -> float:
        """Weights in the products of a block, the mean of all."""
        total = sum(one.n_weights * one.times for one in self.anatomy.products_of("blocks"))
        return total / max(self.anatomy.layers, 1)

    @property
    def n_frozen(self) -> float:
        """Blocks below the first trained weight: the backward pass ends before them."""
        if self.anatomy.adapter_rank or self.anatomy.trained["embeddings"]:
            return 0.0
        products = self.anatomy.products_of("blocks")
        total = sum(one.n_weights * one.times for one in products)
        frozen = sum(one.n_weights * one.times for one in products if not one.trained)
        return self.anatomy.layers * frozen / max(total, 1)

    def step(self, batches: Sequence[MicroBatch], work: Workload) -> dict[StepPart, float]:
        """Return the parts of a step over these micro-batches."""
        passes = [self.trained(batch) for batch in batches]
        n_updating = work.n_ranks if work.zero_stage else 1
        return {
            "data": sum(batch.n_rows for batch in batches) * self.rates.numbers["row"],
            "forward": sum(one["forward"] for one in passes),
            "backward": sum(one["backward"] for one in passes) + (len(passes) - 1) * self._sum_s(),
            "exchange": self._exchange_s(work),
            "optimizer": self.rates.optimizer_s(self.anatomy.optimizer, self._updated(work)) / n_updating,
        }

    def trained(self, batch: MicroBatch) -> dict[Part, float]:
        """Return the forward and the backward pass of a micro-batch."""
        narrow = self._narrow(batch)
        found: dict[Part, float] = {}
        for part in ("forward", "backward"):
            products, attention = self._block(batch, part)
            trained = self.anatomy.layers - (self.n_frozen if part == "backward" else 0.0)
            of_blocks = trained * (products * (1.0 if part == "forward" else self._of_frozen()) + attention)
            of_blocks -= narrow * products if trained >= 1 else 0.0
            found[part] = of_blocks + self._pairs(batch, part) + self._ends(batch, part)
        found["backward"] += self._again(batch)
        found["forward"] += self._head(batch)
        if self.anatomy.teacher is not None:
            found["forward"] += _Passes(self.rates, self.anatomy.teacher, self.precision).evaluated(batch)
        return found

    def read(self, reading: Reading) -> float:
        """Return the passes over rows that have no gradients, with their batches."""
        row_s = self.rates.numbers["row"]
        each_s = sum(self.evaluated(batch) + batch.n_rows * row_s for batch in reading.batches)
        return reading.n_batches * each_s / max(len(reading.batches), 1)

    def evaluated(self, batch: MicroBatch) -> float:
        """Return the pass of a batch without gradients."""
        products, attention = self._block(batch, "forward")
        of_blocks = self.anatomy.layers * (products + attention) - self._narrow(batch) * products
        head = self._head(batch) / self._of_head  # without the gradients of states and weights
        return of_blocks + self._ends(batch, "forward") + head + self._pairs(batch, "forward")

    def _block(self, batch: MicroBatch, part: Part) -> tuple[float, float]:
        """Return the time of a block's products, with all between them, and that of its attention."""
        anatomy, rates = self.anatomy, self.rates
        lengths = np.full(batch.n_rows, batch.padded_to) if batch.padded_to else batch.lengths
        products = rates.block_s(self.kind, self.precision, part, self.block_weights, batch.n_computed)
        attention = rates.attention_s(
            self.kind, self.precision, part, anatomy.head_width or 64, lengths, anatomy.attention_width
        )
        return products, attention

    def _narrow(self, batch: MicroBatch) -> float:
        """Return the share of the last block's products that is left out, as the head reads few of the tokens."""
        reads_all = self.anatomy.causal or self.anatomy.model_class.endswith(_READS_ALL)
        if reads_all or not self.anatomy.packed or self.anatomy.layers == 0:
            return 0.0
        keys_and_values = 2 * self.anatomy.width * self.anatomy.kv_heads * self.anatomy.head_width
        unread = 1.0 - min(batch.n_targets / max(batch.n_computed, 1), 1.0)
        return unread * max(1.0 - keys_and_values / max(self.block_weights, 1), 0.0)

    def _of_frozen(self) -> float:
        """Return the share of a backward pass that blocks take some of whose weights are not trained."""
        products = self.anatomy.products_of("blocks")
        total = sum(one.n_weights * one.times for one in products)
        trained = sum(one.n_weights * one.times for one in products if one.trained)
        if self.n_frozen or not total:
            return 1.0
        frozen = self.rates.numbers[f"frozen {self.precision if self.precision in FORMATS else 'fp32'}"]
        return frozen + (1.0 - frozen) * trained / total

    def _pairs(self, batch: MicroBatch, part: Part) -> float:
        """Return the time of low-rank pairs next to layers: reads and writes of what these take and give."""
        adapted = [one for one in self.anatomy.products if one.rank]
        numbers = sum(one.times * (one.n_in + 2 * one.n_out) for one in adapted) * batch.n_computed
        return (1.0 if part == "forward" else 2.0) * 4 * numbers * self.rates.numbers["copy_byte"]

    def _ends(self, batch: MicroBatch, part: Part) -> float:
        return self.rates.ends_s(self.kind, self.precision, part, self.anatomy.width, batch.n_computed)

    def _head(self, batch: MicroBatch) -> float:
        """Return the time of the head's products, forward and backward; those of a narrow one are in the ends."""
        weights = sum(one.n_weights * one.times for one in self.anatomy.products_of("head"))
        if weights < self.anatomy.width * _NARROW_HEAD:
            return 0.0
        return self._of_head / 3 * self.rates.head_s(self.precision, weights, batch.n_targets)

    @property
    def _of_head(self) -> float:
        """How many products of the head's size a training pass has: three if all of it is trained."""
        products = self.anatomy.products_of("head")
        weights = sum(one.n_weights * one.times for one in products)
        return 2 + sum(one.n_weights * one.times for one in products if one.trained) / max(weights, 1)

    def _again(self, batch: MicroBatch) -> float:
        """Return the time of what backward computes again; of native blocks all but the last product."""
        if self.anatomy.checkpointing is None:
            return 0.0
        products, attention = self._block(batch, "forward")
        if self.anatomy.checkpointing == "selective":
            return self.anatomy.layers * _SELECTIVE * products
        last = self.anatomy.inner_width * self.anatomy.width / max(self.block_weights, 1)
        share = 1.0 - min(last, 0.5) if self.rates.key.operators != "torch" else 1.0
        return self.anatomy.layers * (share * products + attention)

    def _sum_s(self) -> float:
        """Return the time of adding a micro-batch's gradients to those of the step: two reads and a write."""
        return 1.5 * 4 * self.anatomy.n_trained * self.rates.numbers["copy_byte"]

    def _exchange_s(self, work: Workload) -> float:
        """Return the time of exchanges between ranks of this machine."""
        if work.n_ranks < 2:
            return 0.0
        copies = _EXCHANGE_COPIES[work.zero_stage] * (work.n_ranks - 1) / work.n_ranks
        return copies * 4 * self.anatomy.n_trained * self.rates.numbers["copy_byte"]

    def _updated(self, work: Workload) -> float:
        """Return how many weights an update changes: whet's AdamW skips vocabulary rows that no text has used."""
        anatomy = self.anatomy
        head = sum(one.n_weights for one in anatomy.products_of("head"))
        table = anatomy.vocabulary * anatomy.width
        is_tied = head >= table > anatomy.parameters["head"]
        skips = anatomy.optimizer in ("auto", "adamw_whet") and self.rates.key.operators != "torch"
        if not skips or is_tied or anatomy.trained["embeddings"] < table or not table:
            return anatomy.n_trained
        rows_per_step = sum(map(_n_rows, work.steps)) / len(work.steps)
        tokens = work.n_rows * work.tokens_per_step / max(rows_per_step, 1)
        unused = table * (1.0 - min(tokens**_WORDS_EXPONENT / anatomy.vocabulary, 1.0))
        return anatomy.n_trained - unused


def _n_rows(step: Sequence[MicroBatch]) -> int:
    return sum(batch.n_rows for batch in step)


def _doubts(rates: Rates, anatomy: Anatomy, work: Workload, precision: str) -> Iterator[tuple[str, float]]:
    """Yield what the forecast knows less well than usual, and how much wider that makes its range."""
    passes = _Passes(rates, anatomy, precision)
    block = rates.surfaces[f"block {passes.kind} fp32 forward"]
    n_tokens = work.tokens_per_step / max(len(work.steps[0]), 1)
    if rates.is_busy:
        yield "other programs ran when this machine's speed was measured", 0.20
    if not anatomy.packed:
        yield "the model trains with padding, without whet's fused blocks", 0.40
    if not rates.knows(precision):
        yield f"{precision} is not measured on this machine", 1.0
    if not block.covers(passes.block_weights, n_tokens):
        yield "its blocks or batches are far larger or smaller than those measured", 0.15
    if anatomy.adapter_rank:
        yield "adapters are not measured, only what they add in bytes", 0.10
    if any(one.has_experts for one in _models(anatomy)):
        yield "experts are not measured, their products are taken for those of dense layers", 0.20
    if anatomy.teacher is not None:
        yield "the teacher's passes are not measured next to training, only those of a model of its size", 0.10
    if work.saves_best and work.n_saves:
        yield "each evaluation is taken to be a new best, which is saved", 0.03
    if not rates.knows_optimizer(anatomy.optimizer):
        yield f"the update of {anatomy.optimizer} is not measured, AdamW's is", 0.15
    if rates.shared_by > 1:
        yield f"each of {rates.shared_by} ranks is taken to have its part of the speed of all threads", 0.10
    if work.n_ranks > 1:
        yield "the exchange between ranks is estimated from copies in memory", 0.20
    if work.sampled:
        yield "only some of the run's steps were looked at", 0.03


# ---- what a setting costs ----


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a setting adds to a run, next to the same run without it."""

    flag: str
    seconds: float
    """Added to the steps of the run."""
    frac: float
    """The same as a share of those steps without it."""
    without: str
    """What to change on the command line."""


def prices(rates: Rates, anatomy: Anatomy, work: Workload) -> list[Price]:
    """Return what the settings of a run cost in time that another choice would save, the most expensive first."""
    now = forecast(rates, anatomy, work)
    found: list[Price] = []

    def compare(flag: str, without: str, other_anatomy: Anatomy, other_work: Workload) -> None:
        other = forecast(rates, other_anatomy, other_work)
        n_steps = work.n_steps * work.n_seeds
        least, more = other.step_s * n_steps, (now.step_s - other.step_s) * n_steps
        if least > 0 and more > 0:
            found.append(Price(flag=flag, seconds=more, frac=more / least, without=without))

    if anatomy.precision not in ("auto", "fp32") and rates.knows(anatomy.precision):
        compare(f"--{anatomy.precision}", "leave it out: --precision auto measures", _in("auto", anatomy), work)
    if anatomy.checkpointing is not None:
        compare(
            "--gradient_checkpointing",
            "leave it out if the memory is there",
            replace(anatomy, checkpointing=None),
            work,
        )
    if any(len(step) > 1 for step in work.steps):
        joined = replace(work, steps=tuple((_joined(step),) for step in work.steps))
        compare("--gradient_accumulation_steps", "use one larger batch if the memory is there", anatomy, joined)
    return sorted(found, key=lambda price: -price.seconds)


def _in(precision: str, anatomy: Anatomy) -> Anatomy:
    return replace(anatomy, precision=precision)


def split(work: Workload, rows: int) -> Workload:
    """Return the same steps in micro-batches of so many rows; the last of a step may have fewer."""
    return replace(work, steps=tuple(tuple(_cut(_joined(step), rows)) for step in work.steps))


def _cut(batch: MicroBatch, rows: int) -> Iterator[MicroBatch]:
    for first in range(0, batch.n_rows, rows):
        lengths = batch.lengths[first : first + rows]
        share = len(lengths) / batch.n_rows if batch.padded_to else lengths.sum() / max(batch.n_tokens, 1)
        yield replace(
            batch, lengths=lengths, n_computed=round(batch.n_computed * share), n_targets=round(batch.n_targets * share)
        )


def _joined(step: Sequence[MicroBatch]) -> MicroBatch:
    """Return the micro-batches of a step as one."""
    padded_to = max(batch.padded_to for batch in step)
    n_rows = sum(batch.n_rows for batch in step)
    return MicroBatch(
        lengths=np.concatenate([batch.lengths for batch in step]),
        n_computed=n_rows * padded_to if padded_to else sum(batch.n_computed for batch in step),
        n_targets=sum(batch.n_targets for batch in step),
        padded_to=padded_to,
    )


# ---- for people ----

_LEAST_FRAC = 0.005
"""Parts of a run with a smaller share are not shown."""
_NAME, _AMOUNT, _SHARE = 44, 12, 8


def table(rates: Rates, found: Seconds, costs: Sequence[Price]) -> list[str]:
    """Return the time by part, the sum with its range, what widens it, and what settings cost."""
    total = max(found.total_s, 1e-9)
    rows = [
        _row(TIME[part], console.duration(seconds), f"{seconds / total:.0%}")
        for part, seconds in found.run.items()
        if seconds >= _LEAST_FRAC * total
    ]
    low, high = (console.duration(seconds) for seconds in found.range_s)
    ranks = f"{rates.shared_by} ranks on " if rates.shared_by > 1 else ""
    threads = console.plural(rates.key.threads, "thread")
    head = f"time with {ranks}{threads} of {rates.key.processor}, {found.precision}"
    rows += [
        "  " + "-" * (_NAME + _AMOUNT + _SHARE),
        _row("from the command to its end", console.duration(found.total_s), ""),
    ]
    texts = [f"between {low} and {high}; a step takes {console.fine_duration(found.step_s)}"]
    texts += [f"less sure, as {doubt}" for doubt in found.doubts]
    texts += [
        f"{price.flag} costs {console.duration(price.seconds)} ({price.frac:.0%}): {price.without}" for price in costs
    ]
    folded = [line for text in texts for line in console.folded_message(f"  {text}", console.width(), "    ")]
    return [console.shorten(head, console.width()), *rows, *folded]


def _row(name: str, amount: str, share: str) -> str:
    return f"  {name:<{_NAME}}{amount:>{_AMOUNT}}{share:>{_SHARE}}".rstrip()
