"""`--seeds N`: each seed is a normal run, the best model is kept, and a stopped run trains no finished seed again."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from text_tasks import load, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

_DEADLINE_S = 300.0
_BOTH = ("--do_train", "--do_eval")


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_csv(tmp_path_factory.mktemp("data") / "topics.csv", topic_rows())


def _same_weights(one: Path, other: Path) -> bool:
    found, wanted = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return found.keys() == wanted.keys() and all(equal(found[name], wanted[name]) for name in wanted)


def test_seeds_are_normal_runs_and_the_best_one_is_kept(
    sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "out", {"train_file": topics, "validation_file": topics, "max_steps": 6}
    assert run(words("classify", sentence_encoder, out, *_BOTH, **options, seeds=3, seed=7)) == 0
    shown = capsys.readouterr().out
    reached = {seed: load(out / f"seed-{seed}", "eval_results.json")["eval_accuracy"] for seed in (7, 8, 9)}
    found = load(out, "all_results.json")
    assert found["eval_accuracy_mean"] == pytest.approx(statistics.fmean(reached.values()))
    assert found["eval_accuracy_std"] == pytest.approx(statistics.stdev(reached.values()))
    best = found["best_seed"]
    assert reached[best] == max(reached.values()) == load(out, "eval_results.json")["eval_accuracy"]
    assert _same_weights(out, out / f"seed-{best}")
    assert {
        f"seed-{seed}": load(out, "seeds.json")["metrics"][f"seed-{seed}"]["eval_accuracy"] for seed in reached
    } == {f"seed-{seed}": accuracy for seed, accuracy in reached.items()}
    assert f"seed {best}" in shown
    assert "standard deviation" in shown
    assert run(words("classify", sentence_encoder, tmp_path / "alone", *_BOTH, **options, seed=9)) == 0
    assert _same_weights(out / "seed-9", tmp_path / "alone")
    assert run(["predict", str(out), "--file", str(topics), "--output", str(tmp_path / "found.jsonl")]) == 0


@pytest.mark.parametrize("by_variable", [False, True])
def test_each_seed_is_a_run_of_its_own_in_tensorboard(
    by_variable: bool, sentence_encoder: Path, topics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    events, options = tmp_path / "events", {"train_file": topics, "validation_file": topics, "max_steps": 2}
    if by_variable:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(events))
    else:
        options["logging_dir"] = events
    seeds = {"seeds": 2, "seed": 7, "report_to": "tensorboard"}
    assert run(words("classify", sentence_encoder, tmp_path / "out", *_BOTH, **options, **seeds)) == 0
    assert sorted(path.parent.name for path in events.rglob("*tfevents*")) == ["seed-7", "seed-8"]


def test_metrics_of_test_data_have_a_mean_over_the_seeds(
    sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The predictions in the output folder are those of the best seed."""
    out, files = tmp_path / "out", dict.fromkeys(("train_file", "validation_file", "test_file"), topics)
    assert run(words("classify", sentence_encoder, out, *_BOTH, "--do_predict", **files, max_steps=4, seeds=2)) == 0
    found, each = load(out, "all_results.json"), load(out, "seeds.json")["metrics"]
    reached = [each[seed]["predict_loss"] for seed in ("seed-42", "seed-43")]
    assert reached[0] != reached[1]
    assert found["predict_loss_mean"] == pytest.approx(statistics.fmean(reached))
    assert found["predict_loss_std"] == pytest.approx(statistics.stdev(reached))
    shown = " ".join(capsys.readouterr().out.split())
    assert f"mean, test {found['predict_accuracy_mean']:.4f}, standard deviation" in shown
    best = out / f"seed-{found['best_seed']}"
    assert (out / "predict_predictions.jsonl").read_bytes() == (best / "predict_predictions.jsonl").read_bytes()


def test_seeds_without_an_evaluation_are_refused(
    sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words("classify", sentence_encoder, tmp_path / "out", "--do_train", train_file=topics, seeds=3)
    assert run(line) == EXIT_BAD_CONFIG
    said = capsys.readouterr().err
    assert "seeds has no evaluation to choose by" in said
    assert "fix: add --do_eval --validation_file FILE" in said
    assert not (tmp_path / "out").exists()


def test_seeds_resume_only_together(
    sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"train_file": topics, "validation_file": topics, "seeds": 2, "resume_from_checkpoint": tmp_path}
    assert run(words("classify", sentence_encoder, tmp_path / "out", *_BOTH, **options)) == EXIT_BAD_CONFIG
    assert "fix: use --resume_from_checkpoint auto" in capsys.readouterr().err


def test_more_seeds_are_added_and_finished_ones_are_not_repeated(
    sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "out", {"train_file": topics, "validation_file": topics, "max_steps": 4}
    assert run(words("classify", sentence_encoder, out, *_BOTH, **options, seeds=2)) == 0
    before = (out / "seed-42" / "model.safetensors").stat().st_mtime_ns
    more = {"resume_from_checkpoint": "auto", "seeds": 3}
    assert run(words("classify", sentence_encoder, out, *_BOTH, **options, **more)) == 0
    assert (out / "seed-42" / "model.safetensors").stat().st_mtime_ns == before
    assert load(out, "all_results.json")["seeds"] == 3
    assert (
        run(words("classify", sentence_encoder, out, *_BOTH, **{**options, "max_steps": 5}, **more)) == EXIT_BAD_CONFIG
    )
    assert "seed-42 was trained with other settings or data: max_steps" in capsys.readouterr().err
    other = {**more, "learning_rate": 0.5}
    assert run(words("classify", sentence_encoder, out, *_BOTH, **options, **other)) == EXIT_BAD_CONFIG
    assert "learning_rate" in capsys.readouterr().err


def test_seeds_on_changed_data_of_a_folder_do_not_resume(
    sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        write_csv(tmp_path / "data" / f"{split}.csv", topic_rows())
    options = {"dataset_name": tmp_path / "data", "max_steps": 2, "seeds": 2}
    assert run(words("classify", sentence_encoder, tmp_path / "out", *_BOTH, **options)) == 0
    again = words("classify", sentence_encoder, tmp_path / "out", *_BOTH, **options, resume_from_checkpoint="auto")
    assert run(again) == 0
    write_csv(tmp_path / "data" / "train.csv", topic_rows()[::-1])
    capsys.readouterr()
    assert run(again) == EXIT_BAD_CONFIG
    assert "seed-42 was trained with other settings or data: dataset_name" in capsys.readouterr().err


def test_seeds_on_changed_data_behind_a_link_do_not_resume(
    sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`datasets` reads it, as the card names it. A link that leads back in a circle keeps no run from starting."""
    for folder in ("version-1", "data/validation"):
        (tmp_path / folder).mkdir(parents=True)
        write_csv(tmp_path / folder / "rows.csv", topic_rows())
    splits = [{"split": name, "path": f"{name}/*.csv"} for name in ("train", "validation")]
    card = json.dumps({"configs": [{"config_name": "default", "data_files": splits}]})
    (tmp_path / "data" / "README.md").write_text(f"---\n{card}\n---\n", "utf-8")
    (tmp_path / "data" / "train").symlink_to(tmp_path / "version-1")
    (tmp_path / "version-1" / "circle").symlink_to(tmp_path / "data")
    options = {"dataset_name": tmp_path / "data", "max_steps": 2, "seeds": 2}
    assert run(words("classify", sentence_encoder, tmp_path / "out", *_BOTH, **options)) == 0
    assert load(tmp_path / "out" / "seed-42", "train_results.json")["train_samples"] == len(topic_rows())
    again = words("classify", sentence_encoder, tmp_path / "out", *_BOTH, **options, resume_from_checkpoint="auto")
    assert run(again) == 0
    write_csv(tmp_path / "version-1" / "more.csv", topic_rows())
    capsys.readouterr()
    assert run(again) == EXIT_BAD_CONFIG
    assert "seed-42 was trained with other settings or data: dataset_name" in capsys.readouterr().err


def test_metrics_that_are_not_finite_have_no_spread(
    sentence_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of the evaluation overflows, and its other metrics do not."""
    rows = [{"text": row["text"], "label": n / 10} for n, row in enumerate(topic_rows())]
    train = write_csv(tmp_path / "train.csv", rows)
    file = write_csv(tmp_path / "validation.csv", [row | {"label": f"{n}.5e30"} for n, row in enumerate(rows, 1)])
    options = {"train_file": train, "validation_file": file, "max_steps": 2, "seeds": 2}
    assert run(words("classify", sentence_encoder, tmp_path / "out", *_BOTH, **options)) == 0
    found = load(tmp_path / "out", "all_results.json")
    assert found["eval_loss"] == "Infinity"
    assert (found["eval_loss_mean"], found["eval_loss_std"]) == ("NaN", "NaN")
    assert found["eval_pearson_std"] >= 0
    again = words("classify", sentence_encoder, tmp_path / "out", *_BOTH, **options, resume_from_checkpoint="auto")
    assert run(again) == 0


def test_a_seed_whose_weights_are_gone_is_trained_again(
    sentence_encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "out", {"train_file": topics, "validation_file": topics, "max_steps": 4, "seeds": 2}
    assert run(words("classify", sentence_encoder, out, *_BOTH, **options)) == 0
    model = (out / "model.safetensors").read_bytes()
    for seed in (42, 43):
        (out / f"seed-{seed}" / "model.safetensors").unlink()
    assert run(words("classify", sentence_encoder, out, *_BOTH, **options, resume_from_checkpoint="auto")) == 0
    assert "seed-42 has no weights any more, and is trained again" in capsys.readouterr().out
    assert (out / "model.safetensors").read_bytes() == model


def _numbers(folder: Path) -> Path:
    return write_lines(folder / "numbers.jsonl", [row | {"label": len(row["text"]) / 10} for row in topic_rows()])


@pytest.mark.parametrize("asked", ["metric_name", "metric_for_best_model"])
def test_best_by_the_error_is_the_model_with_the_smallest(asked: str, sentence_encoder: Path, tmp_path: Path) -> None:
    file, metric = _numbers(tmp_path), "eval_mse" if asked == "metric_for_best_model" else "mse"
    options = {
        "train_file": file, "validation_file": file, "num_train_epochs": 3, "eval_strategy": "epoch",
        "save_strategy": "epoch", asked: metric, "seeds": 2, "seed": 7,
    }  # fmt: skip
    out = tmp_path / "out"
    assert run(words("classify", sentence_encoder, out, *_BOTH, "--load_best_model_at_end", **options)) == 0
    reached = {}
    for seed in (7, 8):
        state = load(out / f"seed-{seed}", "trainer_state.json")
        errors = [entry["eval_mse"] for entry in state["log_history"] if "eval_mse" in entry]
        assert len({*errors}) > 1
        reached[seed] = state["best_metric"]
        assert reached[seed] == min(errors) == load(out / f"seed-{seed}", "eval_results.json")["eval_mse"]
    found = load(out, "all_results.json")
    assert reached[found["best_seed"]] == min(reached.values())


@pytest.mark.parametrize(
    ("words_of", "better"),
    [
        (["classify", "--metric_for_best_model", "mse"], False),
        (["classify", "--metric_for_best_model", "eval_mse"], False),
        (["classify", "--metric_name", "mse"], False),
        (["classify", "--metric_for_best_model", "mse", "--greater_is_better", "true"], True),
        (["classify", "--metric_for_best_model", "pearson", "--metric_name", "mse"], True),
        (["tune", "classify", "--metric_for_best_model", "mse"], False),
        (["lm", "--loss", "dpo", "--metric_for_best_model", "rewards/rejected"], False),
        (["tag", "--metric_for_best_model", "f1"], True),
    ],
    ids=str,
)
def test_which_metric_is_better_is_known(words_of: list[str], better: bool, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model_name_or_path", "m", "--train_file", "t.jsonl", "--validation_file", "v.jsonl", "--print_config"]
    assert run([*words_of, "--do_train", "--do_eval", *given]) == 0
    assert f"greater_is_better: {str(better).lower()}\n" in capsys.readouterr().out


def test_tagger_keeps_the_best_of_two_seeds(sentence_encoder: Path, tmp_path: Path) -> None:
    rows = [{"tokens": row["text"].split(), "tags": ["X" if len(w) > 4 else "Y" for w in row["text"].split()]}
            for row in topic_rows()]  # fmt: skip
    file = write_lines(tmp_path / "words.jsonl", rows)
    options = {"train_file": file, "validation_file": file, "max_steps": 4, "seeds": 2}
    assert run(words("tag", sentence_encoder, tmp_path / "out", *_BOTH, **options)) == 0
    found = load(tmp_path / "out", "all_results.json")
    assert found["eval_accuracy"] == max(
        one["eval_accuracy"] for one in load(tmp_path / "out", "seeds.json")["metrics"].values()
    )


@pytest.mark.reliability
@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_seeds_resume_bitwise_without_repeating_a_finished_one(
    sentence_encoder: Path, topics: Path, tmp_path: Path, kill: signal.Signals
) -> None:
    options = {"train_file": topics, "validation_file": topics, "max_steps": 100, "save_steps": 10, "seeds": 2}
    options["save_strategy"] = "steps"

    def line(folder: Path, *more: str) -> list[str]:
        return [sys.executable, "-m", "whet", *words("classify", sentence_encoder, folder, *_BOTH, **options), *more]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert subprocess.run(line(whole), capture_output=True, check=False).returncode == 0
    log = tmp_path / "log"
    with log.open("ab") as file:
        process = subprocess.Popen(line(cut), stdout=file, stderr=file)
        give_up = time.monotonic() + _DEADLINE_S
        while not (cut / "seed-43" / "checkpoint-10" / "MANIFEST.json").exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.02)
        os.kill(process.pid, kill)
        assert process.wait(_DEADLINE_S) != 0, "the run was over before it could be stopped"
    if kill == signal.SIGTERM:
        assert "--resume_from_checkpoint auto" in log.read_text()
        assert "1 of 2 seeds are trained" in log.read_text()
    before = (cut / "seed-42" / "model.safetensors").stat().st_mtime_ns
    resumed = subprocess.run(line(cut, "--resume_from_checkpoint", "auto"), capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert (cut / "seed-42" / "model.safetensors").stat().st_mtime_ns == before
    for part in ("", "seed-42", "seed-43"):
        assert _same_weights(cut / part, whole / part)
    metrics = [json.loads((folder / "seeds.json").read_text())["metrics"] for folder in (cut, whole)]
    for seed in ("seed-42", "seed-43"):
        assert metrics[0][seed]["eval_loss"] == metrics[1][seed]["eval_loss"]
