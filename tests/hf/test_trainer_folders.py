"""Several trainings by `whet.Trainer` in one output folder: each has its own checkpoints, and leaves the others'."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_runs import KillAt, SignalAt, arguments, classifier, forked, output, pad, rows, same, weights
from test_trainer_resume import BeganAt, classify

import whet
from whet import log
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


class OwnRows(torch.utils.data.Dataset[Any]):
    """Rows of a class that nobody but the user knows; `noise` differs in each process."""

    def __init__(self, given: list[dict[str, Any]], *, noise: bool = False) -> None:
        self.given, self.noise = given, noise

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, n: int) -> dict[str, Any]:
        return self.given[n] | ({"noise": time.monotonic_ns()} if self.noise else {})


@pytest.mark.parametrize(
    "differs",
    ["seed", "ended early", "best alone is kept", "rows", "rows of a Subset", "rows of an own class", "origin"],
)
def test_restarted_script_that_leaves_out_what_is_done_continues_the_rest(differs: str, tmp_path: Path) -> None:
    """It trains its second fold first: that one is known by what it trains, and not by its number."""
    out = tmp_path / "out"

    class Early(transformers.TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_training_stop or state.global_step == 6

    def fold(number: int, *callbacks: Any) -> None:
        own = [
            BeganAt(tmp_path / "began"),
            *callbacks,
            *([Early()] if differs == "ended early" and number == 1 else []),
        ]
        with_seed = {"seed": number} if differs in ("seed", "ended early", "best alone is kept") else {}
        if differs == "best alone is kept":
            scored(out, *own, save_total_limit=1 if number == 1 else None, **with_seed).train()
            return
        model, given = classifier(), rows(40)
        half: Any = rows(20)
        if differs == "rows":
            half = given[:20] if number == 1 else given[20:]
        elif differs == "rows of a Subset":
            half = torch.utils.data.Subset(OwnRows(given), range(20 * number - 20, 20 * number))  # pyright: ignore
        elif differs == "rows of an own class":
            half = OwnRows(given[:20] if number == 1 else given[20:])
        elif differs == "origin":
            model.config.name_or_path = f"/elsewhere/model-{number}"
        whet.Trainer(model, arguments(out, **with_seed), pad, half, callbacks=own).train()

    def script(first: int, *callbacks: Any) -> None:
        os.environ.update(WHET_RESUME="auto", WHET_LAUNCH_ID="a" * 32)
        for number in range(first, 3):
            fold(number, *(callbacks if number == 2 else ()))

    for kill in (2, 6, 10):  # before the first save of the second fold, and after it
        killed = forked(lambda _, kill=kill: script(1 if kill == 2 else 2, KillAt("on_step_end", kill)), tmp_path / "a")
        assert killed == [-signal.SIGKILL], output(tmp_path / "a")
    assert forked(lambda _: script(2), tmp_path / "b") == [0], output(tmp_path / "b")
    assert (tmp_path / "began").read_text() == "0 0 0 4 8 "


@pytest.mark.parametrize("kind", ["other numbers each time", "objects"])
def test_training_whose_rows_nobody_can_compare_continues_after_its_end(kind: str, tmp_path: Path) -> None:
    """The script was killed behind its training, such as in an evaluation: nothing is trained again."""

    def script() -> None:
        os.environ["WHET_RESUME"] = "auto"
        given = OwnRows(rows(20), noise=True) if kind == "other numbers each time" else [
            row | {"made": object(), "names": np.array(["a", [1]], dtype=object)} for row in rows(20)
        ]  # fmt: skip
        made = arguments(tmp_path / "out", remove_unused_columns=False)
        whet.Trainer(classifier(), made, pad, given, callbacks=[BeganAt(tmp_path / "began")]).train()

    for name in ("a", "b"):
        assert forked(lambda _: script(), tmp_path / name) == [0], output(tmp_path / name)
    assert (tmp_path / "began").read_text() == "0 12 "


def test_restart_continues_though_the_named_checkpoint_was_removed_by_then(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert forked(lambda _: classify(out, max_steps=4).train(), tmp_path / "base") == [0]

    def attempt(*callbacks: Any) -> None:
        os.environ.update(WHET_RESUME="auto", WHET_LAUNCH_ID="a" * 32)
        classify(out, BeganAt(tmp_path / "began"), *callbacks, save_total_limit=1).train(str(out / "checkpoint-4"))

    assert forked(lambda _: attempt(KillAt("on_step_end", 10)), tmp_path / "a") == [-signal.SIGKILL]
    assert _names(out) == {"checkpoint-8"}
    assert forked(lambda _: attempt(), tmp_path / "b") == [0], output(tmp_path / "b")
    assert (tmp_path / "began").read_text() == "4 8 "


@pytest.mark.parametrize("when", ["at its last step", "killed behind it"])
def test_training_that_was_stopped_early_is_not_trained_further(when: str, tmp_path: Path) -> None:
    def script(*callbacks: Any) -> None:
        os.environ["WHET_RESUME"] = "auto"
        own = [BeganAt(tmp_path / "began"), transformers.EarlyStoppingCallback(1), *callbacks]
        trainer = scored(tmp_path / "out", *own)
        trainer.train()
        if callbacks:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.save_model(str(tmp_path / "model"))

    stops = SignalAt("on_step_end", 8 if when == "at its last step" else 99, signal.SIGTERM)
    code = forked(lambda _: script(stops), tmp_path / "a")
    assert code == [75 if when == "at its last step" else -signal.SIGKILL], output(tmp_path / "a")
    assert forked(lambda _: script(), tmp_path / "b") == [0], output(tmp_path / "b")
    assert (tmp_path / "began").read_text() == "0 8 "
    assert _names(tmp_path / "out") == {"checkpoint-4", "checkpoint-8"}
    assert same(weights(tmp_path / "model"), weights(tmp_path / "out" / "checkpoint-4")), "the best"


def test_training_that_another_callback_has_ended_trains_on_and_says_so(tmp_path: Path) -> None:
    """Such as one that keeps to a limit of time: the next start continues."""

    class Limit(transformers.TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_training_stop or state.global_step % 4 == 0

    def script() -> None:
        os.environ["WHET_RESUME"] = "auto"
        log.set_up()
        classify(tmp_path / "out", BeganAt(tmp_path / "began"), Limit()).train()

    for name in ("a", "b", "c"):
        assert forked(lambda _: script(), tmp_path / name) == [0], output(tmp_path / name)
    assert (tmp_path / "began").read_text() == "0 4 8 "
    assert "had ended this training after step 4 of 12" in " ".join(output(tmp_path / "b").split())


def test_restart_continues_each_of_two_trainings_that_began_at_one_checkpoint(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    assert forked(lambda _: classify(base, max_steps=4).train(), tmp_path / "base-log") == [0]

    def script(*callbacks: Any) -> None:
        os.environ.update(WHET_RESUME="auto", WHET_LAUNCH_ID="a" * 32)
        for seed in (1, 2):
            own = [BeganAt(tmp_path / "began"), *(callbacks if seed == 2 else ())]
            classify(out, *own, seed=seed).train(str(base / "checkpoint-4"))

    assert forked(lambda _: script(KillAt("on_step_end", 10)), tmp_path / "a") == [-signal.SIGKILL]
    assert forked(lambda _: script(), tmp_path / "b") == [0], output(tmp_path / "b")
    assert (tmp_path / "began").read_text() == "4 4 12 8 "


def test_restart_before_the_first_save_leaves_what_another_job_has_saved(tmp_path: Path) -> None:
    """A launcher starts its own training again, and a new pod continues any job's."""
    out = tmp_path / "out"

    def attempt(job: str, number: int, *callbacks: Any, **variables: str) -> None:
        os.environ.update(WHET_LAUNCH_ID=job * 32, TORCHELASTIC_RESTART_COUNT=str(number), **variables)
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
        classify(out, BeganAt(tmp_path / "began"), *callbacks).train()

    kills = [KillAt("on_step_end", 2), KillAt("on_step_end", 6), KillAt("on_step_end", 10)]
    began = [("a", 0, kills[2]), ("b", 0, kills[0]), ("b", 1, kills[1]), ("b", 2, kills[2])]
    for number, (job, count, kill) in enumerate(began):
        folder = tmp_path / f"{number}"
        assert forked(lambda _, one=(job, count, kill): attempt(*one), folder) == [-signal.SIGKILL], output(folder)
    assert (tmp_path / "began").read_text() == "0 0 0 4 "
    pod = {"WHET_RESUME": "auto"}
    for number, kill in enumerate((kills[2], None)):
        more = [] if kill is None else [kill]
        code = forked(lambda _, n=number, more=more: attempt("c", n, *more, **pod), tmp_path / f"pod-{number}")
        assert code == [0 if kill is None else -signal.SIGKILL], output(tmp_path / f"pod-{number}")
    assert (tmp_path / "began").read_text() == "0 0 0 4 8 8 "


def test_job_of_several_machines_is_known_by_each_of_them(tmp_path: Path) -> None:
    """Its launcher has a process on each, machines leave and join, and torchrun may begin with any of them."""
    out = tmp_path / "out"

    def attempt(number: int, machines: set[str], *callbacks: Any) -> None:
        os.environ.update(TORCHELASTIC_RESTART_COUNT=str(number % 2), TORCHELASTIC_MAX_RESTARTS="3")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("whet.store.find.own_launches", lambda: frozenset(machines))
            classify(out, BeganAt(tmp_path / "began"), *callbacks).train()

    started = [({"a", "b"}, 6), ({"b", "c"}, 10), ({"c"}, None)]  # torchrun counts no restart for one that has joined
    for number, (machines, kill) in enumerate(started):
        more = [] if kill is None else [KillAt("on_step_end", kill)]
        folder = tmp_path / f"{number}"
        code = forked(lambda _, n=number, one=machines, more=more: attempt(n, one, *more), folder)
        assert code == [0 if kill is None else -signal.SIGKILL], output(folder)
    assert (tmp_path / "began").read_text() == "0 4 8 "


@pytest.mark.parametrize("event", ["on_step_end", "on_train_end"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("best", [False, True], ids=["last", "best"])
def test_signal_at_the_end_of_a_training_stops_the_script(event: str, number: int, best: bool, tmp_path: Path) -> None:
    """No training follows that nobody would stop; the same command continues where it was."""
    made = scored if best else functools.partial(classify, save_strategy="no")

    def script(*callbacks: Any) -> None:
        os.environ["WHET_RESUME"] = "auto"
        trainer = made(tmp_path / "out", BeganAt(tmp_path / "began"), *callbacks)
        trainer.train()
        trainer.save_model(str(tmp_path / "model"))

    code = forked(lambda _: script(SignalAt(event, 12, number)), tmp_path / "a")
    assert code == [75 if number == signal.SIGTERM else 130], output(tmp_path / "a")
    said = " ".join(output(tmp_path / "a").split())
    assert f"stopped by {signal.Signals(number).name}" in said
    assert f"after step 12: saved in {tmp_path / 'out' / 'checkpoint-12'}" in said
    assert not (tmp_path / "model").exists()
    assert forked(lambda _: script(), tmp_path / "b") == [0], output(tmp_path / "b")
    assert (tmp_path / "began").read_text() == "0 12 "
    wanted = tmp_path / "out" / ("checkpoint-4" if best else "checkpoint-12")
    assert same(weights(tmp_path / "model"), weights(wanted))


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
