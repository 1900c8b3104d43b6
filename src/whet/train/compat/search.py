"""hyperparameter_search: repeated trainings with settings that optuna proposes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_utils import BestRun, default_compute_objective, default_hp_space_optuna

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.log import logger
from whet.optional import require
from whet.train.compat.public import PublicTrainer


@dataclasses.dataclass
class Search:
    """The search that a Trainer is part of."""

    space: Callable[[Any], Mapping[str, Any]]
    value_of: Callable[[dict[str, float]], Any]
    base: TrainingArguments
    """The settings that each trial changes."""
    name_of: Callable[[Any], str] | None = None
    value: Any = None
    """The objective of the running trial after its last evaluation."""


def run(
    trainer: PublicTrainer, search: Search, n_trials: int, direction: str | list[str], options: dict[str, Any]
) -> Any:
    """Return the best of n_trials trainings (for several directions: the list of Pareto-optimal ones)."""
    _require_model_init(trainer)
    if options.pop("n_jobs", 1) != 1:
        raise ConfigError(
            what="the trials of a search run one after the other",
            got="n_jobs other than 1",
            why="one training already uses every core",
            fix="leave n_jobs out",
        )
    optuna: Any = require("optuna", needed_for="hyperparameter_search", install="optuna")
    how = {name: options.pop(name) for name in ("timeout", "gc_after_trial", "catch") if name in options}
    several = isinstance(direction, list | tuple)
    study = optuna.create_study(**{"directions" if several else "direction": direction}, **options)
    trainer.search = search
    try:
        study.optimize(lambda trial: _run_trial(trainer, search, trial), n_trials=n_trials, **how)
    finally:
        trainer.search = None
        trainer.use_arguments(search.base)
    if several:
        return [BestRun(str(best.number), best.values, best.params) for best in study.best_trials]
    return BestRun(str(study.best_trial.number), study.best_trial.value, study.best_trial.params)


def apply_trial(trainer: PublicTrainer, trial: Any) -> None:
    """Apply the settings of a trial to the Trainer: those from `hp_space`, or the trial itself if it is a dict."""
    search = trainer.search
    if trial is None:
        return
    base = trainer.args if search is None else search.base
    proposed = trial if isinstance(trial, Mapping) else {} if search is None else search.space(trial)
    if search is None and not isinstance(trial, Mapping):
        proposed = trial.params
    unknown = sorted(name for name in proposed if not hasattr(base, name))
    if unknown:
        raise ConfigError(
            what="the search changes unknown settings",
            got=", ".join(unknown),
            why="a setting without effect would mislead",
            fix="name fields of TrainingArguments in hp_space",
        )
    number = getattr(trial, "number", None)
    name = f"run-{number}" if search is None or search.name_of is None else search.name_of(trial)
    place = {} if number is None else {"output_dir": str(Path(base.output_dir) / name)}
    trainer.use_arguments(dataclasses.replace(base, **place, **proposed))
    logger.info("trial %s: %s", number if number is not None else "", dict(proposed))


def report(trainer: PublicTrainer, metrics: dict[str, float]) -> None:
    """Report an evaluation of the running trial to the search; raises TrialPruned if optuna gives the trial up."""
    search, trial = trainer.search, trainer.trial
    if search is None or trial is None:
        return
    search.value = search.value_of(dict(metrics))
    study = getattr(trial, "study", None)
    if study is None or len(study.directions) > 1:
        return
    trial.report(search.value, trainer.state.global_step)
    if trial.should_prune():
        raise require("optuna", needed_for="hyperparameter_search", install="optuna").TrialPruned


def make_search(
    trainer: PublicTrainer,
    hp_space: Callable[[Any], Mapping[str, Any]] | None,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    hp_name: Callable[[Any], str] | None,
    backend: Any,
) -> Search:
    """Return the search; ConfigError for a backend other than optuna."""
    name = getattr(backend, "value", backend)
    if name not in (None, "optuna"):
        raise ConfigError(
            what="hyperparameter_search does not have this backend",
            got=name,
            why="whet runs trials in its own process, with optuna",
            fix="use backend='optuna', or leave it out",
        )
    return Search(
        space=hp_space or default_hp_space_optuna,
        value_of=compute_objective or default_compute_objective,
        base=trainer.args,
        name_of=hp_name,
    )


def _run_trial(trainer: PublicTrainer, search: Search, trial: Any) -> Any:
    search.value = None
    trainer.train(trial=trial)
    if search.value is None:  # no evaluation during the training
        search.value = search.value_of(dict(trainer.evaluate()))
    return search.value


def _require_model_init(trainer: PublicTrainer) -> None:
    if trainer.model_init is None:
        raise ConfigError(
            what="hyperparameter_search needs model_init",
            why="each trial starts from a new model",
            fix="pass Trainer(model_init=function_that_returns_a_model) instead of model",
        )
