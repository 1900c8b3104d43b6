"""Runs with preferences, a teacher or experts that a signal stops: the command that is printed leads to their end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dpo_runs import PAIRS

from stop_at import stop_at
from text_tasks import SAILING, load, words, write_lines
from whet.cli.main import run
from whet.engine.engine import Engine
from whet.engine.loop import TrainingLoop
from whet.errors import EXIT_STOPPED_AND_SAVED
from whet.jobs import model_card
from whet.store.save import Saver
from whet.tasks.lm.job import LmJudge
from whet.watch import stop

TRAINED, LAST = "once the model is saved", "in the last evaluation"
STAGES = {
    "before the first step": (Engine, "train", 1),
    "in the first pass": (Engine, "forward_batches", 1),
    "in the first step": (TrainingLoop, "take_step", 1),
    "in a later step": (TrainingLoop, "take_step", 3),
    "in an evaluation of the training": (Engine, "evaluate", 1),
    "in a save": (Saver, "save", 1),
    TRAINED: (model_card, "write", 1),
    LAST: (LmJudge, "judge", 1),
    "in the prediction": (LmJudge, "judge", 2),
}
"""When the signal comes -> at which call of what."""
KINDS: dict[str, dict[str, Any]] = {
    "dpo": {"loss": "dpo", "beta": 0.2, "label_smoothing": 0.1},
    "dpo of an adapter": {"loss": "dpo", "lora_r": 2},
    "teacher": {"teacher_model": "teacher", "distillation_alpha": 0.8, "distillation_temperature": 3.0},
    "experts": {"moe_experts": 4, "moe_top_k": 2, "moe_every": 1, "moe_aux_loss_coef": 0.02, "profile": "true"},
}


@pytest.fixture(autouse=True)
def _no_signal_stays() -> Iterator[None]:
    yield
    stop.restore()


def line(kind: str, decoder: Path, folder: Path, name: str, **more: Any) -> list[str]:
    """The words of a run of four steps, which saves and evaluates after each second one."""
    rows = PAIRS if kind.startswith("dpo") else [{"text": text} for text in SAILING * 2]
    file = write_lines(folder / "rows.jsonl", rows)
    given = KINDS[kind] | ({"teacher_model": decoder} if kind == "teacher" else {})
    usual = {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "max_seq_length": 48}
    usual |= {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    files = dict.fromkeys(("train_file", "validation_file", "test_file"), file)
    options = usual | files | given | more
    return words("lm", decoder, folder / name, "--do_train", "--do_eval", "--do_predict", **options)


def results(folder: Path) -> dict[str, float]:
    """The metrics of the last evaluation and of the prediction that do not measure time."""
    found = {**load(folder, "eval_results.json"), **load(folder, "predict_results.json")}
    return {name: value for name, value in found.items() if "runtime" not in name and "per_second" not in name}


FAST = [(kind, TRAINED) for kind in KINDS]
SLOW = [(kind, stage) for kind in KINDS for stage in STAGES if stage != TRAINED]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [*FAST, *(pytest.param(*one, marks=(pytest.mark.slow, pytest.mark.reliability)) for one in SLOW)],
)
def test_printed_command_leads_to_the_results_of_the_run_that_was_not_stopped(
    kind: str, stage: str, decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(line(kind, decoder, tmp_path, "straight")) == 0
    with pytest.MonkeyPatch.context() as patched:
        stop_at(patched, *STAGES[stage])
        capfd.readouterr()
        assert run(line(kind, decoder, tmp_path, "stopped")) == EXIT_STOPPED_AND_SAVED
    stop.restore()
    said = capfd.readouterr().err
    printed = [shlex.split(one)[1:] for one in said.splitlines() if one.startswith("whet lm")]
    assert printed or "start again with the same command" in said
    assert run(printed[0] if printed else line(kind, decoder, tmp_path, "stopped")) == 0
    wanted, found = results(tmp_path / "straight"), results(tmp_path / "stopped")
    found.pop("epoch", None)  # a run that evaluates alone has none
    wanted.pop("epoch", None)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_rewards_without_a_checkpoint_print_no_command(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a run from the weights before the training can compute them."""
    stop_at(monkeypatch, model_card, "write", 1)
    changes = {"save_strategy": "no", "eval_strategy": "no"}
    assert run(line("dpo", decoder, tmp_path, "out", **changes)) == EXIT_STOPPED_AND_SAVED
    said = capfd.readouterr().err
    assert "the trained model is in" in said
    assert "continue with" not in said
