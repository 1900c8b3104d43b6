"""What `--auto` may change of a run, what of it is tried, what wins, and where the choice is kept.

A candidate changes how fast a step is and how much memory it takes, not what it computes: how a step is split into
micro-batches, what is recomputed, and on which threads, cores, ranks and allocator it runs. Who forecasts candidates
and takes their steps, `jobs/auto.py` and `jobs/trial_processes.py` decide. Nothing here imports torch: a run whose
choice is known begins at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

from whet import console
from whet.config.arguments import TrainingArguments
from whet.config.fields import UPLOAD
from whet.config.upload import MODEL_FILES
from whet.data.files.file_bytes import contents, digest_with_names
from whet.hardware import cpu, topology
from whet.hardware.rank_plan import RankPlan, plan_ranks
from whet.kernels import native_file
from whet.paths import NO_CACHE, default_cache_dir, keep_newest
from whet.version import __version__

Policy = Literal["blocks", "selective"]
POLICIES: tuple[Policy, ...] = ("selective", "blocks")
Allocator = Literal["default", "tcmalloc", "jemalloc"]
FITS_FRAC = 0.9
"""A candidate fits if it takes less than this share of what is free: forecasts are up to 5 % too low, and a run stops
when 5 % are left."""
_STILL_FITS_FRAC, _SURELY_FITS_FRAC = 0.93, 0.85
"""A choice that has fitted holds up to this share, and what did not fit then is a reason to try again below that one:
what is free varies by some percent by itself."""
MOST_ROUNDS = 6
FEWEST_ROUNDS = 3
_HOPELESS, _SLOWER, _FASTER, _BARELY = (1.3, 1.08), 1.03, 0.97, 0.015
"""`_BARELY`: times that differ by a smaller share are the same, as far as rounds can tell."""
_WORTH_SAYING = 0.05
_CLEARLY_FASTER = (0.8, 0.92)
"""In one round, and in each of two: enough if there was time for no more."""
_SMALLEST_FRAC = 16
"""Micro-batches are not split below this part of a step if larger ones fit: products of few rows are slow."""
_MOST_SPLITS, _MOST_WORSE = 3, 1.4
"""So many splits are tried, the fastest by forecast, and none that should take so many times as long as the first."""
_NOT_FAR = 1.15
_CORES_OF_RANKS = 16
"""Cores of a NUMA node from which two ranks are tried on it."""
_FORM = 5
"""Raise this when a kept choice would be made in another way."""
_MOST_KEPT = 64
"""Files of choices in the cache."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run the same training."""

    rows: int
    """Those of a micro-batch of one rank."""
    batches: int
    """Micro-batches of a step."""
    checkpointing: Policy | None = None
    ranks: int = 1
    threads: int | None = None
    """Those of a rank; None: as they are without --auto."""
    cpus: tuple[int, ...] = ()
    """The logical CPUs that a rank alone is bound to; empty: not bound."""
    allocator: Allocator = "default"
    without: str = ""
    """A flag of the user's that is left out, to measure what it costs. Such a candidate is never taken."""

    @classmethod
    def of(cls, args: TrainingArguments) -> Candidate:
        """Return the run as its settings have it."""
        return cls(
            rows=args.per_device_train_batch_size, batches=args.gradient_accumulation_steps,
            checkpointing=args.checkpointing_policy if args.gradient_checkpointing else None,
        )  # fmt: skip

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Candidate:
        """Return what `asdict` made; raise TypeError for anything else."""
        return cls(**{**found, "cpus": tuple(found["cpus"])})

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a training that make it this one."""
        found: dict[str, Any] = {
            "per_device_train_batch_size": self.rows, "gradient_accumulation_steps": self.batches,
            "gradient_checkpointing": self.checkpointing is not None,
            "checkpointing_policy": self.checkpointing or "blocks",
        }  # fmt: skip
        if self.checkpointing is None:
            found["gradient_checkpointing_kwargs"] = None
        return {**found, **_WITHOUT.get(self.without, {})}

    def changed(self, args: TrainingArguments) -> dict[str, Any]:
        """Return those of its settings that differ from these."""
        return {name: value for name, value in self.settings.items() if getattr(args, name) != value}

    @property
    def needs_other_process(self) -> bool:
        """Whether it begins with another environment than that of a running process."""
        return self.ranks > 1 or self.allocator != "default"

    def __str__(self) -> str:
        if self.without:
            return f"without {self.without}"
        parts = [f"{self.rows} x {self.batches}"]
        parts += [f"{self.ranks} ranks"] if self.ranks > 1 else []
        parts += [f"recomputing {self.checkpointing}"] if self.checkpointing else []
        parts += [console.plural(self.threads, "thread")] if self.threads and self.ranks == 1 else []
        parts += [self.allocator] if self.allocator != "default" else []
        return ", ".join(parts)


CHECKPOINTING, COMPILE = "--gradient_checkpointing", "--torch_compile"
_FORMATS = {"bf16": "--bf16", "fp16": "--fp16", "int8": "--precision int8"}
_WITHOUT: Mapping[str, Mapping[str, Any]] = {
    CHECKPOINTING: {
        "gradient_checkpointing": False, "checkpointing_policy": "blocks", "gradient_checkpointing_kwargs": None
    },
    COMPILE: {"torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None},
    **{flag: {"precision": "auto", "bf16": None, "fp16": None} for flag in _FORMATS.values()},
}  # fmt: skip
"""Flag of the guides that may cost time on a CPU -> the settings without it."""


def without(candidate: Candidate, flag: str) -> Candidate:
    """Return the same without this flag of the user's."""
    checkpointing = None if flag == CHECKPOINTING else candidate.checkpointing
    return replace(candidate, checkpointing=checkpointing, without=flag)


def doubtful(args: TrainingArguments) -> list[str]:
    """Return the flags among these settings whose price is measured."""
    found = [CHECKPOINTING] if args.gradient_checkpointing else []
    found += [COMPILE] if args.torch_compile else []
    return found + ([_FORMATS[args.precision]] if args.precision in _FORMATS else [])


Sizes = list[tuple[int, int]]
"""Ways to split a step: rows of a micro-batch, and micro-batches."""


def sizes(base: Candidate) -> tuple[Sizes, Sizes]:
    """Return how the rows of a step may be split into micro-batches, the largest first; the user's split among them.

    Then smaller ones, for a step of which none of these fits into memory.
    """
    total = base.rows * base.batches
    usual, smaller, rows = {base.rows}, set[int](), total
    while rows:
        (usual if rows * _SMALLEST_FRAC >= total else smaller).add(rows)
        rows = next((one for one in range(rows // 2, 0, -1) if total % one == 0), 0)
    ordered = (sorted(usual, reverse=True), sorted(smaller - usual, reverse=True))
    usual_sizes, smaller_sizes = ([(rows, total // rows) for rows in found] for found in ordered)
    return usual_sizes, smaller_sizes


def fixed_split(args: TrainingArguments) -> str:
    """Return why another split of a step would change its result, or is not the run's to choose; "" if it is."""
    if args.deepspeed is not None:
        return "the configuration of DeepSpeed has it"
    if args.optimizer_in_backward:
        return "a step inside backward has one micro-batch"
    if args.padding_in_loss != "none":
        return "the loss counts the padding of each batch"
    if args.train_sampling_strategy == "batch_rebalance":
        return "batch_rebalance deals rows to batches"
    if args.dataloader_drop_last:
        return "dataloader_drop_last leaves out a batch"
    return ""


def largest_fitting(ways: Sequence[Candidate], look: Callable[[Candidate], Forecast]) -> list[Forecast]:
    """Return the forecasts that it takes to find the largest of these that fits; they are given in falling size."""
    found: list[Forecast] = []
    low, high = 0, len(ways)  # those before `low` are too large, those from `high` on fit
    at = 0
    while low < high:
        found.append(look(ways[at]))
        low, high = (low, at) if found[-1].fits else (at + 1, high)
        at = (low + high) // 2
    return found


def forecasts(
    base: Candidate,
    sizes: tuple[Sizes, Sizes],
    policies: Sequence[Policy | None],
    look: Callable[[Candidate], Forecast],
    timed: Callable[[Candidate], Forecast],
) -> list[Forecast]:
    """Return what is known of the ways to run a step: with each policy, unless one before it lets as many rows fit.

    `sizes` are those that are tried first, and those for a step of which none of these fits. `look` rehearses a
    candidate; `timed` forecasts its time alone, as a larger one fits.
    """
    known: list[Forecast] = []
    for some in sizes:
        for policy in policies if not any(one.fits for one in known) else ():
            larger = [size for size in some if all(not one.fits or one.candidate.rows < size[0] for one in known)]
            ways = [replace(base, rows=rows, batches=batches, checkpointing=policy) for rows, batches in larger]
            looks = largest_fitting(ways, look)
            known += looks
            largest = max((one.candidate.rows for one in looks if one.fits), default=0)
            seen = [one.candidate for one in looks]
            known += [timed(one) for one in ways if one.rows < largest and one not in seen]
    return known


def shortlist(known: Sequence[Forecast]) -> list[Forecast]:
    """Return the forecasts of what may be tried, the fastest first."""
    fitting = sorted((one for one in known if one.fits), key=lambda one: one.step_s)
    return [one for one in fitting[:_MOST_SPLITS] if one.step_s <= _MOST_WORSE * fitting[0].step_s]


def in_order(known: Sequence[Forecast], base: Candidate) -> tuple[list[Candidate], list[Candidate]]:
    """Return what is tried, the first candidate first, and what is tried if none of these comes to a step.

    `base` is the run as its user has set it: it is tried in any case, if it fits.
    """
    tried = [one.candidate for one in shortlist(known) if one.candidate != base]
    own = next((one for one in known if one.candidate == base and one.fits), None)
    if own is not None:  # what is far behind by forecast is not the first, as there may be time for no other
        tried.insert(0 if own.step_s <= _NOT_FAR * shortlist(known)[0].step_s else 1, base)
    smaller = [one.candidate for one in known if one.fits and one.candidate not in tried]
    return tried, sorted(smaller, key=lambda one: -one.rows)


def environments(
    best: Candidate, threads: int, allocators: Sequence[Allocator], most_ranks: int | None
) -> list[Candidate]:
    """Return the other environments to try for a run, those first that change the most on large machines.

    `threads` is how many it has by itself. Threads that the user has set with OMP_NUM_THREADS stay. `most_ranks` None:
    as many as the machine's NUMA nodes, or its many cores, suggest.
    """
    usable, quota = cpu.usable_cpus(), cpu.quota_cores()
    own = topology.read(cpus=usable).within(usable)
    alone = plan_ranks(own, quota_cores=quota, n_ranks=1)[0]
    found = [*_of_ranks(best, own.nodes, alone, most_ranks)]
    found += [replace(best, allocator=one) for one in allocators]
    if not os.environ.get("OMP_NUM_THREADS"):
        cpus = () if set(alone.cpus) == usable else alone.cpus
        counts = [alone.n_threads] if (alone.n_threads, cpus) != (threads, ()) else []
        counts += [max(alone.n_threads // 2, 1)] if alone.n_threads > 1 else []
        found += [replace(best, threads=n, cpus=cpus) for n in counts]
    return found


def _of_ranks(best: Candidate, nodes: Sequence[int], alone: RankPlan, most: int | None) -> list[Candidate]:
    n_nodes, n_cores = len(nodes), len(alone.cores)
    counts = {n_nodes, 2 * n_nodes} if n_cores >= _CORES_OF_RANKS * n_nodes else {n_nodes}
    counts = {n for n in counts if most is None or n <= most} | ({most} if most else set())
    total = best.rows * best.batches
    found = []
    for n in sorted(counts):
        if n < 2 or n > n_cores or total % n:
            continue
        each = total // n
        rows = next(rows for rows in range(min(best.rows, each), 0, -1) if each % rows == 0)
        found.append(replace(best, ranks=n, rows=rows, batches=each // rows))
    return found


# ---- what is known of a candidate ----


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a candidate should take."""

    candidate: Candidate
    step_s: float
    fits: bool
    peak_bytes: int | None = None
    """None: not rehearsed, as a larger one fits."""

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Forecast:
        """Return what `asdict` made."""
        return cls(**{**found, "candidate": Candidate.from_json(found["candidate"])})


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a candidate."""

    candidate: Candidate
    step_s: float | None = None
    """None: it was not tried, or did not come to a step."""
    peak_bytes: int | None = None
    """The most that a rank held."""
    why: str = ""
    """Why it was not tried, or not to the end."""

    def as_json(self) -> dict[str, Any]:
        """Return it as run.jsonl has it."""
        return {"setting": str(self.candidate), "step_s": self.step_s, "peak_bytes": self.peak_bytes, "why": self.why}


def verdict(ratios: Sequence[float], *, are_all: bool = False) -> Literal["faster", "alike", "slower"] | None:
    """Return how fast a candidate is, by its times over those of the best so far on the same steps.

    None: more rounds are needed. `are_all`: no more will come.
    """
    middle = median(ratios)
    first, second = _HOPELESS
    if min(ratios) > (first if len(ratios) == 1 else second):
        return "slower"
    if len(ratios) < FEWEST_ROUNDS:
        first, second = _CLEARLY_FASTER
        return "faster" if are_all and max(ratios) < (first if len(ratios) == 1 else second) else None
    if middle > _SLOWER:
        return "slower"
    if middle < _FASTER and max(ratios) < 1.0:
        return "faster"
    is_alike = are_alike(middle, 1.0)
    if are_all or len(ratios) >= MOST_ROUNDS:
        return "alike" if is_alike else "faster" if middle < 1.0 else "slower"
    return "alike" if is_alike and len(ratios) > FEWEST_ROUNDS else None


def are_alike(one_s: float, other_s: float) -> bool:
    """Return whether two times are the same, as far as rounds can tell."""
    return abs(one_s - other_s) <= _BARELY * max(one_s, other_s)


def holds_less(one_bytes: int, other_bytes: int) -> bool:
    """Return whether the first of two peaks is so much lower that it is worth a word, or a choice."""
    return other_bytes - one_bytes > _WORTH_SAYING * other_bytes


# ---- for people ----

_INDENT, _SETTING, _STEP, _MEMORY = 11, 36, 8, 9
_MOST_UNTRIED = 5


def table(results: Sequence[Result], taken: Candidate, took_s: float, n_rows: int) -> list[str]:
    """Return what was tried, in lines of at most 80 columns: the candidate that is taken first, the slowest last."""
    tried = sorted((one for one in results if one.step_s is not None), key=lambda one: one.step_s or 0.0)
    tried.sort(key=lambda one: one.candidate != taken)
    others = [one for one in results if one.step_s is None]
    n_more = len(others) - _MOST_UNTRIED
    best = tried[0].step_s if tried else None
    rows = [f"{'rows x micro-batches':<{_SETTING + 2}}{'a step':>{_STEP}}{'memory':>{_MEMORY}}"] if tried else []
    for one in tried:
        assert one.step_s is not None
        more = one.step_s / (best or one.step_s) - 1
        how = "slower" if more >= 0 else "faster"
        why = one.why or ("as fast" if are_alike(1 + more, 1.0) else f"{abs(more):.0%} {how}")
        mark, why = (">", "taken") if one.candidate == taken else (" ", why)
        held = "" if one.peak_bytes is None else console.amount(one.peak_bytes)
        name = f"{mark} {console.cell(str(one.candidate), _SETTING)}"
        rows.append(f"{name}{console.fine_duration(one.step_s):>{_STEP}}{held:>{_MEMORY}}  {why}")
    rows += [f"  {console.cell(str(one.candidate), _SETTING)}  {one.why}" for one in others[:_MOST_UNTRIED]]
    rows += [f"  {n_more} more were not tried"] if n_more > 0 else []
    count, rows_of_step = console.plural(len(tried), "setting"), console.plural(n_rows, "row")
    head = f"{count} tried for {console.duration(took_s)}, on real steps of {rows_of_step}"
    lines = [f"{'' if n else 'auto':<{_INDENT}}{text}".rstrip() for n, text in enumerate((head, *rows))]
    return [line if len(line) <= console.USUAL else f"{line[: console.USUAL - 1]}…" for line in lines]


def why_the_next_lost(results: Sequence[Result], taken: Candidate) -> str:
    """Return what the fastest of the others lacks, in words; "" if nothing else was tried."""
    best = next((one for one in results if one.candidate == taken), None)
    others = [one for one in results if one.step_s is not None and one.candidate != taken and not one.candidate.without]
    if best is None or best.step_s is None or not others:
        return ""
    second = min(others, key=lambda one: one.step_s or 0.0)
    second_s = second.step_s or 0.0
    if second.why:
        return f"{second.candidate} is not: {second.why}"
    lost = f"lost by {console.fine_duration(second_s - best.step_s)} a step"
    words = f"{second.candidate} {'is as fast' if are_alike(second_s, best.step_s) else lost}"
    one, other = second.peak_bytes, best.peak_bytes
    if one is None or other is None or not (holds_less(one, other) or holds_less(other, one)):
        return words
    return f"{words}, and holds {console.amount(abs(other - one))} {'less' if one < other else 'more'}"


def price(flag: str, with_s: float, without_s: float) -> str:
    """Return what a flag of the user's costs a step, or saves, and what to do about it."""
    times = f"{console.fine_duration(with_s)} a step with it, {console.fine_duration(without_s)} without"
    if with_s > (1 + _BARELY) * without_s:
        return f"{flag} costs {with_s / without_s - 1:.0%} here ({times}): it stays on, as asked for; leave it out"
    return f"{flag} costs nothing here ({times})"


# ---- the machine ----


_LOOKS, _BETWEEN_S, _BUSY_FRAC = 5, 0.02, 0.5


def is_busy() -> bool:
    """Return whether other programs keep cores busy that this process might use, by some looks at what runs now.

    The system's load is a mean over a minute: it counts what has ended.
    """
    counts = []
    for _ in range(_LOOKS):
        time.sleep(_BETWEEN_S)
        counts += [cpu.running_threads() or 0]
    return median(counts) - 1 >= _BUSY_FRAC * cpu.usable_cores()


# ---- what is kept ----

_SHAPELESS = frozenset({
    "output_dir", "overwrite_output_dir", "logging_dir", "run_name", "report_to", "report_html", "log_level",
    "log_format", "logging_strategy", "logging_steps", "logging_first_step", "disable_tqdm", "profile", "seed", "seeds",
    "data_seed",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "num_train_epochs",
    "max_steps", "min_steps", "resume_from_checkpoint", "resume_allow_changes", "save_steps", "save_total_limit",
    "save_strategy", "save_interval_s", "eval_steps", "eval_strategy", "eval_delay", "eval_on_start", "token",
    "cache_dir", "overwrite_cache", "dry_run", "auto_again", "auto_budget_s",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "enable_jit_checkpoint", "ddp_timeout",
    *UPLOAD,
})  # fmt: skip
"""Settings that change neither the speed of a step nor what a run holds."""
_MODELS = ("model_name_or_path", "config_name", "tokenizer_name", "teacher_model")
_NOT_SHAPES = (".safetensors", ".safetensors.index.json", "README.md")
_SHAPES = (*(name for name in MODEL_FILES if not name.endswith(_NOT_SHAPES)), "vocab*", "*.model")
"""The files of a model's folder that say how large it is, and how many tokens a text has."""


def key_of(task: str, job: Any, args: TrainingArguments) -> dict[str, Any]:
    """Return what a choice depends on: the machine, versions, the model's shape, and the data.

    Files, and the folder of a data set, count by their content: the longest row of other data may not fit into memory.
    The folder of a model counts by its configuration and its tokenizer, not by its path and its weights.
    """
    values = {one.name: getattr(part, one.name) for part in (job, args) for one in fields(part)}
    found = {name: value for name, value in values.items() if name not in _SHAPELESS}
    for name in _MODELS:
        folder = Path(found[name] or "")
        shapes = {path for one in _SHAPES for path in folder.glob(one) if path.is_file()} if found[name] else ()
        if shapes:
            found[name] = digest_with_names(folder, sorted(shapes))
    return {
        "form": _FORM, "task": task, "whet": __version__, "native": native_file.digest(),
        "several_seeds": values["seeds"] > 1,  # they run in one process
        **{name: metadata.version(name) for name in ("torch", "transformers")},
        "processor": cpu.model_name(), "cpus": sorted(cpu.usable_cpus()), "quota": cpu.quota_cores(),
        **{name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "WHET_ISA", "WHET_KERNELS")},
        **found, **contents(found),
    }  # fmt: skip


_REACH = ("max_steps", "num_train_epochs", "min_steps", "seed", "data_seed")


def reach_of(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings that decide how many rows a run reads, and which come first."""
    return {name: getattr(args, name) for name in _REACH}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen for a run, and why."""

    candidate: Candidate
    precision: str | None = None
    """The number format that `--precision auto` took in the trials; None: it was given, or takes part in the run."""
    step_s: float | None = None
    peak_bytes: int | None = None
    """The most that a rank will hold; None: unknown."""
    larger_bytes: int | None = None
    """What the smallest of those holds that did not fit: with so much memory, the choice may be another."""
    free_bytes: int | None = None
    """What the trials might hold in all; None: unknown."""
    seen_bytes: int | None = None
    """What this command saw of it before the trials, without the libraries that the run loads."""
    reach: Mapping[str, Any] | None = None
    """`reach_of` the run that it was made for, if that one left out rows; None: its forecast has seen all rows."""
    was_busy: bool = False
    """Whether other programs ran when it was made: fewer threads may have won by that."""
    made: float = field(default_factory=time.time)
    took_s: float = 0.0
    lines: tuple[str, ...] = ()
    """What was printed about it."""
    prices: tuple[str, ...] = ()
    results: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Choice:
        """Return what `asdict` made; raise TypeError, KeyError or ValueError for anything else."""
        several = {name: tuple(found[name]) for name in ("lines", "prices", "results")}
        return cls(**{**found, **several, "candidate": Candidate.from_json(found["candidate"])})

    def as_json(self) -> dict[str, Any]:
        """Return it as run.jsonl has it."""
        found = self.candidate
        return {
            "setting": str(found), "ranks": found.ranks, "threads": found.threads, "allocator": found.allocator,
            "step_s": self.step_s, "made": self.made, "took_s": self.took_s, "tried": list(self.results),
            "prices": list(self.prices),
        }  # fmt: skip

    def covers(self, args: TrainingArguments) -> bool:
        """Return whether the run that it was made for reads all rows that a run with these settings reads."""
        now = reach_of(args)
        if self.reach is None or self.reach == now:
            return True
        is_shorter = 0 < args.max_steps <= self.reach["max_steps"]
        return is_shorter and {**self.reach, "max_steps": args.max_steps} == now

    def why_again(self, seen: int | None) -> str:
        """Return why it does not hold any more, if a command sees so much memory now; "" if it does."""
        if self.was_busy and not is_busy():
            return "other programs ran next to the trials"
        most, free = self.larger_bytes, self._free(seen)
        if free is None or (self.fits(seen) and (most is None or most > _SURELY_FITS_FRAC * free)):
            return ""
        return f"{console.amount(free)} are free now, which is another amount than then"

    def fits(self, seen: int | None) -> bool:
        """Return whether it holds no more than may be taken if a command sees so much memory, in bytes, before it runs.

        None: unknown.
        """
        free = self._free(seen)
        return free is None or self.peak_bytes is None or self.peak_bytes <= _STILL_FITS_FRAC * free

    def _free(self, seen: int | None) -> int | None:
        """Return what a run may hold if a command sees so much before it: as much more or less as it sees now."""
        if seen is None or not self.free_bytes or not self.seen_bytes:
            return seen
        return int(self.free_bytes * (seen / self.seen_bytes))


def kept(key: Mapping[str, Any]) -> Choice | None:
    """Return the choice that was kept for this key; None if there is none, or its file is damaged."""
    path = _path(key)
    try:
        found = {} if path is None else json.loads(path.read_text("utf-8"))
        return Choice.from_json(found["choice"]) if found["key"] == _plain(key) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(choice: Choice, key: Mapping[str, Any]) -> str | None:
    """Keep the choice; return why it is not kept, None if it is."""
    path = _path(key)
    found = json.dumps({"key": _plain(key), "choice": asdict(choice)})
    return NO_CACHE if path is None else keep_newest(path, found, _MOST_KEPT)


def _plain(key: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(key, sort_keys=True, default=str))


def _path(key: Mapping[str, Any]) -> Path | None:
    folder = default_cache_dir()
    digest = hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()[:16]
    return None if folder is None else folder / f"auto-{digest}.json"
