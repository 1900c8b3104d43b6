"""Where a `whet.Trainer` stops: with steps of the user's own, in any evaluation, for memory, in any thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_runs import SignalAt, arguments, classifier, forked, output, pad, rows, same, weights
from torch import nn
from transformers import TrainerCallback

import whet
from whet import log
from whet.errors import EXIT_OTHER, EXIT_STOPPED_AND_SAVED
from whet.hardware import memory
from whet.watch import stop


def classify(folder: Path, *callbacks: Any, **changes: Any) -> whet.Trainer:
    return whet.Trainer(classifier(), arguments(folder, **changes), pad, rows(), rows(8), callbacks=[*callbacks])


def run(act: Callable[[], Any], folder: Path, n_ranks: int = 1) -> list[int]:
    """Call `act` in forked processes as a script would that shows whet's messages; return their exit codes."""

    def shown(_rank: int) -> None:
        log.set_up()
        act()

    return forked(shown, folder, n_ranks)


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*checkpoint-*")}


def words(folder: Path) -> str:
    """Return what a forked process printed, on one line."""
    return " ".join(output(folder).split())


class OwnSteps(whet.Trainer):
    """Computes gradients by a `training_step` that replaces the one of all other classes."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=pytest.mark.reliability)])
def test_signal_stops_a_trainer_whose_training_step_is_its_own(n_ranks: int, tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 6}

    def train(folder: Path, *callbacks: Any, resume: bool | None = None, save: str = "steps") -> None:
        args = arguments(folder, **changes, save_strategy=save, save_steps=6)
        OwnSteps(classifier(), args, pad, rows(), callbacks=[*callbacks]).train(resume_from_checkpoint=resume)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(lambda: train(whole), tmp_path / "w", n_ranks) == [0] * n_ranks, output(tmp_path / "w")
    stops = SignalAt("on_step_end", 3, signal.SIGTERM)
    stopped = run(lambda: train(cut, stops, save="no"), tmp_path / "c", n_ranks)
    assert stopped == [75] * n_ranks, output(tmp_path / "c")
    assert checkpoints(cut) == {"checkpoint-3"}
    again = f"resume with trainer.train(resume_from_checkpoint='{cut / 'checkpoint-3'}')"
    assert words(tmp_path / "c").count(again) == 1, "a script that ends by SystemExit prints nothing of it"
    rest = run(lambda: train(cut, resume=True), tmp_path / "r", n_ranks)
    assert rest == [0] * n_ranks, output(tmp_path / "r")
    assert same(weights(whole / "checkpoint-6"), weights(cut / "checkpoint-6"))


def test_noise_of_embeddings_ends_with_a_training_that_stops(tmp_path: Path) -> None:
    """As in a notebook: the same Trainer trains on after Ctrl-C, and its model is used after that."""
    changes = {"neftune_noise_alpha": 5.0, "save_strategy": "no", "max_steps": 6}

    def train() -> None:
        whole = classify(tmp_path / "whole", **changes)
        whole.train()
        trainer = classify(tmp_path / "cut", SignalAt("on_step_end", 3, signal.SIGINT), **changes)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert not trainer.is_in_train
        plain = noisy(trainer.model)
        trainer.train(resume_from_checkpoint=True)
        assert same(dict(whole.model.state_dict()), dict(trainer.model.state_dict()))
        assert not plain
        assert not noisy(trainer.model)

    def noisy(model: Any) -> bool:
        """Return whether the embeddings of the model in training differ from its table."""
        table = model.get_input_embeddings()
        ids = torch.arange(5).unsqueeze(0)
        return not torch.equal(table.train()(ids), table.weight[ids])

    assert run(train, tmp_path / "t") == [0], output(tmp_path / "t")


def test_what_is_switched_off_is_no_longer_due_after_a_stop_in_an_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluation that takes too long is stopped by Ctrl-C, and the training resumes without any."""
    changes = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 2}
    stops = SignalAt("on_prediction_step", 4, signal.SIGTERM)
    stopped = run(lambda: classify(tmp_path / "cut", stops, **changes).train(), tmp_path / "c")
    assert stopped == [75], output(tmp_path / "c")
    whole = classify(tmp_path / "whole")
    whole.train()
    rest = whet.Trainer(classifier(), arguments(tmp_path / "cut", save_strategy="no"), pad, rows())
    rest.train(resume_from_checkpoint=True)
    assert same(dict(whole.model.state_dict()), dict(rest.model.state_dict()))
    assert checkpoints(tmp_path / "cut") == {"checkpoint-4"}
    for left_out in ("the evaluation that was due there is left out, with eval_strategy=no",
                     "the save that was due there is left out, with save_strategy=no"):  # fmt: skip
        assert f"checkpoint-4: {left_out}" in caplog.text


def test_training_that_stops_before_its_first_step_names_the_checkpoint_that_it_resumed_from(tmp_path: Path) -> None:
    """Its random states and its place are not those of the checkpoint yet."""
    old, new = tmp_path / "old", tmp_path / "new"
    classify(old, max_steps=4).train()
    stops = SignalAt("on_prediction_step", 4, signal.SIGTERM)

    def train() -> None:
        classify(new, stops, eval_on_start=True).train(str(old / "checkpoint-4"))

    assert run(train, tmp_path / "t") == [75], output(tmp_path / "t")
    assert checkpoints(new) == set()
    assert f"after step 4: saved in {old / 'checkpoint-4'}, no completed step is lost" in words(tmp_path / "t")


def test_signal_after_the_last_step_saves_no_weights_of_another_step(tmp_path: Path) -> None:
    """The model is that of the best step by then, and no checkpoint may hold it as the last one's."""

    class EvaluatesAgain(TrainerCallback):
        trainer: Any = None

        def on_train_end(self, *_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            self.trainer.evaluate()

    changes: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "best", "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip

    def train() -> None:
        again = EvaluatesAgain()
        again.trainer = classify(tmp_path / "out", again, **changes)
        again.trainer.train()

    assert run(train, tmp_path / "t") == [75], output(tmp_path / "t")
    assert checkpoints(tmp_path / "out") == {"checkpoint-4"}, "that of the largest loss, which falls"
    assert f"a restart repeats what came after {tmp_path / 'out' / 'checkpoint-4'}" in words(tmp_path / "t")


def test_stop_in_an_evaluation_by_a_callback_keeps_what_is_due_after_its_step(tmp_path: Path) -> None:
    """The step is the last one, in the middle of an epoch: a resumed training takes no other."""

    class Evaluates(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == state.max_steps:
                os.kill(os.getpid(), signal.SIGTERM)
                self.trainer.evaluate()

    def train() -> None:
        evaluates = Evaluates()
        evaluates.trainer = classify(tmp_path / "cut", evaluates)
        evaluates.trainer.train()

    assert run(train, tmp_path / "t") == [75], output(tmp_path / "t")
    whole = classify(tmp_path / "whole")
    whole.train()
    rest = classify(tmp_path / "cut")
    assert rest.train(resume_from_checkpoint=True).global_step == 12
    assert same(dict(whole.model.state_dict()), dict(rest.model.state_dict()))


class Takes(TrainerCallback):
    """Takes so many bytes after a step."""

    def __init__(self, step: int, n_bytes: int) -> None:
        self.step, self.n_bytes, self.taken = step, n_bytes, b""

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.taken = b"x" * self.n_bytes


def test_training_without_memory_says_where_it_is_saved_or_that_it_fails(tmp_path: Path) -> None:
    room = 2**28

    def train() -> None:
        limit_gb = ((memory.resident_bytes() or 0) + room) / 2**30
        classify(tmp_path / "out", Takes(3, room), memory_limit_gb=limit_gb).train()

    assert run(train, tmp_path / "t") == [EXIT_STOPPED_AND_SAVED], output(tmp_path / "t")
    assert checkpoints(tmp_path / "out") == {"checkpoint-3"}
    said, folder = words(tmp_path / "t"), tmp_path / "out" / "checkpoint-3"
    assert f"after step 3: saved in {folder}" in said
    assert f"resume with trainer.train(resume_from_checkpoint='{folder}')" in said

    def too_little() -> None:
        classify(tmp_path / "out", memory_limit_gb=0.001).train(resume_from_checkpoint=True)

    assert run(too_little, tmp_path / "r") == [EXIT_OTHER], "it would end in the same way each time it starts"
    assert f"resume with trainer.train(resume_from_checkpoint='{folder}')" in words(tmp_path / "r")
    with pytest.raises(whet.WhetError, match="memory runs out before the first step is done") as failed:
        classify(tmp_path / "new", memory_limit_gb=0.001).train()
    (problem,) = failed.value.problems
    assert "use per_device_train_batch_size=2, with gradient_accumulation_steps=2" in problem.fix
    assert "a higher memory_limit_gb" in problem.fix


def test_training_in_another_thread_says_that_no_signal_saves_it(tmp_path: Path) -> None:
    def train_in_thread(**changes: Any) -> None:
        trainer = classify(tmp_path / "out", max_steps=1, save_strategy="no", **changes)
        thread = threading.Thread(target=trainer.train)
        thread.start()
        thread.join()

    def twice() -> None:
        stop._warn_of_thread.cache_clear()  # this process is forked from one in which other tests may have heard it
        train_in_thread(save_on_signal=False)
        print("from here on", flush=True)
        train_in_thread()
        train_in_thread()

    assert run(twice, tmp_path / "t") == [0], output(tmp_path / "t")
    silent, _, said = words(tmp_path / "t").partition("from here on")
    assert "another thread" not in silent
    assert said.count("another thread than the main one, where Python handles no signals") == 1
    assert "call train() in the main thread" in said
