"""Several trainings by `whet.Trainer` in one output folder: each has its own checkpoints, and leaves the others'."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hf_runs import KillAt, SignalAt, arguments, classifier, forked, output, pad, rows, same, weights
from test_trainer_resume import BeganAt, classify

import whet
from whet.watch import lock


def scored(folder: Path, *callbacks: Any, **changes: Any) -> whet.Trainer:
    """A training of 12 steps that ends with its best checkpoint, the first of three."""
    scores = iter([3.0, 1.0, 2.0])
    best: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "metric_for_best_model": "score",
        "greater_is_better": True,
    }  # fmt: skip
    return whet.Trainer(
        classifier(), arguments(folder, **best | changes), pad, rows(), rows(8), callbacks=[*callbacks],
        compute_metrics=lambda _: {"score": next(scores)},
    )  # fmt: skip


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


def _aside(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.glob("abandoned-*/checkpoint-*")}


def test_best_and_last_of_an_earlier_training_are_set_aside_and_resume(tmp_path: Path) -> None:
    scored(tmp_path).train()
    best = weights(tmp_path / "checkpoint-4")
    classify(tmp_path, seed=7).train()
    assert _names(tmp_path) == {"checkpoint-4", "checkpoint-8", "checkpoint-12"}
    aside = _aside(tmp_path)
    assert set(aside) == {"checkpoint-4", "checkpoint-12"}
    again = scored(tmp_path)
    again.train(str(aside["checkpoint-12"]))
    assert same(dict(again.model.state_dict()), best), "the best is its own, and not what has its name now"


def test_training_that_has_ended_leaves_the_checkpoints_of_another(tmp_path: Path) -> None:
    """Also where it keeps its best one alone: resumed, it only loads that."""
    scored(tmp_path, save_total_limit=1).train()
    assert _names(tmp_path) == {"checkpoint-4"}
    scored(tmp_path / "other").train()
    best = weights(tmp_path / "other" / "checkpoint-4")
    classify(tmp_path / "other", seed=7).train()
    before = _names(tmp_path / "other")
    ended = scored(tmp_path / "other", save_total_limit=1)
    ended.train(str(_aside(tmp_path / "other")["checkpoint-12"]))
    assert _names(tmp_path / "other") == before
    assert same(dict(ended.model.state_dict()), best)


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.night), 4])
def test_stop_of_a_training_that_saves_nothing_leaves_the_checkpoints_of_another(step: int, tmp_path: Path) -> None:
    """Only the one whose name it needs is moved."""
    out = tmp_path / "out"
    assert forked(lambda _: scored(out).train(), tmp_path / "a") == [0], output(tmp_path / "a")
    before = {name: weights(out / name) for name in _names(out)}

    def cut(_rank: int) -> None:
        classify(out, SignalAt("on_step_end", step, signal.SIGTERM), save_strategy="no", seed=7).train()

    assert forked(cut, tmp_path / "b") == [75], output(tmp_path / "b")
    assert f"saved in {out / f'checkpoint-{step}'}" in " ".join(output(tmp_path / "b").split())
    assert _names(out) == {*before, f"checkpoint-{step}"}
    aside = _aside(out)
    assert set(aside) == ({"checkpoint-4"} if step == 4 else set())
    for name, wanted in before.items():
        assert same(weights(aside.get(name, out / name)), wanted), name


def test_new_pod_continues_the_training_of_a_script_that_was_stopped(tmp_path: Path) -> None:
    """The trainings before it begin again, as nothing of theirs is saved, and leave its checkpoint."""

    def folds(_rank: int, *callbacks: Any) -> None:
        os.environ["WHET_RESUME"] = "auto"
        for fold in (1, 2, 3):
            own = [BeganAt(tmp_path / "began"), *(callbacks if fold == 3 else ())]
            classify(tmp_path / "out", *own, save_strategy="no", max_steps=5, seed=fold).train()

    stops = SignalAt("on_step_end", 3, signal.SIGTERM)
    assert forked(lambda rank: folds(rank, stops), tmp_path / "a") == [75], output(tmp_path / "a")
    assert forked(folds, tmp_path / "b") == [0], output(tmp_path / "b")
    assert (tmp_path / "began").read_text() == "0 0 0 0 0 3 "


@pytest.mark.parametrize(
    ("job", "began"), [("a" * 32, "0 0 12 4 "), pytest.param("", "0 0 0 0 ", marks=pytest.mark.night)]
)
def test_restart_continues_each_training_of_a_script_with_its_own(job: str, began: str, tmp_path: Path) -> None:
    """Of a job that is known, also with what another training has set aside; else a training begins again."""
    out = tmp_path / "out"

    def folds(attempt: int, *callbacks: Any) -> None:
        os.environ.update(WHET_RESUME="auto", WHET_LAUNCH_ID=job)
        for fold in (1, 2):
            own = [BeganAt(tmp_path / "began"), *(callbacks if fold == 2 else ())]
            trainer = scored(out, *own, seed=fold)
            trainer.train()
            trainer.save_model(str(tmp_path / f"model-{attempt}-{fold}"))

    killed = forked(lambda _: folds(0, KillAt("on_step_end", 6)), tmp_path / "a")
    assert killed == [-signal.SIGKILL], output(tmp_path / "a")
    assert forked(lambda _: folds(1), tmp_path / "b") == [0], output(tmp_path / "b")
    assert (tmp_path / "began").read_text() == began
    assert same(*(weights(tmp_path / f"model-{attempt}-1") for attempt in (0, 1)))


def test_restart_under_torchrun_goes_back_to_nothing_but_its_own(tmp_path: Path) -> None:
    """An earlier job that began at the same checkpoint has saved later ones in the folder."""
    out = tmp_path / "out"
    assert forked(lambda _: classify(out, max_steps=4).train(), tmp_path / "base") == [0], output(tmp_path / "base")

    def job(name: str, *attempts: list[Any]) -> None:
        def rank(number: int) -> None:
            found = {"RUN_ID": "none", "MAX_RESTARTS": "3", "RESTART_COUNT": str(number)}
            os.environ.update({f"TORCHELASTIC_{one}": value for one, value in found.items()}, WORLD_SIZE="1", RANK="0")
            trainer = classify(out, BeganAt(tmp_path / "began"), *attempts[number])
            trainer.train(str(out / "checkpoint-4"))

        def agent(_rank: int) -> None:  # a process of its own for each job, as torchrun is
            for number in range(len(attempts)):
                ended = forked(lambda _, number=number: rank(number), tmp_path / f"{name}-{number}")
                assert ended == [-signal.SIGKILL if attempts[number] else 0], output(tmp_path / f"{name}-{number}")

        assert forked(agent, tmp_path / name) == [0], output(tmp_path / name)

    job("first", [])
    job("second", [KillAt("on_step_end", 6)], [KillAt("on_step_end", 10)], [])
    assert (tmp_path / "began").read_text() == "4 4 4 8 "


def test_ranks_that_stop_right_after_a_save_all_name_its_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def cut(_rank: int) -> None:
        classify(out, SignalAt("on_step_end", 4, signal.SIGTERM)).train()

    assert forked(cut, tmp_path / "c", 2) == [75, 75], output(tmp_path / "c")
    for rank in range(2):
        assert f"saved in {out / 'checkpoint-4'}" in " ".join(output(tmp_path / "c", rank).split())
    assert _names(out) == {"checkpoint-4"}


def test_stop_in_a_folder_that_another_training_writes_to_is_a_stop(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def cut(_rank: int) -> None:
        classify(out, SignalAt("on_step_end", 3, signal.SIGTERM), save_strategy="no").train()

    with lock.locked(out):
        assert forked(cut, tmp_path / "c") == [75], output(tmp_path / "c")
    said = " ".join(output(tmp_path / "c").split())
    assert "stopped by SIGTERM after step 3: its checkpoint could not be written" in said
    assert not _names(out)


def test_training_that_had_ended_takes_no_step_more_when_it_is_resumed(tmp_path: Path) -> None:
    """It ended in the middle of an epoch."""
    whole, again = (classify(tmp_path, max_steps=7) for _ in range(2))
    whole.train()
    assert again.train(resume_from_checkpoint=True).global_step == 7
    assert same(dict(again.model.state_dict()), dict(whole.model.state_dict()))
    assert _names(tmp_path) == {"checkpoint-4", "checkpoint-7"}
