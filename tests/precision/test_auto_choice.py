"""`precision auto`: what is measured decides, the log says it, and a resumed run does not measure again."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timed_runs import clock_of, measurable_model, no_clock, trainer_of

from tiny import losses, tiny_model, tiny_rows, weights_of
from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.precision import compare

_SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


_LONG = 48
"""Rows of an evaluation that is worth a measurement, in batches of 8."""


def _model_to_evaluate() -> Any:
    """A BERT whose forward pass over 512 tokens is more than what is not worth a measurement."""
    return tiny_model("bert", hidden_size=256, num_hidden_layers=4, intermediate_size=512)


def _n_tokens_of_a_batch(rows: Any) -> int:
    return sum(len(rows[n]["input_ids"]) for n in range(8))


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "precision auto" in text or "slower" in text]


def _settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "training_args.json").read_text("utf-8"))


def _same_bits(found: Any, wanted: Any) -> bool:
    return losses(found) == losses(wanted) and all(
        value.equal(weights_of(wanted.model)[name]) for name, value in weights_of(found.model).items()
    )


@pytest.mark.parametrize(
    ("fp32_s", "bf16_s", "chosen", "speedup", "n_rounds"),
    [
        (0.6, 0.2, "bf16", "3.00", 2),
        (0.6, 0.5, "bf16", "1.20", 2),
        (0.6, 0.55, "fp32", "1.09", 5),
        (0.2, 0.6, "fp32", "0.33", 2),
    ],
)
def test_faster_format_is_chosen_and_logged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fp32_s: float,
    bf16_s: float,
    chosen: str,
    speedup: str,
    n_rounds: int,
) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    trainer = trainer_of(tmp_path, clock_of(fp32_s, bf16_s))
    trainer.train()
    (line,) = _said(caplog)
    assert line.startswith(f"precision auto: {chosen}; bf16 runs at {speedup} times the speed of fp32, and 1.15 are")
    assert f"fp32 {fp32_s:g} s, bf16 {bf16_s:g} s, least of {n_rounds}" in line
    assert trainer.precision.name == chosen
    assert any(f"products {chosen}, optimizer state fp32" in text for text in caplog.messages)
    trainer.save_model()
    kept = _settings(tmp_path)
    assert (kept["precision"], kept["bf16"], kept["fp16"]) == (chosen, chosen == "bf16", False)
    TrainingArguments(**kept)  # what was written gives the same run again


def test_real_measurement_chooses_one_of_the_two(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    trainer = trainer_of(tmp_path)
    assert trainer.precision.clock is time.perf_counter
    trainer.train()
    assert trainer.precision.name in ("fp32", "bf16")
    assert len(_said(caplog)) == 1


def test_small_products_are_not_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    trainer = trainer_of(tmp_path, no_clock, model=tiny_model("bert"))
    trainer.train()
    (line,) = _said(caplog)
    assert line == (
        "precision auto: fp32; 512 tokens are 0.053 GFLOP of products, too few for a format to gain (below 1)"
    )
    assert trainer.precision.name == "fp32"


def test_short_evaluation_runs_in_fp32_without_measuring(tmp_path: Path) -> None:
    rows = trainer_of(tmp_path).train_dataset
    auto, fp32 = trainer_of(tmp_path, no_clock), trainer_of(tmp_path, no_clock, precision="fp32")
    assert auto.evaluate(rows)["eval_loss"] == fp32.evaluate(rows)["eval_loss"]
    bf16 = trainer_of(tmp_path, no_clock, bf16=True)
    assert bf16.evaluate(rows)["eval_loss"] != fp32.evaluate(rows)["eval_loss"]
    auto.save_model()
    assert _settings(tmp_path)["precision"] == "auto"


@pytest.mark.parametrize(("fp32_s", "bf16_s", "chosen", "n_rounds"), [(0.3, 0.1, "bf16", 2), (0.3, 0.29, "fp32", 3)])
def test_long_evaluation_runs_in_the_faster_format(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fp32_s: float, bf16_s: float, chosen: str, n_rounds: int
) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    rows, model = tiny_rows(_LONG, lengths=(10, 20)), _model_to_evaluate()
    wanted = trainer_of(tmp_path, no_clock, model=model, precision=chosen).evaluate(rows)
    caplog.clear()
    auto = trainer_of(tmp_path, clock_of(fp32_s, bf16_s), model=model)
    weights = {name: value.clone() for name, value in weights_of(model).items()}
    assert auto.evaluate(rows)["eval_loss"] == wanted["eval_loss"]
    (line,) = _said(caplog)
    assert line.startswith(f"precision auto: {chosen}; bf16 runs at ")
    tokens = f"{_n_tokens_of_a_batch(rows)} tokens"
    assert f"(forward of {tokens}: fp32 {fp32_s:g} s, bf16 {bf16_s:g} s, least of {n_rounds})" in line
    assert all(value.equal(weights[name]) for name, value in weights_of(model).items())
    auto.precision.clock = no_clock
    assert auto.evaluate(rows)["eval_loss"] == wanted["eval_loss"]  # chosen once


def test_training_after_an_evaluation_measures_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, clock_of(0.3, 0.1), model=_model_to_evaluate())
    trainer.evaluate(tiny_rows(_LONG, lengths=(10, 20)))
    trainer.precision.clock = clock_of(0.1, 0.3)
    trainer.train()
    assert trainer.precision.name == "fp32"


def test_bf16_false_means_fp32(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, no_clock, bf16=False)
    trainer.train()
    assert trainer.precision.name == "fp32"


@pytest.mark.parametrize("name", ["bf16", pytest.param("fp16", marks=pytest.mark.night)])
def test_requested_format_is_used_and_its_cost_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    trainer = trainer_of(tmp_path, clock_of(0.2, 0.75), **{name: True})
    trainer.train()
    (line,) = _said(caplog)
    assert line.startswith(f"--{name} is slower than fp32 here: a pass takes 3.75 times as long")
    assert f"fp32 0.2 s, {name} 0.75 s" in line
    assert trainer.precision.name == name


def test_no_warning_if_the_requested_format_is_faster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(tmp_path, clock_of(0.6, 0.5), bf16=True).train()
    assert _said(caplog) == []


def test_resumed_run_keeps_the_choice_bitwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    whole = trainer_of(tmp_path, clock_of(0.6, 0.2), **_SAVING)
    whole.train()
    assert _settings(tmp_path / "checkpoint-2")["precision"] == "bf16"
    for changes in ({}, {"bf16": True}):
        caplog.clear()
        resumed = trainer_of(tmp_path, no_clock, **_SAVING, **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert _said(caplog) == ([] if changes else ["precision auto: bf16, as in the checkpoint"])
        assert _same_bits(resumed, whole)


def test_precision_other_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, clock_of(0.6, 0.2), **_SAVING).train()
    with pytest.raises(ConfigError, match="precision: bf16 in the checkpoint -> fp32 now"):
        trainer_of(tmp_path, no_clock, **_SAVING, precision="fp32").train(resume_from_checkpoint="auto")


def test_older_checkpoint_gives_its_precision_by_bf16() -> None:
    from whet.precision.policy import in_checkpoint

    assert [in_checkpoint({"bf16": value}) for value in (True, False)] == ["bf16", "fp32"]


@pytest.mark.parametrize(("pass_s", "n_rounds"), [(0.1, 5), (2.0, 3), (9.0, 1), (60.0, 1)])
def test_long_passes_are_measured_less_often(pass_s: float, n_rounds: int) -> None:
    """In turns, the first of each not counted, unless it has used up the time."""
    order: list[str] = []
    clock = clock_of(pass_s, 0.95 * pass_s)
    times = compare.alternate(lambda: order.append("a"), lambda: order.append("b"), clock, torch.device("cpu"))
    assert times.n_rounds == n_rounds
    assert times.speedup == pytest.approx(1 / 0.95)
    uncounted = 2 * pass_s < compare.BUDGET_S
    assert order == ["a", "b"] * (n_rounds + uncounted)


def test_measured_run_has_the_curve_of_an_unmeasured_one(tmp_path: Path) -> None:
    measured, plain = trainer_of(tmp_path, clock_of(1.0, 1.0)), trainer_of(tmp_path, no_clock, precision="fp32")
    for trainer in (measured, plain):
        trainer.train()
    assert _same_bits(measured, plain)
    assert weights_of(measurable_model())["qa_outputs.weight"].ne(weights_of(plain.model)["qa_outputs.weight"]).any()


@pytest.mark.parametrize(
    ("device", "n_rows", "n_tokens", "n_timed"),
    [("cpu", 8, 4096, 1), ("cpu", 64, 4096, 8), ("cpu", 4, 300, 4), ("cuda", 64, 4096, 64), ("cuda", 1, 300, 1)],
)
def test_a_gpu_is_timed_with_complete_batches(device: str, n_rows: int, n_tokens: int, n_timed: int) -> None:
    """It computes 512 tokens faster than the program launches their kernels, in any format."""
    assert compare.n_timed_rows(n_rows, n_tokens, torch.device(device)) == n_timed


@pytest.mark.parametrize("by", ["training", "evaluation"])
@pytest.mark.parametrize(("most", "tried"), [(2, [8, 4, 2]), (0, [8, 4, 2, 1])])
def test_formats_are_compared_on_rows_that_fit_into_memory(
    by: str, most: int, tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """fp32 has memory for `most` rows, and bf16, which is faster, for all."""
    caplog.set_level(logging.INFO, logger="whet")
    model = _model_to_evaluate() if by == "evaluation" else measurable_model()
    trainer = trainer_of(tmp_path, model=model, per_device_train_batch_size=8)
    forward, seen, now_s = type(trainer.objective).forward, list[tuple[str, int]](), [0.0]

    def scarce(objective: Any, batch: Any, **given: Any) -> Any:
        is_half = torch.is_autocast_enabled("cpu")
        seen.append(("bf16" if is_half else "fp32", batch.n_rows))
        if not is_half and batch.n_rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        now_s[0] += 0.1 if is_half else 0.3
        return forward(objective, batch, **given)

    monkeypatch.setattr(type(trainer.objective), "forward", scarce)
    trainer.precision.clock = lambda: now_s[0]
    if by == "training":
        trainer.train()
        assert trainer.precision.name == "bf16"
    else:
        trainer.evaluate(tiny_rows(_LONG, lengths=(10, 20)))
    assert seen[: len(tried)] == [("fp32", n_rows) for n_rows in tried]
    assert seen[-1] == ("bf16", 8)
    (line,) = _said(caplog)
    said = "bf16 runs at 3.00 times the speed of fp32" if most else "there is no memory for one row in fp32"
    assert line.startswith(f"precision auto: bf16; {said}")


def test_a_timed_batch_that_does_not_fit_gets_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before auto_find_batch_size has looked for what fits."""
    trainer = trainer_of(tmp_path, clock_of(1.0, 1.0), per_device_train_batch_size=8)
    forward, seen = type(trainer.objective).forward, []

    def scarce(objective: Any, batch: Any, **given: Any) -> Any:
        seen.append(batch.n_rows)
        if batch.n_rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(objective, batch, **given)

    monkeypatch.setattr(type(trainer.objective), "forward", scarce)
    timing = trainer.precision.time_steps(trainer.prepared, np.arange(24), "bf16")
    assert timing is not None
    assert seen[:3] == [8, 4, 2]
    assert set(seen[2:]) == {2}
