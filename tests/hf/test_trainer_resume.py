"""`whet.Trainer` killed or stopped at any moment and resumed: bitwise the run that was not."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from hf_runs import (
    KillAt,
    SignalAt,
    arguments,
    classifier,
    forked,
    mask_tokens,
    masked_words,
    output,
    pad,
    rows,
    same,
    weights,
)

import whet


def classify(folder: Path, *callbacks: Any, **changes: Any) -> whet.Trainer:
    return whet.Trainer(classifier(), arguments(folder, **changes), pad, rows(), rows(8), callbacks=[*callbacks])


def fill_in(folder: Path, *callbacks: Any, **changes: Any) -> whet.Trainer:
    """Masked words, whose masks are drawn from torch's and numpy's generators in each batch."""
    given = rows(labelled=False)
    return whet.Trainer(masked_words(), arguments(folder, **changes), mask_tokens, given, callbacks=[*callbacks])


def stream(folder: Path, *callbacks: Any, **changes: Any) -> whet.Trainer:
    def read() -> Iterator[dict[str, Any]]:
        yield from rows()

    given = datasets.IterableDataset.from_generator(read)
    return whet.Trainer(classifier(), arguments(folder, **changes), pad, given, callbacks=[*callbacks])


KINDS: dict[str, tuple[Callable[..., whet.Trainer], dict[str, Any]]] = {
    "classes": (classify, {}),
    "accumulated": (classify, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "masked words": (fill_in, {}),
    "by length": (classify, {"train_sampling_strategy": "group_by_length"}),
    "stream": (stream, {}),
    "torch's optimizer": (classify, {"optim": "adamw_torch"}),
    "bf16": (classify, {"precision": "auto", "bf16": True}),
    "recomputed": (classify, {"activation_checkpointing": True}),
    "evaluated": (classify, {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}),
    "workers": (classify, {"dataloader_num_workers": 1}),
}
_BY_DAY = {("classes", "on_pre_optimizer_step"), ("masked words", "on_step_end"), ("accumulated", "on_step_end")}
_SIGNALS_BY_DAY = {(1, "on_substep_end", signal.SIGINT), (2, "on_prediction_step", signal.SIGTERM)}
"""The rest is killed and stopped by `make test-kill`."""


@pytest.mark.parametrize(
    ("kind", "event", "step"),
    [
        pytest.param(kind, event, step, marks=() if (kind, event) in _BY_DAY else pytest.mark.reliability)
        for event, step in (("on_step_end", 6), ("on_pre_optimizer_step", 9))
        for kind in KINDS
    ],
)
def test_killed_run_resumes_bitwise(kind: str, event: str, step: int, tmp_path: Path) -> None:
    make, changes = KINDS[kind]
    forked(lambda _: make(tmp_path / "whole", **changes).train(), tmp_path / "w")
    killed = forked(lambda _: make(tmp_path / "cut", KillAt(event, step), **changes).train(), tmp_path / "c")
    assert killed == [-signal.SIGKILL], output(tmp_path / "c")
    resumed = forked(lambda _: make(tmp_path / "cut", **changes).train(resume_from_checkpoint=True), tmp_path / "r")
    assert resumed == [0], output(tmp_path / "r")
    for name in ("checkpoint-8", "checkpoint-12"):
        assert same(weights(tmp_path / "whole" / name), weights(tmp_path / "cut" / name)), name


@pytest.mark.parametrize(
    "kind",
    ["masked words", *(pytest.param(kind, marks=pytest.mark.reliability) for kind in ("classes", "accumulated"))],
)
def test_two_killed_ranks_resume_bitwise(kind: str, tmp_path: Path) -> None:
    make, changes = KINDS[kind]
    assert forked(lambda _: make(tmp_path / "whole", **changes).train(), tmp_path / "w", 2) == [0, 0]
    killed = forked(lambda _: make(tmp_path / "cut", KillAt("on_step_end", 6), **changes).train(), tmp_path / "c", 2)
    assert -signal.SIGKILL in killed
    resumed = forked(lambda _: make(tmp_path / "cut", **changes).train(resume_from_checkpoint=True), tmp_path / "r", 2)
    assert resumed == [0, 0], output(tmp_path / "r")
    assert same(weights(tmp_path / "whole" / "checkpoint-12"), weights(tmp_path / "cut" / "checkpoint-12"))


@pytest.mark.parametrize(
    ("n_ranks", "event", "step", "number", "code"),
    [
        pytest.param(
            n_ranks, event, step, number, code,
            marks=() if (n_ranks, event, number) in _SIGNALS_BY_DAY else pytest.mark.reliability,
        )
        for n_ranks in (1, 2)
        for event, step in (("on_step_end", 6), ("on_substep_end", 6), ("on_prediction_step", 4))
        for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130))
    ],
)  # fmt: skip
def test_signal_saves_the_completed_steps(
    n_ranks: int, event: str, step: int, number: int, code: int, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "save_steps": 100, "eval_steps": 2,
        "eval_strategy": "steps",
    }  # fmt: skip
    forked(lambda _: classify(tmp_path / "whole", save_strategy="epoch", **_but(changes, "save_steps")).train(),
           tmp_path / "w", n_ranks)  # fmt: skip

    def cut(_rank: int) -> None:
        classify(tmp_path / "cut", SignalAt(event, step, number), **changes).train()

    assert forked(cut, tmp_path / "c", n_ranks) == [code] * n_ranks, output(tmp_path / "c")
    agreed = step + (event == "on_substep_end" and n_ranks == 2)  # ranks agree at the beginning of a step
    assert (tmp_path / "cut" / f"checkpoint-{agreed}").is_dir()
    assert f"saved in {tmp_path / 'cut'}" in output(tmp_path / "c")

    def go_on(_rank: int) -> None:
        classify(tmp_path / "cut", **changes | {"save_steps": 12}).train(resume_from_checkpoint="auto")

    assert forked(go_on, tmp_path / "r", n_ranks) == [0] * n_ranks, output(tmp_path / "r")
    last = max((tmp_path / "whole").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    assert same(weights(last), weights(tmp_path / "cut" / "checkpoint-12"))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGUSR1, 75),
        *(pytest.param(*one, marks=pytest.mark.reliability) for one in ((signal.SIGHUP, 75), (signal.SIGINT, 130))),
    ],
)
def test_every_signal_saves_also_where_nothing_else_is_saved(number: int, code: int, tmp_path: Path) -> None:
    out, changes = tmp_path / "out", {"save_strategy": "no", "max_steps": 6}

    def cut(_rank: int) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)  # as without nohup
        classify(out, SignalAt("on_step_end", 3, number), **changes).train()

    assert forked(cut, tmp_path / "c") == [code], output(tmp_path / "c")
    assert [path.name for path in out.glob("*checkpoint*")] == ["checkpoint-3"]
    whole, rest = classify(tmp_path / "whole", **changes), classify(out, **changes)
    whole.train()
    rest.train(resume_from_checkpoint=True)
    assert same(dict(whole.model.state_dict()), dict(rest.model.state_dict()))


def test_signals_that_are_ignored_or_that_python_does_not_handle_stay(tmp_path: Path) -> None:
    def train(_rank: int) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        faulthandler.register(signal.SIGUSR1)
        senders = [SignalAt("on_step_end", 3, one) for one in (signal.SIGHUP, signal.SIGUSR1)]
        classify(tmp_path / "out", *senders, max_steps=4).train()

    assert forked(train, tmp_path / "t") == [0], output(tmp_path / "t")
    assert "most recent call first" in output(tmp_path / "t")


_STOPS_BY_DAY = {("steps", 4, 2), ("epoch", 10, 1)}


@pytest.mark.parametrize(
    ("strategy", "step", "n_ranks"),
    [
        pytest.param(*one, marks=() if one in _STOPS_BY_DAY else pytest.mark.reliability)
        for one in (("steps", 4, 1), ("steps", 4, 2), ("steps", 12, 1), ("epoch", 5, 1), ("epoch", 10, 1))
    ],
)
def test_signal_during_an_evaluation_stops_there_and_a_resumed_run_begins_with_it(
    strategy: str, step: int, n_ranks: int, tmp_path: Path
) -> None:
    """With dropout, whose masks follow the random numbers that an evaluation has drawn, and the best of all steps."""
    changes: dict[str, Any] = {
        "eval_strategy": strategy, "save_strategy": strategy, "load_best_model_at_end": True, "eval_steps": 4,
        "per_device_eval_batch_size": 2,
    }  # fmt: skip
    if strategy == "epoch":
        changes |= {"max_steps": -1, "num_train_epochs": 2}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert forked(lambda _: classify(whole, **changes).train(), tmp_path / "w", n_ranks) == [0] * n_ranks
    stops = SignalAt("on_prediction_step", step, signal.SIGTERM)
    stopped = forked(lambda _: classify(cut, stops, **changes).train(), tmp_path / "c", n_ranks)
    assert stopped == [75] * n_ranks, output(tmp_path / "c")
    assert f"stopped by SIGTERM during the evaluation after step {step}" in " ".join(output(tmp_path / "c").split())
    assert step not in dict(_evaluations(cut / f"checkpoint-{step}"))
    resumed = forked(lambda _: classify(cut, **changes).train(True), tmp_path / "r", n_ranks)
    assert resumed == [0] * n_ranks, output(tmp_path / "r")
    names = {path.name for path in whole.glob("checkpoint-*")}
    assert {path.name for path in cut.glob("checkpoint-*")} == names
    for name in names:
        assert same(weights(whole / name), weights(cut / name)), name
        assert _evaluations(whole / name) == _evaluations(cut / name), name


def _evaluations(folder: Path) -> list[tuple[int, float]]:
    """Return the step and the loss of each evaluation that a checkpoint's log holds."""
    log = json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"]
    return [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]


def _but(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


class BeganAt(transformers.TrainerCallback):
    """Adds the step that a training begins after to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        with self._file.open("a") as file:
            file.write(f"{state.global_step} ")


_BY_TORCHRUN = {"TORCHELASTIC_MAX_RESTARTS": "3"}
_IN_A_POD = {"WHET_RESUME": "auto"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (_BY_TORCHRUN, "base"), (_IN_A_POD, "other"),
        *(pytest.param(*one, marks=pytest.mark.night) for one in ((_BY_TORCHRUN, "other"), (_IN_A_POD, "base"))),
    ],
)  # fmt: skip
def test_restart_of_a_training_that_names_its_checkpoint_keeps_what_it_has_saved(
    variables: dict[str, str], place: str, tmp_path: Path
) -> None:
    """Killed before its first save it begins there again, though the folder has the later ones that it goes back from.

    After its first save it continues from its own newest checkpoint.
    """
    forked(lambda _: classify(tmp_path / "base").train(), tmp_path / "b")
    out, named = tmp_path / place, str(tmp_path / "base" / "checkpoint-4")

    def attempt(number: int, *callbacks: Any) -> list[int]:
        def train(_rank: int) -> None:
            os.environ.update(variables)
            if "WHET_RESUME" not in variables:
                os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
            classify(out, BeganAt(tmp_path / "began"), *callbacks).train(named)

        return forked(train, tmp_path / f"a{number}")

    assert attempt(0, KillAt("on_step_end", 6)) == [-signal.SIGKILL]
    assert attempt(1, KillAt("on_step_end", 10)) == [-signal.SIGKILL], output(tmp_path / "a1")
    assert attempt(2) == [0], output(tmp_path / "a2")
    assert (tmp_path / "began").read_text() == "4 4 8 "
    aside = {path.name for path in out.glob("abandoned-*/*")}
    assert aside == ({"checkpoint-8", "checkpoint-12"} if place == "base" else set())
    assert {path.name for path in out.glob("checkpoint-*")} >= {"checkpoint-8", "checkpoint-12"}


def test_training_of_a_new_pod_continues_and_the_next_one_in_its_folder_begins(tmp_path: Path) -> None:
    """A script says nothing of resuming; its second training in the folder is another one in every pod."""

    def train(*callbacks: Any) -> None:
        os.environ.update(_IN_A_POD)
        for seed in (1, 2):
            classify(tmp_path / "out", BeganAt(tmp_path / "began"), *callbacks, seed=seed).train()

    assert forked(lambda _: train(KillAt("on_step_end", 6)), tmp_path / "a") == [-signal.SIGKILL]
    assert forked(lambda _: train(), tmp_path / "b") == [0], output(tmp_path / "b")
    assert (tmp_path / "began").read_text() == "0 4 0 "


@pytest.mark.parametrize("kind", ["stopped in the next epoch", "killed after the end of an epoch"])
def test_stream_that_ends_within_a_step_resumes_bitwise(kind: str, tmp_path: Path) -> None:
    """transformers carries the gradient of an epoch's last micro-batches, two of ten, into the first step of the next.

    Of the step that has begun, a checkpoint holds nothing: it begins again at its first micro-batch.
    """
    changes: dict[str, Any] = {
        "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_steps": 6, "save_strategy": "epoch"
    }  # fmt: skip
    if kind == "stopped in the next epoch":
        cut, code, saved = SignalAt("on_epoch_begin", 2, signal.SIGTERM), 75, {"save_strategy": "steps"}
    else:
        cut, code, saved = KillAt("on_step_end", 3), -signal.SIGKILL, {}
    whole, rest = tmp_path / "whole", tmp_path / "cut"
    assert forked(lambda _: stream(whole, **changes).train(), tmp_path / "w") == [0], output(tmp_path / "w")
    before = functools.partial(stream, rest, cut, **changes | {"save_steps": 100} | saved)
    assert forked(lambda _: before().train(), tmp_path / "c") == [code], output(tmp_path / "c")
    assert [path.name for path in rest.glob("checkpoint-*")] == ["checkpoint-2"]
    again = forked(lambda _: stream(rest, **changes).train(resume_from_checkpoint=True), tmp_path / "r")
    assert again == [0], output(tmp_path / "r")
    assert same(weights(whole / "checkpoint-6"), weights(rest / "checkpoint-6"))


def test_training_that_saves_nothing_leaves_the_checkpoint_that_another_run_writes(tmp_path: Path) -> None:
    class Interrupted(whet.Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            other = forked(lambda _: classify(tmp_path, save_strategy="no", max_steps=1).train(), tmp_path / "other")
            assert other == [0], output(tmp_path / "other")
            super()._save_rng_state(output_dir)

    Interrupted(classifier(), arguments(tmp_path, max_steps=4), pad, rows()).train()
    assert (tmp_path / "checkpoint-4" / "model.safetensors").is_file()
    classify(tmp_path, max_steps=5).train(resume_from_checkpoint=True)


def test_handlers_of_the_program_stay(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        classify(tmp_path, SignalAt("on_step_end", 6, signal.SIGTERM)).train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_signals_are_the_programs_after_training(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    classify(tmp_path, max_steps=1).train()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(
    "damage", ["cut", "no manifest", *(pytest.param(one, marks=pytest.mark.reliability) for one in ("gone", "changed"))]
)
def test_damaged_newest_checkpoint_is_passed_over(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = classify(tmp_path / "whole")
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "cut" / "checkpoint-4")
    newest = shutil.copytree(tmp_path / "whole" / "checkpoint-8", tmp_path / "cut" / "checkpoint-8")
    file = newest / ("MANIFEST.json" if damage == "no manifest" else "optimizer.safetensors")
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 8)
    elif damage == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    else:
        file.unlink()
    resumed = classify(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert "is damaged and was passed over" in caplog.text
    assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))


def test_named_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    classify(tmp_path, max_steps=4).train()
    (tmp_path / "checkpoint-4" / "scheduler.json").write_text("{}", "utf-8")
    with pytest.raises(whet.WhetError, match="is not a complete checkpoint"):
        classify(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_checkpoint_of_transformers_is_refused_with_the_way_on(tmp_path: Path) -> None:
    given = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
    )
    transformers.Trainer(classifier(), given, pad, rows()).train()
    with pytest.raises(whet.WhetError, match="start from its weights"):
        classify(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(whet.WhetError, match="checkpoint of transformers' Trainer"):
        classify(tmp_path).train(resume_from_checkpoint=True)


def test_resume_without_a_checkpoint_is_transformers_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        classify(tmp_path).train(resume_from_checkpoint=True)
    assert classify(tmp_path, max_steps=1).train(resume_from_checkpoint="auto").global_step == 1


def test_moved_folder_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "max_steps": 8}
    trainer = classify(tmp_path / "a", **changes)
    trainer.train()
    best = Path(str(trainer.state.best_model_checkpoint)).name
    (tmp_path / "a").rename(tmp_path / "b")
    moved = classify(tmp_path / "b", **changes)
    moved.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-8"))
    assert moved.state.best_model_checkpoint == str(tmp_path / "b" / best)


def test_best_checkpoint_is_its_own_where_another_training_has_the_old_place(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "max_steps": 8}
    classify(tmp_path / "a", **changes).train()
    (tmp_path / "a").rename(tmp_path / "b")
    classify(tmp_path / "a", seed=7, **changes).train()
    moved = classify(tmp_path / "b", **changes)
    moved.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-8"))
    best = Path(str(moved.state.best_model_checkpoint))
    assert best.parent == tmp_path / "b"
    assert same(dict(moved.model.state_dict()), weights(best))


def test_checkpoint_is_named_by_a_path_too(tmp_path: Path) -> None:
    classify(tmp_path / "a", max_steps=8, save_steps=4).train()
    began = tmp_path / "began"
    classify(tmp_path / "b", BeganAt(began), max_steps=8).train(resume_from_checkpoint=tmp_path / "a" / "checkpoint-4")
    assert began.read_text() == "4 "
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        classify(tmp_path / "b").train(resume_from_checkpoint=tmp_path / "a" / "checkpoint-5")


def test_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    trainer = classify(tmp_path, max_steps=4)
    trainer.train()
    trainer.save_model()
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"training_args.json", "optimizer.json", "rng_state.json", "trainer_state.json"} <= names
    assert not {name for name in names if name.endswith((".pt", ".pth", ".bin", ".pkl"))}


def test_failed_save_stops_or_continues_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whet.hf.trainer.write_state", fails)
    with pytest.raises(whet.WhetError, match="the checkpoint of step 4 cannot be written"):
        classify(tmp_path / "stop").train()
    assert not [*(tmp_path / "stop").glob("*checkpoint*")]
    assert classify(tmp_path / "on", save_error_policy="continue").train().global_step == 12


def test_only_the_weights_saved_cannot_be_resumed(tmp_path: Path) -> None:
    classify(tmp_path, save_only_model=True, max_steps=4).train()
    with pytest.raises(whet.WhetError, match="holds only the model"):
        classify(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_auto_precision_of_a_resumed_run_is_that_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whet.Trainer, "_faster_format", lambda _: "bf16")
    whole = classify(tmp_path / "whole", precision="auto")
    whole.train()
    monkeypatch.setattr(whet.Trainer, "_faster_format", lambda _: "fp32")
    other = classify(tmp_path / "other", precision="auto")
    other.train()
    resumed = classify(tmp_path / "cut", precision="auto")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))
    assert not same(dict(whole.model.state_dict()), dict(other.model.state_dict()))


def test_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    class Spoiled(whet.Trainer):
        bad: tuple[int, ...] = (2,)

        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *more, **named)
            return loss * float("nan") if self.state.global_step in self.bad else loss

    seen: list[dict[str, torch.Tensor]] = []

    class Keep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            seen.append({name: one.clone() for name, one in model.state_dict().items()})

    make = functools.partial(Spoiled, classifier(), arguments(tmp_path, max_steps=5), pad, rows())
    make(callbacks=[Keep()]).train()
    assert same(seen[1], seen[2])
    assert not same(seen[2], seen[3])
    Spoiled.bad = (1, 2, 3)
    with pytest.raises(whet.WhetError, match="3 steps in a row were not finite"):
        Spoiled(classifier(), arguments(tmp_path / "b"), pad, rows()).train()


def test_state_file_reads_as_transformers_writes_it(tmp_path: Path) -> None:
    classify(tmp_path, max_steps=4).train()
    state = transformers.TrainerState.load_from_json(str(tmp_path / "checkpoint-4" / "trainer_state.json"))
    assert state.global_step == 4
    assert json.loads((tmp_path / "checkpoint-4" / "training_args.json").read_text("utf-8"))["max_steps"] == 4
