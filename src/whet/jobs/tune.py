"""`whet tune`: a study of optuna whose trials are trainings by the command itself, each a process of its own.

The study chooses the values (TPE, Bergstra et al. 2011) and drops trials that fall behind the median of the earlier
ones at the same evaluation. It is kept in a journal in the output folder, so a search that was killed continues with
`--resume_from_checkpoint auto`: a trial that was running is trained again. The first trial has the settings as they
were given, if they are among the values, so the best is never worse. A trial's scores are those in its `run.jsonl`.

The output folder ends as one of a training with the best settings, next to `tune.json`, `tune.svg` and a folder for
each trial.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from whet import console, json_output, system
from whet.config.arguments import TrainingArguments
from whet.config.command_line import kinds_of, without
from whet.config.environment import RESUME
from whet.config.fields import UPLOAD
from whet.config.secrets import hidden, is_token
from whet.config.settings import Names, options_of, printable
from whet.data.files.file_bytes import contents
from whet.errors import EXIT_BAD_CONFIG, ConfigError, DataError, escape_controls, hide_secrets
from whet.jobs import used_again
from whet.jobs.fields import JobFields
from whet.jobs.places import logging_dir_in, may_hold_files, require_places
from whet.jobs.run import resumed
from whet.jobs.task import Task
from whet.jobs.tune_arguments import TuneArguments, Values, seconds_of, space_of
from whet.launch.words import without_secrets
from whet.optional import extra, require
from whet.watch import files as output_files
from whet.watch import lock, printing, record, results, stop

_JOURNAL = "tune.journal"
_SUMMARY, _PICTURE = "tune.json", "tune.svg"
_SETTINGS = "tune-settings.json"
"""What the config files of the command say of the training: the config file of the trials."""
_TRIAL = re.compile(r"trial-(0|[1-9]\d*)")
"""The folder of a trial. What else begins with trial- is the user's."""
_DEFAULT_TRIALS = 20
_COMPLETE_BEFORE_DROPPING = 5
_EVERY_S = 0.2
_MOST_REPEATS = 50
"""So many suggestions in a row that were tried before end the search: a range may hold few numbers that differ."""
_FAILED = "failed"
"""Attribute of a trial whose training ended in an error."""
_AS_GIVEN = "settings as given"
"""Attribute of the first trial: whether it has the settings of the command, which may lie outside what is searched."""
_FIRST_FAILURES, _FAILURES_IN_A_ROW = 3, 6
"""So many failed trials end the search, before one is complete (the command itself is wrong) and later."""
_KEPT = ("run.jsonl", "run.log", "report.html", "errors.jsonl", "trainer_state.json", "eval_confusion.csv")
"""Files of a trial that stay when its model is removed, next to its results."""
_UNLIKE = {
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "token", "hub_token", "push_to_hub", "log_level",
    "report_html", "preprocessing_num_workers", "overwrite_cache", "cache_dir",
}  # fmt: skip
"""Settings that may change when a search continues."""


@dataclass
class _Outcome:
    """How a trial ended."""

    state: str
    """complete, dropped, failed, or stopped (time or a signal)."""
    score: float | None
    seconds: float
    why: str = ""


def tune(task: Task, asked: TuneArguments, job: JobFields, args: TrainingArguments) -> int:
    """Run the search and return the exit code. Raises Stopped if a signal comes."""
    optuna = require("optuna", needed_for="whet tune", install=extra("optuna"))
    args = resumed(args)
    space = space_of(asked, job, args)
    printing.configure(args)
    lock.refuse_taken(Path(args.output_dir))
    require_places(job, args)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    upload = None
    if args.push_to_hub:
        from whet.jobs import hub_upload

        upload = hub_upload.begin(args, job)
    json_output.add_outputs(folder=args.output_dir)
    output = Path(args.output_dir)
    json_output.may_write(summary=output / _SUMMARY, picture=output / _PICTURE)
    with lock.output_folder(args.output_dir, may_hold_files(args)) as folder:
        stop.defer_signals()
        search = _Search(optuna, task, asked, job, args, space, folder)
        search.run()
        search.finish()
        if upload is not None:
            printing.show([upload.finish()])
    return 0


class _Search:
    """One search: its study, its trials, and what is printed of them."""

    def __init__(
        self, optuna: Any, task: Task, asked: TuneArguments, job: JobFields, args: TrainingArguments,
        space: Sequence[Values], folder: Path,
    ) -> None:  # fmt: skip
        self._optuna, self._task, self._asked, self._job, self._args = optuna, task, asked, job, args
        self._space, self._folder = space, folder
        self._greater = bool(args.greater_is_better) if args.metric_for_best_model else not task.lower_is_better
        self._metric: str | None = None
        self._limit_s = None if asked.time_limit is None else seconds_of(asked.time_limit)
        self._began_s = time.perf_counter()
        self._study = self._opened()
        self._words = _words_of_training(asked, job, args, [one.name for one in space], folder / _SETTINGS)

    # ---- the study ----

    def _opened(self) -> Any:
        optuna, path = self._optuna, self._folder / _JOURNAL
        if self._args.resume_from_checkpoint is None:
            for old in (path, self._folder / _SUMMARY):
                old.unlink(missing_ok=True)
            for old in self._trial_folders().values():
                shutil.rmtree(old, ignore_errors=True)
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, study_name="whet tune", load_if_exists=True,
            direction="maximize" if self._greater else "minimize",
            pruner=optuna.pruners.MedianPruner(
                n_startup_trials=_COMPLETE_BEFORE_DROPPING, n_warmup_steps=max(self._asked.min_epochs - 1, 0)
            ),
        )  # fmt: skip
        seed = self._args.seed + len(study.trials)  # a search that continues draws new values
        study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
        settings = self._settings()
        if "settings" in study.user_attrs:
            self._require_same(study.user_attrs["settings"], settings)
        else:
            study.set_user_attr("settings", settings)
            first = [(one, _plain(getattr(self._owner(one.name), one.name))) for one in self._space]
            known = {one.name: _encoded(value) for one, value in first if one.has(value)}
            study.enqueue_trial(known, user_attrs={_AS_GIVEN: len(known) == len(first)})
        for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            self._again(study, trial)  # it was killed with its search
        return study

    def _again(self, study: Any, trial: Any) -> None:
        """End a trial that was not trained to its end, and have its values tried first when the search continues."""
        study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        known = study.get_trials(deepcopy=False)[trial.number]
        study.enqueue_trial(known.params, user_attrs={_AS_GIVEN: known.user_attrs.get(_AS_GIVEN, False)})

    def _folder_of(self, number: int) -> Path:
        return self._folder / f"trial-{number}"

    def _trial_folders(self) -> dict[int, Path]:
        """Return the folders of the trials by their numbers."""
        found = {path: _TRIAL.fullmatch(path.name) for path in self._folder.iterdir()}
        folders = {int(name[1]): path for path, name in found.items() if name}
        return {number: path for number, path in folders.items() if path.is_dir() and not path.is_symlink()}

    def _owner(self, name: str) -> Any:
        return self._job if hasattr(self._job, name) else self._args

    def _settings(self) -> dict[str, Any]:
        searched = {one.name for one in self._space}
        found = {**printable(self._job), **printable(self._args), **contents(asdict(self._job))}
        found = {name: value for name, value in found.items() if name not in _UNLIKE | searched}
        return json.loads(json.dumps({"search": sorted(self._asked.search), **found}, default=str))

    def _require_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            raise ConfigError(
                what=f"the search in {self._folder} has other settings: {', '.join(changed)}",
                got="; ".join(f"{name}: {before.get(name)} then, {now[name]} now" for name in changed[:5]),
                why="trials are compared, so they differ in nothing but what is searched",
                fix="use the settings and data of the search that continues, or another --output_dir",
            )

    def _suggest(self, trial: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in self._space:
            if one.choices:
                found[one.name] = trial.suggest_categorical(one.name, [_encoded(_plain(one)) for one in one.choices])
            elif one.is_whole:
                step = 1 if one.step is None else round(one.step)
                found[one.name] = trial.suggest_int(one.name, round(one.low), round(one.high), log=one.log, step=step)
            else:
                found[one.name] = trial.suggest_float(one.name, one.low, one.high, log=one.log, step=one.step)
        return found

    # ---- the trials ----

    def run(self) -> None:
        """Train until the trials, or the time, are used up; DataError if several trainings in a row failed."""
        states = self._optuna.trial.TrialState
        if (best := self._best()) is not None:
            self._is_copied(best)  # if its model is gone, this is said before any work
        most, said = self._planned()
        printing.show([*self._head(), *said])
        n_failed = 0
        while True:
            tried = self._trained()
            if len(tried) >= most or self._is_late(tried):
                return
            if (found := self._next()) is None:
                return
            trial, values = found
            outcome = self._train(trial, values)
            if outcome.state == "stopped":
                self._again(self._study, trial)
                if stop.requested() is not None:
                    stop.record_progress(f"{console.plural(len(tried), 'trial')} done", resume_from_checkpoint="auto")
                    stop.check(lambda name: name)
                printing.show([self._line(trial.number, values, outcome)])
                return
            if outcome.state == "complete":
                self._study.tell(trial, outcome.score)
            else:
                trial.set_user_attr(_FAILED, outcome.state == "failed")
                self._study.tell(trial, state=states.PRUNED if outcome.state == "dropped" else states.FAIL)
            printing.show([self._line(trial.number, values, outcome)])
            self._thin()
            n_failed = n_failed + 1 if outcome.state == "failed" else 0
            if n_failed >= (min(_FIRST_FAILURES, most) if self._best() is None else _FAILURES_IN_A_ROW):
                self._end_failing(n_failed, values, outcome.why)

    def _end_failing(self, n_failed: int, values: Mapping[str, Any], why: str) -> None:
        """Raise the error of the last of these trials, once the best model before them is in the output folder."""
        alone = f"run the last one by itself: {self._command(values)}"
        if self._best() is None:
            raise DataError(
                what=f"the first {console.plural(n_failed, 'trial')} failed", got=why,
                why="no trial was complete, so there is nothing to compare", fix=alone,
            )  # fmt: skip
        self.finish()
        raise DataError(
            what=f"{n_failed} trials in a row failed", got=why,
            why="the next ones would fail as well; the best model so far is in the output folder",
            fix=f"{alone}; then continue with --resume_from_checkpoint auto",
        )  # fmt: skip

    def _next(self) -> tuple[Any, dict[str, Any]] | None:
        """Return the next trial and its values; None, and say so, if nothing new is left to try or comes.

        Once a few trials are complete, the sampler mostly returns the best combination of choices that it knows.
        """
        tried = [one.params for one in self._trained()]
        left = self._untried(tried)
        for _ in range(_MOST_REPEATS if left != {} else 0):
            trial = self._study.ask()
            values = self._suggest(trial)
            if trial.params not in tried:
                return trial, values
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            if left is not None:
                self._study.enqueue_trial(left)
        repeats = f"the search ends, as {_MOST_REPEATS} suggestions in a row were tried before"
        printing.show(["all combinations were tried" if left == {} else repeats])
        return None

    def _untried(self, tried: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return a combination that was not tried, by chance; none if all were, None if they cannot be counted."""
        counts = [one.count for one in self._space if one.count is not None]
        if len(counts) < len(self._space):
            return None
        encoded = [replace(one, choices=tuple(map(_encoded, map(_plain, one.choices)))) for one in self._space]
        known = {tuple(one.place_of(params[one.name]) for one in encoded) for params in tried}
        known = {places for places in known if None not in places}
        if len(known) >= math.prod(counts):
            return {}
        chance = Random(self._args.seed + len(tried))  # noqa: S311 (no secret)
        places = next(found for _ in count() if (found := tuple(map(chance.randrange, counts))) not in known)
        return {one.name: one.at(place) for one, place in zip(encoded, places, strict=True)}

    def _trained(self) -> list[Any]:
        """Return the trials that were trained: to their end, until they were dropped, or until they failed."""
        known = self._study.get_trials(deepcopy=False)
        return [one for one in known if one.state in _finished(self._optuna) or one.user_attrs.get(_FAILED, False)]

    def _planned(self) -> tuple[int, list[str]]:
        """Return how many trials there may be, and lines about the time that they take."""
        if self._limit_s is None:
            return self._asked.trials or _DEFAULT_TRIALS, []
        trial_s = _forecast_s(self._task.name, self._words)
        if trial_s is None:
            return self._asked.trials or sys.maxsize, [f"time       as many trials as fit in {self._asked.time_limit}"]
        fit = max(int(self._limit_s / trial_s), 1)
        wanted = "" if self._asked.trials is None else f" of {self._asked.trials}"
        line = (
            f"time       a training takes about {console.duration(trial_s)} by forecast: about {fit}{wanted} fit in "
            f"{self._asked.time_limit}, more if some are dropped"
        )
        return self._asked.trials or sys.maxsize, [line]

    def _head(self) -> list[str]:
        shown = [f"{one.name} {self._range(one)}" for one in self._space]
        n_known = len(self._trained())
        known = f", {console.plural(n_known, 'trial')} known" if n_known else ""
        return [f"search     {', '.join(shown)}{known}"]

    def _range(self, values: Values) -> str:
        if values.choices:
            return "in " + " ".join(_short(_encoded(_plain(one))) for one in values.choices)
        how = " (log)" if values.log else "" if values.step is None else f" by {values.step:g}"
        return f"{values.low:g} to {values.high:g}{how}"

    def _is_late(self, tried: Sequence[Any]) -> bool:
        if self._limit_s is None or not tried:
            return False
        spent = time.perf_counter() - self._began_s
        took = [one.duration.total_seconds() for one in tried if one.state in _finished(self._optuna)]
        return spent + (0.5 * statistics.median(took) if took else 0.0) > self._limit_s

    def _train(self, trial: Any, values: Mapping[str, Any]) -> _Outcome:
        """Run one training to its end, unless it falls behind, the time is up or a signal comes."""
        folder = self._folder_of(trial.number)
        shutil.rmtree(folder, ignore_errors=True)
        words = [*self._words, *_flags(values), "--output_dir", str(folder)]
        if (events := logging_dir_in(self._args, folder.name)) is not None:
            words += ["--logging_dir", events]
        command, environment = _process(words)
        follower, judged = record.Follower(folder), set[int]()
        began_s, errors = time.perf_counter(), self._folder / f".trial-{trial.number}.err"
        with errors.open("wb") as file:
            child = system.start_apart(command, file, environment)
        state, why = "complete", ""
        try:
            while child.poll() is None:
                time.sleep(_EVERY_S)
                if self._reported(trial, follower, judged) and trial.should_prune():
                    state = "dropped"
                elif stop.requested() is not None:
                    state, why = "stopped", "stopped by a signal"
                elif self._limit_s is not None and time.perf_counter() - self._began_s > self._limit_s:
                    state, why = "stopped", "the time is up"
                if state != "complete":
                    break
        finally:
            _kill(child)
        seconds = time.perf_counter() - began_s
        said = errors.read_text("utf-8", "replace")
        errors.unlink(missing_ok=True)
        if state != "complete":
            return _Outcome(state, self._last(trial), seconds, why)
        self._reported(trial, follower, judged)
        score = self._final(folder)
        if child.returncode or score is None:
            if child.returncode == EXIT_BAD_CONFIG and not trial.number:
                raise ConfigError(
                    what="the training is refused", got=hide_secrets(_first_error(said)),
                    why="the first trial has the settings as they were given",
                    fix=f"run it by itself: {self._command(values)}",
                )  # fmt: skip
            return _Outcome("failed", None, seconds, _first_error(said) or f"exit code {child.returncode}")
        return _Outcome("complete", score, seconds)

    def _reported(self, trial: Any, follower: record.Follower, judged: set[int]) -> bool:
        """Report the scores of new evaluations to the study, and note their steps; return whether there were any.

        Of a step that was judged already nothing is reported: at its end a run judges its last model once more.
        """
        found = [one for one in follower.update() if isinstance(one, record.Evaluation)]
        for evaluation in found:
            score = self._score(evaluation.metrics)
            if score is not None and evaluation.step not in judged:
                judged.add(evaluation.step)
                step = len(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
                trial.report(score, step)
        return bool(found)

    def _last(self, trial: Any) -> float | None:
        known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        return known[max(known)] if known else None

    def _score(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the metric that trials are compared by; None if these have it not, or not as a number."""
        if not any(name.startswith("eval_") for name in metrics):
            return None
        if self._metric is None:
            try:
                self._metric = self._task.best_by(metrics, self._args)[0]
            except StopIteration:
                raise ConfigError(
                    what="no metric says which trial is the best",
                    got=", ".join(name.removeprefix("eval_") for name in metrics if name.startswith("eval_")),
                    why=f"whet {self._task.name} is judged by {', '.join(self._task.judged_by)}",
                    fix="name one that was computed in --metric_for_best_model, with --greater_is_better",
                ) from None
        value = metrics.get(self._metric)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def _final(self, folder: Path) -> float | None:
        with suppress(OSError, ValueError):
            return self._score(json.loads((folder / "all_results.json").read_text("utf-8")))
        return None

    def _line(self, number: int, values: Mapping[str, Any], outcome: _Outcome) -> str:
        shown = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        name = (self._metric or "score").removeprefix("eval_")
        score = "" if outcome.score is None else f"  {name} {outcome.score:.4f}"
        ended = {"complete": "", "dropped": "  dropped: behind the median", "stopped": f"  {outcome.why}",
                 "failed": f"  failed: {escape_controls(outcome.why)[:200]}"}[outcome.state]  # fmt: skip
        is_best = outcome.state == "complete" and self._best() is not None and self._best().number == number
        best = "  best so far" if is_best else ""
        return f"trial {number:<5}{shown}{score}{ended}{best}  {console.duration(outcome.seconds)}"

    def _ranked(self) -> list[Any]:
        """Return the complete trials, the best first."""
        complete = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        return sorted(complete, key=lambda one: (-one.value if self._greater else one.value, one.number))

    def _best(self) -> Any:
        return next(iter(self._ranked()), None)

    def _thin(self) -> None:
        """Remove the models of trials that are not among the best."""
        kept = {one.number for one in self._ranked()[: max(self._asked.keep_trials, 1)]}
        for number, folder in self._trial_folders().items():
            if number not in kept:
                _remove_model(folder)

    # ---- the end ----

    def finish(self) -> None:
        """Copy the best model to the output folder, write the summary and the picture, and print what was best."""
        best = self._best()
        if best is None:
            raise DataError(
                what="no trial was complete",
                got=f"{console.plural(self._n_begun(), 'trial')} begun",
                why="the best model is that of a complete training",
                fix="give more time in --time_limit, or see run.log in the folders of the trials",
            )
        source = self._folder_of(best.number)
        if not self._is_copied(best):
            results.forget(self._folder)
            output_files.copy_model(source, self._folder)
            card = self._folder / "README.md"
            with suppress(OSError):
                own = card.read_text("utf-8").replace(source.name, self._folder.absolute().name)
                output_files.write_text(card, own)
        self._final(self._folder)  # names the metric if nothing was trained in this process
        self._write_summary(best)
        if not self._asked.keep_trials and source.is_dir():
            _remove_model(source)
        self._draw()
        again = self._command(best.params, "--output_dir", self._args.output_dir)
        name = (self._metric or "score").removeprefix("eval_")
        rows = [f"  {console.shorten(one, 24):<24}{_short(value)}" for one, value in best.params.items()]
        given = next((one for one in self._ranked() if one.user_attrs.get(_AS_GIVEN)), None)
        gained = "" if given is None else f", {given.value:.4f} with the settings as given"
        n_failed = sum(one.user_attrs.get(_FAILED, False) for one in self._trained())
        failed = f", {n_failed} failed" if n_failed else ""
        printing.show([
            f"best of {console.plural(len(self._ranked()), 'complete trial')}{failed}: {name} {best.value:.4f}{gained}",
            *rows,
            f"  {'files in':<24}{self._folder}, a picture in {_PICTURE}",
            "train so again:",
            f"  {again}",
        ])  # fmt: skip
        json_output.add(train_again=again)

    def _command(self, values: Mapping[str, Any], *more: str) -> str:
        """Return the command of a training with these values, secrets masked."""
        return f"whet {shlex.join(hidden([*self._words, *_flags(values), *more])[0])}"

    def _is_copied(self, best: Any) -> bool:
        """Return whether only the output folder still has the model of this trial; DataError if no folder does."""
        source = self._folder_of(best.number)
        if used_again.holds_model(source):
            return False
        with suppress(OSError, ValueError, TypeError, KeyError):
            before = json.loads((self._folder / _SUMMARY).read_text("utf-8"))
            model = used_again.checksum_in(self._folder)
            if before["best"] == best.number and model is not None and before["model"] == model:
                return True
        again = self._command(best.params, "--output_dir", str(source), "--overwrite_output_dir")
        raise DataError(
            what=f"the model of the best trial, {source.name}, is gone",
            got=f"neither {source} nor {self._folder} has its weights",
            why="a search ends with the model of its best trial",
            fix=f"train it again, and then continue: {again}",
        )

    def _n_begun(self) -> int:
        waiting = self._optuna.trial.TrialState.WAITING
        return sum(one.state != waiting for one in self._study.get_trials(deepcopy=False))

    def _write_summary(self, best: Any) -> None:
        trials = [
            {
                "number": one.number, "state": one.state.name.lower(), "score": one.value, "values": one.params,
                "evaluations": list(one.intermediate_values.values()),
                "seconds": one.duration.total_seconds() if one.duration is not None else None,
            }
            for one in self._trained()
        ]  # fmt: skip
        summary = {"metric": self._metric, "greater_is_better": self._greater, "best": best.number,
                   "values": best.params, "score": best.value, "trials": trials}  # fmt: skip
        kept = {**summary, "model": used_again.checksum_in(self._folder)}
        output_files.write_json(self._folder / _SUMMARY, kept, indent=2, on_error="stop")
        metrics = {} if best.value is None else {self._metric or "score": best.value}
        json_output.add(metrics=metrics, **{name: value for name, value in summary.items() if name != "metric"})

    def _draw(self) -> None:
        """Draw the score of each trial by its number, and by each setting that was searched."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        trials = self._study.get_trials(deepcopy=False, states=_finished(self._optuna))
        complete = [one for one in trials if one.value is not None and one.state.name == "COMPLETE"]
        dropped = [(one, one.intermediate_values[max(one.intermediate_values)]) for one in trials
                   if one.state.name == "PRUNED" and one.intermediate_values]  # fmt: skip
        metric = (self._metric or "score").removeprefix("eval_").replace("_", " ")
        n_panels = 1 + len(self._space)
        columns = min(n_panels, 3)
        rows = -(-n_panels // columns)
        figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
        better = max if self._greater else min
        for place, values in enumerate([None, *self._space], start=1):
            axes = figure.add_subplot(rows, columns, place)
            where = partial(_place, values)
            axes.scatter([where(one) for one in complete], [one.value for one in complete], s=22, color="#2563a8",
                         label="complete", zorder=3)  # fmt: skip
            if dropped:
                axes.scatter([where(one) for one, _ in dropped], [score for _, score in dropped], s=22, marker="x",
                             color="#8a8a8a", label="dropped")  # fmt: skip
            if values is None:
                best = [better(one.value for one in complete[: n + 1]) for n in range(len(complete))]
                axes.step([one.number for one in complete], best, where="post", color="#c2571a", label="best so far")
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                axes.legend(frameon=False, fontsize="small")
            elif values.log:
                axes.set_xscale("log")
            axes.set_xlabel("trial" if values is None else values.name)
            axes.set_ylabel(metric)
            axes.spines[["top", "right"]].set_visible(False)
        with output_files.stored(f"{_PICTURE} cannot be written", self._folder, on_error="continue"):
            figure.savefig(self._folder / _PICTURE)


def _place(values: Values | None, trial: Any) -> Any:
    """Return where a trial stands in a figure: by its number, or by its value; choices stand side by side."""
    if values is None:
        return trial.number
    return _short(trial.params[values.name]) if values.choices else trial.params[values.name]


def _finished(optuna: Any) -> tuple[Any, ...]:
    states = optuna.trial.TrialState
    return states.COMPLETE, states.PRUNED


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _encoded(value: Any) -> Any:
    """Return the value as a study keeps it: numbers, words and null as they are."""
    return value if isinstance(value, str | int | float | bool | None) else json.dumps(value)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _flags(values: Mapping[str, Any]) -> list[str]:
    """Return the values as flags of the command."""
    words: list[str] = []
    for name, value in values.items():
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
        words += [f"--{name}", repr(value) if isinstance(value, float) else text]
    return words


def _words_of_training(
    asked: TuneArguments, job: JobFields, args: TrainingArguments, searched: Sequence[str], settings: Path
) -> list[str]:
    """Return the words of a trial: those of this command without its own and what is searched, and what it implies.

    What the config files say of the training is written to the file `settings`, secrets excepted, which are words.
    """
    command = record.running_command()
    given, sources = ([], {}) if command is None else (list(command.words[2:]), command.sources)
    own = {*options_of(TuneArguments), *searched, *UPLOAD, "output_dir", "overwrite_output_dir",
           "resume_from_checkpoint", "do_train", "do_eval", "eval_strategy", "save_strategy"}  # fmt: skip
    own |= {name for name, alias in Names.of([type(job), type(args)]).aliases.items() if alias.to in own}
    kinds = kinds_of((TuneArguments, type(job), type(args)))
    kept = [word for word in without(given, {*own, "config"}, kinds) if word not in asked.search]
    shown = {**printable(job), **printable(args)}
    filed = {name: shown[name] for name, source in sources.items() if source == "settings file" and name not in own}
    exact = {name: getattr(job if hasattr(job, name) else args, name) for name in filed}
    secret = {
        name: one for name, one in exact.items() if isinstance(one, str) and (one != shown[name] or is_token(one))
    }
    if filed:
        plain = {name: value for name, value in filed.items() if name not in secret}
        output_files.write_json(settings, plain, indent=2, on_error="stop")
        kept = ["--config", str(settings), *_flags(secret), *kept]
    implied = ["--do_train", "--do_eval", "--eval_strategy", str(args.eval_strategy), "--save_strategy",
               str(args.save_strategy)]  # fmt: skip
    task = asked.task or (command.words[1] if command is not None else "")
    return [task, *kept, *implied]


def _process(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs these words of whet's, and its environment, which has the secrets among them."""
    command, held = without_secrets(system.python("-m", "whet", *words))
    own = {name: value for name, value in os.environ.items() if name != RESUME}  # each trial begins
    return command, {**own, **held}


def _forecast_s(task: str, words: Sequence[str]) -> float | None:
    """Return how long a training takes by `whet plan`; None if it cannot tell."""
    command, environment = _process(["plan", task, *words[1:], "--json"])
    done = subprocess.run(  # noqa: S603 - whet itself
        command, capture_output=True, check=False, stdin=subprocess.DEVNULL, env=environment
    )
    with suppress(ValueError, KeyError, TypeError):
        return float(json.loads(done.stdout)["time"]["total_s"])
    return None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the training and all that it has started."""
    if child.poll() is None:
        system.kill_apart(child)
    child.wait()


def _first_error(said: str) -> str:
    """Return the first error among the lines that a training wrote, in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    start = next((number for number, line in enumerate(lines) if line.startswith("error:")), None)
    return " ".join(lines[start : start + 4]) if start is not None else " ".join(lines[-1:])


def _remove_model(folder: Path) -> None:
    """Remove a trial's model and checkpoints; its results, record and report stay."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in _KEPT and not path.name.endswith("_results.json"):
            path.unlink(missing_ok=True)
