"""`--cache_frozen_trunk` in commands: with a teacher and several seeds the curves without it, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from text_tasks import examples, load, save_encoder, words
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG
from whet.jobs import teacher
from whet.models.loading.load import load_model

ROUNDING = 1e-5
"""Relative, of a loss: the frozen layers' products run over other rows together, which changes the order of sums."""
CACHED = "--cache_frozen_trunk"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return folder


def asked(command: str, model: Path, out: Path, *flags: str, **options: Any) -> list[str]:
    """The words of a run of three epochs over twelve rows, whose first block is frozen."""
    file = examples(command, out.parent)
    usual: dict[str, Any] = {"train_file": file, "validation_file": file, "max_steps": 6, "freeze_layers": 1}
    usual |= {"logging_steps": 1} | ({"doc_stride": 8} if command == "qa" else {})
    return words(command, model, out, "--do_train", *flags, **(usual | options))


def curve(folder: Path) -> list[float]:
    return [entry["loss"] for entry in load(folder, "trainer_state.json")["log_history"] if "loss" in entry]


@pytest.mark.parametrize("command", ["qa", "classify", "tag", "lm"])
def test_curve_with_a_teacher_is_that_without_the_cache(
    command: str, encoder: Path, small_decoder: Path, tmp_path: Path
) -> None:
    """The teacher runs completely in each step: its layers are not those whose results are kept."""
    model = small_decoder if command == "lm" else encoder
    assert run(asked(command, model, tmp_path / "teacher", freeze_layers=0)) == 0
    taught = {"teacher_model": tmp_path / "teacher", "distillation_alpha": 0.7}
    assert run(asked(command, model, tmp_path / "plain", **taught)) == 0
    assert run(asked(command, model, tmp_path / "cached", CACHED, **taught)) == 0
    assert run(asked(command, model, tmp_path / "alone", CACHED)) == 0
    wanted, found = curve(tmp_path / "plain"), curve(tmp_path / "cached")
    assert len(wanted) == 6
    assert found == pytest.approx(wanted, rel=ROUNDING)
    assert curve(tmp_path / "alone") != pytest.approx(wanted, rel=1e-3)  # the teacher takes part


@pytest.mark.parametrize("command", ["qa", "classify", "tag", "lm"])
def test_teacher_runs_once_in_each_step_and_never_to_fill_the_cache(
    command: str, encoder: Path, small_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []

    def loaded(*args: Any, **options: Any) -> Any:
        model = load_model(*args, **options)
        model.base_model.register_forward_pre_hook(lambda *_: calls.append(None))
        return model

    monkeypatch.setattr(teacher, "load_model", loaded)
    model = small_decoder if command == "lm" else encoder
    assert run(asked(command, model, tmp_path / "teacher", freeze_layers=0)) == 0
    assert run(asked(command, model, tmp_path / "cached", CACHED, teacher_model=tmp_path / "teacher")) == 0
    assert len(curve(tmp_path / "cached")) == 6
    assert len(calls) == 6


def test_each_of_several_seeds_has_the_curve_without_the_cache(encoder: Path, tmp_path: Path) -> None:
    for name, flags in {"plain": (), "cached": (CACHED,)}.items():
        assert run(asked("classify", encoder, tmp_path / name, "--do_eval", *flags, seeds=2)) == 0
    for seed in ("seed-42", "seed-43"):
        wanted, found = (curve(tmp_path / name / seed) for name in ("plain", "cached"))
        assert found == pytest.approx(wanted, rel=ROUNDING)


@pytest.mark.parametrize(
    "odd", [{"loss": "dpo"}, {"moe_experts": 2}, {"label_smoothing_factor": 0.1}], ids=lambda odd: next(iter(odd))
)
def test_what_keeps_no_states_is_refused_before_the_data_is_read(
    odd: dict[str, Any], small_decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The texts are no pairs of completions, which the reading would refuse."""
    assert run(asked("lm", small_decoder, tmp_path / "out", CACHED, **odd)) == EXIT_BAD_CONFIG
    said = " ".join(capfd.readouterr().err.split())
    first, second = re.search(r"(\w+)(?: \w+)? does not go with (\w+)", said).groups()  # pyright: ignore
    assert {first, second} == {"cache_frozen_trunk", next(iter(odd))}
