"""weight_averaging_start: the mean of the last weights is what is evaluated, saved and returned."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from averaged_run import BEGINS, KILLED_AFTER, N_STEPS, averaged
from safetensors.torch import load_file, save_file
from transformers import EarlyStoppingCallback, TrainerCallback

import engine
from tiny import losses, weights_of
from whet.errors import StorageError
from whet.store import manifest, snapshot

Weights = dict[str, torch.Tensor]
ROUNDING = 1e-6
"""The weights of norms are near 1, where each step of a running mean in float32 rounds by up to 6e-8."""


class Weigher(TrainerCallback):
    """Keeps the weights after each step, and those that are evaluated."""

    def __init__(self) -> None:
        self.trained: list[Weights] = []
        self.evaluated: dict[int, Weights] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.trained.append(weights_of(model))

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.evaluated[state.global_step] = weights_of(model)


def mean_of(many: list[Weights]) -> Weights:
    return {name: torch.stack([one[name].double() for one in many]).mean(0) for name in many[0]}


def gap(found: Weights, wanted: Weights) -> float:
    return max(float((found[name].double() - wanted[name].double()).abs().max()) for name in wanted)


def same(found: Weights, wanted: Weights) -> bool:
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def saved(folder: Path, step: int) -> Weights:
    return load_file(folder / f"checkpoint-{step}" / "model.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[engine.Trainer, Weigher, Path]:
    folder, weigher = tmp_path_factory.mktemp("uninterrupted"), Weigher()
    trainer = averaged(folder, callbacks=[weigher], eval_strategy="steps", eval_steps=1)
    trainer.train()
    return trainer, weigher, folder


Run = tuple[engine.Trainer, Weigher, Path]


def test_the_model_ends_with_the_mean_of_the_last_steps(uninterrupted: Run) -> None:
    trainer, weigher, _ = uninterrupted
    wanted = mean_of(weigher.trained[BEGINS - 1 :])
    assert gap(weights_of(trainer.model), wanted) < ROUNDING
    assert gap(weigher.trained[-1], wanted) > 100 * ROUNDING


def test_the_training_itself_is_not_changed(uninterrupted: Run, tmp_path: Path) -> None:
    plain = Weigher()
    trainer = averaged(tmp_path, callbacks=[plain], weight_averaging_start=None)
    trainer.train()
    assert losses(trainer) == losses(uninterrupted[0])
    assert all(map(same, plain.trained, uninterrupted[1].trained))


def test_evaluations_and_checkpoints_have_the_mean(uninterrupted: Run) -> None:
    _, weigher, folder = uninterrupted
    for step in range(1, N_STEPS + 1):
        wanted = weigher.trained[step - 1] if step < BEGINS else mean_of(weigher.trained[BEGINS - 1 : step])
        assert gap(weigher.evaluated[step], wanted) < ROUNDING
        assert same(saved(folder, step), weigher.evaluated[step])


def test_an_evaluation_that_a_callback_asks_for_has_the_mean(uninterrupted: Run, tmp_path: Path) -> None:
    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == N_STEPS - 1:
                found.append(trainer.evaluate()["eval_loss"])

    found: list[float] = []
    trainer = averaged(tmp_path, callbacks=[Evaluates()], eval_strategy="steps", eval_steps=N_STEPS - 1)
    trainer.train()
    of_loop = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    assert found == of_loop[:1] == of_loop[1:2]


@pytest.mark.reliability
def test_a_run_that_is_killed_while_it_averages_resumes_bitwise(uninterrupted: Run, tmp_path: Path) -> None:
    words = [sys.executable, str(Path(__file__).with_name("averaged_run.py")), str(tmp_path)]
    path = [str(Path(__file__).parents[1]), *sys.path]
    killed = subprocess.run(words, env={"PYTHONPATH": ":".join(path)}, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert (tmp_path / f"checkpoint-{KILLED_AFTER}").is_dir()
    weigher = Weigher()
    trainer = averaged(tmp_path, seed=9, callbacks=[weigher], save_steps=N_STEPS)
    trainer.train(resume_from_checkpoint="auto")
    whole, before, _ = uninterrupted
    assert len(weigher.trained) == N_STEPS - KILLED_AFTER
    assert all(map(same, weigher.trained, before.trained[KILLED_AFTER:]))
    assert losses(trainer) == losses(whole)
    assert same(weights_of(trainer.model), weights_of(whole.model))


@pytest.mark.parametrize("step", [BEGINS - 1, BEGINS, N_STEPS])
def test_a_run_resumes_before_within_and_after_the_averaging(step: int, uninterrupted: Run, tmp_path: Path) -> None:
    whole, _, folder = uninterrupted
    trainer = averaged(tmp_path, seed=9, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert same(weights_of(trainer.model), weights_of(whole.model))


@pytest.mark.parametrize("changes", [{"save_async": True}, {"optim": "adamw_torch"}], ids=["async", "torch"])
def test_other_ways_to_save_and_step_resume_bitwise(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = averaged(tmp_path / "whole", **changes)
    whole.train()
    trainer = averaged(tmp_path / "resumed", seed=9, **changes)
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{KILLED_AFTER}"))
    assert same(weights_of(trainer.model), weights_of(whole.model))


def test_a_run_that_is_stopped_while_the_mean_is_evaluated_resumes_bitwise(uninterrupted: Run, tmp_path: Path) -> None:
    """The checkpoint is written while the mean is in the place of the weights."""

    class Terminate(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == KILLED_AFTER:
                signal.raise_signal(signal.SIGTERM)

    changes: dict[str, Any] = {
        "enable_jit_checkpoint": True, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    with pytest.raises(SystemExit) as stopped:
        averaged(tmp_path, callbacks=[Terminate()], **changes).train()
    assert stopped.value.code == 75
    trainer = averaged(tmp_path, seed=9, **changes)
    trainer.train(resume_from_checkpoint="auto")
    assert losses(trainer) == losses(uninterrupted[0])
    assert same(weights_of(trainer.model), weights_of(uninterrupted[0].model))


def test_checkpoints_with_only_the_model_hold_the_mean(uninterrupted: Run, tmp_path: Path) -> None:
    averaged(tmp_path, save_only_model=True, save_steps=N_STEPS).train()
    assert same(saved(tmp_path, N_STEPS), weights_of(uninterrupted[0].model))
    assert not (tmp_path / f"checkpoint-{N_STEPS}" / "average.safetensors").exists()


def test_a_longer_run_averages_from_its_own_middle(uninterrupted: Run, tmp_path: Path) -> None:
    """At step 8 of 10 weights were averaged; a run of 20 steps begins with that after step 10."""
    _, _, folder = uninterrupted
    weigher = Weigher()
    longer = averaged(tmp_path / "whole", max_steps=20, callbacks=[weigher], save_strategy="no")
    longer.train()
    resumed = averaged(tmp_path / "resumed", seed=9, max_steps=20, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{KILLED_AFTER}"))
    assert gap(weights_of(longer.model), mean_of(weigher.trained[10:])) < ROUNDING
    assert same(weights_of(resumed.model), weights_of(longer.model))


def test_the_best_model_is_what_was_evaluated(tmp_path: Path) -> None:
    weigher = Weigher()
    trainer = averaged(
        tmp_path, callbacks=[weigher], eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        metric_for_best_model="loss",
    )  # fmt: skip
    trainer.train()
    best = trainer.state.best_global_step
    assert best is not None
    assert same(weights_of(trainer.model), weigher.evaluated[best])


def test_a_run_that_is_stopped_early_has_the_mean_so_far(tmp_path: Path) -> None:
    class StopAfter(Weigher):
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **more: Any) -> None:
            super().on_step_end(args, state, control, model=model, **more)
            control.should_training_stop = state.global_step == BEGINS + 1

    weigher = StopAfter()
    trainer = averaged(tmp_path, callbacks=[weigher], save_strategy="no")
    trainer.train()
    assert gap(weights_of(trainer.model), mean_of(weigher.trained[-2:])) < ROUNDING


def test_early_stopping_judges_the_mean(tmp_path: Path) -> None:
    """A learning rate of 0 improves nothing: the run stops, and its model is the mean of equal weights."""
    trainer = averaged(
        tmp_path, callbacks=[EarlyStoppingCallback(2)], eval_strategy="steps", eval_steps=1, learning_rate=0.0,
        load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_run_that_ends_before_the_average_begins_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stop(Weigher):
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **more: Any) -> None:
            super().on_step_end(args, state, control, model=model, **more)
            control.should_training_stop = state.global_step == 2

    weigher = Stop()
    trainer = averaged(tmp_path, callbacks=[weigher], save_strategy="no")
    trainer.train()
    assert same(weights_of(trainer.model), weigher.trained[-1])
    assert "ended before step 6, so no weights were averaged" in caplog.text


def test_a_checkpoint_with_other_weights_next_to_the_mean_is_refused(uninterrupted: Run, tmp_path: Path) -> None:
    """A tensor of another shape would be broadcast over the weights."""
    trainer = averaged(tmp_path)
    trainer.train()
    folder = tmp_path / f"checkpoint-{KILLED_AFTER}"
    kept = load_file(folder / "average.safetensors")
    name = "weights.bert.encoder.layer.0.output.dense.bias"
    save_file(kept | {name: torch.zeros(1)}, folder / "average.safetensors")
    facts = manifest.facts_of(folder) or {}
    (folder / manifest.MANIFEST).unlink()
    kept_facts = {name: one for name, one in facts.items() if name not in ("format_version", "step", "content")}
    manifest.seal(folder, KILLED_AFTER, kept_facts)
    with pytest.raises(StorageError, match="the weights next to the averaged ones have another"):
        averaged(tmp_path / "other").train(resume_from_checkpoint=str(folder))


def test_the_mean_is_counted_in_the_forecast_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for a checkpoint of the first half, but not of the second, is refused before the first step."""

    seen: list[int] = []
    monkeypatch.setattr(snapshot, "free_bytes", lambda _: 10**12)
    forecast = snapshot.forecast_bytes
    monkeypatch.setattr(snapshot, "forecast_bytes", lambda state: seen.append(forecast(state)) or seen[-1])
    averaged(tmp_path).train()
    written = sum(path.stat().st_size for path in (tmp_path / f"checkpoint-{N_STEPS}").iterdir())
    assert 0.9 < seen[0] / written < 1.1


def test_a_run_that_no_longer_averages_resumes_with_the_trained_weights(uninterrupted: Run, tmp_path: Path) -> None:
    _, before, folder = uninterrupted
    weigher = Weigher()
    trainer = averaged(
        tmp_path, seed=9, callbacks=[weigher], weight_averaging_start=None, save_strategy="no",
        resume_allow_changes=("weight_averaging_start",),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{KILLED_AFTER}"))
    assert all(map(same, weigher.trained, before.trained[KILLED_AFTER:]))
    assert same(weights_of(trainer.model), before.trained[-1])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
def test_adapters_are_averaged_and_resume_bitwise(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the package peft")

    def run(folder: Path, seed: int, resume: str | None = None) -> tuple[Weights, Weigher]:
        torch.manual_seed(seed)
        config = peft.LoraConfig(target_modules=["query"], r=2, init_lora_weights=False)
        weigher = Weigher()
        trainer = averaged(folder, callbacks=[weigher], wrap=lambda model: peft.get_peft_model(model, config))
        trainer.train(resume_from_checkpoint=resume)
        return weights_of(trainer.model), weigher

    whole, weigher = run(tmp_path / "whole", 0)
    assert gap(whole, mean_of(weigher.trained[BEGINS - 1 :])) < ROUNDING
    resumed, _ = run(tmp_path / "other", 1, str(tmp_path / "whole" / f"checkpoint-{KILLED_AFTER}"))
    assert same(resumed, whole)
