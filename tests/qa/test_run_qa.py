"""`whet qa` from the command line to the files: training, evaluation, prediction, and what lies in the folder after."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import plain_decode
import pytest
import yaml
from safetensors.torch import load_file
from tiny_qa import command, files, load, questions_of, squad, without_answers, write_json
from torch import equal
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, BertForQuestionAnswering, TrainerState

from whet.cli.main import run
from whet.store import find

_LONG = {"num_train_epochs": 50, "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 10}
_MODEL = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "training_args.json"}
_PREDICTIONS = {"predictions.json", "nbest_predictions.json"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus as SQuAD 1.1 and 2.0, with and without answers."""
    folder = tmp_path_factory.mktemp("data")
    for name, document in (("v1", squad()), ("v2", squad(version_2=True))):
        write_json(folder / f"{name}.json", document)
        write_json(folder / f"{name}_asked.json", without_answers(document))
    return folder


@pytest.fixture(scope="module")
def trained(encoder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run on 20 questions, long enough to learn them by heart."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    words = command(
        encoder, folder, "--do_train", "--do_eval", "--do_predict", train_file=data / "v1.json",
        validation_file=data / "v1.json", test_file=data / "v1_asked.json", logging_steps=50, **_LONG,
    )  # fmt: skip
    assert run(words) == 0
    return folder


@pytest.fixture(scope="module")
def trained_v2(encoder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on 25 questions, five of them without an answer."""
    folder = tmp_path_factory.mktemp("runs_v2") / "out"
    file = data / "v2.json"
    words = command(
        encoder, folder, "--do_train", "--do_eval", "--do_predict", "--version_2_with_negative", train_file=file,
        validation_file=file, test_file=file, **_LONG,
    )  # fmt: skip
    assert run(words) == 0
    return folder


def _n_windows(folder: Path, n_questions: int = 20) -> int:
    return plain_decode.n_windows(folder, questions_of(squad())[:n_questions])


def test_run_writes_every_file(trained: Path) -> None:
    results = {"train_results.json", "eval_results.json", "predict_results.json", "all_results.json"}
    predictions = {f"{part}_{name}" for part in ("eval", "predict") for name in (*_PREDICTIONS, "predictions.jsonl")}
    assert files(trained) == _MODEL | results | predictions | {
        "errors.jsonl",
        "trainer_state.json",
        "run.log",
        "run.jsonl",
        "report.html",
        "README.md",
        "whet_task.json",
        "results_of.json",
    }
    for name in files(trained):
        if name.endswith(".json"):
            load(trained, name)


@pytest.mark.slow
def test_version_2_run_writes_every_file(trained_v2: Path) -> None:
    predictions = {f"{part}_{name}" for part in ("eval", "predict") for name in [*_PREDICTIONS, "null_odds.json"]}
    assert predictions <= files(trained_v2)


def test_run_learns_20_questions_by_heart(trained: Path) -> None:
    results = load(trained, "eval_results.json")
    assert results["eval_f1"] > 80
    best = load(trained, "eval_predictions.json")
    right = [best[q["id"]].casefold() == q["answers"][0]["text"].casefold() for q in questions_of(squad())]
    assert results["eval_exact_match"] == pytest.approx(100 * sum(right) / 20)  # there are no articles in them


def test_run_learns_to_give_no_answer(trained_v2: Path) -> None:
    results = load(trained_v2, "eval_results.json")
    assert results["eval_f1"] > 80
    assert results["eval_NoAns_exact"] >= 60
    best = load(trained_v2, "eval_predictions.json")
    silent = [best[f"none-{n}"] == "" for n in range(5)]
    assert results["eval_NoAns_exact"] == pytest.approx(100 * sum(silent) / 5)
    assert (results["eval_HasAns_total"], results["eval_NoAns_total"], results["eval_total"]) == (20, 5, 25)


def test_results_have_the_keys_of_run_qa(trained: Path) -> None:
    train, evaluated, every = (load(trained, f"{name}_results.json") for name in ("train", "eval", "all"))
    assert {
        "epoch", "train_loss", "train_runtime", "train_samples", "train_samples_per_second", "train_steps_per_second",
        "total_flos",
    } <= train.keys()  # fmt: skip
    assert {"epoch", "eval_exact_match", "eval_f1", "eval_samples"} <= evaluated.keys()
    assert every == train | evaluated | load(trained, "predict_results.json")
    assert train["epoch"] == 50
    assert train["train_samples"] == evaluated["eval_samples"] == _n_windows(trained)


def test_trainer_state_has_the_losses(trained: Path) -> None:
    state = TrainerState.load_from_json(str(trained / "trainer_state.json"))
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 3
    assert state.global_step == state.max_steps == 50 * -(-_n_windows(trained) // 12)


def test_settings_are_saved(trained: Path) -> None:
    kept = load(trained, "training_args.json")
    assert (kept["learning_rate"], kept["num_train_epochs"], kept["do_predict"]) == (3e-3, 50, True)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_saved_model_gives_the_written_answers(version: str, request: pytest.FixtureRequest) -> None:
    """By other code, from transformers' own padded model; equal to float32 rounding, so near ties may go apart."""
    folder = request.getfixturevalue("trained" if version == "v1" else "trained_v2")
    asked = questions_of(squad(version_2=version == "v2"))
    wanted = plain_decode.answers(folder, asked)
    best, nbest = load(folder, "eval_predictions.json"), load(folder, "eval_nbest_predictions.json")
    assert list(best) == list(nbest) == [question["id"] for question in asked]
    odds = load(folder, "eval_null_odds.json") if version == "v2" else {}
    for name, found in wanted.items():
        first = next(entry for entry in nbest[name] if entry["text"])
        assert first["start_logit"] + first["end_logit"] == pytest.approx(found.score, abs=1e-3)
        if found.ahead > 1e-2:
            assert first["text"] == found.text
        if version == "v2":
            assert odds[name] == pytest.approx(found.null_odds, abs=1e-3)
        assert best[name] == ("" if odds.get(name, -1.0) > 0 else first["text"])
    assert sum(found.ahead > 1e-2 for found in wanted.values()) >= 0.9 * len(wanted)


def test_nbest_lists_have_the_right_form(trained: Path) -> None:
    for entries in load(trained, "eval_nbest_predictions.json").values():
        assert 1 <= len(entries) <= 20
        assert all(entry.keys() == {"text", "probability", "start_logit", "end_logit"} for entry in entries)
        assert sum(entry["probability"] for entry in entries) == pytest.approx(1.0)
        scores = [entry["start_logit"] + entry["end_logit"] for entry in entries]
        assert scores == sorted(scores, reverse=True)


def test_predictions_for_questions_without_answers(trained: Path) -> None:
    """The same questions, so the same answers; and no metric but the counts."""
    assert load(trained, "predict_predictions.json") == load(trained, "eval_predictions.json")
    assert not {"predict_f1", "predict_exact_match"} & load(trained, "predict_results.json").keys()


def test_predictions_with_answers_are_scored(trained_v2: Path) -> None:
    assert load(trained_v2, "predict_results.json")["predict_f1"] == load(trained_v2, "eval_results.json")["eval_f1"]


def test_predict_and_ask_choose_answers_as_the_training_did(
    encoder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "out", data / "v2.json"
    chosen = {"max_answer_length": 1, "n_best_size": 6, "null_score_diff_threshold": 1e6}
    words = command(encoder, out, "--do_train", "--do_predict", "--version_2_with_negative", train_file=file,
                    test_file=file, max_steps=1, precision="fp32", **chosen)  # fmt: skip
    assert run(words) == 0
    wanted = load(out, "predict_predictions.json")
    assert all(text and " " not in text for text in wanted.values())
    assert run(["predict", str(out), "--file", str(file), "--output", str(tmp_path / "found.jsonl")]) == 0
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text("utf-8").splitlines()]
    assert {one["id"]: one["answer"] for one in found} == wanted

    (tmp_path / "notes.txt").write_text(questions_of(squad())[0]["context"], "utf-8")

    def asked(*more: str) -> list[str]:
        capsys.readouterr()
        line = ["ask", str(out), "--context", str(tmp_path / "notes.txt"), "--question", "Who made it?", "--json"]
        assert run([*line, "--version_2_with_negative", *more]) == 0
        (answered,) = json.loads(capsys.readouterr().out)["answers"]
        return [one["text"] for one in answered["answers"]]

    assert asked()[0]
    assert not [text for text in asked() if " " in text]
    assert asked("--null_score_diff_threshold=-1e6")[0] == "", "the flag wins"
    assert [text for text in asked("--max_answer_length", "9", "--n_best", "20") if " " in text]
    older = {name: value for name, value in load(out, "whet_task.json").items() if name not in chosen}
    write_json(out / "whet_task.json", older)
    assert [text for text in asked("--n_best", "20") if " " in text], "folders of earlier versions do not say"

    line = ["ask", str(out), "--context", str(tmp_path / "notes.txt"), "--question", "Who made it?", "--json"]
    for allowed in (True, False):
        known = {"version_2_with_negative": allowed, "null_score_diff_threshold": -1e6}
        write_json(out / "whet_task.json", older | known)
        capsys.readouterr()
        assert run(line) == 0
        (answered,) = json.loads(capsys.readouterr().out)["answers"]
        assert (answered["answers"][0]["text"] == "") is allowed, "as in the training"
    assert run([*line, "--null_score_diff_threshold", "1"]) == 78
    assert "null_score_diff_threshold has no effect here" in capsys.readouterr().out


def test_evaluation_alone_reproduces_the_metrics(trained: Path, data: Path, tmp_path: Path) -> None:
    words = command(trained, tmp_path / "again", "--do_eval", validation_file=data / "v1.json")
    assert run(words) == 0
    assert files(tmp_path / "again") == {
        "eval_results.json", "all_results.json", "run.log", "run.jsonl", "report.html", "errors.jsonl",
        "eval_predictions.jsonl", "results_of.json",
        *(f"eval_{n}" for n in _PREDICTIONS),
    }  # fmt: skip
    timed = ("runtime", "per_second", "epoch")
    first, second = (
        {name: value for name, value in load(folder, "eval_results.json").items() if not name.endswith(timed)}
        for folder in (trained, tmp_path / "again")
    )
    assert first == second
    assert load(trained, "eval_nbest_predictions.json") == load(tmp_path / "again", "eval_nbest_predictions.json")


def test_evaluation_into_the_folder_of_the_model(trained: Path, data: Path, tmp_path: Path) -> None:
    """As run_qa.py is used on a trained model: nothing is overwritten but results."""
    folder = tmp_path / "copy"
    AutoModelForQuestionAnswering.from_pretrained(trained).save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained).save_pretrained(folder)
    before = (folder / "model.safetensors").read_bytes()
    assert run(command(folder, folder, "--do_eval", validation_file=data / "v1.json")) == 0
    assert (folder / "model.safetensors").read_bytes() == before
    assert "eval_results.json" in files(folder)


def test_flag_overrides_a_config_file(encoder: Path, data: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model_name_or_path": str(encoder), "output_dir": str(tmp_path / "out"), "do_train": True, "max_seq_length": 40,
        "doc_stride": 12, "train_file": str(data / "v1.json"), "num_train_epochs": 9.0, "max_train_samples": 3,
        "save_strategy": "no", "use_cpu": True,
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings), "utf-8")
    assert run(["qa", "--config", str(path), "--num_train_epochs", "1"]) == 0
    results = load(tmp_path / "out", "train_results.json")
    assert (results["epoch"], results["train_samples"]) == (1.0, _n_windows(encoder, 3))


def test_sample_limits_take_the_first_rows(encoder: Path, data: Path, tmp_path: Path) -> None:
    file = data / "v1.json"
    words = command(
        encoder, tmp_path / "out", "--do_train", "--do_eval", "--do_predict", train_file=file, validation_file=file,
        test_file=file, max_train_samples=2, max_eval_samples=5, max_predict_samples=3, max_steps=1,
    )  # fmt: skip
    assert run(words) == 0
    ids = [question["id"] for question in questions_of(squad())]
    assert list(load(tmp_path / "out", "eval_predictions.json")) == ids[:5]
    assert list(load(tmp_path / "out", "predict_predictions.json")) == ids[:3]
    assert load(tmp_path / "out", "all_results.json")["train_samples"] == _n_windows(encoder, 2)


def test_run_evaluates_saves_and_ends_with_the_best_model(encoder: Path, data: Path, tmp_path: Path) -> None:
    words = command(
        encoder, tmp_path / "out", "--do_train", "--do_eval", "--load_best_model_at_end", train_file=data / "v1.json",
        validation_file=data / "v1.json", num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch",
        save_total_limit=1, metric_for_best_model="f1",
    )  # fmt: skip
    assert run(words) == 0
    state = load(tmp_path / "out", "trainer_state.json")
    scores = [entry["eval_f1"] for entry in state["log_history"] if "eval_f1" in entry]
    assert len(scores) == 3
    assert state["best_metric"] == max(scores) == load(tmp_path / "out", "eval_results.json")["eval_f1"]
    best = tmp_path / "out" / state["best_model_checkpoint"]
    weights, kept = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", best))
    assert all(equal(weights[name], kept[name]) for name in kept)


def test_json_lines_for_programs(encoder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of standard output is one, so that a program can read them; words for people go to standard error."""
    words = command(
        encoder, tmp_path / "out", "--do_train", "--do_eval", "--log_format", "json", train_file=data / "v1.json",
        validation_file=data / "v1.json", max_steps=2, logging_steps=1,
    )  # fmt: skip
    assert run(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines][:2] == [1, 2]
    assert any("eval_f1" in line for line in lines)


def test_results_and_their_folder_are_printed(
    encoder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(encoder, tmp_path / "model")
    BertForQuestionAnswering.from_pretrained(encoder).save_pretrained(tmp_path / "model")
    words = command(tmp_path / "model", tmp_path / "out", "--do_eval", validation_file=data / "v1.json")
    capsys.readouterr()
    assert run(words) == 0
    shown = "".join(capsys.readouterr())
    assert f"{load(tmp_path / 'out', 'eval_results.json')['eval_f1']:.2f}" in shown
    (folder,) = (line for line in shown.splitlines() if line.startswith("  files in "))
    assert folder.endswith(f"{tmp_path.name[-20:]}/out")


def test_weights_that_turn_to_nan_end_the_run_with_70(encoder: Path, data: Path, tmp_path: Path) -> None:
    words = command(
        encoder, tmp_path / "out", "--do_train", train_file=data / "v1.json", learning_rate=1e30, max_grad_norm=0
    )
    assert run(words) == 70
    assert files(tmp_path / "out") == {"run.log", "run.jsonl"}  # nothing else was worth keeping


def _process(words: list[str], **how: Any) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "whet", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **how,
    )  # fmt: skip


def _saving(encoder: Path, data: Path, folder: Path, **changes: Any) -> list[str]:
    return command(
        encoder, folder, "--do_train", train_file=data / "v1.json",
        **({"max_steps": 6, "save_strategy": "steps", "save_steps": 2} | changes),
    )  # fmt: skip


@pytest.mark.slow
def test_killed_run_resumes_bitwise(encoder: Path, data: Path, tmp_path: Path) -> None:
    """Killed as soon as it has saved once, wherever that is; the model drops out at 0.1."""
    assert run(_saving(encoder, data, tmp_path / "whole", max_steps=40, save_steps=5)) == 0
    words = _saving(encoder, data, tmp_path / "killed", max_steps=40, save_steps=5)
    with _process([*words, "--log_level", "info"]) as process:
        for line in process.stderr:
            if "saved" in line and "checkpoint-" in line:
                process.send_signal(signal.SIGKILL)
                break
        else:
            pytest.fail("the run ended before it could be killed")
    assert process.wait() == -signal.SIGKILL
    assert "model.safetensors" not in files(tmp_path / "killed")
    assert run([*words, "--resume_from_checkpoint", "auto"]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_full_disk_ends_the_run_with_74_and_keeps_the_checkpoint(encoder: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert run(_saving(encoder, data, folder, max_steps=2)) == 0
    words = [*_saving(encoder, data, folder), "--resume_from_checkpoint", "auto"]
    with _process(words, preexec_fn=_files_may_not_grow) as process:
        _, errors = process.communicate()
    assert process.returncode == 74, errors
    assert "error: the checkpoint of step 4 cannot be written" in errors
    assert find.newest(folder) == folder / "checkpoint-2"
    assert not list(folder.glob(".*"))


def _files_may_not_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
