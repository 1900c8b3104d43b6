"""hyperparameter_search with optuna."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from override_runs import class_rows, ours, theirs
from torch import nn

import engine
from whet.errors import ConfigError


@pytest.fixture(autouse=True)
def _quiet_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _grid() -> Any:
    return optuna.samplers.GridSampler({"learning_rate": [1e-6, 0.03]})


class Plain(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3, bias=bias)

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _searched(folder: Path, **changes: Any) -> Any:
    args = ours(folder, **({"eval_strategy": "epoch"} | changes))
    return engine.Trainer(model_init=Plain, args=args, train_dataset=class_rows(), eval_dataset=class_rows(6))


def _space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-6, 0.03]), "num_train_epochs": 2}


def test_the_best_trial_is_found_and_the_settings_are_put_back(tmp_path: Path) -> None:
    trainer = _searched(tmp_path, save_strategy="epoch")
    before = trainer.args
    best = trainer.hyperparameter_search(_space, n_trials=4, sampler=_grid())
    assert best.hyperparameters == {"learning_rate": 0.03}
    assert trainer.args is before
    assert {path.name for path in tmp_path.iterdir()} >= {"run-0", "run-1"}
    assert list((tmp_path / f"run-{best.run_id}").glob("checkpoint-*"))


def test_a_search_finds_what_transformers_finds(tmp_path: Path) -> None:
    import transformers

    found = []
    for trainer in (
        _searched(tmp_path / "a"),
        transformers.Trainer(
            model_init=Plain, args=theirs(tmp_path / "b", eval_strategy="epoch"), train_dataset=class_rows(),
            eval_dataset=class_rows(6),
        ),
    ):  # fmt: skip
        seed = optuna.samplers.TPESampler(seed=3)
        found.append(trainer.hyperparameter_search(_wide, n_trials=5, sampler=seed, backend="optuna"))
    assert found[0].run_id == found[1].run_id
    assert found[0].hyperparameters == found[1].hyperparameters
    assert found[0].objective == pytest.approx(found[1].objective, rel=1e-4)


def _wide(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1.0, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4, 8]),
    }


def test_an_objective_and_a_name_of_ones_own(tmp_path: Path) -> None:
    trainer = _searched(tmp_path, eval_strategy="no", save_strategy="epoch")
    best = trainer.hyperparameter_search(
        _space, compute_objective=lambda metrics: -metrics["eval_loss"], n_trials=2, direction="maximize",
        hp_name=lambda trial: f"trial-{trial.number}",
        sampler=_grid(),
    )  # fmt: skip
    assert best.objective < 0
    assert (tmp_path / "trial-0").is_dir()


def test_several_directions_give_the_trials_that_none_beats(tmp_path: Path) -> None:
    trainer = _searched(tmp_path)
    best = trainer.hyperparameter_search(
        _space, compute_objective=lambda metrics: (metrics["eval_loss"], 1.0), n_trials=2,
        direction=["minimize", "minimize"],
    )  # fmt: skip
    assert isinstance(best, list)
    assert len(best[0].objective) == 2


def test_trials_that_are_not_worth_their_time_end_early(tmp_path: Path) -> None:
    class Never(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number > 0

    trainer = _searched(tmp_path, num_train_epochs=3)
    study: list[Any] = []
    made = optuna.create_study

    def kept(**options: Any) -> Any:
        study.append(made(**options))
        return study[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna, "create_study", kept)
        trainer.hyperparameter_search(_space, n_trials=3, pruner=Never())
    states = [trial.state.name for trial in study[0].trials]
    assert states == ["COMPLETE", "PRUNED", "PRUNED"]


def test_model_init_may_take_the_trial(tmp_path: Path) -> None:
    sizes: list[int] = []

    def new(trial: Any) -> nn.Module:
        bias = trial is None or trial.suggest_categorical("bias", [True, False])
        model = Plain(bias)
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
        return model

    args = ours(tmp_path, eval_strategy="epoch")
    trainer = engine.Trainer(model_init=new, args=args, train_dataset=class_rows(), eval_dataset=class_rows(6))
    sampler = optuna.samplers.GridSampler({"bias": [True, False]})
    trainer.hyperparameter_search(lambda _: {}, n_trials=2, sampler=sampler)
    assert set(sizes) == {12, 15}


def test_the_trial_may_be_a_dict_of_settings(tmp_path: Path) -> None:
    trainer = _searched(tmp_path)
    trainer.train(trial={"learning_rate": 0.25})
    assert trainer.state.log_history[0]["learning_rate"] == 0.25


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"backend": "ray"}, r"(?s)got: ray.*fix: use backend='optuna'"),
        ({"hp_space": lambda _: {"learning_rat": 1.0}}, "unknown settings"),
        ({"n_jobs": 4}, "one after the other"),
        ({"model": True}, "needs model_init"),
    ],
)
def test_searches_that_cannot_be_are_refused(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    trainer = _searched(tmp_path)
    if given.pop("model", False):
        trainer = engine.Trainer(Plain(), ours(tmp_path), train_dataset=class_rows())
    with pytest.raises(ConfigError, match=says):
        trainer.hyperparameter_search(**({"hp_space": _space, "n_trials": 1} | given))
