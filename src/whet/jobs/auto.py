"""`--auto`: finds what makes this run fastest on this machine without changing its result, and runs it so.

What may change, and what wins, `plan/choose.py` decides. Here is the contest: a process forecasts the candidates, then
the best few take real steps (`trial_processes.py`), the best so far and the next in turn. The winner runs in this
process, or in its place if it needs another environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from whet import console, json_output, system
from whet.config.arguments import TrainingArguments
from whet.config.environment import AUTO
from whet.config.ranks import Elsewhere, checked_for
from whet.config.rules.training import LAUNCH_LOGS_NAME
from whet.errors import ConfigError, WhetError
from whet.hardware import cpu, memory
from whet.jobs.task import Task
from whet.jobs.trial_processes import (
    NO_TIME,
    Lost,
    Process,
    Workshop,
    drafted,
    ordered,
    started_by,
    without_auto,
)
from whet.launch.start import as_preloaded, choose_libraries
from whet.log import logger
from whet.plan import choose
from whet.plan.choose import Candidate, Choice, Forecast, Result
from whet.store import find, manifest
from whet.watch import printing, record

_ROUND_S = 0.25
"""A round of steps takes about this time, or is one step."""
_MOST_STEPS = 64
_ALONE_ROUNDS = 4
"""Rounds of a candidate that has to end before the next one can begin, as both do not fit into memory."""
_SHARE_OF_DOUBTFUL = 0.5
"""Of the time for trials, for the first one with flags that may cost time; then comes one without."""
_LONG_S = 1.0
"""Rounds that take longer are not repeated for each candidate as long as their first times will do."""
_ENOUGH_S = 2.0
"""After so much time of rounds, the first candidate has taken enough of them."""


# ---- the contest ----


@dataclass
class _Runner:
    """A candidate that takes steps."""

    candidate: Candidate
    process: Process
    start_s: float
    """From its process to its first step, without a trial of the number format."""
    n: int
    """Steps of a round."""
    precision: str
    threads: int
    peak_bytes: int
    level: float = 1.0
    """Its time for a step over that of the first candidate."""
    rounds: dict[int, float] = field(default_factory=dict)
    """Round -> its last time. The same round has the same rows for all candidates."""

    def round(self, number: int, until_s: float) -> float:
        """Return how long this round takes, in seconds."""
        self.rounds[number] = self.take(1 + number * self.n, self.n, until_s)
        return self.rounds[number]

    def take(self, first: int, n: int, until_s: float) -> float:
        """Take steps, and return how long they took, in seconds."""
        found = self.process.ask(until_s, first=first, n=n)
        self.peak_bytes = max(self.peak_bytes, *(one["peak"] or 0 for one in found))
        return max(one["seconds"] for one in found)


class _Contest:
    """Tries candidates within a budget, the best so far against the next one."""

    def __init__(
        self, workshop: Workshop, plan: Mapping[str, Any], task: Task, job: Any, args: TrainingArguments
    ) -> None:
        self.workshop, self.task, self.job, self.args = workshop, task, job, args
        self._known, self._without = (
            {form: [Forecast.from_json(one) for one in found] for form, found in plan[name].items()}
            for name in ("known", "without")
        )
        self.expected_precision: str = plan["precision"]
        self.precision: str | None = None
        """What `auto` has chosen in the first trial."""
        self.free: int | None = plan["free"]
        self.split_is_fixed = bool(plan["split_is_fixed"])
        self.is_timed = plan["train_s"] is not None
        """Whether the forecasts know how long a step takes, and not only which takes longer."""
        self.by_forecast: Mapping[str, float] = plan["prices"]
        self.prices: list[str] = []
        """What flags of the user's that may cost time cost."""
        self.results: list[tuple[Candidate, float | None, int | None, str]] = []
        """Candidate, its time over that of the first, its peak, and why it was not tried to the end."""
        self.failed: list[Candidate] = []
        self.first: _Runner | None = None
        self.began_s = time.monotonic()
        self.until_s = self.began_s + job.auto_budget_s

    @property
    def known(self) -> list[Forecast]:
        """The forecasts in the run's number format."""
        return self._known[self._format]

    @property
    def _format(self) -> str:
        """The number format of the run, or what `auto` should choose; auto if each of several seeds may choose."""
        found = self.precision or self.expected_precision
        return found if found in self._known and self.job.seeds == 1 else self.args.precision

    def fitting_in_any_format(self) -> list[Forecast]:
        """Return the forecasts that fit whatever `auto` chooses."""
        return [one for one in self._known[self.args.precision] if one.fits]

    def fits_in_some_format(self) -> bool:
        """Return whether a candidate fits in one of the formats that the run may take."""
        return any(one.fits for known in self._known.values() for one in known)

    def run(self) -> _Runner | None:
        """Return the winner; None if no candidate came to a step."""
        base, best, begun = Candidate.of(self.args), None, list[Candidate]()
        while best is None:
            candidate = next((one for one in chain(*choose.in_order(self.known, base)) if one not in begun), None)
            if candidate is None:
                return None
            begun.append(candidate)
            best = self._first(candidate)
            if best is None and self.prices:  # with these flags no other comes to its steps
                return None
        tried, _ = choose.in_order(self.known, base)
        for one in self.known:
            if one.candidate not in (*tried, *begun):
                slow = f"forecast at {console.fine_duration(one.step_s)}" if self.is_timed else "expected to be slower"
                why = slow if one.fits else self._too_large(one.peak_bytes or 0)
                self.results.append((one.candidate, None, None, why))
        for candidate in tried:
            if candidate not in begun:
                best = self._duel(best, candidate)
        self.prices += self._price_of_accumulation(best)
        return self._in_environments(best)

    def _first(self, candidate: Candidate) -> _Runner | None:
        """Return the first candidate at work, once the user's flags have their price: there may be time for no more."""
        flags, began_s = choose.doubtful(self.args), time.monotonic()
        found = self._begun(candidate, began_s + (self.until_s - began_s) * (_SHARE_OF_DOUBTFUL if flags else 1.0))
        if found is not None:
            self.prices = [*self._prices(found)]
            return found
        waited_s = time.monotonic() - began_s
        for flag in flags if self.results[-1][3] == NO_TIME else ():
            without = choose.without(candidate, flag)
            if self._is_forecast(without) and (other := self._begun(without)) is not None:
                took, waited = console.fine_duration(self.step_s), console.duration(waited_s)
                self.prices.append(f"{flag}: no steps came in {waited} with it, {took} a step without: leave it out")
                other.process.end()
                self.first = None
        return None

    def _is_forecast(self, without: Candidate) -> bool:
        """Return whether it is known that the candidate without a flag fits."""
        return any(one.candidate == without and one.fits for one in self._without[self._format])

    def _in_environments(self, best: _Runner) -> _Runner:
        origin = best.candidate
        own = choose.environments(origin, best.threads, allocators(), self._most_ranks())
        for one in own:
            changed = {name: value for name, value in vars(one).items() if value != getattr(origin, name)}
            candidate = replace(best.candidate, **changed)
            if candidate.ranks == 1 or ("threads" not in changed and self._takes(candidate)):
                best = self._duel(best, candidate)
        return best

    def _most_ranks(self) -> int | None:
        return 1 if self.job.seeds > 1 or self.split_is_fixed else self.job.auto_ranks

    def _takes(self, candidate: Candidate) -> bool:
        """Return whether the settings go with so many ranks, and all of them fit into memory."""
        peak = self.expected(candidate)
        if self.free is not None and candidate.ranks * peak > choose.FITS_FRAC * self.free:
            return False
        from whet.optional import is_installed

        with checked_for(Elsewhere(n_ranks=candidate.ranks, has_deepspeed=is_installed("deepspeed"))):
            try:
                args = replace(self.args, **candidate.changed(self.args))
            except WhetError:
                return False
            return not self.task.problems(drafted(self.job, auto=False), args)

    def expected(self, candidate: Candidate) -> int:
        """Return the memory of a rank of the candidate, at most."""
        known = [one for one in self.known if one.candidate.checkpointing == candidate.checkpointing and one.peak_bytes]
        enough = [one.peak_bytes or 0 for one in known if one.candidate.rows >= candidate.rows]
        return min(enough, default=max((one.peak_bytes or 0 for one in known), default=0))

    def _begun(self, candidate: Candidate, wanted_s: float | None = None) -> _Runner | None:
        """Return the candidate at work, after its first step; None if it does not come to that."""
        began_s = time.monotonic()
        until_s = self.until_s if wanted_s is None else wanted_s
        first = self.first
        settings = {} if self.precision is None else {"precision": self.precision}
        process = None
        if began_s >= until_s:
            self.results.append((candidate, None, None, NO_TIME))
            return None
        try:
            process = self.workshop.start(until_s, candidate, do="steps", settings=settings)
            said = process.ask(until_s)[0]
            runner = _Runner(candidate, process, 0.0, 1, said["precision"], said["threads"], 0)
            if first is None:
                self._keep_format(runner)
            runner.take(0, 1, until_s)
            runner.start_s = time.monotonic() - began_s - said["trial_s"]
            if first is None and self._is_too_large(runner):
                raise Lost(self._too_large(runner.peak_bytes))
            if first is None:
                runner.n = max(1, min(round(_ROUND_S / max(runner.round(0, until_s), 1e-6)), _MOST_STEPS))
                for number in range(2):
                    if sum(runner.rounds.values()) < _ENOUGH_S:
                        runner.round(number, until_s)
                self.first = runner
            else:
                runner.n = first.n
        except Lost as lost:
            if process is not None:
                process.end(at_once=True)
            self.results.append((candidate, None, None, str(lost)))
            self.failed += [] if str(lost) == NO_TIME else [candidate]
            return None
        return runner

    def _keep_format(self, runner: _Runner) -> None:
        """Keep the number format that the first trial has chosen; raise Lost before its first step if it is too large.

        It may be another one than `auto` was forecast to choose.
        """
        if self.args.precision != "auto":
            return
        self.precision = runner.precision
        known = next((one for one in self.known if one.candidate == runner.candidate), None)
        if known is not None and not known.fits:
            raise Lost(f"{self._too_large(known.peak_bytes or 0)} in {runner.precision}")

    def _duel(self, best: _Runner, candidate: Candidate) -> _Runner:
        """Return the faster of the two at work; the other one has ended."""
        other, ratios, why = self._compared(best, candidate)
        if other is None:
            return best
        other.level = best.level * median(ratios) if ratios else best.level
        won = why in ("", NO_TIME) and bool(ratios) and self._is_taken(other, best, ratios)
        if won and self._is_too_large(other):
            won, why = False, self._too_large(other.peak_bytes * candidate.ranks)
        winner, loser = (other, best) if won else (best, other)
        loser.process.end()
        self.results.append((loser.candidate, loser.level if ratios else None, loser.peak_bytes, "" if won else why))
        return winner

    def _is_taken(self, other: _Runner, best: _Runner, ratios: Sequence[float]) -> bool:
        """Return whether a runner takes the place of the best one: it is faster, or as fast and to be preferred.

        Of two splits that are as fast this is the user's own, and else the one that holds less. Threads, cores, ranks
        and the allocator stay what they are if no others are faster.
        """
        if (found := choose.verdict(ratios, are_all=True)) != "alike":
            return found == "faster"
        own, split = Candidate.of(self.args), other.candidate
        is_split = replace(own, rows=split.rows, batches=split.batches, checkpointing=split.checkpointing) == split
        if not is_split or best.candidate == own:
            return False
        tried = [level for one, level, _, _ in self.results if level is not None and not one.without]
        if not choose.are_alike(other.level, min(best.level, other.level, *tried)):
            return False  # of several, each may be as fast as the one before it, and the last slower than the first
        return split == own or choose.holds_less(other.peak_bytes, best.peak_bytes)

    def _compared(self, best: _Runner, candidate: Candidate) -> tuple[_Runner | None, list[float], str]:
        """Return the candidate at work, its times over those of the best in turn, and why there are too few.

        There may be no more of them than rounds of a best that has ended.
        """
        each_s = median(best.rounds.values())
        if self.until_s - time.monotonic() < best.start_s + 2 * each_s:
            self.results.append((candidate, None, None, NO_TIME))
            return None, [], ""
        if not best.process.has_ended and not self._both_fit(best.candidate, candidate):
            with suppress(Lost):
                for number in range(_ALONE_ROUNDS):
                    best.round(number, self.until_s)
            best.process.end()
        other = self._begun(candidate)
        if other is None:
            return None, [], ""
        ratios: list[float] = []
        try:
            while not ratios or choose.verdict(ratios) is None:
                number = len(ratios)
                is_known = number in best.rounds and (best.process.has_ended or each_s > _LONG_S)
                if is_known or best.process.has_ended:
                    if not is_known:
                        return other, ratios, "" if number >= choose.FEWEST_ROUNDS else NO_TIME
                    ratios.append(other.round(number, self.until_s) / best.rounds[number])
                    continue
                pair = (best, other) if number % 2 else (other, best)
                times = {id(one): one.round(number, self.until_s) for one in pair}
                ratios.append(times[id(other)] / times[id(best)])
        except Lost as lost:
            return other, ratios, str(lost)
        return other, ratios, ""

    def _both_fit(self, one: Candidate, other: Candidate) -> bool:
        needed = sum(two.ranks * self.expected(two) for two in (one, other))
        available = memory.available_bytes()
        return available is None or needed <= available + self.expected(one)

    def _too_large(self, peak_bytes: int) -> str:
        return f"takes {peak_bytes / (self.free or peak_bytes):.0%} of what is free"

    def _is_too_large(self, runner: _Runner) -> bool:
        return self.free is not None and runner.candidate.ranks * runner.peak_bytes > choose.FITS_FRAC * self.free

    def _prices(self, best: _Runner) -> Iterator[str]:
        """Yield what the user's flags that may cost time cost, measured with and without them."""
        base_s = self.step_s
        for flag in choose.doubtful(self.args):
            candidate = choose.without(best.candidate, flag)
            found = next((one for one in self._without[self._format] if one.candidate == candidate), None)
            if found is None:
                yield self._price_by_forecast(flag, "its memory is not forecast")
                continue
            if not found.fits:
                room = "" if self.free is None else f", and {console.amount(self.free)} are free"
                yield f"{flag} is needed: without it the run takes {console.amount(found.peak_bytes or 0)}{room}"
                continue
            other, ratios, _ = self._compared(best, candidate)
            if other is None or not ratios:
                yield self._price_by_forecast(flag, self.results[-1][3] if other is None else NO_TIME)
                continue
            other.process.end()
            other.level = best.level * median(ratios)
            self.results.append((candidate, other.level, other.peak_bytes, ""))
            yield choose.price(flag, base_s * best.level, base_s * other.level)

    def _price_by_forecast(self, flag: str, why: str) -> str:
        if (share := self.by_forecast.get(flag)) is None:
            return f"{flag}: not measured: {why}"
        return f"{flag} costs {share:.0%} by forecast (not measured: {why})"

    def _price_of_accumulation(self, best: _Runner) -> list[str]:
        """Return what the user's split into micro-batches costs, if another one with fewer is taken."""
        asked, base_s = Candidate.of(self.args), self.step_s
        level = next((level for one, level, _, _ in self.results if one == asked), None)
        if level is None or best.candidate.batches >= asked.batches:
            return []
        asked_s, taken_s = (console.fine_duration(base_s * one) for one in (level, best.level))
        times = f"{asked_s} a step as {asked}, {taken_s} as taken"
        return [f"--gradient_accumulation_steps {asked.batches} costs {level / best.level - 1:.0%} here ({times})"]

    @property
    def step_s(self) -> float:
        """The time of a step of the first candidate."""
        return 0.0 if self.first is None else median(self.first.rounds.values()) / self.first.n

    def all_results(self, best: _Runner) -> list[Result]:
        """Return what came of every candidate."""
        found = [*self.results, (best.candidate, best.level, best.peak_bytes, "")]
        return [
            Result(candidate=one, step_s=None if level is None else self.step_s * level, peak_bytes=peak, why=why)
            for one, level, peak, why in found
        ]


def allocators() -> list[choose.Allocator]:
    """Return the allocators that are installed, next to the process's own; none if its user has preloaded one."""
    if as_preloaded()[0] != "default":
        return []
    found: list[choose.Allocator] = []
    for name in ("tcmalloc", "jemalloc"):
        with suppress(ConfigError):
            choose_libraries(name, "default")
            found.append(name)
    return found


# ---- the choice of a run ----


def chosen(task: Task, job: Any, args: TrainingArguments) -> tuple[TrainingArguments, Choice | None]:
    """Return the settings with what was chosen for this run, and the choice; None: the settings stay as they are.

    What needs another environment begins in place of this process: the call then does not return.
    """
    if (order := ordered()) is not None:
        os.environ.pop(AUTO)
        choice = Choice.from_json(order["choice"])
        return _with(choice, job, args), choice
    command = record.running_command()
    assert command is not None
    key = choose.key_of(task.name, job, args)
    known = choose.kept(key)
    choice = _resumed(job, args, known)
    if choice is None and known is not None and not job.auto_again:
        choice = _kept(known, args)
    if choice is None:
        choice = _tried(task, job, args, command.words, known)
        if choice is not None and choice.step_s is not None and (why := choose.keep(choice, key)):
            _say(f"the next start tries again, as the choice is not kept: {why}", "")
    if choice is None:
        return args, None
    if not job.dry_run:
        _begin(choice, command.words, Path(args.output_dir) / LAUNCH_LOGS_NAME)
        return _with(choice, job, args), choice
    _say(without_auto(choice.candidate, task.name, args), "run")
    if choice.candidate.ranks > 1:
        _say("what follows is the forecast of one process", "")
        return args, choice
    return _with(choice, job, args), choice


@contextmanager
def recorded(choice: Choice | None, args: TrainingArguments, asked: TrainingArguments) -> Iterator[None]:
    """Let the log of the run in the block have what was tried, and its record name --auto where a setting came from."""
    command = record.running_command()
    if choice is None or command is None:
        yield
        return
    for line in (*choice.lines, *choice.prices):
        logger.info("%s", line)
    changed = [one.name for one in fields(args) if getattr(args, one.name) != getattr(asked, one.name)]
    with record.of_command(replace(command, sources={**command.sources, **dict.fromkeys(changed, "--auto")})):
        yield


def _with(choice: Choice, job: Any, args: TrainingArguments) -> TrainingArguments:
    changed = choice.candidate.changed(args)
    if choice.precision is not None and args.precision == "auto" and job.seeds == 1 and not args.resume_from_checkpoint:
        changed |= {"precision": choice.precision, "bf16": None}
    return replace(args, **changed) if changed else args


def _say(text: str, label: str = "auto") -> None:
    for n, line in enumerate(console.folded_message(text, console.width() - 11, "")):
        printing.show([f"{label if n == 0 else '':<11}{line}"])


def _kept(known: Choice, args: TrainingArguments) -> Choice | None:
    """Return the choice of an earlier run if it still holds, and say so."""
    fewer = "" if known.covers(args) else "the trials were of a run that reads fewer rows, and others may be longer"
    if why := fewer or known.why_again(_seen_bytes(args)):
        _say(f"settings are tried again: {why}")
        return None
    if not _can_begin(known):
        return None
    _say(f"{_in_words(known)} on this machine; --auto_again true tries again")
    for text in known.prices:
        _say(text)
    return known


def _as_known(known: Choice | None, args: TrainingArguments, why: str) -> Choice | None:
    """Return the choice of an earlier run in place of trials, and say why there are none; None if it does not fit."""
    if known is None or known.was_busy or not known.covers(args):
        return None
    if not known.fits(_seen_bytes(args)) or not _can_begin(known):
        return None
    _say(f"{why}: {_in_words(known)}")
    return known


def _seen_bytes(args: TrainingArguments) -> int | None:
    """Return what this process, which begins the run, sees of the memory that there is for it."""
    return memory.free_bytes(held_bytes=memory.resident_bytes() or 0, limit_gb=args.memory_limit_gb)


def _can_begin(known: Choice) -> bool:
    return known.candidate.allocator in ("default", *allocators())


def _in_words(known: Choice) -> str:
    step = "" if known.step_s is None else f", {console.fine_duration(known.step_s)} a step"
    return f"{known.candidate}{step}: as tried {console.duration(max(time.time() - known.made, 0))} ago"


def _resumed(job: Any, args: TrainingArguments, known: Choice | None) -> Choice | None:
    """Return what the run of the checkpoint was, which this one resumes; None if there is none.

    The choice that is known stays if it agrees: it also says what a result does not depend on.
    """
    asked, output_dir = args.resume_from_checkpoint, Path(args.output_dir)
    if not asked or asked == "no":
        return None
    folders = [output_dir / f"seed-{args.seed + n}" for n in range(job.seeds)] if job.seeds > 1 else [output_dir]
    folder = next(filter(None, map(find.would_resume, folders)), None) if asked == "auto" else Path(str(asked))
    if folder is None:
        return None
    from whet.store import compare

    try:
        settings = json.loads((folder / compare.ARGUMENTS).read_text("utf-8"))
        threads = json.loads((folder / compare.FINGERPRINT).read_text("utf-8"))["environment"]["threads"]
        ranks = manifest.n_ranks_of(folder)
        found = Candidate(
            rows=int(settings["per_device_train_batch_size"]), batches=int(settings["gradient_accumulation_steps"]),
            checkpointing=settings["checkpointing_policy"] if settings["gradient_checkpointing"] else None,
            ranks=ranks, threads=None if os.environ.get("OMP_NUM_THREADS") else int(threads),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None  # what is wrong with it, the resume says
    if found.rows * found.batches * ranks != args.train_rows_per_step or ranks > cpu.usable_cores():
        return None  # the resume says so, or deals the rows to the ranks that there are
    own = None if known is None else known.candidate
    if own is not None and replace(own, threads=found.threads, cpus=(), allocator="default") == found:
        found = replace(own, threads=found.threads)
    _say(f"{found}: as in {folder.name}, so that the run resumes bitwise")
    return Choice(candidate=found)


def _tried(task: Task, job: Any, args: TrainingArguments, words: Sequence[str], known: Choice | None) -> Choice | None:
    """Return what trials have chosen, and say what was tried; None if nothing could be.

    Where the run is too short for trials, what an earlier one has `known` stays, if it fits.
    """
    was_busy, seen = choose.is_busy(), _seen_bytes(args)
    with Workshop(words) as workshop:
        try:
            far_s = time.monotonic() + 24 * 3600
            planned = workshop.start(far_s, Candidate.of(args), do="forecast")
            plan = planned.ask(far_s)[0]
            planned.end()
        except Lost as lost:
            _say(f"nothing is tried, as the run cannot be forecast: {lost}")
            return None
        if plan["device"] != "cpu":
            raise _on_a_gpu(plan["device"])
        contest = _Contest(workshop, plan, task, job, args)
        if not contest.fits_in_some_format():
            raise _nothing_fits(contest)
        short = contest.is_timed and plan["train_s"] < job.auto_budget_s and not job.dry_run and not job.auto_again
        short = short and bool(contest.fitting_in_any_format())
        if short:
            took, budget = (console.duration(seconds) for seconds in (plan["train_s"], job.auto_budget_s))
            why = f"nothing is tried, as the run takes about {took} and trials up to {budget} (--auto_again tries)"
            return _as_known(known, args, why) or _by_forecast(contest, why)
        best = contest.run()
        if best is None and not any(one.fits for one in contest.known):
            raise _nothing_fits(contest)
        if best is None:
            choice = _by_forecast(contest, f"no trial came to its steps ({contest.results[-1][3]})")
            for text in contest.prices:
                _say(text, "")
            return choice
        prices, results = tuple(contest.prices), contest.all_results(best)
    took_s = time.monotonic() - contest.began_s
    taken = best.candidate
    lines = choose.table(results, taken, took_s, args.train_rows_per_step)
    printing.show(lines)
    said = [f"{taken} is taken"]
    said += [lost] if (lost := choose.why_the_next_lost(results, taken)) else []
    said += [f"micro-batches stay, as {plan['split_is_fixed']}"] if plan["split_is_fixed"] else []
    for text in ("; ".join(said), *prices):
        _say(text, "")
    too_large = [one.peak_bytes for one in contest.known if not one.fits and one.peak_bytes]
    return Choice(
        candidate=taken, precision=best.precision if args.precision == "auto" else None,
        step_s=contest.step_s * best.level, peak_bytes=max(best.peak_bytes, contest.expected(taken)) * taken.ranks,
        larger_bytes=min(too_large, default=None), free_bytes=plan["free"], seen_bytes=seen,
        reach=None if plan["sees_all_rows"] else choose.reach_of(args), was_busy=was_busy, took_s=took_s,
        lines=(*lines, "; ".join(said)), prices=prices, results=tuple(one.as_json() for one in results),
    )  # fmt: skip


def _by_forecast(contest: _Contest, why: str) -> Choice | None:
    """Return what a run takes without a trial: its own settings if they fit, else the fastest forecast that does."""
    base = Candidate.of(contest.args)
    fitting = [one for one in contest.fitting_in_any_format() if one.candidate not in contest.failed]
    if not fitting or any(one.candidate == base for one in fitting):
        _say(f"{why}: the settings stay as they are")
        return None
    best = choose.shortlist(fitting)[0].candidate
    _say(f"{why}: {best} is taken by its forecast, as {base} does not fit")
    return Choice(candidate=best)


def _begin(choice: Choice, words: Sequence[str], log_dir: Path) -> None:
    """Give this process the threads and cores of the choice, or begin another one in its place.

    Ranks log in this folder.
    """
    found = choice.candidate
    if found.cpus:
        system.bind(found.cpus)
    if not found.needs_other_process:
        if found.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(found.threads)
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(found.threads)
        return
    reported = ["--json"] if json_output.is_wanted() else []
    command, environment = started_by(found, [*words, *reported], str(log_dir))
    environment[AUTO] = json.dumps({"do": "run", "choice": asdict(choice)})
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    json_output.hand_over()
    os.execve(command[0], command, environment)  # noqa: S606 (no shell)


def _on_a_gpu(device: str) -> WhetError:
    return ConfigError(
        what="auto chooses for CPUs",
        got=f"this run is on a GPU ({device})",
        why="threads, cores, allocators and ranks of CPUs are what it tries, and its forecasts are of CPUs",
        fix="leave --auto out, and add --auto_find_batch_size true, which finds the rows that fit; or add --use_cpu",
    )


def _nothing_fits(contest: _Contest) -> WhetError:
    least = min(contest.known, key=lambda one: one.peak_bytes or 0)
    return ConfigError(
        what="no settings with the same result fit into memory",
        got=f"{least.candidate} takes {console.amount(least.peak_bytes or 0)}, and "
        f"{console.amount(contest.free or 0)} are free, of which a tenth is left for what a forecast does not know",
        why="auto changes how a step is split and what is recomputed, and nothing that changes the result",
        fix=f"run: whet plan {contest.task.name} with the options of this run and --fit, which lists changes that fit",
    )
