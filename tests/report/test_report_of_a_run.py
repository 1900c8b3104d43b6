"""The page that a command leaves at the end of its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from page_parts import Page

from text_tasks import save_encoder, topic_rows, words, write_csv
from whet.cli.main import run
from whet.report import runs
from whet.watch import record


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny encoder without a head."""
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return folder


def _words(encoder: Path, folder: Path, **options: object) -> list[str]:
    data = write_csv(folder / "topics.csv", topic_rows())
    usual = {"train_file": data, "validation_file": data, "max_steps": 6, "logging_steps": 2}
    return words("classify", encoder, folder / "out", "--do_train", "--do_eval", **(usual | options))


def test_run_leaves_its_page(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_words(encoder, tmp_path)) == 0
    path = tmp_path / "out" / "report.html"
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  report  "))
    assert line.endswith("/out/report.html"), "a long path is shortened in its middle"
    found = Page(path.read_text("utf-8"))
    assert found.unclosed == []
    assert found.headings[0] == (1, "out")
    assert any(row[0] == "accuracy" for row in found.table("Metrics at the end").rows)
    assert found.table("Confusion matrix of the validation split.").rows[0] == ["", "baking", "garden", "sailing"]
    assert "Loss of the training" in found.text


def test_closing_evaluation_of_the_best_model_leaves_that_of_the_last_step_as_it_was(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls, so of the highest loss the first checkpoint is the best."""
    best = {"metric_for_best_model": "loss", "greater_is_better": "true", "load_best_model_at_end": "true"}
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    words, out = _words(encoder, tmp_path, **best, **every), tmp_path / "out"
    assert run(words) == 0
    losses = [(one.step, one.metrics["eval_loss"]) for one in record.read(out).evaluations]
    assert [step for step, _ in losses] == [2, 4, 6, 2]
    assert losses[0] == losses[3], "the same weights"
    table = (out / "README.md").read_text("utf-8").partition("### Evaluations during the training")[2]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| ")]
    assert [row[1] for row in rows[1:] if row[1].isdigit()] == ["2", "4", "6"]
    assert f"{losses[2][1]:.4f}" in rows[-1]
    again = _words(out, tmp_path, model_name_or_path=out, learning_rate=3e-3)
    assert run([word for word in again if word != "--do_train"]) == 0, "later, in a process that only judges"
    found = {step: metrics["eval_loss"] for step, metrics in runs.read(out).evaluations.items()}
    assert found == dict(losses)
    capsys.readouterr()
    assert run(["watch", str(out), "--json"]) == 0
    (watched,) = json.loads(capsys.readouterr().out)["runs"]
    assert watched["evaluation"]["step"] is None, "nobody knows whether it was the last model or the best"


def test_page_can_be_left_out(encoder: Path, tmp_path: Path) -> None:
    assert run(_words(encoder, tmp_path, report_html="false")) == 0
    assert not (tmp_path / "out" / "report.html").exists()


def test_page_that_cannot_be_written_leaves_the_run_finished(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert run([*_words(encoder, tmp_path), "--overwrite_output_dir"]) == 0
    assert "report.html was not written" in capsys.readouterr().err


def test_seeds_are_compared_on_one_page_of_the_run_and_of_the_command(encoder: Path, tmp_path: Path) -> None:
    assert run(_words(encoder, tmp_path, seeds=2, seed=5)) == 0
    path = tmp_path / "out" / "report.html"
    for _ in range(2):
        found = Page(path.read_text("utf-8"))
        assert found.headings[0] == (1, "2 runs")
        assert {"./seed-5/report.html", "./seed-6/report.html"} <= {*found.addresses}
        path.unlink()
        assert run(["report", str(tmp_path / "out")]) == 0
