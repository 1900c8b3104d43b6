"""How fast this machine does what a training step consists of: measured once in about ten seconds, then kept in a file.

Counting operations does not give the time of a step: the rate of a product depends on its shape, and a third of a small
encoder's step is no product. So blocks of whet's own packed path are timed, forward and backward, at a few widths and
numbers of tokens, next to attention by sequence length, a vocabulary's head and the optimizers' updates. What lies
between two measured sizes follows the power law through them. `seconds.py` adds these parts up for a model and rows.

A training never calibrates: `whet plan` and `whet doctor --rates` do, and say so.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median, median_low
from typing import Any, Literal

import numpy as np

from whet import system
from whet.errors import ConfigError, WhetError
from whet.hardware import cpu
from whet.paths import NO_CACHE, default_cache_dir, keep_newest
from whet.version import __version__

Kind = Literal["encoder", "decoder"]
Part = Literal["forward", "backward"]
FORMATS = ("fp32", "bf16")
"""The number formats that `--precision auto` chooses from."""
OTHER_FORMATS = ("fp16", "int8")
"""Timed in one place, so that a plan can say what they cost."""
OPTIMIZERS = ("auto", "adamw_torch", "adamw_torch_fused", "adamw_whet_8bit", "adafactor", "lion", "sgd")
"""Those whose updates are timed; others are taken for `auto`, and the forecast says so."""
BUDGET_S = 10.0
"""A calibration of all parts ends at about this time: later rounds of what it measures are left out."""
BUSY = 0.5
"""A load of more threads than this, on processors that the calibration needs itself, makes its times too long."""
_FORM = 2
"""Raise this when the same machine would be measured in another way."""
_MOST_KEPT = 8
"""Files of rates in the cache: one for each number of threads and version in use, and as many again."""


# ---- seconds by size ----


@dataclass(frozen=True)
class Curve:
    """Seconds by one size, known at a few, in rising order: a power law between two of them.

    Below the first size the law of the first two holds, but seconds neither rise nor fall faster than the size; above
    the last they grow with the size.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[float, float]) -> Curve:
        """Return the curve through these points: more work never takes less time, whatever a busy machine measured."""
        sizes = sorted(points)
        return cls(tuple(sizes), tuple(accumulate((points[size] for size in sizes), max)))

    def at(self, size: Any) -> Any:
        """Return the seconds of a size, or of an array of sizes; 0 for none."""
        size = np.asarray(size, dtype=np.float64)
        found = np.exp(_on_line(np.log(self.sizes), np.log(self.seconds), np.log(np.maximum(size, 1e-9))))
        return np.where(size > 0, found, 0.0)[()]


@dataclass(frozen=True)
class Surface:
    """Seconds by two sizes: a curve over the second one at each of a few of the first, in rising order."""

    firsts: tuple[float, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Mapping[float, Mapping[float, float]]) -> Surface:
        """Return the surface through these points."""
        firsts = sorted(points)
        return cls(tuple(firsts), tuple(Curve.of(points[first]) for first in firsts))

    def at(self, first: float, second: Any) -> Any:
        """Return the seconds of two sizes; the second may be an array."""
        second = np.asarray(second, dtype=np.float64)
        heights = np.stack([np.log(np.maximum(curve.at(second), 1e-12)) for curve in self.curves])
        found = np.exp(_on_line(np.log(self.firsts), heights, math.log(max(first, 1e-9))))
        return np.where(second > 0, found, 0.0)[()]

    def covers(self, first: float, second: float) -> bool:
        """Return whether both sizes lie between measured ones, a factor of two allowed for."""
        seconds = [size for curve in self.curves for size in curve.sizes]
        return all(
            0.5 * min(known) <= size <= 2 * max(known) for known, size in ((self.firsts, first), (seconds, second))
        )


def _on_line(xs: Any, ys: Any, x: Any) -> Any:
    """Return y at x on the line through the points (xs, ys), in logarithms; `ys` may have a row for each of `xs`."""
    ys, n = np.asarray(ys), len(xs)
    if n == 1:
        return ys[0] + np.maximum(x - xs[0], 0.0)
    place = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, n - 2)
    slopes = (ys[1:] - ys[:-1]) / (np.diff(xs) if ys.ndim == 1 else np.diff(xs).reshape(-1, *[1] * (ys.ndim - 1)))
    inside = ys[place] + slopes[place] * (x - np.asarray(xs)[place])
    below = ys[0] + np.clip(slopes[0], 0.0, 1.0) * (x - xs[0])
    above = ys[-1] + (x - xs[-1])
    return np.where(x < xs[0], below, np.where(x > xs[-1], above, inside))


# ---- what is known of a machine ----


@dataclass(frozen=True, kw_only=True)
class Key:
    """What rates depend on: others are measured if one of these changes."""

    processor: str
    cores: int
    threads: int
    operators: str
    """The instruction set of the native operators; plain torch runs without them."""
    native: str | None
    """The digest of their library; None: plain torch."""
    torch: str
    whet: str
    form: int = _FORM

    @property
    def digest(self) -> str:
        """A short name of it, for a file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speed of one machine with a number of threads. Seconds are of one call."""

    key: Key
    made: float
    """When it was measured, in Unix seconds."""
    took_s: float
    load: float | None
    """Threads that wanted to run when it began; None: unknown."""
    clock: Literal["wall", "processor"] = "wall"
    noise: float = 0.0
    """By how much the second best time of a measurement was above its best, the median of all."""
    shared_by: int = 1
    """Ranks that compute here at once, each at its part of this speed."""
    surfaces: Mapping[str, Surface] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """Whether other programs ran next to it: its times are too long then."""
        return _is_busy(self.load, self.key.threads)

    def block_s(self, kind: Kind, precision: str, part: Part, weights: float, n_tokens: float) -> float:
        """Return the time of one block whose products have this many weights, without its attention."""
        return self._in(precision, lambda form: self.surfaces[f"block {kind} {form} {part}"].at(weights, n_tokens))

    def ends_s(self, kind: Kind, precision: str, part: Part, width: float, n_tokens: float) -> float:
        """Return the time of what surrounds the blocks: embeddings, the last norm, a small head and its loss."""
        return self._in(precision, lambda form: self.surfaces[f"ends {kind} {form} {part}"].at(width, n_tokens))

    def attention_s(
        self, kind: Kind, precision: str, part: Part, head_width: float, lengths: Any, width: float
    ) -> float:
        """Return the time of one attention over rows of these lengths, with heads that are `width` wide together."""
        lengths = np.asarray(lengths, dtype=np.float64)

        def of(form: str) -> float:
            surface = self.surfaces[f"attention {kind} {form} {part}"]
            known = min(max(head_width, surface.firsts[0]), surface.firsts[-1])
            return float((surface.at(known, lengths) * lengths).sum() * width)

        return self._in(precision, of)

    def head_s(self, precision: str, weights: float, n_targets: float) -> float:
        """Return the time of the logits of these targets with their loss and gradients, by a head of these weights."""
        return self._in(precision, lambda form: self.surfaces[f"head {form}"].at(weights, n_targets))

    def optimizer_s(self, name: str, n_weights: float) -> float:
        """Return the time of an update of this many weights, with the norm of their gradient."""
        known = f"optimizer {name}" if self.knows_optimizer(name) else "optimizer auto"
        each_s = self.numbers.get(known, self.numbers["optimizer auto"]) + self.numbers["norm"]
        return self.shared_by * n_weights * each_s

    def knows_optimizer(self, name: str) -> bool:
        """Return whether the update of this optimizer was measured; on a CPU, auto is whet's AdamW."""
        return name == "adamw_whet" or f"optimizer {name}" in self.numbers

    def knows(self, precision: str) -> bool:
        """Return whether something was measured in this format."""
        return precision in FORMATS or f"format {precision}" in self.numbers

    def _in(self, precision: str, of: Callable[[str], Any]) -> float:
        """Return the time in a format; for those that were measured in one place alone, that of fp32 by their ratio."""
        of_format = 1.0 if precision in FORMATS else self.numbers.get(f"format {precision}", 1.0)
        return self.shared_by * float(of(precision if precision in FORMATS else "fp32")) * of_format


def _is_busy(load: float | None, threads: int) -> bool:
    spare = max((os.cpu_count() or threads) - threads, 0)
    return load is not None and load > BUSY + spare / 2


def key_here() -> Key:
    """Return what rates measured here and now would depend on."""
    import torch

    from whet.kernels import native_file
    from whet.kernels.library import library

    native = library()
    return Key(
        processor=cpu.model_name(), cores=cpu.usable_cores(), threads=torch.get_num_threads(),
        operators="torch" if native is None else native.isa, native=None if native is None else native_file.digest(),
        torch=torch.__version__, whet=__version__,
    )  # fmt: skip


# ---- files ----


def as_json(rates: Rates) -> dict[str, Any]:
    """Return the rates as JSON values: what the cache and `whet doctor --json` hold."""
    surfaces = {
        name: [
            [first, [list(point) for point in zip(curve.sizes, curve.seconds, strict=True)]]
            for first, curve in zip(surface.firsts, surface.curves, strict=True)
        ]
        for name, surface in rates.surfaces.items()
    }
    plain = {name: getattr(rates, name) for name in ("made", "took_s", "load", "clock", "noise")}
    return {"key": asdict(rates.key), **plain, "surfaces": surfaces, "numbers": dict(rates.numbers)}


def from_json(found: Any) -> Rates:
    """Return the rates that `as_json` wrote; raise ValueError if these are none, or are of an older form."""
    another = "they were measured by another version of whet"
    if isinstance(found, dict) and isinstance(key := found.get("key"), dict) and key.get("form", _FORM) != _FORM:
        raise ValueError(another)
    try:
        surfaces = {
            name: Surface.of({_size(first): {_size(n): _size(s) for n, s in points} for first, points in rows})
            for name, rows in found["surfaces"].items()
        }
        numbers = {str(name): _size(value) for name, value in found["numbers"].items()}
        key = Key(**found["key"])
        rates = Rates(
            key=key, made=_size(found["made"]), took_s=_size(found["took_s"]),
            load=None if found["load"] is None else _size(found["load"], least=0.0),
            clock=found["clock"], noise=_size(found["noise"], least=0.0), surfaces=surfaces, numbers=numbers,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"these are no rates of a machine: {error}") from error
    missing = (_NEEDED_SURFACES - surfaces.keys()) | (_NEEDED_NUMBERS - numbers.keys())
    if missing or not all(surface.firsts for surface in surfaces.values()):
        raise ValueError(another)
    return rates


def _size(value: Any, *, least: float = 1e-30) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number) or number < least:
        raise ValueError(f"{value!r} is no measured number")
    return number


_NEEDED_SURFACES = {
    *(
        f"{what} {kind} {form} {part}"
        for what in ("block", "ends", "attention")
        for kind in ("encoder", "decoder")
        for form in FORMATS
        for part in ("forward", "backward")
    ),
    *(f"head {form}" for form in FORMATS),
}
_NEEDED_NUMBERS = {"optimizer auto", "norm", "copy_byte", "save_byte", "row", "start", "frozen fp32", "frozen bf16"}


def cached(key: Key, folder: Path | None = None) -> Rates | None:
    """Return the rates that were kept for this key; None if there are none, or their file is damaged."""
    path = _path(key, folder)
    if path is None:
        return None
    try:
        found = from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return None
    return found if found.key == key else None


def keep(rates: Rates, folder: Path | None = None) -> str | None:
    """Write the rates to whet's cache, and remove the oldest there; return why they are not kept, None if they are."""
    path = _path(rates.key, folder)
    return NO_CACHE if path is None else keep_newest(path, json.dumps(as_json(rates)), _MOST_KEPT)


def _path(key: Key, folder: Path | None) -> Path | None:
    folder = folder or default_cache_dir()
    return None if folder is None else folder / f"rates-{key.digest}.json"


def of_report(path: Path) -> Rates | None:
    """Return the rates in a report of `whet doctor --json`, of any machine; None if it was asked without --rates."""
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no report of whet doctor")
        return None if found.get("training_rates") is None else from_json(found["training_rates"])
    except (OSError, ValueError) as error:
        raise ConfigError(
            what="the report of a machine cannot be read",
            got=f"{path}: {error}",
            why="the time of a training on another machine is forecast from rates that were measured there",
            fix="run: whet doctor --rates --json > report.json on that machine, with this version of whet",
        ) from error


def of_this_machine(say: Callable[[str], None], folder: Path | None = None, *, budget_s: float = BUDGET_S) -> Rates:
    """Return this machine's rates: those in the cache, or measured now, which `say` announces.

    Rates from a busy machine are measured again, unless it is busy still.
    """
    key = key_here()
    known = cached(key, folder)
    if known is not None and (not known.is_busy or _is_busy(cpu.load(), key.threads)):
        return known
    why = "" if known is None else ", again: other programs ran next to the last time"
    say(f"measuring this machine's speed once, for about {budget_s:.0f} seconds{why}")
    measured = _measured_apart(budget_s)
    if measured.is_busy:
        say(f"other programs were running (load {measured.load:.1f}): the forecast of the time is too long")
    if why := keep(measured, folder):
        say(f"the speed is measured again next time: {why}")
    return measured


def nominal() -> Rates:
    """Return rates that no machine was asked for: operations at a usual speed, each of the same cost at every size.

    They order settings of one run, where the machine cannot be measured. Their seconds mean nothing.
    """
    key = key_here()
    flop_s = 1 / (_USUAL_FLOPS * key.threads)
    forward_s = {"block": 2 * flop_s, "ends": 20 * _USUAL_BYTE_S, "attention": 4 * flop_s, "head": 6 * flop_s}
    surfaces = {}
    for name in _NEEDED_SURFACES:
        kind, part = name.split()[0], name.split()[-1]
        factor = {"backward": 2.5 if kind == "attention" else 2.0}.get(part, 1.0)
        surfaces[name] = Surface.of({1.0: {1.0: factor * forward_s[kind]}})
    numbers = dict.fromkeys(_NEEDED_NUMBERS, _USUAL_BYTE_S)
    numbers |= {"optimizer auto": 20 * _USUAL_BYTE_S, "row": 1e-5, "start": 5.0, "frozen fp32": 0.5, "frozen bf16": 0.5}
    return Rates(key=key, made=0.0, took_s=0.0, load=None, surfaces=surfaces, numbers=numbers)


_USUAL_FLOPS, _USUAL_BYTE_S = 4e10, 1e-10
"""Operations a second of a core, and seconds for a byte of memory."""

# ---- the measurement ----

_APART = "import json, sys, torch; from whet.plan import rates; torch.set_num_threads(int(sys.argv[1]));"
_APART += "print(json.dumps(rates.as_json(rates.measure(budget_s=float(sys.argv[2])))))"
"""What a process of its own measures, with the caller's number of threads, and prints in its last line."""


def _measured_apart(budget_s: float) -> Rates:
    """Measure this machine in a process of its own.

    What a measurement maps and holds would stay with the caller, who then forecasts what a run in this process will
    hold, or trains, often under a limit. Errors: a `WhetError` if the process ends without rates.
    """
    import torch

    start_s = time.process_time()
    words = system.python("-c", _APART, str(torch.get_num_threads()), str(budget_s))
    done = subprocess.run(  # noqa: S603 - whet itself
        words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise WhetError(
            what="this machine's speed cannot be measured",
            got=said[-1] if said else f"the measurement ended with status {done.returncode}",
            why="its process ended early, as it does where memory is short",
            fix="free memory or raise the limit (ulimit -v); without --auto and whet plan a run needs no measurement",
        )
    measured = from_json(json.loads(done.stdout.splitlines()[-1]))
    return replace(measured, numbers={**measured.numbers, "start": max(start_s, measured.numbers["start"])})


_ROW_TOKENS = 64
"""Tokens of a row of the timed blocks: few enough that attention hardly counts, and what it takes is subtracted."""
_VOCABULARY = 512
_HEAD = (8192, 512)
"""Entries and width of the timed vocabulary."""
_HEAD_TOKENS = (64, 512)
_LENGTHS = (64, 256, 1024)
_ATTENTION_WIDTH = 256
_HEAD_WIDTHS: Mapping[Kind, tuple[int, ...]] = {"encoder": (32, 64), "decoder": (64, 128)}
_COPY_BYTES = 64 << 20
_WRITE_BYTES = 32 << 20
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 8
_ENOUGH_S = 0.25
"""Rounds of a measurement end after this time, once there are two."""


@dataclass(frozen=True)
class _Probe:
    """The widths at which blocks of a kind are timed: width -> how many blocks the larger model has, tokens."""

    kind: Kind
    widths: Mapping[int, tuple[int, tuple[int, ...]]]


_PROBES = (
    _Probe("encoder", {128: (3, (64, 512, 2048)), 384: (3, (64, 384, 1024)), 768: (2, (64, 512))}),
    _Probe("decoder", {256: (3, (64, 512, 1024)), 1024: (2, (64, 320))}),
)


def measure(*, clock: Literal["wall", "processor"] = "wall", budget_s: float = BUDGET_S) -> Rates:
    """Measure this machine with torch's threads; nothing is kept.

    `clock`: "processor" counts the time of this process alone, which one thread can be measured by on a busy machine.
    """
    from whet.kernels import allocator
    from whet.kernels.random import generators_kept

    load, start_s = cpu.load(), time.process_time()
    allocator.keep_freed_memory()
    with generators_kept():
        found = _Measurement(time.process_time if clock == "processor" else time.perf_counter, budget_s)
        found.run()
    numbers = found.numbers | {"start": max(start_s, 0.1)}
    return Rates(
        key=key_here(), made=time.time(), took_s=found.elapsed_s, load=load, clock=clock,
        noise=median(found.gaps) if found.gaps else 0.0,
        surfaces={name: Surface.of(points) for name, points in found.points.items()}, numbers=numbers,
    )  # fmt: skip


class _Measurement:
    """What has been measured so far."""

    def __init__(self, clock: Callable[[], float], budget_s: float) -> None:
        self.clock, self.budget_s, self.began_s = clock, budget_s, clock()
        self.points: dict[str, dict[float, dict[float, float]]] = {}
        self.numbers: dict[str, float] = {}
        self.gaps: list[float] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.began_s

    def run(self) -> None:
        """Measure everything, what others are made from first."""
        for kind in ("encoder", "decoder"):
            self._attention(kind)
        for probe in _PROBES:
            for width, (n_blocks, tokens) in probe.widths.items():
                self._blocks(probe.kind, width, n_blocks, tokens)
        self._head()
        self._memory()

    def _put(self, name: str, first: float, second: float, seconds: float) -> None:
        self.points.setdefault(name, {}).setdefault(first, {})[second] = max(seconds, 1e-9)

    def _usual(self, works: Sequence[Callable[[], Sequence[float]]]) -> list[list[float]]:
        """Return the usual one of each time that each work returns, run in alternation; first runs do not count.

        Other programs only add to a time, so of two it is the shorter one.
        """
        rounds: list[list[Sequence[float]]] = []
        began_s = self.clock()
        for work in works:
            work()
        while len(rounds) < _MOST_ROUNDS:
            late = self.clock() - began_s > _ENOUGH_S or self.elapsed_s > self.budget_s
            if (rounds and self.elapsed_s > self.budget_s) or (len(rounds) >= _FEWEST_ROUNDS and late):
                break
            rounds.append([work() for work in works])
        found = [[median_low(times) for times in zip(*of_one, strict=True)] for of_one in zip(*rounds, strict=True)]
        for of_one in zip(*rounds, strict=True):
            totals = sorted(sum(times) for times in of_one)
            self.gaps += [totals[1] / totals[0] - 1.0] if len(totals) > 1 else []
        return found

    def _attention(self, kind: Kind) -> None:
        """Time attention by the length of rows, in seconds for each token and each number of its width."""
        import torch

        from whet.kernels.attention_spec import AttentionSpec
        from whet.kernels.batch_position import BatchPosition, Drop
        from whet.kernels.packed_attention import attend_joined

        n = max(_LENGTHS)
        for length in _LENGTHS:
            starts = torch.arange(0, n + 1, length, dtype=torch.int32)
            slots = torch.arange(len(starts) - 1, dtype=torch.int32)
            position = BatchPosition(
                0, 0, slots.repeat_interleave(length), torch.arange(n, dtype=torch.int32) % length, starts, slots
            )
            drop = Drop(0.1, position, 0) if kind == "encoder" else None
            works, names = [], []
            for head_width in _HEAD_WIDTHS[kind]:
                spec = AttentionSpec(starts, head_width**-0.5, causal=kind == "decoder", drop=drop)
                for form in FORMATS:
                    shape = (n, 3, _ATTENTION_WIDTH // head_width, head_width)
                    dtype = torch.bfloat16 if form == "bf16" else torch.float32
                    qkv = torch.randn(shape).to(dtype).requires_grad_()

                    def run(qkv: Any = qkv, spec: Any = spec) -> list[float]:
                        begin_s = self.clock()
                        out = attend_joined(qkv, spec)
                        middle_s = self.clock()
                        torch.autograd.grad(out, qkv, out)
                        return [middle_s - begin_s, self.clock() - middle_s]

                    works.append(run)
                    names.append((head_width, form))
            for (head_width, form), times in zip(names, self._usual(works), strict=True):
                for part, seconds in zip(("forward", "backward"), times, strict=True):
                    self._put(f"attention {kind} {form} {part}", head_width, length, seconds / n / _ATTENTION_WIDTH)

    def _blocks(self, kind: Kind, width: int, n_blocks: int, tokens: Sequence[int]) -> None:
        """Time passes of a model of one block and of a larger one: the difference is that of the blocks."""
        models = {n: _ProbeModel(kind, width, n, self.clock) for n in (1, n_blocks)}
        keys = [(n, form) for form in FORMATS for n in models]
        found: dict[tuple[int, str], list[list[float]]] = {key: [] for key in keys}
        for n_tokens in tokens:
            batches = {n: model.batch(n_tokens // _ROW_TOKENS) for n, model in models.items()}
            works = [partial(models[n].times, batches[n], form) for n, form in keys]
            for key, times in zip(keys, self._usual(works), strict=True):
                found[key].append(times)
        for form in FORMATS:
            self._separate(models[n_blocks], n_blocks, tokens, form, found)
        if width == _TIMED_WIDTH and kind == "encoder":
            self._updates(models[n_blocks])
            self._frozen(models)
            self._other_formats(models[1])

    def _separate(
        self, model: _ProbeModel, n_blocks: int, tokens: Sequence[int], form: str, found: Mapping[Any, Any]
    ) -> None:
        """Keep the times of a block and of what surrounds the blocks, from models of one block and of several."""
        sizes, kind = np.asarray(tokens, dtype=np.float64), model.kind
        for number, part in enumerate(("forward", "backward")):
            one, all_of_them = (np.asarray(found[n, form])[:, number] for n in (1, n_blocks))
            ends = _around(sizes, one, all_of_them, n_blocks)
            block = ((one - ends) + (all_of_them - ends) / n_blocks) / 2
            attention = Surface.of(self.points[f"attention {kind} {form} {part}"]).at(model.head_width, _ROW_TOKENS)
            rest = np.maximum(block - attention * sizes * model.width, 0.2 * block)
            for size, seconds, around in zip(tokens, rest, ends, strict=True):
                self._put(f"block {kind} {form} {part}", model.block_weights, size, float(seconds))
                self._put(f"ends {kind} {form} {part}", model.width, size, float(around))

    def _updates(self, model: _ProbeModel) -> None:
        """Time the update of a model's weights by each optimizer, and the norm of their gradient, a weight each."""
        from whet.config.arguments import TrainingArguments
        from whet.kernels.adamw import gradient_norm
        from whet.optim import registry

        batch = model.batch(1)
        model.times(batch, "fp32", clear=False)
        weights = [one for one in model.model.parameters() if one.grad is not None]
        n_weights = sum(one.numel() for one in weights)
        works: dict[str, Callable[[], Any]] = {"norm": lambda: gradient_norm([one.grad for one in weights])}
        for name in OPTIMIZERS:
            with suppress(ConfigError):  # it does not work here, so no training has it either
                args = TrainingArguments(output_dir="unused", optim=name, use_cpu=True, learning_rate=1e-6)
                works[f"optimizer {name}"] = registry.build(model.model, args).step
        timed = [lambda work=work: _seconds(work, self.clock) for work in works.values()]
        for name, (seconds,) in zip(works, self._usual(timed), strict=True):
            self.numbers[name] = seconds / n_weights
        rows = lambda: _seconds(lambda: model.batch(16), self.clock)  # noqa: E731
        self.numbers["row"] = self._usual([rows])[0][0] / 16

    def _other_formats(self, model: _ProbeModel) -> None:
        """Time a pass in the formats that `auto` does not choose, as a multiple of fp32's."""
        batch = model.batch(1)
        for form in OTHER_FORMATS:
            with suppress(ConfigError, RuntimeError):  # not every processor computes in it
                fp32, other = self._usual([lambda: model.times(batch, "fp32"), lambda: model.times(batch, form)])  # noqa: B023
                self.numbers[f"format {form}"] = sum(other) / sum(fp32)

    def _frozen(self, models: Mapping[int, _ProbeModel]) -> None:
        """Time the backward pass of blocks whose weights are not trained, next to that of trained ones."""
        batches = {n: model.batch(256 // _ROW_TOKENS) for n, model in models.items()}
        for form in FORMATS:
            trained = self._backward(models, batches, form)
            for model in models.values():
                model.train_blocks(False)
            frozen = self._backward(models, batches, form)
            for model in models.values():
                model.train_blocks(True)
            self.numbers[f"frozen {form}"] = min(max(frozen / trained, 0.2), 1.0)

    def _backward(self, models: Mapping[int, _ProbeModel], batches: Mapping[int, Any], form: str) -> float:
        works = [lambda n=n: models[n].times(batches[n], form) for n in models]
        small, large = (times[1] for times in self._usual(works))
        return max(large - small, 0.2 * large)

    def _head(self) -> None:
        """Time the logits of a vocabulary, with loss and gradients."""
        import torch

        from whet.kernels.cross_entropy import linear_cross_entropy
        from whet.precision import policy

        entries, width = _HEAD
        weight = torch.randn(entries, width).requires_grad_()
        for n_targets in _HEAD_TOKENS:
            states = torch.randn(n_targets, width).requires_grad_()
            labels = torch.randint(0, entries, (n_targets,))

            def run(form: str, states: Any = states, labels: Any = labels) -> None:
                with policy.make(form, states.device).forward():
                    loss = linear_cross_entropy(states, weight, labels)
                loss.backward()
                weight.grad = states.grad = None

            works = [lambda form=form: _seconds(lambda: run(form), self.clock) for form in FORMATS]
            for form, (seconds,) in zip(FORMATS, self._usual(works), strict=True):
                self._put(f"head {form}", entries * width, n_targets, seconds)

    def _memory(self) -> None:
        """Time a copy in memory, and a file that is written and synced, a byte each."""
        import torch

        source = torch.zeros(_COPY_BYTES // 4)
        target = torch.empty_like(source)
        copy = self._usual([lambda: _seconds(lambda: target.copy_(source), self.clock)])
        self.numbers["copy_byte"] = copy[0][0] / _COPY_BYTES
        content = source.numpy().tobytes()[:_WRITE_BYTES]
        with tempfile.TemporaryFile() as file:
            began_s = time.perf_counter()  # the disk takes no processor time
            file.write(content)
            file.flush()
            system.fsync_handle(file.fileno())
            self.numbers["save_byte"] = max(time.perf_counter() - began_s, 1e-6) / _WRITE_BYTES


_TIMED_WIDTH = 384
"""The width of the encoder whose weights are updated."""


def _around(sizes: np.ndarray, one: np.ndarray, all_of_them: np.ndarray, n_blocks: int) -> np.ndarray:
    """Return the times (sizes,) of what surrounds the blocks, by the times of a model of one block and of n.

    They are differences of much longer times, and noisy: a constant and a share of the size fit all of them, where
    short times count most.
    """
    differences, weights = (n_blocks * one - all_of_them) / (n_blocks - 1), 1.0 / one
    terms = np.stack([np.ones_like(sizes), sizes], axis=1)
    constant, slope = np.linalg.lstsq(terms * weights[:, None], differences * weights, rcond=None)[0]
    if slope < 0:
        constant, slope = np.average(differences, weights=weights**2), 0.0
    elif constant < 0:
        constant, slope = 0.0, max(np.average(differences / sizes, weights=(weights * sizes) ** 2), 0.0)
    return np.clip(constant + slope * sizes, 0.01 * one, 0.4 * one)


class _ProbeModel:
    """A small model as whet trains it: packed, on the operators that this machine has."""

    def __init__(self, kind: Kind, width: int, n_blocks: int, clock: Callable[[], float]) -> None:
        from whet.config.methods import MethodSettings
        from whet.methods import order
        from whet.models.view import ModelView
        from whet.objectives.choose import choose

        self.kind: Kind = kind
        self.width, self._clock = width, clock
        self.head_width = min(64, width)
        self.model = _encoder(width, n_blocks) if kind == "encoder" else _decoder(width, n_blocks)
        collate: Any = _collate if kind == "decoder" else (lambda rows: {})
        self.objective = choose(self.model, None, collate)
        order.apply(ModelView(self.model), MethodSettings(operators="auto", row_gradients=True))
        self.model.train()
        blocks = ModelView(self.model).blocks()
        self._blocks = [block.module for block in blocks] or [_only_block(self.model)]
        self.block_weights = sum(one.numel() for one in self._blocks[0].parameters() if one.dim() > 1)

    def batch(self, n_rows: int) -> Any:
        """Return a batch of so many rows."""
        return self.objective.batch(_rows(self.kind, n_rows), range(n_rows), 0)

    def times(self, batch: Any, form: str, *, clear: bool = True) -> list[float]:
        """Return the times of a forward and a backward pass."""
        from whet.precision import policy

        precision = policy.make(form, next(self.model.parameters()).device)
        precision.begin(0, 0)
        begin_s = self._clock()
        with precision.forward():
            loss = self.objective.loss_sum(self.objective.forward(batch, seed=0, step=0), batch)
        middle_s = self._clock()
        precision.backward(loss)
        end_s = self._clock()
        if clear:
            self.model.zero_grad(set_to_none=True)
        return [middle_s - begin_s, end_s - middle_s]

    def train_blocks(self, wanted: bool) -> None:
        """Let the blocks' weights have gradients, or not."""
        for block in self._blocks:
            block.requires_grad_(wanted)


def _encoder(width: int, n_blocks: int) -> Any:
    from transformers import BertConfig, BertForQuestionAnswering

    return BertForQuestionAnswering(
        BertConfig(
            vocab_size=_VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=n_blocks,
            num_attention_heads=max(width // 64, 1), max_position_embeddings=_ROW_TOKENS,
        )
    )  # fmt: skip


def _decoder(width: int, n_blocks: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(width // 64, 1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=n_blocks,
            num_attention_heads=heads, num_key_value_heads=max(heads // 2, 1), max_position_embeddings=_ROW_TOKENS,
        )
    )  # fmt: skip


def _only_block(model: Any) -> Any:
    """Return the block of a model of one, which a view does not take for a stack."""
    encoder = getattr(model, "bert", None)
    return (encoder.encoder.layer if encoder is not None else model.model.layers)[0]


def _rows(kind: Kind, n_rows: int) -> Any:
    from whet.data.store import RowStore

    numbers = np.random.default_rng(0)
    ids = numbers.integers(10, _VOCABULARY, n_rows * _ROW_TOKENS)
    if kind == "decoder":
        rows = ids.reshape(n_rows, _ROW_TOKENS).tolist()
        return [{"input_ids": row, "labels": row} for row in rows]
    places = np.zeros(n_rows, dtype=np.int64)
    return RowStore(
        cu_seqlens=np.arange(0, len(ids) + 1, _ROW_TOKENS, dtype=np.int64),
        tokens={"input_ids": ids, "token_type_ids": np.zeros_like(ids)},
        labels={"start_positions": places, "end_positions": places + 1},
    )


def _collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import torch

    found = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return found | {"attention_mask": torch.ones_like(found["input_ids"])}


def _seconds(work: Callable[[], Any], clock: Callable[[], float]) -> list[float]:
    began_s = clock()
    work()
    return [clock() - began_s]
